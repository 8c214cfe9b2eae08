"""Single steps of a controller: its waits, the notices it sends before it ends machines, and what it leaves alone."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from broker.errors import TransientError
from broker.jobs.controller import JobController
from broker.jobs.progress import record_progress
from broker.types import (
    Attempt,
    Cluster,
    EventKind,
    Goal,
    JobRecovery,
    JobStatus,
    NodeList,
    OutcomeKind,
    Progress,
    RunStatus,
    Task,
)
from tests.clouds.simulated import FaultRates
from tests.simulation.test_crashes import run_to_end
from tests.simulation.world import Report, World, make_plan


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def note_cancels(world: World) -> list[tuple[str, int]]:
    """Record clusters whose program was notified of its end, with the nodes alive at that time."""
    told: list[tuple[str, int]] = []
    cancel = world.gang.cancel

    async def note(cluster: Cluster, run_id: int) -> None:
        told.append((cluster.name, len(world.list_live_nodes())))
        await cancel(cluster, run_id)

    world.gang.cancel = note  # type: ignore[method-assign]
    return told


def list_names(world: World) -> list[str]:
    return [attempt.cluster for attempt in world.store.jobs.list_attempts(world.job_id)]


def test_a_program_whose_budget_is_used_up_is_notified_before_teardown(world: World) -> None:
    told = note_cancels(world)
    world.gang.steps = 600
    world.job_id = world.store.jobs.add("dear", replace(world.task, goal=Goal(budget_usd=0.05))).id
    run_to_end(world, "plain")
    assert world.get_job().status is JobStatus.FAILED
    assert told == [(name, 2) for name in list_names(world)] and len(told) == 1


def test_a_cancelled_program_is_notified_before_teardown(world: World) -> None:
    told = note_cancels(world)
    run_to_end(world, "cancel")
    assert world.get_job().status is JobStatus.CANCELLED
    assert told == [(name, 2) for name in list_names(world)] and len(told) == 1


def test_the_log_is_complete_up_to_the_end(world: World) -> None:
    run_to_end(world, "cancel")
    log = (world.folder / "logs" / "jobs" / f"{world.job_id}.log").read_text()
    assert f"{list_names(world)[0]} step 1\n" in log


def step(world: World, work: Callable[[Any], Awaitable[float]]) -> float:
    """Run one piece of a controller's work and return its result."""
    found: list[float] = []

    async def act() -> None:
        found.append(await work(world.make_controller()))

    world.clock.run(act)
    return found[0]


def test_full_places_are_retried_with_backoff_up_to_five_minutes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("random.uniform", lambda low, high: high)
    world = World(tmp_path, faults=FaultRates(full=1.0))
    controller = world.make_controller()
    waits: list[float] = []

    async def act() -> None:
        for _ in range(8):
            waits.append(await controller.step())
            await asyncio.sleep(0)
            await world.clock.sleep(4000.0)

    world.clock.run(act)
    assert waits[:5] == [20.0, 40.0, 80.0, 160.0, 300.0] and set(waits[5:]) == {300.0}
    job = world.get_job()
    assert (job.status, job.attempts) == (JobStatus.PENDING, ())
    assert [event.kind for event in world.store.events.list(job_id=job.id)].count("waiting") == 8


@pytest.mark.parametrize("status", [JobStatus.FAILED, JobStatus.CANCELLED])
def test_a_job_is_cancelled_if_a_dependency_fails_and_names_it(world: World, status: JobStatus) -> None:
    needed = world.job_id
    world.job_id = world.store.jobs.add("second", world.task, needs=(needed,)).id
    assert step(world, lambda controller: controller.step()) > 0
    assert world.get_job().status is JobStatus.PENDING and not world.cloud.asked_s
    world.store.jobs.set_status(needed, status)
    step(world, lambda controller: controller.step())
    job = world.get_job()
    assert job.status is JobStatus.CANCELLED
    assert job.failure == f"it depends on job {needed} (train), which is {status.value}"


def test_a_job_starts_when_all_that_it_needs_has_succeeded(world: World) -> None:
    needed = [world.job_id, world.store.jobs.add("other", world.task).id]
    world.job_id = world.store.jobs.add("third", world.task, needs=needed).id
    world.store.jobs.set_status(needed[0], JobStatus.SUCCEEDED)
    assert step(world, lambda controller: controller.step()) > 0 and not world.cloud.asked_s
    world.store.jobs.set_status(needed[1], JobStatus.SUCCEEDED)
    run_to_end(world, "plain")
    assert world.get_job().status is JobStatus.SUCCEEDED


def test_a_job_whose_dependency_was_deleted_is_cancelled(world: World) -> None:
    world.job_id = world.store.jobs.add("second", world.task, needs=(99,)).id
    step(world, lambda controller: controller.step())
    assert world.get_job().failure == "it depends on another job, which is gone"


def test_a_deleted_or_ended_job_needs_no_further_action(world: World) -> None:
    run_to_end(world, "plain")
    asked = dict(world.cloud.asked_s)
    assert math.isinf(step(world, lambda controller: controller.step()))
    world.job_id = 99
    assert math.isinf(step(world, lambda controller: controller.step()))
    assert world.cloud.asked_s == asked


def test_each_event_of_a_job_is_recorded_once(world: World) -> None:
    run_to_end(world, "preemption")
    job = world.get_job()
    kinds = [event.kind for event in world.store.events.list(job_id=job.id)]
    told = ("attempt", "attempt_in_place", "started", "attempt_lost", "recovered", "ended")
    assert [kinds.count(EventKind(kind)) for kind in told] == [1, 1, 2, 1, 1, 1]
    first, second = job.attempts
    assert first.running_s is not None and first.lost_s is not None and second.resumed_s is not None
    assert first.started_s <= first.running_s < first.lost_s < second.started_s < second.resumed_s
    assert first.ended_s is not None and first.usd > 0 and first.number + 1 == second.number
    assert job.progress is not None and job.progress.step == world.gang.steps


def test_a_job_goes_where_its_strategy_says_after_a_loss(tmp_path: Path) -> None:
    recovery = JobRecovery(strategy="eager_next_region")
    task = Task(name="train", num_nodes=2, recovery=recovery)
    world = World(tmp_path)
    world.job_id = world.store.jobs.add("j", task).id
    run_to_end(world, "preemption", lambda task, avoid: make_plan(task))
    first, second = (attempt.placement.offer.region for attempt in world.get_job().attempts)
    assert first != second


# -- a running job -------------------------------------------------------------------------------------------------


def begin(world: World) -> JobController:
    """Return a controller whose job has just been started, for ten minutes of work."""
    world.gang.steps = 600
    controller = world.make_controller()
    world.clock.run(controller.step)
    assert world.get_job().status is JobStatus.RUNNING
    return controller


def watch(world: World, controller: JobController, duration_s: float) -> None:
    async def act() -> None:
        end_s = world.clock.now_s() + duration_s
        while world.clock.now_s() < end_s:
            await controller.step()
            await world.clock.sleep(5.0)

    world.clock.run(act)


@pytest.mark.parametrize("blindness", ["blank lists", "a region without lists"])
def test_a_job_whose_agents_answer_continues_despite_missing_list_entries(world: World, blindness: str) -> None:
    controller = begin(world)
    if blindness == "blank lists":
        world.cloud.black_out(900.0)
    else:
        world.cloud.silent_regions["east1"] = TransientError("no answer")
    watch(world, controller, 300.0)
    job = world.get_job()
    assert (job.status, len(job.attempts)) == (JobStatus.RUNNING, 1)
    assert "unseen" not in {event.kind for event in world.store.events.list(job_id=job.id)}
    log = (world.folder / "logs" / "jobs" / f"{job.id}.log").read_text()
    assert f"{list_names(world)[0]} step 290\n" in log, "its log is copied meanwhile"


def silence(world: World) -> None:
    """Make every node silent, as after a loss of power; their cloud lists them as running."""

    async def poll(cluster: Cluster, run_id: int) -> Report:
        return Report(status=RunStatus.RUNNING, returncode=None, unreachable=(0, 1), progress=None)

    world.gang.poll = poll  # type: ignore[method-assign]


def restart(world: World) -> JobController:
    world.reborn()
    return world.make_controller()


def test_a_silent_gang_is_given_up_after_ten_minutes_although_its_broker_restarts_in_between(world: World) -> None:
    controller = begin(world)
    silence(world)
    for _ in range(3):
        watch(world, controller, 180.0)
        assert [attempt.outcome for attempt in world.get_job().attempts] == [None], "less than ten minutes"
        controller = restart(world)
    watch(world, controller, 300.0)
    first, *_ = world.get_job().attempts
    assert first.outcome is not None and first.outcome.kind is OutcomeKind.PREEMPTED
    assert first.ended_s is not None, "and its nodes are terminated"


def test_time_without_a_broker_is_not_evidence_of_silence(world: World) -> None:
    controller = begin(world)
    silence(world)
    watch(world, controller, 400.0)
    world.clock.run(lambda: world.clock.sleep(3600.0))
    watch(world, restart(world), 60.0)
    assert [attempt.outcome for attempt in world.get_job().attempts] == [None]


def test_a_bug_in_a_list_is_not_taken_for_a_cloud_that_does_not_answer(world: World) -> None:
    """The daemon reports it, and makes another controller."""
    controller = begin(world)

    async def fail(*given: object, **named: object) -> Cluster:
        raise RuntimeError("a bug")

    controller._provisioner.refresh = fail  # type: ignore[method-assign]
    silence(world)
    with pytest.raises(RuntimeError, match="a bug"):
        watch(world, controller, 400.0)


def test_an_answer_also_ends_a_silence_for_later_brokers(world: World) -> None:
    controller, poll = begin(world), world.gang.poll
    silence(world)
    watch(world, controller, 500.0)
    world.gang.poll = poll  # type: ignore[method-assign]
    watch(world, controller, 5.0)
    silence(world)
    watch(world, restart(world), 300.0)
    assert [attempt.outcome for attempt in world.get_job().attempts] == [None]


@pytest.mark.parametrize("is_listed", [True, False])
def test_a_gang_that_works_keeps_its_lease_whether_lists_answer_or_not(world: World, is_listed: bool) -> None:
    controller = begin(world)
    begun_s, renewed_s = world.clock.now_s(), list[float]()

    async def renew(cluster: Cluster, *, lease_s: float) -> None:
        renewed_s.append(world.clock.now_s() - begun_s)

    async def fail(owner: str) -> NodeList:
        raise TransientError("no answer")

    world.gang.renew_lease = renew  # type: ignore[method-assign]
    if not is_listed:
        world.cloud.list_nodes = fail  # type: ignore[method-assign]
    watch(world, controller, 400.0)
    assert len(renewed_s) >= 3 and max(b - a for a, b in pairwise([0.0, *renewed_s, 400.0])) < 150.0, renewed_s


@pytest.mark.parametrize(
    ("progress", "is_resumed"),
    [
        (Progress(step=0), False),
        (Progress(step=3), True),
        (Progress(step=40, checkpoint_step=40), False),
        (Progress(step=45, checkpoint_step=40), True),
    ],
    ids=["nothing yet", "from nothing", "just restored", "first reported five steps later"],
)
def test_a_recovery_ends_with_the_first_step_past_what_was_restored(
    world: World, progress: Progress, is_resumed: bool
) -> None:
    controller = begin(world)

    async def poll(cluster: Cluster, run_id: int) -> Report:
        return Report(status=RunStatus.RUNNING, returncode=None, unreachable=(), progress=progress)

    world.gang.poll = poll  # type: ignore[method-assign]
    world.clock.run(controller.step)
    assert (world.get_job().attempts[-1].resumed_s is not None) is is_resumed


def test_progress_alone_does_not_wait_for_the_disk(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    controller, store = begin(world), world.store
    watch(world, controller, 30.0)
    commit, modes = store._commit, list[int]()

    def note() -> None:
        modes.append(store.rows("PRAGMA synchronous")[0][0])
        commit()

    monkeypatch.setattr(store, "_commit", note)
    watch(world, controller, 40.0)
    assert len(modes) > 6 and set(modes) == {1}, "SQLite's number for NORMAL: it would be observed again"


def test_the_step_that_ends_a_recovery_and_its_event_are_one_commit(world: World) -> None:
    now_s = world.clock.now_s()
    placement = make_plan(world.task).estimates[0].placement
    lost = Attempt(
        job_id=world.job_id, number=1, cluster="c1", placement=placement, started_s=now_s - 900.0, lost_s=now_s - 60.0
    )
    live = replace(lost, number=2, cluster="c2", started_s=now_s - 50.0, lost_s=None)
    world.store.jobs.put_attempt(lost)
    world.store.jobs.put_attempt(live)
    world.store.jobs.set_progress(world.job_id, Progress(step=10))
    ran = list[str]()
    world.store._connection.set_trace_callback(ran.append)
    noted = record_progress(world.store, world.clock, world.get_job(), live, Progress(step=11))
    world.store._connection.set_trace_callback(None)
    assert noted.resumed_s == now_s and world.store.jobs.list_attempts(world.job_id)[-1] == noted
    assert ran.count("COMMIT") == 1
    [told] = [event.message for event in world.store.events.list(job_id=world.job_id) if event.kind == "recovered"]
    assert told == "recovered at step 11, 60.0 s after the loss"


def test_an_attempt_is_recorded_once_its_nodes_are_up(world: World) -> None:
    """The record precedes the program's start, so that after a daemon's death the next one continues with it."""
    cluster = world.clock.run(lambda: world.make_provisioner().up("c", make_plan(world.task)))
    attempt = world.make_controller()._acquisition._record(world.get_job(), 1, cluster)
    assert world.store.jobs.list_attempts(world.job_id) == [attempt]
    assert (attempt.cluster, attempt.started_s, attempt.running_s) == ("c", cluster.created_s, None)
    assert [event.kind for event in world.store.events.list(job_id=world.job_id)][-1] == "attempt"
