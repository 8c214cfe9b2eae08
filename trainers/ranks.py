"""The processes that train together: the rank of this one, and agreement with the others.

One process alone needs no process group, and gets none.
"""

import ctypes
import datetime
import hashlib
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from trainers.restore_progress import Counter, LocalCounter

# For a peer in a step. One that hangs should be an error soon, not after torch's 30 minutes: the broker restarts the
# whole set anyway. One that died is an error at once, by its closed connection.
TIMEOUT_S = 60.0
FOREVER_S = 365 * 86400.0  # process groups know no endless wait
# Ranks that make the same mistake make it at about the same time.
SAY_S_MAX = 2.0
# Of malloc.h; the second takes 32 MiB at most.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The rank of one process among all, and the group that background work may use concurrently with the loop."""

    rank: int
    world_size: int
    device: torch.device
    local_world_size: int = 1  # ranks of this node
    background_group: Any = None
    start_s: float = TIMEOUT_S  # how long to wait for a peer before `limit_steps`

    @property
    def is_first(self) -> bool:
        """Return whether this process reports and decides for all."""
        return self.rank == 0

    def sum(self, values: list[float]) -> list[float]:
        """Add up numbers over all ranks; every rank gets the same answer."""
        if self.world_size == 1:
            return values
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        result: list[float] = total.tolist()
        return result

    def share(self, value: Any, *, is_background: bool = False) -> Any:
        """Give every rank the first rank's value."""
        if self.world_size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.background_group if is_background else None)
        return box[0]

    def collect(self, value: Any) -> list[Any]:
        """Give every rank the values of all, in rank order, over the background group."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.background_group)
        return values

    def limit_steps(self, timeout_s: float) -> None:
        """From now on, limit each wait for a peer to this time, in all groups except the background one.

        Called after the first step: until then ranks may be far apart because one of them compiles or prepares data.
        """
        if self.world_size == 1:
            return
        from torch.distributed import distributed_c10d

        for group in list(distributed_c10d._world.pg_map):  # torch has no public name for either (2.13)
            if group is not self.background_group:
                distributed_c10d._set_pg_timeout(make_timeout(timeout_s), group)

    def make_counter(self) -> Counter:
        """Return numbers that all ranks add to; usable concurrently with any collective."""
        if self.world_size == 1:
            return LocalCounter()
        store: Any = dist.distributed_c10d._get_default_store()  # torch's stub lacks `clone` (2.13)
        return StoreCounter(store.clone())


class StoreCounter:
    """Numbers kept by the store at which the ranks met."""

    def __init__(self, store: Any) -> None:
        """Count over a connection of its own: one that waits for an answer holds up its other callers."""
        self._store = store

    def add(self, name: str, amount: int) -> int:
        """Add to the number of this name and return it."""
        return int(self._store.add(name, amount))


def make_timeout(timeout_s: float) -> datetime.timedelta:
    """Return a timeout in the form of process groups; 0 means no limit."""
    return datetime.timedelta(seconds=timeout_s or FOREVER_S)


def join_ranks(*, start_s: float = TIMEOUT_S, checkpoint_s: float = TIMEOUT_S) -> Ranks:
    """Read RANK, WORLD_SIZE, LOCAL_RANK as set by our launcher or torchrun, and join the others.

    Wait for a peer as long as `start_s`, or `checkpoint_s` in the background group, where ranks read and write.
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
            torch.set_num_threads(1)  # ranks share the cores; torch would take them all for each
    if world_size == 1:
        return Ranks(rank=rank, world_size=world_size, device=device)
    # With a device NCCL connects now, rather than in the first collective, and a wrong device is an error at once.
    is_cuda = device.type == "cuda"
    dist.init_process_group(
        "nccl" if is_cuda else "gloo", timeout=make_timeout(start_s), device_id=device if is_cuda else None
    )
    # Two threads must not use one group: their messages would pair up wrongly between ranks.
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
    """Make glibc keep freed memory for the next step's activations of the same sizes. By default it returns the memory
    to the system at every step and gets it back zeroed: 4,300 page faults a step of the default model, and 5 % of its
    time. Other C libraries have no such option.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(M_TRIM_THRESHOLD, 2**30)
        set_option(M_MMAP_THRESHOLD, 2**25)


def choose_precision(device: torch.device, dtype: str) -> Callable[[], AbstractContextManager[Any]]:
    """Return the context of each forward pass: autocast for the 16-bit types, nothing for `float32`."""
    is_half = dtype != "float32"
    return lambda: torch.autocast(device.type, dtype=getattr(torch, dtype) if is_half else None, enabled=is_half)


def is_first_to_say(message: str) -> bool:
    """Return whether no other rank has said it yet: an error that all ranks make is reported once.

    Whoever cannot ask says it. The first rank, which keeps the answer, stays until all others asked or time is up.
    """
    if not dist.is_initialized():
        return True
    # `key` on the store at which the ranks met; counting up is its one atomic step.
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


def leave_ranks() -> None:
    """Leave the process group; harmless for a process that never joined."""
    if dist.is_initialized():
        dist.destroy_process_group()
