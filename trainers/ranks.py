"""The ranks that train together: the rank of this process, and agreement with the others.

A single process has no process group.
"""

import ctypes
import datetime
import hashlib
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from trainers.restore_progress import Counter, LocalCounter

# Limit for a peer in a step. A peer that hangs should fail soon, not after torch's 30 minutes, because broker restarts
# the gang anyway. A peer that died fails at once, by its closed connection.
TIMEOUT_S = 60.0
FOREVER_S = 365 * 86400.0  # process groups require a finite timeout
# Ranks that raise the same error raise it at about the same time.
SAY_S_MAX = 2.0
# From malloc.h; the second accepts at most 32 MiB.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The rank of this process, and a process group for work that runs concurrently with the loop."""

    rank: int
    world_size: int
    device: torch.device
    local_world_size: int = 1  # ranks of this node
    background_group: Any = None
    start_s: float = TIMEOUT_S  # timeout for a peer until `limit_steps` is called
    own_limits: list[Any] = field(default_factory=list, compare=False)  # groups with a timeout of their own

    @property
    def is_first(self) -> bool:
        """Return whether this is rank 0, which reports and decides for all."""
        return self.rank == 0

    def sum(self, values: list[float]) -> list[float]:
        """Return the sums of numbers over all ranks, equal on every rank. A collective call."""
        if self.world_size == 1:
            return values
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        result: list[float] = total.tolist()
        return result

    def share(self, value: Any, *, is_background: bool = False) -> Any:
        """Return the first rank's value on every rank. A collective call."""
        if self.world_size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.background_group if is_background else None)
        return box[0]

    def collect(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in rank order, on every rank. A collective call on the background group."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.background_group)
        return values

    def open_group(self, timeout_s: float) -> Any:
        """Create a group of all ranks for large messages between CPUs, to which `limit_steps` does not apply.

        A collective call.
        """
        group = dist.new_group(backend="gloo", timeout=make_timeout(timeout_s))
        self.own_limits.append(group)
        return group

    def limit_steps(self, timeout_s: float) -> None:
        """Limit each wait for a peer to this time from now on, except in the background group and `open_group`'s.

        Call it after the first step: until then ranks may be far apart, because one of them compiles or prepares data.
        """
        if self.world_size == 1:
            return
        from torch.distributed import distributed_c10d

        exempt = [self.background_group, *self.own_limits]
        for group in list(distributed_c10d._world.pg_map):  # neither has a public name (torch 2.13)
            if not any(group is each for each in exempt):
                distributed_c10d._set_pg_timeout(make_timeout(timeout_s), group)

    def wait_for_device(self) -> None:
        """Wait until a GPU has done everything on the training stream; no effect on a CPU, which is never behind."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def make_counter(self) -> Counter:
        """Return counters that all ranks share, usable concurrently with any collective."""
        if self.world_size == 1:
            return LocalCounter()
        store: Any = dist.distributed_c10d._get_default_store()  # torch's stub lacks `clone` (2.13)
        return StoreCounter(store.clone())


class StoreCounter:
    """Shared counters in the store of the process group."""

    def __init__(self, store: Any) -> None:
        """Use a separate connection, because a call that waits for its answer blocks others on the same connection."""
        self._store = store

    def add(self, name: str, amount: int) -> int:
        """Add to the counter of this name and return its value."""
        return int(self._store.add(name, amount))


def make_timeout(timeout_s: float) -> datetime.timedelta:
    """Return a timeout for process groups; 0 means no limit."""
    return datetime.timedelta(seconds=timeout_s or FOREVER_S)


def join_ranks(*, start_s: float = TIMEOUT_S, checkpoint_s: float = TIMEOUT_S) -> Ranks:
    """Read RANK, WORLD_SIZE and LOCAL_RANK, as set by our launcher or torchrun, and create the process groups.

    `start_s` limits the wait for a peer; `checkpoint_s` limits it in the background group, which checkpoints use.
    """
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    else:
        _keep_freed_memory()
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(1)  # ranks share the cores, but each torch would use all of them
    if world_size == 1:
        return Ranks(rank=rank, world_size=world_size, device=device)
    # With `device_id`, NCCL connects now instead of in the first collective, and a wrong device fails at once.
    is_cuda = device.type == "cuda"
    dist.init_process_group(
        "nccl" if is_cuda else "gloo", timeout=make_timeout(start_s), device_id=device if is_cuda else None
    )
    # Two threads must not share a group: ranks would match their messages in different orders.
    background_group = dist.new_group(backend="gloo", timeout=make_timeout(checkpoint_s))
    return Ranks(
        rank=rank,
        world_size=world_size,
        device=device,
        local_world_size=local_world_size,
        background_group=background_group,
        start_s=start_s,
    )


def _keep_freed_memory() -> None:
    """Make glibc keep freed memory for the activations of the next step, which have the same sizes.

    By default it returns the memory to the system at every step and gets it back zeroed: 4,300 page faults per step of
    the default model, or 5 % of its time. Other C libraries have no such option.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(M_TRIM_THRESHOLD, 2**30)
        set_option(M_MMAP_THRESHOLD, 2**25)


def choose_precision(device: torch.device, dtype: str) -> Callable[[], AbstractContextManager[Any]]:
    """Return a factory of the context for forward passes: autocast for 16-bit dtypes, none for `float32`.

    With `float8`, everything but the converted linear layers is in bfloat16, or in float32 on a CPU.
    """
    if dtype == "float8":
        dtype = "float32" if device.type == "cpu" else "bfloat16"
    is_half = dtype != "float32"
    return lambda: torch.autocast(device.type, dtype=getattr(torch, dtype) if is_half else None, enabled=is_half)


def is_first_to_say(message: str) -> bool:
    """Return whether no other rank has reported this message: an error that all ranks raise is printed once.

    A rank that cannot reach the store prints it too. The first rank, which hosts the store, waits until all others have
    asked, for at most `SAY_S_MAX` seconds.
    """
    if not dist.is_initialized():
        return True
    # `add` is the atomic operation of the store.
    store = dist.distributed_c10d._get_default_store()
    key = f"error/{hashlib.sha256(message.encode()).hexdigest()}"
    try:
        is_first = bool(store.add(key, 1) == 1)
        end_s = time.monotonic() + SAY_S_MAX
        while dist.get_rank() == 0 and store.add(key, 0) < dist.get_world_size() and time.monotonic() < end_s:
            time.sleep(0.02)
    except RuntimeError:
        return True
    return is_first


def abort_collectives() -> None:
    """End NCCL's kernels that wait for a lost peer: until then, nothing behind them on the GPU's stream is executed.

    Their results are undefined. No effect without NCCL, and the groups cannot be used afterwards.
    """
    if dist.is_initialized() and dist.get_backend() == "nccl":
        dist.distributed_c10d._abort_process_group()  # has no public name (torch 2.13)


def leave_ranks() -> None:
    """Destroy the process group; no effect in a process that never joined one."""
    if dist.is_initialized():
        dist.destroy_process_group()
