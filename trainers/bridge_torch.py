"""Agreement between the ranks of torch.distributed: a preemption notice may reach only some of them."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist


def agree(is_true: bool) -> bool:
    """Return True on every rank if it is True on any. A collective call; without a group, return `is_true`."""
    if not dist.is_available() or not dist.is_initialized():
        return is_true
    flag = torch.tensor(float(is_true), device=find_device())
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag.item())


def find_device() -> torch.device:
    """Return the device on which this rank communicates.

    A program may place its model on the GPU of its local rank without making that the current one. NCCL would then wait
    forever for ranks that share the first GPU.
    """
    if "nccl" not in dist.get_backend():
        return torch.device("cpu")
    current, local_rank = torch.cuda.current_device(), int(os.environ.get("LOCAL_RANK") or 0)
    # If each process sees only its own GPU, the local rank is not a valid index.
    return torch.device("cuda", local_rank if not current and local_rank < torch.cuda.device_count() else current)
