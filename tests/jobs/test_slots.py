"""Slots for live jobs, on a SQLite file and on PostgreSQL, and with real controllers on virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from broker.config import Config
from broker.errors import UsageError
from broker.jobs.controller import JobController
from broker.jobs.daemon import run_daemon
from broker.jobs.slot_limits import SlotLimits, read_slot_limits
from broker.jobs.slots import AGE_S_MAX, JobQueue
from broker.state.people import Owned
from broker.state.store import Store
from broker.types import EventKind, GroupRole, Job, JobStatus, JobWait, Resources, Task, WaitReason, make_event
from tests.simulation.world import OWNER, World, make_plan
from tests.state.conftest import OpenStore, clock, open_postgres, open_sqlite, open_store, postgres, store
from tests.state.samples import ATTEMPT, Hands

__all__ = ["clock", "open_postgres", "open_sqlite", "open_store", "postgres", "store"]
JOBS = 5  # of a played history


class Stage:
    def __init__(self, store: Store, clock: Hands, limit: int | None) -> None:
        self.store, self.clock, self.limit = store, clock, limit
        self.by_project: dict[str, int] = {}
        self.queue = self.make()

    def make(self, store: Store | None = None) -> JobQueue:
        return JobQueue(
            store or self.store,
            self.clock,
            read_limits=lambda: SlotLimits(total=self.limit, by_project=self.by_project),
        )

    def add(self, **fields: Any) -> int:
        job_id = self.store.jobs.add("j", Task(**fields)).id
        self.clock.time_s += 2 * AGE_S_MAX
        return job_id

    def get(self, job_id: int) -> Job:
        job = self.store.jobs.get(job_id)
        assert job is not None
        return job

    def ask(self, *job_ids: int) -> list[int]:
        """Return those of the jobs that may start."""
        return [job_id for job_id in job_ids if self.queue.admit(self.get(job_id)) == 0.0]

    def end(self, job_id: int) -> None:
        self.store.jobs.set_status(job_id, JobStatus.SUCCEEDED)
        self.clock.time_s += 2 * AGE_S_MAX


@pytest.fixture
def stage(store: Store, clock: Hands) -> Stage:
    return Stage(store, clock, limit=2)


def test_without_a_limit_every_job_starts_and_nothing_is_recorded(store: Store, clock: Hands) -> None:
    stage = Stage(store, clock, limit=None)
    jobs = [stage.add() for _ in range(3)]
    assert stage.ask(*jobs) == jobs
    assert {stage.get(job_id).status for job_id in jobs} == {JobStatus.PENDING}
    assert store.events.list() == []


def test_limit_is_kept_and_an_end_admits_the_next(stage: Stage) -> None:
    jobs = [stage.add() for _ in range(4)]
    assert stage.ask(*reversed(jobs)) == [jobs[1], jobs[0]], "in whatever order they ask"
    assert stage.ask(*jobs[2:]) == []
    stage.end(jobs[0])
    assert stage.ask(*reversed(jobs[2:])) == [jobs[2]]


def test_higher_priority_starts_before_an_earlier_submission(stage: Stage) -> None:
    low, high = stage.add(priority=-100), stage.add(priority=100)
    stage.limit = 1
    assert stage.ask(low, high) == [high]


def test_wait_is_recorded_once_and_explained_with_its_position(stage: Stage) -> None:
    jobs = [stage.add() for _ in range(4)]
    stage.ask(*jobs, *jobs, *jobs)
    (event,) = stage.store.events.list(job_id=jobs[3])
    assert event.message == "waiting for one of 2 slots (`max_live_jobs`), at position 4"
    stage.clock.time_s += 2 * AGE_S_MAX
    assert stage.make().explain(range(100)) == {
        jobs[2]: JobWait(reason=WaitReason.LIMIT, position=1, limit=2),
        jobs[3]: JobWait(reason=WaitReason.LIMIT, position=2, limit=2),
    }
    stage.queue = stage.make()  # a restarted daemon
    stage.ask(*jobs)
    assert len(stage.store.events.list(job_id=jobs[3])) == 1


def test_two_processes_that_ask_at_once_keep_the_limit(open_store: OpenStore, clock: Hands) -> None:
    stage = Stage(open_store(), clock, limit=1)
    first, second = stage.add(), stage.add()
    other = stage.make(open_store())
    other.admit(stage.get(second))  # both have read the queue
    assert stage.ask(first) == [first]
    assert other.admit(stage.get(second)) > 0.0
    stage.end(first)
    assert other.admit(stage.get(second)) == 0.0


def test_stale_order_does_not_admit_too_many(stage: Stage) -> None:
    stage.limit = 1
    first = stage.add()
    stage.queue.explain(range(100))  # a snapshot in which one slot is free
    stage.store.jobs.set_status(stage.add(), JobStatus.RUNNING)
    stage.clock.time_s -= 2 * AGE_S_MAX
    assert stage.ask(first) == []


def test_job_that_is_refused_returns_its_slot_while_it_waits(stage: Stage) -> None:
    stage.limit = 1
    refused, next_one = stage.add(priority=1), stage.add()
    assert stage.ask(refused) == [refused]
    stage.store.events.add(make_event(EventKind.WAITING, error="full", wait_s=60.0), job_id=refused)
    stage.store.jobs.set_status(refused, JobStatus.PENDING)
    begun_s = stage.clock.time_s
    stage.clock.time_s += 2 * AGE_S_MAX
    assert stage.queue.explain(range(100))[refused] == JobWait(reason=WaitReason.CAPACITY, until_s=begun_s + 60.0)
    assert stage.ask(next_one) == [next_one]
    stage.end(next_one)
    stage.clock.time_s = begun_s + 61.0
    assert stage.ask(stage.add(), refused) == [refused], "by its priority"


def test_job_that_needs_others_does_not_block_the_queue(stage: Stage) -> None:
    stage.limit = 1
    running = stage.add()
    assert stage.ask(running) == [running]
    waiting = stage.store.jobs.add("j", Task(priority=9), needs=[running]).id
    free = stage.add()
    assert stage.queue.explain(range(100)) == {
        waiting: JobWait(reason=WaitReason.NEEDS), free: JobWait(reason=WaitReason.LIMIT, position=1, limit=1)
    }  # fmt: skip
    stage.store.jobs.request_cancel(free)
    stage.clock.time_s += 2 * AGE_S_MAX
    assert free not in stage.queue.explain(range(100))


def test_group_takes_one_slot_and_starts_as_a_whole(stage: Stage) -> None:
    stage.limit = 1
    group = [stage.store.jobs.add(name, Task(group=GroupRole(name="g")), pipeline="g-1").id for name in "abc"]
    alone = stage.add()
    assert stage.ask(group[1], alone, *group) == [group[1], *group]
    for job_id in group[:2]:
        stage.end(job_id)
    assert stage.ask(alone) == []
    stage.end(group[2])
    assert stage.ask(alone) == [alone]


def test_cancelled_job_does_not_stand_in_the_queue(stage: Stage) -> None:
    stage.limit = 1
    first, cancelled, last = stage.add(), stage.add(), stage.add()
    assert stage.ask(first) == [first]
    stage.store.jobs.request_cancel(cancelled)
    stage.clock.time_s += 2 * AGE_S_MAX
    assert stage.queue.explain([last])[last].position == 1
    stage.end(first)
    assert stage.ask(last) == [last]


def test_replica_of_a_service_needs_no_slot(stage: Stage) -> None:
    stage.limit = 1
    replica = stage.store.jobs.add("r", Task(), "service/web/1").id
    job = stage.add()
    assert stage.ask(job, replica) == [job, replica]


def test_damaged_job_blocks_no_other(stage: Stage) -> None:
    stage.limit = 1
    damaged = stage.add(priority=9)
    stage.store.write("UPDATE jobs SET task = ? WHERE id = ?", ("{", damaged))
    job = stage.add()
    assert stage.ask(job) == [job]


def test_project_with_fewer_gpu_hours_starts_first(stage: Stage) -> None:
    stage.limit = 1
    earlier = stage.add()
    own = replace(ATTEMPT, job_id=earlier, started_s=stage.clock.time_s - 7200.0, ended_s=stage.clock.time_s)
    stage.store.jobs.put_attempt(own)
    stage.end(earlier)
    busy, idle = stage.add(), stage.add()
    for project, names in (("busy", [earlier, busy]), ("idle", [idle])):
        number = stage.store.commitments.add(
            user="ada", project=project, kind=Owned.JOB, names=(), usd=None, usd_hour=1.0, gpus=1.0
        )
        stage.store.commitments.bind(number, [str(each) for each in names])
    assert stage.ask(busy, idle) == [idle]


@pytest.mark.parametrize(
    ("begin_days", "end_days", "is_first"),
    [
        (6.0, 5.9, False),  # 2.4 h in the last week, against 1 h of the other project
        (8.0, 7.1, True),  # before it
        (8.0, 6.99, True),  # of a day, a quarter of an hour
        (8.0, 6.9, False),  # 2.4 h
    ],
)
def test_use_of_a_project_counts_for_a_week(stage: Stage, begin_days: float, end_days: float, is_first: bool) -> None:
    stage.limit = 1
    for project, begin, end in (("past", begin_days, end_days), ("other", 2 / 24, 1 / 24)):
        used = stage.add()
        now_s = stage.clock.time_s
        offer = replace(ATTEMPT.placement.offer, accelerator="H100", accelerator_count=1)
        placement = replace(ATTEMPT.placement, offer=offer, node_count=1)
        attempt = replace(
            ATTEMPT, job_id=used, placement=placement, started_s=now_s - begin * 86400, ended_s=now_s - end * 86400
        )
        stage.store.jobs.put_attempt(attempt)
        stage.end(used)
        own(stage, project, used)
    past, other = stage.add(), stage.add()
    own(stage, "past", past)
    own(stage, "other", other)
    assert stage.ask(past, other) == [past if is_first else other]


def test_jobs_ahead_in_the_queue_count_with_all_their_gpus(stage: Stage) -> None:
    """Four hours are assumed for the gang of project a, and one for each job of project b."""
    stage.limit = 1
    assert stage.ask(holder := stage.add()) == [holder]
    one = Resources(accelerator="H100", accelerator_count=1)
    of_a = [stage.add(resources=(one,), num_nodes=4), stage.add(resources=(one,))]
    of_b = [stage.add(resources=(one,)) for _ in range(3)]
    own(stage, "a", *of_a)
    own(stage, "b", *of_b)
    waits = stage.make().explain([*of_a, *of_b])
    order = sorted(waits, key=lambda job_id: waits[job_id].position or 0)
    assert order == [of_a[0], *of_b, of_a[1]]


def test_wait_for_capacity_from_before_the_clock_was_set_back_holds_no_job(stage: Stage) -> None:
    job = stage.add()
    stage.store.events.add(make_event(EventKind.WAITING, error="full", wait_s=60.0), job_id=job)
    assert stage.ask(job) == [], "it asks the clouds again later"
    stage.clock.time_s -= 3600.0
    stage.queue = stage.make()
    assert stage.ask(job) == [job]


def own(stage: Stage, project: str, *job_ids: int) -> None:
    number = stage.store.commitments.add(
        user="a", project=project, kind=Owned.JOB, names=(), usd=None, usd_hour=0.0, gpus=1.0
    )
    stage.store.commitments.bind(number, [str(each) for each in job_ids])


def test_full_project_waits_and_does_not_block_others(stage: Stage) -> None:
    stage.limit, stage.by_project = None, {"vision": 1}
    jobs = [stage.add(priority=100) for _ in range(2)] + [stage.add(), stage.add()]
    own(stage, "vision", *jobs[:3])
    assert stage.ask(*jobs) == [jobs[0], jobs[3]]
    stage.clock.time_s += 2 * AGE_S_MAX
    wait = JobWait(reason=WaitReason.LIMIT, position=1, limit=1, project="vision")
    assert stage.queue.explain(jobs)[jobs[1]] == wait
    told = [event.message for event in stage.store.events.list(job_id=jobs[1])]
    assert told == ["waiting for the only slot of project vision (`max_live_jobs_by_project`), at position 2"]
    stage.end(jobs[0])
    assert stage.ask(*jobs[1:3]) == [jobs[1]]


def test_two_processes_keep_the_limit_of_a_project(stage: Stage, open_store: OpenStore) -> None:
    stage.limit, stage.by_project = 2, {"vision": 1}
    first, second = stage.add(), stage.add()
    own(stage, "vision", first, second)
    other = stage.make(open_store())
    assert other.explain([first, second]), "it has read the queue"
    assert stage.ask(first) == [first]
    assert other.admit(stage.get(second)) > 0.0


@pytest.mark.parametrize("text", ["max_live_jobs_by_project = 3", "[max_live_jobs_by_project]\nvision = 0"])
def test_invalid_limit_of_a_project_names_the_setting(tmp_path: Path, text: str) -> None:
    config = Config(home=tmp_path, owner=OWNER)
    (tmp_path / "config.toml").write_text("[max_live_jobs_by_project]\nvision = 3\n")
    assert read_slot_limits(config) == SlotLimits(by_project={"vision": 3})
    (tmp_path / "config.toml").write_text(text)
    with pytest.raises(UsageError, match="max_live_jobs_by_project"):
        read_slot_limits(config)


# -- with real controllers


def play(folder: Path, seed: int, limit: int | None) -> tuple[Sequence[int], int]:
    """Run jobs of random priorities through a real daemon; return the order of their starts and the most at once."""
    world = World(folder)
    chance = Random(seed)
    store = world.store
    store.jobs.set_status(world.job_id, JobStatus.CANCELLED)
    wanted = [(chance.choice([-100, 0, 100]), number) for number in range(JOBS)]
    ids = [store.jobs.add(f"j{number}", replace(world.task, priority=each)).id for each, number in wanted]
    queue = JobQueue(store, world.clock, read_limits=lambda: SlotLimits(total=limit))
    provisioner = world.make_provisioner()
    most = 0

    def make(job_id: Any) -> JobController:
        return JobController(
            job_id, store=store, provisioner=provisioner, gang=world.gang, planner=lambda task, avoid: make_plan(task),
            clock=world.clock, config=Config(home=folder, owner=OWNER), queue=queue,
        )  # fmt: skip

    async def watch() -> None:
        nonlocal most
        while store.queue.list_live():
            most = max(most, len(store.queue.list_live(has_started=True)))
            await world.clock.sleep(1.0)

    async def work() -> None:
        watching = asyncio.ensure_future(watch())
        await run_daemon(
            store=store, make_controller=make, provisioner=provisioner, clock=world.clock,
            config=Config(home=folder, owner=OWNER), idle_s=0.0,
        )  # fmt: skip
        await watching

    world.clock.run(work)
    starts = [event.job_id for event in store.events.list() if event.kind is EventKind.ATTEMPT and event.job_id in ids]
    assert all(job.status is JobStatus.SUCCEEDED for job in store.jobs.list() if job.id in ids)
    by_priority = {job_id: each for job_id, (each, _) in zip(ids, wanted, strict=True)}
    return [by_priority[job_id] for job_id in dict.fromkeys(starts) if job_id is not None], most


@pytest.mark.parametrize(
    ("seed", "limit"),
    [(0, 1), (1, 2), *(pytest.param(seed, limit, marks=pytest.mark.long) for seed in range(2, 6) for limit in (1, 3))],
)
def test_controllers_keep_the_limit_and_start_by_priority(tmp_path: Path, seed: int, limit: int) -> None:
    starts, most = play(tmp_path, seed, limit)
    assert len(starts) == JOBS and most == limit
    if limit == 1:
        assert starts == sorted(starts, reverse=True)


def test_controllers_without_a_limit_start_all_at_once(tmp_path: Path) -> None:
    starts, most = play(tmp_path, 0, None)
    assert len(starts) == most == JOBS
