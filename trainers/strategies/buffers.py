"""Synchronise buffers that forward passes change, such as BatchNorm's statistics.

Every rank takes those of the first rank that computes with the same model.

Each rank's passes change its own. If they stayed different, a checkpoint would hold those of one rank or another, and
a resumed run would evaluate with other statistics than an uninterrupted one.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class SharedBuffers:
    """The buffers of a model that belong to its state."""

    def __init__(self, model: nn.Module) -> None:
        """Find the buffers by module and name: a pass may replace the tensors themselves."""
        self._places = [
            (module, name)
            for module in model.modules()
            for name, _ in module.named_buffers(recurse=False)
            if name not in module._non_persistent_buffers_set  # has no public name (torch 2.13)
        ]

    def take_first(self, groups: Sequence[Any]) -> None:
        """Replace the values by those of the first rank of each group in turn; None: all ranks.

        One message for each group: a collective call if there are any buffers.
        """
        tensors = [getattr(module, name).detach() for module, name in self._places]
        # The longest elements first, because views of bytes must be aligned.
        tensors = sorted(filter(Tensor.numel, tensors), key=Tensor.element_size, reverse=True)
        if not tensors:
            return
        parts = [tensor.reshape(-1).view(torch.uint8) for tensor in tensors]
        flat = torch.cat(parts)
        for group in groups:
            dist.broadcast(flat, group=group, group_src=0)
        with torch.no_grad():
            for tensor, part in zip(tensors, flat.split([len(part) for part in parts]), strict=True):
                tensor.copy_(part.view(tensor.dtype).view(tensor.shape))
