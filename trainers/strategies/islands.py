"""State of ranks that drift apart: what each holds of its own, as plain local tensors."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trainers.checkpoint import HeldByOne
from trainers.optimizer import Optimizer, local


class OwnTensors:
    """One rank's model and moments, shard or whole, apart from those of the same names elsewhere."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Keep hold of the live tensors."""
        self._model, self._optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        """Return the live tensors by name."""
        moments = {key: value for key, value in self._optimizer.state_dict().items() if isinstance(value, dict)}
        parts = {"model": self._model.state_dict(), **moments}
        return {key: {name: local(value.detach()) for name, value in part.items()} for key, part in parts.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Copy saved tensors into the live ones."""
        with torch.no_grad():
            for key, part in self.state_dict().items():
                for name, value in part.items():
                    value.copy_(state[key][name])


def hold_by_first(model: nn.Module, optimizer: Optimizer, *, is_first: bool) -> Mapping[str, Any]:
    """Return the shared state of ranks that drift apart: the first's model and moments stand for all."""
    return {
        "model": HeldByOne(model, is_holder=is_first),
        "optimizer": HeldByOne(optimizer, is_holder=is_first),
    }


def list_local(model: nn.Module) -> list[Tensor]:
    """Return this rank's part of every parameter, in one order everywhere."""
    return [local(parameter.detach()) for parameter in model.parameters()]
