"""What a strategy is: three verbs round an ordinary model, and a few more that most leave as they are here.

A plain `Strategy` is one process training alone; each file beside this one changes what its way of sharing changes.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from trainers.optimizer import AdamW
from trainers.ranks import Ranks
from trainers.strategies.gradients import clip_gradients
from trainers.strategies.grid import Grid, Part
from trainers.strategies.options import StrategyOptions


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Samples of one forward pass."""

    inputs: Tensor
    targets: Tensor
    part: float  # of the global batch, in samples


@dataclass(frozen=True, kw_only=True)
class Passes:
    """All that a rank has to push through the model in one step."""

    micro_batches: Sequence[MicroBatch]
    loss_of: Callable[[Tensor, Tensor], Tensor]  # outputs and targets -> mean over the samples
    precision: Callable[[], AbstractContextManager[Any]]  # surrounds forward passes
    share_count: int
    loss_scale: float = 1.0

    @property
    def part(self) -> float:
        """The part of the global batch that is this rank's."""
        return sum(each.part for each in self.micro_batches)

    def scale(self, micro_batch: MicroBatch) -> float:
        """The weight of a micro-batch's loss.

        The mean over ranks is taken of gradients. Weighing by samples makes that the mean of the global batch also
        where the ranks' shares differ in size.
        """
        return micro_batch.part * self.share_count * self.loss_scale


class Strategy:
    """How ranks share one model's work."""

    AXES: ClassVar[tuple[str, ...]] = ()
    # Whether ranks that differ along `replicate` only hold equal state, and move it without asking each other.
    MOVES_ALONE: ClassVar[bool] = False
    # Whether `wrap` also takes a model without memory, which gets it afterwards: more than one rank could hold.
    TAKES_EMPTY: ClassVar[bool] = False

    def __init__(self, ranks: Ranks, grid: Grid, options: StrategyOptions) -> None:
        """Take a place in the grid. Nothing is sent yet."""
        self.ranks, self.grid, self.options = ranks, grid, options
        self.share = grid.find_share()

    # The three verbs.

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the module whose forward is to be called. Called once, with the same weights on every rank.

        Afterwards the parameters of `model` itself are those this rank trains, under the names they had: the
        optimizer and the checkpoint use them. They may be DTensors, and some may be gone to other ranks.
        """
        return model

    def micro_step(self, model: nn.Module, *, last: bool) -> AbstractContextManager[None]:
        """Surround one forward and backward; after the last of a step, gradients are the mean over all shares."""
        return nullcontext()

    def clip(self, model: nn.Module, norm_max: float) -> float:
        """Scale gradients down to `norm_max` over the whole model and return their norm before."""
        pipeline = [self.grid.group("pipeline")] if self.grid.size("pipeline") > 1 else []
        return clip_gradients(model.parameters(), norm_max, across=pipeline)

    # For a strategy with an order of its own for forward and backward.

    def run_passes(self, model: nn.Module, passes: Passes) -> float:
        """Leave the mean gradient of the global batch; return this rank's part of its mean loss."""
        loss_part = 0.0
        for place, micro_batch in enumerate(passes.micro_batches, start=1):
            with self.micro_step(model, last=place == len(passes.micro_batches)):
                with passes.precision():
                    outputs = model(micro_batch.inputs)
                loss = passes.loss_of(outputs, micro_batch.targets)
                (loss * passes.scale(micro_batch)).backward()
            loss_part += loss.item() * micro_batch.part
        return loss_part

    def evaluate(self, model: nn.Module, passes: Passes) -> float:
        """Change nothing; return this rank's part of the mean loss."""
        loss_part = 0.0
        with torch.no_grad():
            for micro_batch in passes.micro_batches:
                with passes.precision():
                    outputs = model(micro_batch.inputs)
                loss_part += passes.loss_of(outputs, micro_batch.targets).item() * micro_batch.part
        return loss_part

    # For a strategy whose ranks do not all take each step together.

    def step(self, model: nn.Module, optimizer: AdamW) -> None:
        """Move the parameters once along the gradients, and drop those."""
        optimizer.step()

    def tally(self, loss_part: float, *, part: float, is_stop_asked: bool) -> tuple[float, bool]:
        """The loss of the global batch, and whether any rank asks to stop; all ranks stop after the same step.

        `part` is the part of the batch that `loss_part` comes from.
        """
        loss, stop_count = self.ranks.sum([loss_part if self.share.is_counted else 0.0, float(is_stop_asked)])
        return loss, stop_count > 0

    def find_part(self) -> Part | None:
        """The part of the shared state that this rank holds, and others may hold too; None where they never do."""
        return self.grid.find_part() if self.MOVES_ALONE else None

    # For a strategy under which ranks hold different values of the same parameter.

    def shared_state(self, model: nn.Module, optimizer: AdamW) -> Mapping[str, Any]:
        """What is one for all ranks, by name: enough to go on with other ranks or another strategy."""
        return {"model": model, "optimizer": optimizer}

    def own_state(self, model: nn.Module, optimizer: AdamW) -> Mapping[str, Any]:
        """What differs from rank to rank, by name: read back over the shared state by as many ranks as before."""
        return {}
