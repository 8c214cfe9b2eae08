"""Execution of a policy's decisions: a program is moved as before a preemption, and polled at a bounded rate."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from broker.errors import NoOfferError
from broker.jobs.deadline import Situation, find_margin_hours
from broker.jobs.policy_runner import POLL_S_MAX, POLL_S_MIN, Pause, PolicyRunner
from broker.jobs.successor import Successor
from broker.spot.policies.base import Decision
from broker.state.store import Store
from broker.types import Attempt, Cluster, JobStatus, Plan, Progress, Task
from tests.jobs.test_deadline import DEAR, TASK, make_moving_stage, plan_of
from tests.state.samples import START_S, Hands

FULL = 2  # SQLite's number of `synchronous`


def test_a_moved_program_is_notified_after_its_outcome_is_stored_and_before_teardown(
    tmp_path: Path,
) -> None:
    stage = make_moving_stage(tmp_path)
    world = stage.world
    told: list[tuple[JobStatus, str, int]] = []
    stored: dict[tuple[JobStatus, str], int] = {}  # state of the first attempt after a crash -> how durable
    cancel, commit = world.gang.cancel, type(world.store)._commit

    def read() -> tuple[JobStatus, str]:
        job = world.get_job()
        outcome = job.attempts[0].outcome if job.attempts else None
        return job.status, outcome.kind.value if outcome else ""

    async def note_cancel(cluster: Cluster, run_id: int) -> None:
        told.append((*read(), len(world.list_live_nodes())))
        await cancel(cluster, run_id)

    def note_commit() -> None:
        level = world.store.rows("PRAGMA synchronous")[0][0]
        commit(world.store)
        if len(world.get_job().attempts) == 1:
            stored.setdefault(read(), level)

    world.gang.cancel = note_cancel  # type: ignore[method-assign]
    world.store._commit = note_commit  # type: ignore[method-assign]
    stage.run()
    assert told == [(JobStatus.RECOVERING, "moved", 4)], "the next machines are up by then"
    assert (JobStatus.RUNNING, "moved") not in stored and (JobStatus.RUNNING, "") in stored
    assert stored[JobStatus.RECOVERING, "moved"] == FULL


def test_frequent_checkpoints_cause_at_most_two_decisions_a_minute(tmp_path: Path) -> None:
    clock = Hands()
    store = Store(tmp_path / "state.db", clock=clock)
    job = store.jobs.add("train", TASK)
    placement = plan_of(TASK, DEAR).choice.placement
    attempt = Attempt(job_id=job.id, number=1, cluster="c", placement=placement, started_s=START_S, resumed_s=START_S)
    planned_s: list[float] = []
    unused: Any = None

    def plan(task: Task, avoid: object) -> Plan:
        planned_s.append(clock.time_s)
        return plan_of(task, DEAR)

    async def look(seconds: int, *, save_every: int) -> list[float]:
        """Return the seconds between one decision and the next."""
        pilot = PolicyRunner(store, plan, clock, unused, Successor(store, unused, clock))
        planned_s.clear()
        for second in range(seconds):
            clock.time_s = START_S + second
            progress = Progress(step=second + 2, total=10_000, checkpoint_step=second // save_every + 1)
            assert not await pilot.reconsider(job, attempt, unused, progress)
        return [later - earlier for earlier, later in pairwise(planned_s)]

    assert set(asyncio.run(look(600, save_every=1))) == {POLL_S_MIN} == {30.0}
    assert set(asyncio.run(look(1000, save_every=10_000))) == {POLL_S_MAX} == {300.0}


def test_a_policy_allows_for_a_fault_just_after_the_longest_pause_between_two_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Hands()
    store = Store(tmp_path / "state.db", clock=clock)
    job = store.jobs.add("train", TASK)
    unused: Any = None
    found: list[float] = []
    decide = PolicyRunner._decide

    def note(self: PolicyRunner, situation: Situation) -> Decision:
        found.append(situation.view.look_hours)
        return decide(self, situation)

    monkeypatch.setattr(PolicyRunner, "_decide", note)
    with suppress(Pause):
        PolicyRunner(
            store, lambda task, avoid: plan_of(task, DEAR), clock, unused, Successor(store, unused, clock)
        ).plan(job)
    assert TASK.goal is not None
    assert [hours - find_margin_hours(TASK.goal) for hours in found] == [
        pytest.approx((POLL_S_MAX + POLL_S_MIN) / 3600)
    ]


def test_running_machines_are_kept_if_nothing_fits_the_rest_of_the_budget(tmp_path: Path) -> None:
    clock = Hands()
    store = Store(tmp_path / "state.db", clock=clock)
    assert TASK.goal is not None
    job = store.jobs.add("train", replace(TASK, goal=replace(TASK.goal, budget_usd=0.01)))
    placement = plan_of(TASK, DEAR).choice.placement
    attempt = Attempt(job_id=job.id, number=1, cluster="c", placement=placement, started_s=START_S, resumed_s=START_S)
    refused_s: list[float] = []
    unused: Any = None

    def plan(task: Task, avoid: object) -> Plan:
        with pytest.raises(NoOfferError, match="budget") as caught:
            plan_of(task, DEAR)
        refused_s.append(clock.time_s)
        raise caught.value

    async def look(seconds: int) -> None:
        runner = PolicyRunner(store, plan, clock, unused, Successor(store, unused, clock))
        for second in range(seconds):
            clock.time_s = START_S + second
            assert not await runner.reconsider(job, attempt, unused, Progress(step=2, total=400, checkpoint_step=1))

    asyncio.run(look(700))
    assert [time_s - START_S for time_s in refused_s] == [0.0, POLL_S_MAX, 2 * POLL_S_MAX]
