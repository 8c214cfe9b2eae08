"""Collectives to measure: wrong or missing results are counted in every run, and the time is the slowest rank's."""

import dataclasses
import itertools
from pathlib import Path

import pytest
import torch

from trainers import collectives
from trainers.ranks import Ranks

from .strategies.conftest import Worlds

NAMES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_wrong_result_is_counted_whatever_the_buffers_held(worlds: Worlds, tmp_path: Path, ranks: int) -> None:
    ended = worlds.call(tmp_path, f"{__name__}:find_wrong_results", [], ranks=ranks)
    assert ended.codes == [0] * ranks, ended.errors


def test_the_time_of_a_run_is_the_mean_of_the_slowest_rank(worlds: Worlds, tmp_path: Path) -> None:
    ended = worlds.call(tmp_path, f"{__name__}:measure_with_a_clock_of_its_own", [], ranks=3)
    assert ended.codes == [0] * 3, ended.errors


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sums_over_many_ranks_are_exact_in_16_bits(dtype: str) -> None:
    """So that a wrong element is one, and never a rounding error of the right one."""
    kind = getattr(torch, dtype)
    for world_size in (2, 3, 64, 600):
        ranks = [Ranks(rank=rank, world_size=world_size, device=torch.device("cpu")) for rank in range(world_size)]
        parts = [collectives._values(9, each.rank, kind, each) for each in ranks]
        total = sum(parts, torch.zeros(9, dtype=kind))
        assert torch.equal(total.double(), torch.stack(parts).double().sum(0))
        assert len({tuple(each.tolist()) for each in parts}) == min(world_size, 3), "ranks can be distinguished"


def find_wrong_results(_: list[str]) -> int:
    """Check in a world that a collective that stops working after a good run is detected."""
    from trainers.collectives import create_collective
    from trainers.ranks import join_ranks, leave_ranks

    ranks = join_ranks()
    for name, dtype, size in itertools.product(NAMES, ("float32", "bfloat16"), (1, 10, 4100)):
        collective = create_collective(name, size, dtype, ranks)
        bytes_each = getattr(torch, dtype).itemsize
        part = max(1, size // bytes_each // ranks.world_size)
        assert collective.name == name and collective.size == part * ranks.world_size * bytes_each, (name, size)
        for _ in range(2):
            assert collective.check() == 0, (name, dtype, size)
        idle = dataclasses.replace(collective, run=lambda: None)
        is_source = name == "broadcast" and ranks.is_first
        assert is_source or idle.check() > 0, f"{name} of {size} bytes: the last run's result was counted again"
        assert collective.check() == 0
    leave_ranks()
    return 0


def measure_with_a_clock_of_its_own(_: list[str]) -> int:
    """Measure in a world in which each run takes as many seconds as its rank, by a clock that only runs advance."""
    from trainers.ranks import join_ranks, leave_ranks

    ranks = join_ranks()
    calls: list[str] = []

    def run() -> None:
        calls.append("run")

    class Clock:
        @staticmethod
        def perf_counter() -> float:
            return float(calls.count("run") * (ranks.rank + 1))

    collective = collectives.Collective(name="all_reduce", size=8, prepare=list, run=run, count_wrong=lambda: 0)
    collectives.time = Clock  # type: ignore[assignment]
    found = collectives.time_runs(collective, warmup=3, runs=4, ranks=ranks)
    assert found == ranks.world_size and len(calls) == 7, (found, calls)
    leave_ranks()
    return 0
