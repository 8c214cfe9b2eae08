"""PyTorch's DistributedDataParallel: gradients are all-reduced during the backward pass."""

import contextlib
from collections.abc import Iterator

from torch import nn

from trainers.errors import TrainerError
from trainers.strategies.base import Strategy


class DataParallel(Strategy):
    """Every rank holds the whole model. A single process runs the plain model."""

    AXES = ("replicate",)
    MOVES_ALONE = True
    EXCHANGES_LAST = True

    def wrap(self, model: nn.Module) -> nn.Module:
        """Wrap in DistributedDataParallel, whose constructor imports torch._dynamo: 1.0 s on torch 2.13."""
        if any(self.grid.size(axis) > 1 for axis in ("tensor", "pipeline", "expert")):
            raise TrainerError(
                "`ddp` needs the whole model on each rank; combine `allreduce`, `fsdp` or `hsdp` instead"
            )
        if self.grid.size("replicate") == 1:
            return model
        # After its first step DDP rebuilds its buckets, which changes the order of sums over three or more ranks. A
        # resumed run would rebuild them at a later step than an uninterrupted one and differ in the last bit. The
        # search for unused parameters, though there are none, disables the rebuild.
        group = self.grid.group("replicate")
        # Gradients are views of the buckets instead of copies, which saves 4 bytes per parameter.
        wrapped = nn.parallel.DistributedDataParallel(
            model, process_group=group, find_unused_parameters=True, gradient_as_bucket_view=True
        )
        # Buffers are broadcast after each step (`share_buffers`): DDP does so before a pass, too late for a checkpoint.
        # Set here because the constructor's argument was renamed in torch 2.13.
        wrapped.broadcast_buffers = False
        return wrapped

    @contextlib.contextmanager
    def micro_step(self, model: nn.Module, *, last: bool) -> Iterator[None]:
        """Accumulate gradients locally until the last micro-step."""
        if last or not isinstance(model, nn.parallel.DistributedDataParallel):
            yield
            return
        with model.no_sync():
            yield
