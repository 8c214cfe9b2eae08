"""Clip gradients as plain local tensors, sharded or not."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainers.optimizer import local


def clip_gradients(
    parameters: Iterable[Tensor], norm_max: float, *, device: torch.device, across: Sequence[Any] = ()
) -> Tensor:
    """Scale gradients in place so that their norm is at most `norm_max`; return the norm before, on the device.

    Shards of a gradient are summed over the mesh axes along which they are sharded; replicas count once. `across` has
    the groups whose ranks hold different parameters. The host does not wait for a GPU.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    by_groups: dict[tuple[Any, ...], list[Tensor]] = {}
    for gradient in gradients:
        by_groups.setdefault(_shard_groups(gradient), []).append(local(gradient))
    squared = torch.zeros((), dtype=torch.float64, device=device)
    for groups, parts in by_groups.items():
        total = torch.stack(torch._foreach_norm([part.float() for part in parts])).double().square().sum()
        for group in groups:
            dist.all_reduce(total, group=group)
        squared = squared + total
    for group in across:
        # A collective on every rank of the group, also on one without gradients.
        dist.all_reduce(squared, group=group)
    norm = squared.sqrt()
    # The constant is the one in torch's `clip_grad_norm_`.
    factor = (norm_max / (norm + 1e-6)).clamp(max=1.0)
    # On a CPU, reading the factor is free and may save a pass over all gradients; on a GPU it would wait.
    if device.type != "cpu" or factor < 1.0:
        for parts in by_groups.values():
            # The fused kernel of GPUs requires the dtype of the list; on a CPU float64 keeps all digits.
            torch._foreach_mul_(parts, factor if device.type == "cpu" else factor.to(parts[0].dtype))
    return norm


def _shard_groups(gradient: Tensor) -> tuple[Any, ...]:
    if not hasattr(gradient, "device_mesh"):
        return ()
    spread: Any = gradient
    mesh, placements = spread.device_mesh, spread.placements
    assert not any(placement.is_partial() for placement in placements), "a gradient was not reduced"
    return tuple(mesh.get_group(axis) for axis, placement in enumerate(placements) if not placement.is_replicate())
