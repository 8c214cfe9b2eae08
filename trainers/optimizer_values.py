"""Values of a user's optimizer that are not tensors of one parameter, as checkpointed state.

Examples: the counter `k` in the groups of schedule-free optimizers, `d` in those of Prodigy, a number or a list in the
state of a parameter.
"""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trainers.errors import TrainerError
from trainers.extra_state import pack, unpack

# Parameters, and what the schedule sets in each step.
NOT_SAVED = ("params", "param_names", "lr")


class OptimizerValues:
    """What updates have changed in the groups, and all that the state of parameters has besides tensors and `step`."""

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor]) -> None:
        """Remember the groups as they are before the first update."""
        self._optimizer, self._parameters = optimizer, parameters
        self._given = [
            {key: copy.deepcopy(value) for key, value in group.items() if key not in ("params", "param_names")}
            for group in optimizer.param_groups
        ]

    def reset_groups(self) -> None:
        """Undo what updates have changed in the groups."""
        for group, given in zip(self._optimizer.param_groups, self._given, strict=True):
            for key in [key for key in group if key not in given and key not in NOT_SAVED]:
                del group[key]
            group.update(copy.deepcopy(given))

    def check(self) -> None:
        """Raise TrainerError if the values cannot be saved. Call it when the optimizer has its state."""
        for name, values in self._list_states().items():
            for key, value in values.items():
                if _has_shards(value):
                    raise TrainerError(
                        f"your optimizer keeps shards of tensors in a {type(value).__name__}, `{key}` of `{name}`, "
                        "which cannot be saved\n\nhint: `--strategy ddp`, or one entry of its state for each tensor"
                    )
        try:
            self.state_dict()
        except Exception as error:
            raise TrainerError(f"the state of your optimizer cannot be saved: {error}") from error

    def state_dict(self) -> dict[str, Any]:
        """Return all values, encoded as they are now."""
        groups = [
            {key: value for key, value in group.items() if key not in NOT_SAVED and _is_changed(key, value, given)}
            for group, given in zip(self._optimizer.param_groups, self._given, strict=True)
        ]
        return {"content": pack({"groups": groups, "states": self._list_states()})}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore saved values. What updates never changed keeps the value that the program gave it."""
        content = unpack(state["content"])
        self.reset_groups()
        for group, saved in zip(self._optimizer.param_groups, content["groups"], strict=False):
            group.update(saved)
        for name, values in content["states"].items():
            if name in self._parameters:
                self._optimizer.state[self._parameters[name]].update(values)

    def _list_states(self) -> dict[str, dict[str, Any]]:
        states = {name: self._optimizer.state.get(value, {}) for name, value in self._parameters.items()}
        found = {
            name: {key: value for key, value in state.items() if key != "step" and not isinstance(value, Tensor)}
            for name, state in states.items()
        }
        return {name: values for name, values in found.items() if values}


def _is_changed(key: str, value: Any, given: Mapping[str, Any]) -> bool:
    if key not in given:
        return True
    if isinstance(value, Tensor) or isinstance(given[key], Tensor):
        return True
    try:
        return bool(value != given[key])
    except (ValueError, TypeError, RuntimeError):  # arrays, or tensors in a list, have no single answer
        return True


def _has_shards(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(_has_shards(part) for part in value.values())
    if isinstance(value, list | tuple | set):
        return any(_has_shards(part) for part in value)
    return hasattr(value, "device_mesh")
