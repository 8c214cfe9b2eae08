"""Copies of this rank's parameters in CPU memory, on which the optimizer works (`--offload optimizer`).

On a GPU the moments then take none of its memory. A step copies the gradients to the CPU, updates the copies there and
copies them back. On a CPU the same copies are made: the result is bit-identical, and they only cost memory.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class HostCopies:
    """Parameters and gradients in CPU memory, in pinned buffers if the parameters are on a GPU."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        """Allocate a copy of each plain (not distributed) tensor; the first `load` fills it."""
        self._live = dict(parameters)
        self._is_stale = True
        self.values = {name: _allocate(value) for name, value in self._live.items()}
        self._gradients = {name: _allocate(value) for name, value in self._live.items()}

    def mark_stale(self) -> None:
        """Copy the parameters again at the next `load`: something other than `store` has changed them."""
        self._is_stale = True

    @torch.no_grad()
    def load(self, gradients: Mapping[str, Tensor]) -> None:
        """Copy the gradients, and the parameters if they have changed, and wait for them."""
        if self._is_stale:
            for name, value in self._live.items():
                self.values[name].copy_(value, non_blocking=True)
        for name, gradient in gradients.items():
            self._gradients[name].copy_(gradient, non_blocking=True)
        for device in {value.device for value in self._live.values() if value.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        for name in gradients:
            self.values[name].grad = self._gradients[name]
        self._is_stale = False

    @torch.no_grad()
    def store(self) -> None:
        """Copy the parameters back. Later work on the training stream, the next `load` included, waits for this."""
        for name, value in self._live.items():
            value.copy_(self.values[name], non_blocking=True)


def place_on_mesh(value: Tensor, parameter: Tensor) -> Tensor:
    """Return a tensor in CPU memory as this rank's shard of a DTensor, placed like `parameter`.

    `DTensor.from_local` would move it to the mesh's device. FSDP's own CPU offload creates DTensors in this way.
    """
    from torch.distributed.tensor import DTensor

    placed: Any = parameter
    return DTensor(value, placed._spec, requires_grad=False)  # type: ignore[no-any-return,no-untyped-call,unused-ignore]


def _allocate(value: Tensor) -> Tensor:
    return torch.empty_like(value, device="cpu", pin_memory=value.is_cuda, memory_format=torch.contiguous_format)
