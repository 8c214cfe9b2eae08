"""The random number generators of a rank, as checkpointed state."""

import random
import sys
from typing import Any

import torch

from trainers.extra_state import pack, unpack

NUMPY_SEEDS = 2**32


class RandomNumbers:
    """The generators of one process."""

    def __init__(self, device: torch.device) -> None:
        """Use torch's generator of the CPU and, on a GPU, that of the device; and those of Python and NumPy."""
        self._device = device
        self.libraries = LibraryRandomNumbers()

    def seed(self, seed: int) -> None:
        """Seed all generators."""
        torch.default_generator.manual_seed(seed)
        if self._device.type == "cuda":
            torch.cuda.manual_seed(seed)
        self.libraries.seed(seed)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of torch's generators."""
        state = {"cpu": torch.get_rng_state()}
        if self._device.type == "cuda":
            state["cuda"] = torch.cuda.get_rng_state(self._device)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the states of torch's generators."""
        torch.set_rng_state(state["cpu"])
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(state["cuda"], self._device)

    def copy_all(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the states of all generators, for `restore_all`."""
        return self.state_dict(), self.libraries.state_dict()

    def restore_all(self, states: tuple[dict[str, Any], dict[str, Any]]) -> None:
        """Restore the states of all generators."""
        own, others = states
        self.load_state_dict(own)
        self.libraries.load_state_dict(others)


class LibraryRandomNumbers:
    """The global generators of Python and NumPy, from which the passes of a user's model may draw.

    Separate from torch's in checkpoints, because older ones do not have them.
    """

    def seed(self, seed: int) -> None:
        """Seed the generators."""
        random.seed(seed)
        if numpy := find_numpy():
            numpy.random.seed(seed % NUMPY_SEEDS)

    def state_dict(self) -> dict[str, Any]:
        """Return the generators' states, encoded."""
        numpy = find_numpy()
        states = {"python": random.getstate(), "numpy": numpy.random.get_state() if numpy else None}
        return {"content": pack(states)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the generators' states."""
        states = unpack(state["content"])
        random.setstate(states["python"])
        numpy = find_numpy()
        if numpy and states["numpy"]:
            numpy.random.set_state(states["numpy"])


def find_numpy() -> Any:
    """Return the module if it is there; torch imports it if it is installed."""
    return sys.modules.get("numpy")
