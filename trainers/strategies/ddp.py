"""PyTorch's DistributedDataParallel: gradients are exchanged while the backward pass runs."""

import contextlib
from collections.abc import Iterator

from torch import nn

from trainers.errors import TrainerError
from trainers.strategies.base import Strategy


class DataParallel(Strategy):
    """Every rank holds the whole model. One process alone runs the plain model."""

    AXES = ("replicate",)
    MOVES_ALONE = True
    EXCHANGES_LAST = True

    def wrap(self, model: nn.Module) -> nn.Module:
        """Wrap for gradient exchange. The constructor imports torch._dynamo: 1.0 s on torch 2.13."""
        if any(self.grid.size(axis) > 1 for axis in ("tensor", "pipeline", "expert")):
            raise TrainerError(
                "`ddp` needs the whole model on each rank; combine `allreduce`, `fsdp` or `hsdp` instead"
            )
        if self.grid.size("replicate") == 1:
            return model
        # After its first step DDP regroups gradients, and the order of a sum over three or more ranks changes with
        # the groups. A resumed run would regroup one step later than an unbroken one and differ in the last bit.
        # Searching for unused parameters, though there are none, keeps the first grouping for good.
        group = self.grid.group("replicate")
        # Gradients live in the buckets that travel, rather than once more beside them: 4 bytes a parameter saved.
        return nn.parallel.DistributedDataParallel(
            model, process_group=group, find_unused_parameters=True, gradient_as_bucket_view=True
        )

    @contextlib.contextmanager
    def micro_step(self, model: nn.Module, *, last: bool) -> Iterator[None]:
        """Keep gradients on this rank until the last micro step."""
        if last or not isinstance(model, nn.parallel.DistributedDataParallel):
            yield
            return
        with model.no_sync():
            yield
