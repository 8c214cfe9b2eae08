"""PyTorch's fully_shard: parameters, gradients and moments are sharded, and parameters gathered block by block."""

import contextlib
import math
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainers.errors import TrainerError
from trainers.strategies.base import Strategy


class FullyShardedDataParallel(Strategy):
    """Every rank holds an equal shard of every block."""

    AXES: ClassVar[tuple[str, ...]] = ("shard",)
    MOVES_ALONE = True
    HAS_PEER_COPIES = True
    TAKES_EMPTY = True

    def wrap(self, model: nn.Module) -> nn.Module:
        """Shard every child of a module list as one unit, and the remaining parameters with the model itself."""
        self._roots: list[Any] = []
        if all(self.grid.size(axis) == 1 for axis in self.AXES):
            return model
        for name, parameter in model.named_parameters():
            if parameter.dim() == 0:
                raise TrainerError(
                    f"`{'hsdp' if len(self.AXES) > 1 else 'fsdp'}` cannot shard `{name}`: give it the shape (1,)"
                )
        from torch.distributed.fsdp import FSDPModule, fully_shard

        units = find_units(model)
        settings = self._settings()
        for unit in reversed(units):  # inner units before those that contain them
            fully_shard(unit, **settings)
        if not isinstance(model, nn.ModuleList):  # stages of a pipeline are called one by one
            # What is left is needed again as soon as the backward pass begins: freeing it would only gather it twice.
            fully_shard(model, **{**settings, "reshard_after_forward": False})
        self._roots = list(model) if isinstance(model, nn.ModuleList) else [model]
        ahead = self.options.fsdp.prefetch
        if ahead:
            blocks: list[FSDPModule] = [unit for unit in units if isinstance(unit, FSDPModule)]
            for place, block in enumerate(blocks):
                block.set_modules_to_forward_prefetch(blocks[place + 1 : place + 1 + ahead])
                block.set_modules_to_backward_prefetch(blocks[max(0, place - ahead) : place][::-1])
        return model

    @contextlib.contextmanager
    def micro_step(self, model: nn.Module, *, last: bool) -> Iterator[None]:
        """Accumulate unsharded gradients locally until the last micro-step."""
        for root in self._roots:
            root.set_requires_gradient_sync(last)
        yield

    def find_mixture(self, model: nn.Module) -> Tensor | None:
        """Return whether ranks used different parameters. A collective call.

        fully_shard exchanges the weights and gradients of the layers that each rank calls, in the order of its calls.
        If ranks call different layers of equal shapes, these are mixed without an error.
        """
        if not self._roots:
            return None
        trained = [parameter for _, parameter in self.list_trained(model) if parameter.requires_grad]
        used = [parameter.grad is not None for parameter in trained]
        uses = torch.ones(len(used), device=self.ranks.device)
        if not all(used):
            uses.copy_(torch.tensor(used))
        for axis in self.AXES:
            dist.all_reduce(uses, group=self.grid.group(axis))
        return ((uses > 0) & (uses < math.prod(map(self.grid.size, self.AXES)))).any()

    def _settings(self) -> dict[str, Any]:
        from torch.distributed.fsdp import MixedPrecisionPolicy

        asked = self.options.fsdp
        is_mixed = (asked.param_dtype, asked.reduce_dtype) != ("float32", "float32")
        policy = MixedPrecisionPolicy(
            param_dtype=getattr(torch, asked.param_dtype) if is_mixed else None,
            reduce_dtype=getattr(torch, asked.reduce_dtype) if is_mixed else None,
        )
        return {
            "mesh": self.grid.device_mesh(*self.AXES),
            "reshard_after_forward": asked.reshard == "always",
            "mp_policy": policy,
        }


def find_units(model: nn.Module) -> list[nn.Module]:
    """Return the children of module lists that have parameters, outer ones before inner ones."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return [child for children in lists for child in children if next(child.parameters(), None) is not None]
