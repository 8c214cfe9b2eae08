"""The collectives to measure: each is one call on preallocated buffers, with a check of its result."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from trainers.ranks import Ranks

# Values that differ by position and rank. Those of three consecutive ranks add up to 1, so sums over many ranks stay
# small enough to be exact in 16 bits.
VALUES = (-1, 0, 2)


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One collective on buffers of one size."""

    name: str
    size: int  # bytes of the whole message, as nccl-tests counts it: for gather and scatter, the parts of all ranks
    prepare: Callable[[], None]  # fills the buffers before a check
    run: Callable[[], None]
    count_wrong: Callable[[], int]

    def check(self) -> int:
        """Run once; return the number of wrong elements."""
        self.prepare()
        self.run()
        return self.count_wrong()


def create_collective(name: str, size: int, dtype_name: str, ranks: Ranks) -> Collective:
    """Allocate the buffers for at least two ranks; `size` is rounded down to equal parts of whole elements."""
    dtype = getattr(torch, dtype_name)
    part = max(1, size // dtype.itemsize // ranks.world_size)
    whole = part * ranks.world_size
    make = {"all_reduce": _all_reduce, "all_gather": _all_gather, "reduce_scatter": _reduce_scatter}
    builder = make.get(name, _broadcast)
    return builder(part, whole, dtype, ranks)


def time_runs(collective: Collective, *, warmup: int, runs: int, ranks: Ranks) -> float:
    """Return the seconds per run: the mean over `runs`, on the slowest rank."""
    for _ in range(warmup):
        collective.run()
    ranks.sum([0.0])  # a barrier: all ranks begin together
    _wait(ranks)
    begin = time.perf_counter()
    for _ in range(runs):
        collective.run()
    _wait(ranks)
    seconds: list[float] = ranks.collect((time.perf_counter() - begin) / runs)
    return max(seconds)


def _all_reduce(part: int, whole: int, dtype: torch.dtype, ranks: Ranks) -> Collective:
    buffer = _values(whole, 0, dtype, ranks)
    expected = sum(_values(whole, rank, dtype, ranks) for rank in range(ranks.world_size))
    return Collective(
        name="all_reduce",
        size=whole * dtype.itemsize,
        prepare=lambda: _fill(buffer, _values(whole, ranks.rank, dtype, ranks)),
        run=lambda: dist.all_reduce(buffer),
        count_wrong=lambda: int((buffer != expected).sum()),
    )


def _all_gather(part: int, whole: int, dtype: torch.dtype, ranks: Ranks) -> Collective:
    mine = _values(part, ranks.rank, dtype, ranks)
    gathered = torch.zeros(whole, dtype=dtype, device=ranks.device)
    # torch 2.13 renamed both.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    expected = torch.cat([_values(part, rank, dtype, ranks) for rank in range(ranks.world_size)])
    return Collective(
        name="all_gather",
        size=whole * dtype.itemsize,
        prepare=lambda: _clear(gathered),
        run=lambda: gather(gathered, mine),
        count_wrong=lambda: int((gathered != expected).sum()),
    )


def _reduce_scatter(part: int, whole: int, dtype: torch.dtype, ranks: Ranks) -> Collective:
    mine = _values(whole, ranks.rank, dtype, ranks)
    summed = torch.zeros(part, dtype=dtype, device=ranks.device)
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    total = torch.stack([_values(whole, rank, dtype, ranks) for rank in range(ranks.world_size)]).sum(0, dtype=dtype)
    expected = total[ranks.rank * part : (ranks.rank + 1) * part]
    return Collective(
        name="reduce_scatter",
        size=whole * dtype.itemsize,
        prepare=lambda: _clear(summed),
        run=lambda: scatter(summed, mine),
        count_wrong=lambda: int((summed != expected).sum()),
    )


def _broadcast(part: int, whole: int, dtype: torch.dtype, ranks: Ranks) -> Collective:
    buffer = _values(whole, ranks.rank, dtype, ranks)
    expected = _values(whole, 0, dtype, ranks)
    return Collective(
        name="broadcast",
        size=whole * dtype.itemsize,
        prepare=lambda: _fill(buffer, _values(whole, ranks.rank, dtype, ranks)),
        run=lambda: dist.broadcast(buffer, src=0),
        count_wrong=lambda: int((buffer != expected).sum()),
    )


def _values(count: int, rank: int, dtype: torch.dtype, ranks: Ranks) -> Tensor:
    kinds = torch.tensor(VALUES, dtype=dtype, device=ranks.device)
    return kinds[(torch.arange(count, device=ranks.device) + rank) % len(VALUES)]


def _fill(buffer: Tensor, values: Tensor) -> None:
    buffer.copy_(values)


def _clear(buffer: Tensor) -> None:
    """Fill with a value that no result has: that of an earlier run would hide that this one did nothing."""
    buffer.fill_(99)


def _wait(ranks: Ranks) -> None:
    if ranks.device.type == "cuda":
        torch.cuda.synchronize(ranks.device)
