"""A slot goes to a waiting job of higher priority: which job returns it, and how, with one or several controllers."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.config import Config
from broker.errors import UsageError
from broker.jobs.controller import JobController
from broker.jobs.daemon import run_daemon
from broker.jobs.displacing import AGAIN_S, Holder, choose_victim
from broker.jobs.slot_limits import SlotLimits, read_slot_limits
from broker.jobs.slots import AGE_S_MAX, JobQueue
from broker.state.store import Store
from broker.types import EventKind, GroupRole, Job, JobStatus, OutcomeKind, Progress, Task
from tests.simulation.world import OWNER, World, make_plan
from tests.state.conftest import OpenStore, clock, open_postgres, open_sqlite, open_store, postgres, store
from tests.state.samples import Hands

__all__ = ["clock", "open_postgres", "open_sqlite", "open_store", "postgres", "store"]
AFTER_S = 300.0
NOW_S = 1e6


def hold(job_id: int, priority: int = 0, **fields: Any) -> Holder:
    return Holder(job_id=job_id, priority=priority, **{"is_preemptible": True, **fields})


@pytest.mark.parametrize(
    ("holders", "expected"),
    [
        ([hold(1), hold(2)], 2),
        ([hold(1, -100), hold(2)], 1),
        ([hold(1, 100), hold(2, 100)], None),
        ([hold(1, is_preemptible=False)], None),
        ([hold(1, displaced_s=NOW_S - AGAIN_S + 1.0), hold(2, 50)], 2),
        ([hold(1, displaced_s=NOW_S - AGAIN_S)], 1),
        ([hold(1, displaced_s=NOW_S + 90.0), hold(2, 50)], 2),  # by a controller whose clock is ahead
        ([hold(1, displaced_s=NOW_S + 1e5)], 1),
        ([hold(1, displaced_by=8), hold(2, 50)], 2),
        ([hold(1, displaced_by=9), hold(2, 50)], None),
    ],
)
def test_lowest_preemptible_job_returns_its_slot(holders: list[Holder], expected: int | None) -> None:
    assert choose_victim(9, 100, holders, now_s=NOW_S) == expected


def test_job_that_waits_for_its_project_takes_a_slot_of_the_project() -> None:
    holders = [hold(1, -100, project="speech"), hold(2, project="vision")]
    assert choose_victim(9, 100, holders, now_s=NOW_S, project="vision") == 2


@given(
    st.lists(
        st.builds(
            Holder,
            job_id=st.integers(1, 99),
            priority=st.integers(-1000, 1000),
            is_preemptible=st.booleans(),
            displaced_by=st.none() | st.integers(1, 99),
            displaced_s=st.none() | st.floats(0, 2 * NOW_S),
        )
    ),
    st.integers(-1000, 1000),
)
def test_victim_is_always_lower_and_has_a_checkpoint(holders: list[Holder], priority: int) -> None:
    victim = choose_victim(9, priority, holders, now_s=NOW_S)
    chosen = [each for each in holders if each.job_id == victim]
    assert victim is None or any(
        each.priority < priority and each.is_preemptible and each.displaced_by is None for each in chosen
    )


# -- claimed in the store


class Stage:
    """A limit of one slot, and a running job that has a checkpoint."""

    def __init__(self, store: Store, clock: Hands) -> None:
        self.store, self.clock = store, clock
        self.limits = SlotLimits(total=1, preempt_after_s=AFTER_S)
        self.queue = self.make(store)
        self.low = self.add(priority=-100)
        assert self.queue.admit(self.get(self.low)) == 0.0
        store.jobs.set_status(self.low, JobStatus.RUNNING)
        store.jobs.set_progress(self.low, Progress(step=5, checkpoint_step=5))

    def make(self, store: Store) -> JobQueue:
        return JobQueue(store, self.clock, read_limits=lambda: self.limits)

    def add(self, **fields: Any) -> int:
        job_id = self.store.jobs.add("j", Task(**fields)).id
        self.clock.time_s += 2 * AGE_S_MAX
        return job_id

    def get(self, job_id: int) -> Job:
        job = self.store.jobs.get(job_id)
        assert job is not None
        return job

    def wait(self, *job_ids: int, duration_s: float = AFTER_S) -> None:
        for passed_s in (0.0, duration_s):
            self.clock.time_s += passed_s
            for job_id in job_ids:
                assert self.queue.admit(self.get(job_id)) > 0.0


@pytest.fixture
def stage(store: Store, clock: Hands) -> Stage:
    return Stage(store, clock)


def test_slot_is_taken_only_after_the_stated_time(stage: Stage) -> None:
    high = stage.add(priority=100)
    stage.wait(high, duration_s=AFTER_S - 10.0)
    assert stage.get(stage.low).displaced_by is None
    stage.wait(high, duration_s=10.0)
    assert stage.get(stage.low).displaced_by == high
    told = {each.kind: each.message for each in stage.store.events.list()}
    assert f"job {stage.low}" in told[EventKind.DISPLACING] and f"job {high}" in told[EventKind.DISPLACED]


def test_it_is_off_by_default(stage: Stage) -> None:
    stage.limits = SlotLimits(total=1)
    stage.wait(stage.add(priority=100), duration_s=100 * AFTER_S)
    assert stage.get(stage.low).displaced_by is None


def test_two_waiting_jobs_do_not_take_one_slot_twice(stage: Stage, open_store: OpenStore) -> None:
    first, second = stage.add(priority=100), stage.add(priority=100)
    stage.wait(first, second)
    assert stage.get(stage.low).displaced_by == first
    other = stage.make(open_store())
    assert other.admit(stage.get(second)) > 0.0
    assert stage.get(stage.low).displaced_by == first


def test_displaced_job_is_pending_in_its_place_and_comes_back_after_the_other(stage: Stage) -> None:
    high, later = stage.add(priority=100), stage.add(priority=-100)
    stage.wait(high)
    stage.store.jobs.set_status(stage.low, JobStatus.RECOVERING)
    assert stage.queue.admit(stage.get(stage.low)) > 0.0
    low = stage.get(stage.low)
    assert (low.status, low.displaced_by) == (JobStatus.PENDING, None)
    assert stage.queue.admit(low) > 0.0, "the slot is for the job that took it"
    assert stage.queue.admit(stage.get(high)) == 0.0
    stage.wait(stage.low, later, duration_s=10 * AFTER_S)
    assert stage.get(high).displaced_by is None, "no lower job takes it back"
    stage.store.jobs.set_status(high, JobStatus.SUCCEEDED)
    stage.clock.time_s += 2 * AGE_S_MAX
    assert stage.queue.admit(stage.get(later)) > 0.0
    assert stage.queue.admit(stage.get(stage.low)) == 0.0


def test_job_without_a_checkpoint_keeps_its_slot(stage: Stage) -> None:
    stage.store.jobs.set_progress(stage.low, Progress(step=9))
    stage.wait(stage.add(priority=100), duration_s=10 * AFTER_S)
    assert stage.get(stage.low).displaced_by is None


def test_job_group_keeps_its_slot_which_its_other_tasks_need(stage: Stage) -> None:
    stage.store.jobs.set_status(stage.low, JobStatus.SUCCEEDED)
    task = Task(priority=-100, group=GroupRole(name="g"))
    member = stage.store.jobs.add("g", task, pipeline="g-1").id
    stage.clock.time_s += 2 * AGE_S_MAX
    assert stage.queue.admit(stage.get(member)) == 0.0
    stage.store.jobs.set_status(member, JobStatus.RUNNING)
    stage.store.jobs.set_progress(member, Progress(step=5, checkpoint_step=5))
    stage.wait(stage.add(priority=100), duration_s=10 * AFTER_S)
    assert stage.get(member).displaced_by is None


def test_job_that_is_being_cancelled_is_not_displaced_as_well(stage: Stage) -> None:
    """Its slot will be free in a moment."""
    stage.store.jobs.request_cancel(stage.low)
    stage.wait(stage.add(priority=100), duration_s=10 * AFTER_S)
    assert stage.get(stage.low).displaced_by is None


@pytest.mark.parametrize("text", ["preempt_lower_priority = 1", 'preempt_after = "soon"'])
def test_error_names_an_invalid_setting(tmp_path: Path, text: str) -> None:
    config = Config(home=tmp_path, owner=OWNER)
    (tmp_path / "config.toml").write_text('preempt_lower_priority = true\npreempt_after = "10m"\n')
    assert read_slot_limits(config).preempt_after_s == 600.0
    (tmp_path / "config.toml").write_text(text)
    with pytest.raises(UsageError, match=text.split()[0]):
        read_slot_limits(config)


# -- with real controllers


def test_job_of_high_priority_runs_between_two_attempts_of_a_low_one(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.gang.steps = 200
    store = world.store
    store.jobs.set_status(world.job_id, JobStatus.CANCELLED)
    low = store.jobs.add("low", replace(world.task, priority=-100)).id
    limits = SlotLimits(total=1, preempt_after_s=60.0)
    queue = JobQueue(store, world.clock, read_limits=lambda: limits)
    provisioner = world.make_provisioner()
    config = Config(home=tmp_path, owner=OWNER)
    most = 0

    def make(job_id: Any) -> JobController:
        return JobController(
            job_id, store=store, provisioner=provisioner, gang=world.gang, planner=lambda task, avoid: make_plan(task),
            clock=world.clock, config=config, queue=queue,
        )  # fmt: skip

    async def watch() -> None:
        nonlocal most
        await world.clock.sleep(100.0)
        store.jobs.add("high", replace(world.task, priority=100))
        while store.queue.list_live():
            most = max(most, len(store.queue.list_live(has_started=True)))
            await world.clock.sleep(0.5)

    async def work() -> None:
        watching = asyncio.ensure_future(watch())
        await run_daemon(
            store=store, make_controller=make, provisioner=provisioner, clock=world.clock, config=config, idle_s=0.0
        )
        await watching

    world.clock.run(work)
    high = store.jobs.list()[-1].id
    events = [(each.kind, each.job_id) for each in store.events.list() if each.job_id in (low, high)]
    wanted = [
        (EventKind.ATTEMPT, low), (EventKind.QUEUED, high), (EventKind.DISPLACING, high), (EventKind.DISPLACED, low),
        (EventKind.SLOT_RETURNED, low), (EventKind.ATTEMPT, high), (EventKind.ENDED, high), (EventKind.ATTEMPT, low),
        (EventKind.ENDED, low),
    ]  # fmt: skip
    kinds = {kind for kind, _ in wanted}
    assert [each for each in events if each[0] in kinds and each != (EventKind.QUEUED, low)] == wanted
    assert [job.status for job in store.jobs.list() if job.id in (low, high)] == [JobStatus.SUCCEEDED] * 2
    first, second = store.jobs.list_attempts(low)
    assert first.outcome is not None and first.outcome.kind is OutcomeKind.DISPLACED
    steps = store.jobs.list_steps(low)
    assert steps[second.number].first_step >= (steps[first.number].checkpoint_step or 0) > 0, "it resumes"
    assert most == 1
