"""The machines of the next attempt: a refusal is noted, found again after a restart, and never runs twice."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from broker.errors import BrokerError, CapacityError, QuotaError
from broker.jobs.successor import RETRY_S_MAX, Successor
from broker.provision.hedge_timer import Answer, HedgeTimer
from broker.state.store import Store
from broker.types import Cluster, ClusterStatus, Goal, Job, Plan
from tests.jobs.test_deadline import TASK, plan_of
from tests.state.samples import Hands


class Requests:
    """A provisioner with a scripted answer that records its calls."""

    def __init__(self, answer: Callable[[], Awaitable[Cluster]]) -> None:
        self.answer = answer
        self.names = list[str]()
        self.downs = list[str]()

    async def up(self, name: str, plan: Plan, **facts: object) -> Cluster:
        self.names.append(name)
        return await self.answer()

    async def down(self, name: str) -> None:
        self.downs.append(name)


def refuse(error: BrokerError) -> Callable[[], Awaitable[Cluster]]:
    async def answer() -> Cluster:
        raise error

    return answer


def make_successor(folder: Path, requests: Requests) -> tuple[Successor, Store, Hands, Job]:
    clock = Hands()
    store = Store(folder / "state.db", clock=clock)
    unused: Any = requests
    return Successor(store, unused, clock), store, clock, store.jobs.add("train", TASK)


@pytest.mark.parametrize(("error", "can_overlap"), [(CapacityError("full"), True), (QuotaError("no quota"), False)])
def test_a_refusal_delays_the_next_machines_and_a_quota_refusal_ends_the_overlap(
    tmp_path: Path, error: BrokerError, can_overlap: bool
) -> None:
    async def play() -> None:
        requests = Requests(refuse(error))
        successor, _, clock, job = make_successor(tmp_path, requests)
        successor.begin(job, plan_of(TASK))
        while successor.is_busy:
            assert not successor.check()
            await asyncio.sleep(0)
        assert successor.can_overlap(job) is can_overlap
        successor.begin(job, plan_of(TASK))
        assert not successor.is_busy and len(requests.names) == 1, "it has just been refused"
        clock.time_s += RETRY_S_MAX
        successor.begin(job, plan_of(TASK))
        assert successor.is_busy
        await successor.stop()

    asyncio.run(play())


def test_a_clock_that_is_set_back_after_a_refusal_does_not_extend_the_wait(tmp_path: Path) -> None:
    async def play() -> None:
        successor, _, clock, job = make_successor(tmp_path, Requests(refuse(CapacityError("full"))))
        successor.begin(job, plan_of(TASK))
        while successor.is_busy:
            assert not successor.check()
            await asyncio.sleep(0)
        clock.time_s -= 3600.0
        successor.begin(job, plan_of(TASK))
        assert successor.is_busy
        await successor.stop()

    asyncio.run(play())


def test_successive_refusals_lead_to_longer_and_longer_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []

    def draw(count: int, *, base_s: float, cap_s: float) -> float:
        counts.append(count)
        return base_s

    monkeypatch.setattr("broker.jobs.successor.draw_backoff_s", draw)

    async def play() -> None:
        successor, _, clock, job = make_successor(tmp_path, Requests(refuse(CapacityError("full"))))
        for _ in range(3):
            successor.begin(job, plan_of(TASK))
            while successor.is_busy:
                successor.check()
                await asyncio.sleep(0)
            clock.time_s += RETRY_S_MAX

    asyncio.run(play())
    assert counts == [1, 2, 3]


def test_a_stopped_request_has_ended_when_stop_returns(tmp_path: Path) -> None:
    ended: list[str] = []

    async def hang() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append("request")

    async def play() -> None:
        successor, _, _, job = make_successor(tmp_path, Requests(hang))  # type: ignore[arg-type]
        successor.begin(job, plan_of(TASK))
        for _ in range(5):
            await asyncio.sleep(0)
        await successor.stop()
        assert ended == ["request"]

    asyncio.run(play())


def test_a_budget_leaves_no_room_beside_the_present_machines(tmp_path: Path) -> None:
    successor, _, _, job = make_successor(tmp_path, Requests(refuse(CapacityError("full"))))
    assert successor.can_overlap(job)
    assert not successor.can_overlap(replace(job, task=replace(TASK, goal=Goal(work_hours=1.0, budget_usd=5.0))))


def test_a_move_overlaps_for_the_mean_boot_of_its_cloud_unless_there_is_a_budget(tmp_path: Path) -> None:
    successor, store, _, job = make_successor(tmp_path, Requests(refuse(CapacityError("full"))))
    assert successor.expect_overlap_hours(job, "x") == 0.0, "never measured"
    timer = HedgeTimer(store.response_times)
    timer.note("x", Answer.CREATED, 12.0)
    timer.note("x", Answer.WHOLE, 60.0)
    assert successor.expect_overlap_hours(job, "x") == pytest.approx(0.02)
    assert successor.expect_overlap_hours(job, "y") == 0.0
    poor = replace(job, task=replace(TASK, goal=Goal(work_hours=1.0, budget_usd=5.0)))
    assert successor.expect_overlap_hours(poor, "x") == 0.0


def test_only_one_request_is_under_way_and_stopping_leaves_its_records(tmp_path: Path) -> None:
    async def play() -> None:
        never = asyncio.Event()

        async def wait() -> Cluster:
            await never.wait()
            raise AssertionError("unreachable")

        requests = Requests(wait)
        successor, _, _, job = make_successor(tmp_path, requests)
        for _ in range(3):
            successor.begin(job, plan_of(TASK))
            await asyncio.sleep(0)
        assert requests.names == [job.name_cluster(job.next_attempt)]
        await successor.stop()
        assert not successor.is_busy and not requests.downs

    asyncio.run(play())


@pytest.mark.parametrize(
    ("status", "attempt", "is_found"),
    [(ClusterStatus.UP, 1, True), (ClusterStatus.UP, 2, False), (ClusterStatus.TERMINATING, 1, False)],
)
def test_machines_that_are_up_are_found_by_their_name(
    tmp_path: Path, status: ClusterStatus, attempt: int, is_found: bool
) -> None:
    successor, store, _, job = make_successor(tmp_path, Requests(refuse(CapacityError("full"))))
    assert successor.find_placement(job) is None
    placement = plan_of(TASK).choice.placement
    store.clusters.put(
        Cluster(
            name=job.name_cluster(job.next_attempt), status=status, placement=placement, attempt=attempt,
            created_s=0.0, job_id=job.id,
        )
    )  # fmt: skip
    assert (successor.find_placement(job) == placement) is is_found
