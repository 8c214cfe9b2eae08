"""Pipeline parallelism with torch.distributed.pipelining: stages of blocks on different ranks (arXiv:2104.04473)."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, distributed, nn

from trainers.data import samples_of_rank
from trainers.errors import TrainerError
from trainers.models.cuts import Segmentable
from trainers.strategies.base import Passes, Strategy

SCHEDULES = {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B", "interleaved": "ScheduleInterleaved1F1B"}


class PipelineParallel(Strategy):
    """Ranks of the axis process the same samples and hold one stage each, or several under `interleaved`."""

    AXES = ("pipeline",)
    MOVES_ALONE = True

    def wrap(self, model: nn.Module) -> nn.Module:
        """Keep this rank's blocks and return them as `Stages`. Raises TrainerError if the model has no blocks."""
        self._schedule: Any = None
        count = self.grid.size("pipeline")
        if count == 1:
            return model
        if not isinstance(model, Segmentable):
            raise TrainerError("this model does not consist of blocks; `pipeline` cannot be used")
        is_interleaved = self.options.pipeline.schedule == "interleaved"
        self._stage_count = count * (self.options.pipeline.stages_per_rank if is_interleaved else 1)
        depth = len(model.blocks)
        if depth < self._stage_count:
            raise TrainerError(f"{depth} blocks cannot be cut into {self._stage_count} stages")
        bounds = [depth * place // self._stage_count for place in range(self._stage_count + 1)]
        # Stages alternate between ranks, so that under `interleaved` the first rank has work while the last is busy.
        self._places = range(self.grid.index("pipeline"), self._stage_count, count)
        modules = model.cut([range(bounds[place], bounds[place + 1]) for place in self._places])
        return Stages(modules, self._places, self._stage_count, self.grid.group("pipeline"))

    @property
    def has_own_schedule(self) -> bool:
        """Return whether there is more than one stage."""
        return self.grid.size("pipeline") > 1

    def choose_micro_batch(self, batch: int, micro_batch: int) -> int:
        """Return the largest number that divides the samples of every share, with enough passes for the schedule."""
        ranks, shares = self.grid.size("pipeline"), self.share.count
        if ranks == 1 or batch < shares:
            return micro_batch
        sizes = [len(samples_of_rank(0, batch, share, shares)) for share in range(shares)]
        for size in range(micro_batch, 0, -1):
            count = math.ceil(max(sizes) / size)
            if math.gcd(*sizes) % size == 0 and not find_count_needed(self.options.pipeline.schedule, count, ranks):
                return size
        return micro_batch

    def has_equal_work(self) -> bool:
        """Return whether there is one stage: stages differ, the last one by the output layer and the loss."""
        return self.grid.size("pipeline") == 1

    def run_schedule(self, model: nn.Module, passes: Passes) -> Tensor:
        """Run all micro-batches through all stages; return the loss on the rank of the last stage, 0 on the others."""
        assert isinstance(model, Stages)
        micro_batches = passes.micro_batches
        first = micro_batches[0]
        if any(part.inputs.shape != first.inputs.shape for part in micro_batches):
            raise TrainerError(
                "a pipeline needs micro-batches of equal size; "
                f"choose a `--train.batch` that {self.share.count} x `--train.micro_batch` divides"
            )
        # A share without further samples repeats its last one with weight 0.
        self._scales = [passes.scale(part) for part in micro_batches]
        self.scale_own_losses(model, sum(self._scales) / len(self._scales))
        if self._schedule is None:
            self._schedule = self._make_schedule(model, passes)
        losses: list[Tensor] = []
        inputs, arguments = [], {}
        if self._places[0] == 0:
            inputs = [torch.cat([part.inputs for part in micro_batches])]
        if self._places[-1] == self._stage_count - 1:
            arguments = {"target": torch.cat([part.targets for part in micro_batches]), "losses": losses}
        self._schedule.step(*inputs, **arguments, return_outputs=False)
        total = torch.zeros((), dtype=torch.float64, device=passes.device)
        for loss in losses:
            total += loss.detach().double()
        return total / passes.share_count / passes.loss_scale

    def _make_schedule(self, model: "Stages", passes: Passes) -> Any:
        """Create the schedule at the first step: stages are wrapped, and the size of a micro-batch is known."""
        from torch.distributed import pipelining

        count = len(passes.micro_batches)
        name = self.options.pipeline.schedule
        _check_count(name, count, self.grid.size("pipeline"))
        stages = [self._make_stage(module, place, passes) for module, place in zip(model, self._places, strict=True)]
        return getattr(pipelining, SCHEDULES[name])(
            stages if name == "interleaved" else stages[0],
            n_microbatches=count,
            loss_fn=lambda outputs, targets: passes.loss(outputs, targets) * self._find_scale(targets),
            scale_grads=False,
        )

    def _find_scale(self, targets: Tensor) -> float:
        """Return the factor of the loss of a micro-batch, whose targets are a view of those of all micro-batches."""
        scale: float = self._scales[targets.storage_offset() // targets.numel()]
        return scale

    def _make_stage(self, module: nn.Module, place: int, passes: Passes) -> Any:
        from torch.distributed.pipelining import PipelineStage

        # Before the first step torch infers the shapes of a stage by an extra pass. Restore the random numbers after
        # it, or a resumed run would drop different activations.
        _run_in_precision(module, passes)
        group = self.grid.group("pipeline")
        return PipelineStage(module, place, self._stage_count, self.ranks.device, group=group)


class Stages(nn.ModuleList):
    """The stages of one rank. A call, collective over the pipeline, forwards the outputs from stage to stage.

    It is meant for evaluation, not for training: only one rank is busy at a time.
    """

    def __init__(self, modules: Iterable[nn.Module], places: range, stage_count: int, group: Any) -> None:
        super().__init__(modules)
        self._places = places
        self._stage_count = stage_count
        self._group = group

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the last stage's outputs, on every rank."""
        assert not torch.is_grad_enabled(), "calls are for evaluation: gradients do not flow between stages"
        value = inputs
        for place in range(self._stage_count):
            is_mine = place in self._places
            if is_mine:
                value = self[self._places.index(place)](value).float().contiguous()
            value = self._pass_on(value, owner=place % self._places.step, is_mine=is_mine)
        return value

    def _pass_on(self, value: Tensor, *, owner: int, is_mine: bool) -> Tensor:
        shape = [tuple(value.shape)]
        distributed.broadcast_object_list(shape, group=self._group, group_src=owner, device=value.device)
        passed = value if is_mine else value.new_empty(shape[0], dtype=torch.float32)
        distributed.broadcast(passed, group=self._group, group_src=owner)
        return passed


def find_count_needed(schedule: str, count: int, ranks: int) -> str:
    """Return how many micro-batches torch's schedule needs, if it does not support this number; "" if it does."""
    if schedule == "1f1b" and count < ranks:
        return f"at least {ranks}"
    return f"a multiple of {ranks}" if schedule == "interleaved" and count % ranks else ""


def _check_count(schedule: str, count: int, ranks: int) -> None:
    """Raise TrainerError for a number of micro-batches that torch's schedule does not support."""
    if needed := find_count_needed(schedule, count, ranks):
        raise TrainerError(
            f"`{schedule}` needs {needed} micro-batches per step on each rank, not {count}; "
            "see `--train.batch` and `--train.micro_batch`"
        )


def _run_in_precision(module: nn.Module, passes: Passes) -> None:
    """Run the stage in the precision of the passes; its outputs are float32."""
    forward = module.forward

    def run(inputs: Tensor) -> Tensor:
        with passes.precision():
            outputs: Tensor = forward(inputs)
        return outputs.float()

    module.forward = run
