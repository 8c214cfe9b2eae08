"""The state of ranks that drift apart, as plain local tensors."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainers.checkpoint import HeldByOne
from trainers.extra_state import SUFFIX, find_owner
from trainers.optimizer import Optimizer, local
from trainers.strategies.grid import Grid, Share


class OwnTensors:
    """The model and moments of one rank, sharded or whole, distinct from those of other ranks."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Refer to the live tensors of the model and the optimizer."""
        self._model, self._optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        """Return the live tensors by name."""
        moments = {key: value for key, value in self._optimizer.state_dict().items() if isinstance(value, dict)}
        parts = {"model": self._model.state_dict(), **moments}
        return {key: {name: _find_own(value) for name, value in part.items()} for key, part in parts.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Copy saved tensors into the live ones."""
        with torch.no_grad():
            for key, part in self.state_dict().items():
                for name, value in part.items():
                    if isinstance(value, Tensor):
                        value.copy_(state[key][name])
        for name, value in state["model"].items():
            if name.endswith(SUFFIX):
                find_owner(self._model, name).set_extra_state(value)


class OwnMoves:
    """The numbers of updates of one rank, by which Adam corrects its moments: islands may skip different steps."""

    def __init__(self, optimizer: Optimizer) -> None:
        """Refer to the optimizer."""
        self._optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        """Return the numbers as of now."""
        return {"moves_done": self._optimizer.moves_done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the numbers."""
        self._optimizer.load_moves(state["moves_done"])


def list_own_state(grid: Grid, model: nn.Module, optimizer: Optimizer) -> Mapping[str, Any]:
    """Return the state of one rank of islands that drift apart, by name."""
    if grid.size("island") == 1:
        return {}
    layout = name_layout(grid)
    return {layout: OwnTensors(model, optimizer), f"{layout}-moves": OwnMoves(optimizer)}


def hold_by_first(model: nn.Module, optimizer: Optimizer, *, is_first: bool) -> Mapping[str, Any]:
    """Return the shared state of ranks that drift apart: model and moments of the first rank."""
    return {
        "model": HeldByOne(model, is_holder=is_first),
        "optimizer": HeldByOne(optimizer, is_holder=is_first),
    }


def _find_own(value: Any) -> Any:
    return local(value.detach()) if isinstance(value, Tensor) else value


def list_local(model: nn.Module) -> list[Tensor]:
    """Return this rank's part of every trained parameter, in the same order on all ranks; frozen ones are equal."""
    return [local(parameter.detach()) for parameter in model.parameters() if parameter.requires_grad]


def average_loss(loss: Tensor, *, weight: float, grid: Grid, share: Share) -> Tensor:
    """Return the mean loss of this rank's island, on the device. A collective call of the island's ranks."""
    totals = torch.stack([loss, torch.full_like(loss, weight)]) * float(share.is_counted)
    for axis in list_inner_axes(grid):
        dist.all_reduce(totals, group=grid.group(axis))
    return totals[0] / totals[1]


def list_inner_axes(grid: Grid) -> list[str]:
    """Return the axes along which the ranks of an island differ."""
    return [axis for axis in grid.axes if axis != "island" and grid.size(axis) > 1]


def name_layout(grid: Grid) -> str:
    """Return the name of a rank's own tensors in a checkpoint, the same only where each rank holds the same part.

    Example: `island` if each rank is one, and `island2-shard2` or `shard2-island2` if an island is two ranks. In
    another layout of as many ranks, a rank finds no tensors of its own, and all islands continue from the shared ones.
    """
    if not list_inner_axes(grid):
        return "island"
    return "-".join(f"{axis}{size}" for axis, size in zip(grid.axes, grid.sizes, strict=True) if size > 1)
