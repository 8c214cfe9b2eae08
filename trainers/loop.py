"""The training loop: read samples, forward, loss, backward, clip, step, all-reduce the loss, report.

The loop knows no strategy by name, no cloud and no storage. Saving, resuming and stopping happen around it.

Nothing in a step waits for the device: loss, norm and the request to stop stay in device memory until the host reads
them (`is_read_due`), with one copy for all steps since the last reading.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainers.config import TrainConfig
from trainers.data import Samples, split_batch, to_device
from trainers.errors import TrainerError
from trainers.optimizer import Optimizer
from trainers.own_time import WorkClock
from trainers.ranks import Ranks
from trainers.recipe import Count, Forward, Loss, call_model
from trainers.scaling import LossScale
from trainers.strategies.base import MicroBatch, Passes, Strategy


@dataclass(frozen=True, kw_only=True)
class DeviceReading:
    """Values that the host reads from the device. Equal on all ranks that step together."""

    loss: float  # the loss of the step at which the host read the device
    norm: float
    skipped_steps: tuple[int, ...]  # since the last reading, skipped because of non-finite gradients
    is_stop_asked: bool


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """A completed step; `reading` is None if the host did not read the device."""

    step: int
    learning_rate: float
    reading: DeviceReading | None
    own_s: float | None = None  # seconds of this rank's own work in the step, measured where the host read the device


@dataclass(frozen=True, kw_only=True)
class Work:
    """The samples, the loss, the precision and the forward function of a run."""

    samples: Samples
    loss: Loss  # (outputs, targets) -> mean over the samples, or over what `count` counts
    precision: Callable[[], AbstractContextManager[Any]]  # surrounds forward passes
    forward: Forward = call_model
    count: Count | None = None


class Position:
    """The progress of the run, in steps and in samples of the data order."""

    def __init__(self, fingerprint: str) -> None:
        """Start at step 0 of the data with this fingerprint."""
        self.fingerprint = fingerprint
        self.steps_done = 0
        self.samples_done = 0

    def advance(self, samples: int) -> None:
        """Count one step of `samples` samples."""
        self.steps_done += 1
        self.samples_done += samples

    def state_dict(self) -> dict[str, Any]:
        """Return all counters."""
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from saved counters. Raises TrainerError if the checkpoint was trained on other data."""
        if state["fingerprint"] != self.fingerprint:
            raise TrainerError(
                "the checkpoint was trained on other data, or on data that was split differently (`--data.*`, "
                "`--model.context`). The text that ships with Python differs between releases\n\n"
                "hint: set `$BROKER_CHECKPOINT_DIR` to a new folder to start a new run"
            )
        self.steps_done, self.samples_done = state["steps_done"], state["samples_done"]


def iterate_steps(
    config: TrainConfig,
    *,
    model: nn.Module,
    strategy: Strategy,
    optimizer: Optimizer,
    work: Work,
    position: Position,
    ranks: Ranks,
    is_stop_asked: Callable[[], bool],
    before_change: Callable[[], None],
    scaling: LossScale,
    changing: AbstractContextManager[Any] | None = None,
    is_read_due: Callable[[int], bool] = lambda step: True,
    clock: WorkClock | None = None,
) -> Iterator[StepReport]:
    """Train from `position` to the last step and yield after each step. While suspended, all state is consistent.

    `before_change` is called before parameters are updated: a checkpoint may still be copying them. Outside `changing`
    parameters, moments, `scaling` and `position` belong to the same step. A request to stop is reduced with the loss,
    so that all ranks see it at the same step; `is_read_due` must therefore return the same on all ranks.
    """
    device_log, clock = DeviceLog(config), clock or WorkClock()
    while position.steps_done < config.steps:
        learning_rate = optimizer.learning_rate
        clock.begin()
        passes = read_passes(config, strategy, work, position.samples_done, ranks, loss_scale=scaling.factor)
        clock.note_samples()
        passes = weigh_passes(passes, work, ranks)

        # Forward, loss and backward of every micro-batch; a pipeline interleaves them across stages.
        if strategy.has_own_schedule:
            loss = strategy.run_schedule(model, passes)
        else:
            loss = forward_backward(model, passes, strategy, clock)
        mixture = strategy.find_mixture(model)
        strategy.share_buffers(model)
        scaling.unscale(parameter for _, parameter in strategy.list_trained(model))
        norm = strategy.clip(model, config.norm_max)
        optimizer.skip_unless(torch.isfinite(norm))

        before_change()
        with changing or nullcontext():
            is_overflow = scaling.is_on and scaling.note(is_finite=bool(torch.isfinite(norm)))
            strategy.step(model, optimizer, loss)
            position.advance(config.batch)
        clock.end()

        # Two numbers: the mean loss of the global batch, and the number of ranks asked to stop.
        totals = strategy.all_reduce_loss(loss, weight=passes.weight, is_stop_asked=is_stop_asked())
        device_log.add(position.steps_done, norm, totals, mixture=mixture, is_overflow=is_overflow)
        is_read = is_read_due(position.steps_done) or position.steps_done == config.steps
        yield StepReport(
            step=position.steps_done,
            learning_rate=learning_rate,
            reading=device_log.read() if is_read else None,
            own_s=clock.read() if is_read else None,
        )


def forward_backward(model: nn.Module, passes: Passes, strategy: Strategy, clock: WorkClock) -> Tensor:
    """Accumulate the mean gradient of the global batch; return this rank's part of the mean loss, on the device."""
    total = torch.zeros((), dtype=torch.float64, device=passes.device)
    for index, micro_batch in enumerate(passes.micro_batches, start=1):
        scale, is_last = passes.scale(micro_batch), index == len(passes.micro_batches)
        strategy.scale_own_losses(model, scale)
        # The strategy delays the all-reduce of gradients until the last backward pass.
        with strategy.micro_step(model, last=is_last):
            with passes.precision():
                outputs = passes.forward(model, micro_batch.inputs)
            loss = passes.loss(outputs, micro_batch.targets)
            check_loss(loss)
            if is_last:
                clock.watch(loss)
            (loss * scale).backward()
        total += loss.detach().double() * micro_batch.weight
    return total


def check_loss(loss: Any) -> None:
    """Raise TrainerError unless the loss is a scalar on the device."""
    if not isinstance(loss, Tensor) or loss.dim():
        found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise TrainerError(f"the loss must be the mean over the samples, a tensor without dimensions, not {found}")


def read_passes(
    config: TrainConfig, strategy: Strategy, work: Work, sample_first: int, ranks: Ranks, *, loss_scale: float = 1.0
) -> Passes:
    """Read this rank's samples of a step and copy them to the device, in micro-batches."""
    micro_batches = []
    for samples, weight in strategy.share.find_passes(sample_first, config.batch, config.micro_batch):
        batch = to_device(work.samples.read(samples.start, len(samples)), ranks.device)
        inputs, targets = split_batch(batch)
        micro_batches.append(MicroBatch(inputs=inputs, targets=targets, weight=weight))
    passes = Passes(
        micro_batches=micro_batches,
        forward=work.forward,
        loss=work.loss,
        precision=work.precision,
        share_count=strategy.share.count,
        loss_scale=loss_scale,
        device=ranks.device,
    )
    return strategy.cut(passes)


def weigh_passes(passes: Passes, work: Work, ranks: Ranks) -> Passes:
    """Weight micro-batches by what the recipe counts, if it counts anything. A collective call.

    Example: two micro-batches of one sample, with 9 tokens and 1, have the weights 0.9 and 0.1: the loss is the mean
    over the tokens of the batch, however it is divided.
    """
    measure_loss, count = work.loss, work.count
    if count is None:
        return passes

    def count_elements(targets: Any) -> Tensor:
        return torch.as_tensor(count(targets), dtype=torch.float64, device=passes.device)

    def measure(outputs: Any, targets: Any) -> Tensor:
        loss = measure_loss(outputs, targets)
        check_loss(loss)
        return torch.where(count_elements(targets) > 0, loss, torch.zeros_like(loss))  # a mean of nothing is NaN

    # A sample that a share repeats to make as many passes as others does not count again.
    counts = torch.stack([count_elements(part.targets) * (part.weight > 0) for part in passes.micro_batches])
    total = counts.sum()
    if ranks.world_size > 1:
        dist.all_reduce(total)
    weights = counts / total.clamp(min=1.0)
    weighted = [
        dataclasses.replace(part, weight=weight) for part, weight in zip(passes.micro_batches, weights, strict=True)
    ]
    return dataclasses.replace(passes, micro_batches=weighted, loss=measure)


@dataclass(kw_only=True)
class _Entry:
    step: int
    values: Tensor  # [4]: norm, loss, number of ranks asked to stop, whether ranks used different parameters
    is_overflow: bool


@dataclass
class DeviceLog:
    """Results of steps that are still on the device."""

    config: TrainConfig
    _entries: list[_Entry] = field(default_factory=list)
    _skips: int = 0  # consecutive, up to the last step that was read

    def add(self, step: int, norm: Tensor, totals: Tensor, *, is_overflow: bool, mixture: Tensor | None = None) -> None:
        """Keep the results of a step. `is_overflow`: non-finite gradients may be due to the loss scale."""
        mixed = torch.zeros_like(norm) if mixture is None else mixture
        norm, mixed = (value.detach().double().reshape(1) for value in (norm, mixed))
        values = torch.cat([norm, totals.to(norm.device), mixed])
        self._entries.append(_Entry(step=step, values=values, is_overflow=is_overflow))

    def read(self) -> DeviceReading:
        """Wait for the device and check all steps since the last reading.

        Raises TrainerError if gradients were not finite and `--train.on_nan` does not allow skipping the step, and if
        ranks used different parameters under a strategy that mixes them.
        """
        rows = torch.stack([entry.values for entry in self._entries]).tolist()
        skipped = []
        for entry, (norm, _, _, mixed) in zip(self._entries, rows, strict=True):
            if mixed:
                raise make_mixture_error(entry.step)
            if math.isfinite(norm):
                self._skips = 0
                continue
            skipped.append(entry.step)
            self._skips = 0 if entry.is_overflow else self._skips + 1
            if not entry.is_overflow:
                self._check_skips(entry.step, norm)
        self._entries.clear()
        norm, loss, *_ = rows[-1]
        stops = any(row[2] > 0 for row in rows)
        return DeviceReading(loss=loss, norm=norm, skipped_steps=tuple(skipped), is_stop_asked=stops)

    def _check_skips(self, step: int, norm: float) -> None:
        if self.config.on_nan == "skip" and self._skips <= self.config.skips_max:
            return
        times = f" {self._skips} times in a row" if self._skips > 1 else ""
        raise TrainerError(
            f"the gradients of step {step} are not finite{times} (norm {norm}), so training cannot continue\n\n"
            "hint: lower `--train.learning_rate`, raise `--train.warmup_steps`, or pass `--train.z_loss 1e-4`\n"
            "hint: `--train.on_nan skip` skips single steps; the run resumes from its last checkpoint"
        )


def make_mixture_error(step: int) -> TrainerError:
    """Return the error for a step in which ranks used different parameters."""
    return TrainerError(
        f"ranks used different parameters in step {step}, of which `fsdp` and `hsdp` mix weights and gradients\n\n"
        "hint: `ddp`, `allreduce`, `zero1` and `zero2` average them; with `fsdp`, every rank must use the same layers"
    )
