"""The interface of a strategy: three methods around an ordinary model, and others that few strategies override.

A plain `Strategy` is one process that trains alone. Each file beside this one overrides what its strategy changes.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainers.models.cuts import HasOwnLoss
from trainers.optimizer import Optimizer
from trainers.ranks import Ranks
from trainers.recipe import Forward, Loss
from trainers.strategies.buffers import SharedBuffers
from trainers.strategies.gradients import clip_gradients
from trainers.strategies.grid import Grid, Part
from trainers.strategies.options import StrategyOptions

WEIGHT_BYTES = GRADIENT_BYTES = 4
MOMENTS_BYTES = 8


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Samples of one forward pass."""

    inputs: Any
    targets: Any
    # Share of the global batch: in samples, or a scalar on the device, in what the recipe counts.
    weight: Any


@dataclass(frozen=True, kw_only=True)
class Passes:
    """The micro-batches of a rank in one step, and how their loss is computed."""

    micro_batches: Sequence[MicroBatch]
    forward: Forward
    loss: Loss
    precision: Callable[[], AbstractContextManager[Any]]  # surrounds forward passes
    share_count: int
    device: torch.device
    loss_scale: float = 1.0

    @property
    def weight(self) -> Any:
        """The weight of this rank's samples in the global batch."""
        return sum(micro_batch.weight for micro_batch in self.micro_batches)

    def scale(self, micro_batch: MicroBatch) -> Any:
        """Return the factor of a micro-batch's loss in the backward pass.

        Gradients are averaged over ranks. The weights make this the mean over the global batch even if ranks have
        different numbers of samples.
        """
        return micro_batch.weight * self.share_count * self.loss_scale


class Strategy:
    """How ranks share the work on one model."""

    AXES: ClassVar[tuple[str, ...]] = ()
    # Whether ranks that differ only along `replicate` hold equal state and update it independently.
    MOVES_ALONE: ClassVar[bool] = False
    # Whether the shared state consists of values that all ranks hold, and of DTensors that are sharded over all ranks:
    # then copies of the shards on other ranks suffice to continue with any number of ranks (`peer_checkpoint.py`).
    HAS_PEER_COPIES: ClassVar[bool] = False
    # Whether `wrap` accepts a model on the `meta` device, allocated afterwards: it may be larger than one device.
    TAKES_EMPTY: ClassVar[bool] = False
    # Whether passes wait for no other rank before the last backward pass has ended.
    EXCHANGES_LAST: ClassVar[bool] = False
    # The strategies with which it can be combined; None: any.
    PARTNERS: ClassVar[tuple[str, ...] | None] = None

    def __init__(self, ranks: Ranks, grid: Grid, options: StrategyOptions) -> None:
        """Find the share of this rank in the grid. Nothing is sent."""
        self.ranks, self.grid, self.options = ranks, grid, options
        self.share = grid.find_share()
        self._losses: list[HasOwnLoss] | None = None
        self._buffers: SharedBuffers | None = None

    # The three verbs.

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the module whose forward is called. Called once, with equal weights on every rank.

        Afterwards `model` has the parameters that this rank trains, under their original names, for the optimizer and
        the checkpoint. They may be DTensors, and some may be on other ranks only.
        """
        return model

    def micro_step(self, model: nn.Module, *, last: bool) -> AbstractContextManager[None]:
        """Enclose one forward and backward pass; after the last of a step, gradients are the mean over all shares."""
        return nullcontext()

    def clip(self, model: nn.Module, norm_max: float) -> Tensor:
        """Scale gradients down to `norm_max` over the whole model; return the norm before, a scalar on the device."""
        pipeline = [self.grid.group("pipeline")] if self.grid.size("pipeline") > 1 else []
        trained = (parameter for _, parameter in self.list_trained(model))
        return clip_gradients(trained, norm_max, device=self.ranks.device, across=pipeline)

    def scale_own_losses(self, model: nn.Module, scale: float) -> None:
        """Pass the loss factor of the next pass to modules with an auxiliary loss."""
        if self._losses is None:
            self._losses = [module for module in model.modules() if isinstance(module, HasOwnLoss)]
        for module in self._losses:
            module.loss_scale = scale

    def share_buffers(self, model: nn.Module) -> None:
        """After the passes of a step, give ranks that compute with the same model the buffers of their first rank.

        These are all ranks, or those of an island. Ranks that compute parts of a model are left alone.
        """
        axes = [axis for axis in ("replicate", "shard") if self.grid.size(axis) > 1]
        if not axes or not {"replicate", "shard", "island"}.issuperset(self.grid.axes):
            return
        if self._buffers is None:
            self._buffers = SharedBuffers(model)
        self._buffers.take_first([self.grid.group(each) for each in axes] if self.grid.size("island") > 1 else [None])

    def find_mixture(self, model: nn.Module) -> Tensor | None:
        """After the passes of a step, return whether gradients of different parameters were mixed, on the device.

        None if that cannot happen.
        """
        return None

    # For a strategy under which a rank updates only a part of parameters that it holds whole.

    def list_trained(self, model: nn.Module) -> Iterable[tuple[str, Tensor]]:
        """Return the tensors that this rank updates, by name. After `micro_step` they have the gradients.

        Called after `wrap`, with the model that was passed to it.
        """
        return model.named_parameters()

    def count_state_bytes(self) -> float:
        """Return bytes of float32 weight, gradient and moments for each trained element, on this rank's device."""
        return WEIGHT_BYTES + GRADIENT_BYTES + self.count_optimizer_bytes()

    def count_optimizer_bytes(self) -> float:
        """Return bytes that the optimizer takes on this rank's device for each element that it updates.

        If offloaded, this is 0 on a GPU; on a CPU, copies of weight and gradient take the same memory as well.
        """
        if self.options.offload == "none":
            return MOMENTS_BYTES
        return WEIGHT_BYTES + GRADIENT_BYTES + MOMENTS_BYTES if self.ranks.device.type == "cpu" else 0

    # For the comparison of ranks by the time of their own work (`own_time.py`).

    def has_equal_work(self) -> bool:
        """Return whether every rank with as many samples as this one has as much to compute."""
        return True

    def exchanges_last(self) -> bool:
        """Return whether this rank's passes wait for no other rank before the last backward pass has ended."""
        return self.EXCHANGES_LAST

    # For a strategy whose ranks compute different parts of one sample.

    def cut(self, passes: "Passes") -> "Passes":
        """Return this rank's part of the passes over its share of the samples."""
        return passes

    # For a strategy that orders forward and backward passes itself: a pipeline.

    def choose_micro_batch(self, batch: int, micro_batch: int) -> int:
        """Return the largest number of samples of a pass, at most `micro_batch`, with which a step can be taken.

        Returns `micro_batch` if there is none. Elastic runs call it, because the number of ranks changes.
        """
        return micro_batch

    @property
    def has_own_schedule(self) -> bool:
        """Return whether `run_schedule` replaces the loop's `forward_backward`."""
        return False

    def run_schedule(self, model: nn.Module, passes: Passes) -> Tensor:
        """Compute the mean gradient of the global batch; return this rank's part of the mean loss, on the device."""
        raise NotImplementedError

    # For a strategy whose ranks do not take each step together.

    def step(self, model: nn.Module, optimizer: Optimizer, loss: Tensor) -> None:
        """Update the parameters once and drop the gradients. `loss` is this rank's part of the loss."""
        optimizer.step()

    def all_reduce_loss(self, loss: Tensor, *, weight: float, is_stop_asked: bool) -> Tensor:
        """Return the mean loss of the global batch and the number of ranks asked to stop, on the device.

        The result is equal on all ranks, so they stop after the same step. `weight` is the weight of `loss` in the
        batch.
        """
        counted = loss if self.share.is_counted else torch.zeros_like(loss)
        totals = torch.stack([counted, torch.full_like(loss, float(is_stop_asked))])
        if self.ranks.world_size > 1:
            dist.all_reduce(totals)
        return totals

    def find_part(self) -> Part | None:
        """Return the part of the shared state on this rank if other ranks may hold it too; None otherwise."""
        return self.grid.find_part() if self.MOVES_ALONE else None

    # For a strategy under which ranks hold different values of the same parameter.

    def shared_state(self, model: nn.Module, optimizer: Optimizer) -> Mapping[str, Any]:
        """Return the state common to all ranks, by name, from which other ranks or strategies can continue."""
        return {"model": model, "optimizer": optimizer}

    def own_state(self, model: nn.Module, optimizer: Optimizer) -> Mapping[str, Any]:
        """Return the state that differs between ranks, by name; restored over the shared state by as many ranks."""
        return {}
