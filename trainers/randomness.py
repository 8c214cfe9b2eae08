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
        self.device = DeviceRandomNumbers(device) if device.type == "cuda" else None
        self.libraries = LibraryRandomNumbers()

    def seed(self, seed: int) -> None:
        """Seed all generators."""
        torch.default_generator.manual_seed(seed)
        if self.device is not None:
            torch.cuda.manual_seed(seed)
        self.libraries.seed(seed)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of torch's generator of the CPU."""
        return {"cpu": torch.get_rng_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of torch's generator of the CPU."""
        torch.set_rng_state(state["cpu"])

    def list_states(self) -> "dict[str, RandomNumbers | DeviceRandomNumbers | LibraryRandomNumbers]":
        """Return all generators, by their names in checkpoints."""
        device = {} if self.device is None else {"device_random_numbers": self.device}
        return {"random_numbers": self, **device, "library_random_numbers": self.libraries}

    def copy_all(self) -> dict[str, dict[str, Any]]:
        """Return the states of all generators, for `restore_all`."""
        return {name: generators.state_dict() for name, generators in self.list_states().items()}

    def restore_all(self, states: dict[str, dict[str, Any]]) -> None:
        """Restore the states of all generators."""
        for name, generators in self.list_states().items():
            generators.load_state_dict(states[name])


class DeviceRandomNumbers:
    """Torch's generator of a GPU.

    Separate from that of the CPU in checkpoints, because a run on CPUs may be continued on as many GPUs.
    """

    def __init__(self, device: torch.device) -> None:
        """Use the generator of `device`."""
        self._device = device

    def state_dict(self) -> dict[str, Any]:
        """Return the generator's state."""
        return {"cuda": torch.cuda.get_rng_state(self._device)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the generator's state."""
        torch.cuda.set_rng_state(state["cuda"], self._device)


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
