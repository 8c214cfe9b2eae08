"""PyTorch's DistributedDataParallel: gradients travel while the backward pass still runs."""

import contextlib
from collections.abc import Iterator

from torch import nn

from trainers.ranks import Ranks


class DataParallel:
    """Every rank holds the whole model. One process alone runs the plain model."""

    def __init__(self, ranks: Ranks) -> None:
        """Remember who takes part."""
        self._ranks = ranks

    def wrap(self, model: nn.Module) -> nn.Module:
        """Wrap for gradient exchange. The constructor imports torch._dynamo: 1.0 s on torch 2.13."""
        if self._ranks.world_size == 1:
            return model
        # After its first step DDP regroups gradients, and the order of a sum over three or more ranks changes with
        # the groups. A resumed run would regroup one step later than an unbroken one and differ in the last bit.
        # Searching for unused parameters, though there are none, keeps the first grouping for good.
        return nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)

    @contextlib.contextmanager
    def micro_step(self, model: nn.Module, *, last: bool) -> Iterator[None]:
        """Keep gradients at home until the last micro step."""
        if last or not isinstance(model, nn.parallel.DistributedDataParallel):
            yield
            return
        with model.no_sync():
            yield

    def clip(self, model: nn.Module, norm_max: float) -> float:
        """Gradients are already equal everywhere, so the local norm is the global one."""
        return float(nn.utils.clip_grad_norm_(model.parameters(), norm_max))
