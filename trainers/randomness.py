"""The random number generators of a rank, as checkpointed state."""

from typing import Any

import torch


class RandomNumbers:
    """The torch generators of one process."""

    def __init__(self, device: torch.device) -> None:
        """Use the generator of the CPU and, on a GPU, that of the device."""
        self._device = device

    def seed(self, seed: int) -> None:
        """Seed all generators."""
        torch.default_generator.manual_seed(seed)
        if self._device.type == "cuda":
            torch.cuda.manual_seed(seed)

    def state_dict(self) -> dict[str, Any]:
        """Return the generators' states."""
        state = {"cpu": torch.get_rng_state()}
        if self._device.type == "cuda":
            state["cuda"] = torch.cuda.get_rng_state(self._device)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the states of the generators."""
        torch.set_rng_state(state["cpu"])
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(state["cuda"], self._device)
