"""The time of a rank's own work: what counts, who reports it, and that it does not wait for peers."""

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from trainers.own_time import (
    CpuClock,
    GpuClock,
    NodeTimes,
    WorkClock,
    are_shares_comparable,
    call_after_backward,
    choose_clock,
)
from trainers.ranks import Ranks, join_ranks, leave_ranks
from trainers.strategies import create_strategy
from trainers.strategies.base import Strategy
from trainers.strategies.options import StrategyOptions

from .strategies.conftest import TINY, Worlds

BUSY_S = 0.2
HERE = "tests.trainers.test_own_time"


def spin(seconds: float) -> None:
    """Keep a core busy for that much of this thread's own time."""
    end_s = time.thread_time() + seconds
    while time.thread_time() < end_s:
        pass


def measure(clock: CpuClock, *, read_s: float, busy_s: float, blocked_s: float) -> float:
    clock.begin()
    time.sleep(read_s)
    clock.note_samples()
    spin(busy_s)
    time.sleep(blocked_s)
    clock.end()
    own_s = clock.read()
    assert own_s is not None
    return own_s


def test_waits_for_samples_count_and_waits_for_peers_do_not() -> None:
    clock = CpuClock()
    assert measure(clock, read_s=BUSY_S, busy_s=BUSY_S, blocked_s=0) >= 2 * BUSY_S
    # A loaded machine adds waits for a core, which are counted on purpose: the bound is the blocked time alone.
    began_s = time.perf_counter()
    own_s = measure(clock, read_s=0, busy_s=0, blocked_s=1)
    assert own_s <= time.perf_counter() - began_s - 1 + 0.01


def test_wait_for_a_core_counts_where_the_kernel_accounts_for_it(tmp_path: Path) -> None:
    clock = CpuClock()
    accounts = tmp_path / "schedstat"
    accounts.write_bytes(b"0 0 0\n")
    clock._file = accounts.open("rb", buffering=0)
    clock.begin()
    clock.note_samples()
    accounts.write_bytes(b"0 5000000000 1\n")
    clock.end()
    own_s = clock.read()
    assert own_s is not None and own_s >= 5.0
    clock._file = None  # macOS
    clock.begin()
    clock.note_samples()
    clock.end()
    assert clock.read() is not None


def test_gpu_is_measured_only_where_its_passes_wait_for_no_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: object())
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    late, early = make_strategy("ddp"), make_strategy("fsdp")
    assert isinstance(choose_clock(early, cpu, 4), CpuClock)
    assert isinstance(choose_clock(late, gpu, 4), GpuClock)
    assert type(choose_clock(early, gpu, 4)) is WorkClock and choose_clock(early, gpu, 4).read() is None


def make_strategy(name: str) -> Strategy:
    return create_strategy(name, Ranks(rank=0, world_size=1, device=torch.device("cpu")), StrategyOptions())


@pytest.mark.parametrize(
    ("batch", "count", "is_so"), [(8, 2, True), (100, 3, True), (6, 4, False), (3, 4, False), (8, 0, False)]
)
def test_ranks_with_unequal_numbers_of_samples_are_not_compared(batch: int, count: int, is_so: bool) -> None:
    assert are_shares_comparable(batch, count) is is_so


def make_times(rank: int, files: Sequence[Path | None]) -> NodeTimes:
    class Peers(Ranks):
        def collect(self, value: Any) -> list[Any]:
            return [(value[0], str(file)) for file in files]

    return NodeTimes(Peers(rank=rank, world_size=len(files), device=torch.device("cpu")), files[rank])


def test_first_rank_of_each_node_reports_its_slowest_rank(tmp_path: Path) -> None:
    files = [tmp_path / "a" / "progress.jsonl"] * 2 + [tmp_path / "b" / "progress.jsonl"] * 2
    times = [make_times(rank, files) for rank in range(4)]
    assert [times[rank].publish(own_s) for rank, own_s in ((1, 3.0), (3, 1.0))] == [None, None]
    assert [times[rank].publish(own_s) for rank, own_s in ((0, 2.0), (2, 5.0))] == [3.0, 5.0]
    assert times[1].publish(1.0) is None and times[0].publish(2.0) == 2.0


@pytest.mark.parametrize("files", [[Path("one")] * 2, [None, None]], ids=["one node", "without a file"])
def test_single_node_or_one_without_a_file_reports_nothing(files: Sequence[Path | None]) -> None:
    assert not make_times(0, files).is_on


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ddp", (True, True)),
        ("allreduce", (True, True)),
        ("zero1", (True, True)),
        ("zero2", (True, False)),
        ("fsdp", (True, False)),
        ("diloco", (True, True)),
    ],
)
def test_strategy_says_whether_ranks_compare_and_when_they_exchange(name: str, expected: tuple[bool, bool]) -> None:
    strategy = make_strategy(name)
    assert (strategy.has_equal_work(), strategy.exchanges_last()) == expected


def mark_precedes_the_wait_for_a_peer(_: Sequence[str]) -> int:
    """The second rank begins its backward pass only after the first has passed its mark: otherwise both hang."""
    ranks = join_ranks()
    store: Any = dist.distributed_c10d._get_default_store()
    torch.manual_seed(0)
    model = create_strategy("ddp", ranks, StrategyOptions()).wrap(nn.Linear(4, 1))
    for step in range(3):
        loss = model(torch.ones(2, 4)).mean()
        if ranks.is_first:
            call_after_backward(loss, lambda step=step: store.set(f"mark-{step}", b"1"))  # type: ignore[misc]
        else:
            store.wait([f"mark-{step}"])
        loss.backward()
    leave_ranks()
    return 0


def test_end_of_own_passes_is_noted_before_gradients_of_peers_arrive(worlds: Worlds, tmp_path: Path) -> None:
    ended = worlds.call(tmp_path, f"{HERE}:mark_precedes_the_wait_for_a_peer", [], ranks=2)
    assert ended.codes == [0, 0], ended.errors


def train_on_a_node_of_its_own(arguments: Sequence[str]) -> int:
    """Run the trainer with a progress file for each rank, as on nodes of one rank."""
    from trainers.lm import main

    file = Path(os.environ["BROKER_PROGRESS_FILE"])
    os.environ["BROKER_PROGRESS_FILE"] = str(file.with_name(f"node-{os.environ['RANK']}.jsonl"))
    return main(arguments)


@pytest.mark.parametrize(
    ("strategy", "reporters"),
    [
        ("ddp", {0, 1}),
        pytest.param("fsdp", {0, 1}, marks=pytest.mark.long),
        pytest.param("zero2", {0, 1}, marks=pytest.mark.long),
        pytest.param("parameter_server", {1}, marks=pytest.mark.long),
        pytest.param("pipeline", set(), marks=pytest.mark.long),
    ],
)
def test_each_node_reports_the_time_of_its_own_work(
    worlds: Worlds, tmp_path: Path, strategy: str, reporters: set[int]
) -> None:
    flags = ["--strategy", strategy, *TINY, "--log.every_steps", "2"]
    ended = worlds.call(tmp_path, f"{HERE}:train_on_a_node_of_its_own", flags, ranks=2)
    assert ended.codes == [0, 0], ended.errors
    for rank in range(2):
        file = tmp_path / f"node-{rank}.jsonl"
        lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        steps = [line["step"] for line in lines if "own_s" in line]
        assert steps == ([2, 4, 6, 8] if rank in reporters else []), (rank, lines)
        assert all(0 < line["own_s"] < 60 for line in lines if "own_s" in line)
        assert rank == 0 or all("loss" not in line for line in lines)
