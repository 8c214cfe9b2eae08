"""Agreement between the ranks of torch.distributed: a preemption notice may reach only some of them."""

from __future__ import annotations

import torch
import torch.distributed as dist


def agree(is_true: bool) -> bool:
    """Return True on every rank if it is True on any. A collective call; without a group, return `is_true`."""
    if not dist.is_available() or not dist.is_initialized():
        return is_true
    device = torch.device("cuda" if "nccl" in dist.get_backend() else "cpu")
    flag = torch.tensor(float(is_true), device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag.item())
