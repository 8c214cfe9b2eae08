"""Gradients as plain local tensors: what collectives and norms are computed on, sharded or not."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainers.optimizer import local


def clip_gradients(parameters: Iterable[Tensor], norm_max: float, *, across: Sequence[Any] = ()) -> float:
    """Scale gradients in place so that their norm is at most `norm_max`; return the norm before.

    Shards of one gradient are summed over the mesh axes they are spread along, replicas counted once. `across` names
    groups whose ranks hold different parameters.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    by_groups: dict[tuple[Any, ...], list[Tensor]] = {}
    for gradient in gradients:
        by_groups.setdefault(_shard_groups(gradient), []).append(local(gradient))
    squared = 0.0
    for groups, parts in by_groups.items():
        total = torch.stack(torch._foreach_norm([part.float() for part in parts])).double().square().sum()
        for group in groups:
            dist.all_reduce(total, group=group)
        squared += total.item()
    for group in across:
        # Every rank of the group takes part, also one without any gradients.
        total = torch.tensor(squared, dtype=torch.float64, device=gradients[0].device)
        dist.all_reduce(total, group=group)
        squared = total.item()
    norm = math.sqrt(squared)
    # The small constant is torch's own, so that clipping here and there agree.
    factor = norm_max / (norm + 1e-6)
    if factor < 1.0:
        torch._foreach_mul_([part for parts in by_groups.values() for part in parts], factor)
    return norm


def _shard_groups(gradient: Tensor) -> tuple[Any, ...]:
    if not hasattr(gradient, "device_mesh"):
        return ()
    mesh, placements = gradient.device_mesh, gradient.placements
    assert not any(placement.is_partial() for placement in placements), "a gradient was not reduced"
    return tuple(mesh.get_group(axis) for axis, placement in enumerate(placements) if not placement.is_replicate())
