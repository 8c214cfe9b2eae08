"""The scheduler on a real store: refusals, failures that delay one schedule only, and two of it at once."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from broker.errors import LimitError, NoOfferError, StateError
from broker.jobs.scheduler import POLL_S, STEP_S_MAX, Scheduler
from broker.state.postgres import PostgresDatabase
from broker.state.store import Store
from broker.types import DueOutcome, EventKind, Job, JobSchedule, JobStatus, Overlap, Plan, ScheduleSpec, Secret, Task
from tests.jobs.test_daemon import Stage
from tests.simulation.universe import make_plan
from tests.state.conftest import OpenStore, clock, open_postgres, open_sqlite, open_store, postgres, store
from tests.state.samples import START_S, Hands

__all__ = ["clock", "open_postgres", "open_sqlite", "open_store", "postgres", "store"]
TASK = Task(name="j", run="true", secrets={"TOKEN": Secret(value="hunter2")})
MINUTE = 60.0


class Launcher:
    """Submits jobs; `on_plan` and `on_submit` may raise, or act between the steps of the scheduler."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.on_plan: Callable[[JobSchedule], None] = lambda schedule: None
        self.on_submit: Callable[[JobSchedule], None] = lambda schedule: None

    def plan(self, schedule: JobSchedule, task: Task) -> Plan:
        self.on_plan(schedule)
        return make_plan(task)

    def submit(self, schedule: JobSchedule, task: Task, plan: Plan, *, request_id: str) -> Job:
        self.on_submit(schedule)
        return self._store.jobs.add(schedule.name, task, request_id)


@pytest.fixture(autouse=True)
def set_time_of_the_server(monkeypatch: pytest.MonkeyPatch, clock: Hands) -> None:
    """Let PostgreSQL have the time that the tests set."""
    monkeypatch.setattr(PostgresDatabase, "read_time_s", lambda database: clock.now_s())


@pytest.fixture
def launcher(store: Store) -> Launcher:
    return Launcher(store)


def add(store: Store, name: str = "j", *, overlap: Overlap = Overlap.SKIP) -> JobSchedule:
    return store.schedules.add(name, TASK, ScheduleSpec(cron="* * * * *", overlap=overlap), next_s=START_S)


def list_outcomes(store: Store, schedule: JobSchedule) -> list[tuple[float, DueOutcome, int | None]]:
    return [(each.due_s - START_S, each.outcome, each.job_id) for each in store.schedules.list_due_times(schedule)]


def test_due_time_starts_a_job_with_the_secrets_of_the_schedule(store: Store, launcher: Launcher) -> None:
    made = add(store)
    scheduler = Scheduler(store, launches=launcher)
    assert scheduler.step() == scheduler.step() == POLL_S
    (job,) = store.jobs.list()
    assert (job.name, job.task.secrets, job.status) == ("j", TASK.secrets, JobStatus.PENDING)
    assert list_outcomes(store, made) == [(0.0, DueOutcome.STARTED, job.id)]
    (event,) = [each for each in store.events.list(job_id=job.id) if each.kind is EventKind.SCHEDULED]
    assert event.message == "submitted by schedule j, due 2027-01-15 08:00 UTC"
    found = store.schedules.get("j")
    assert found is not None and found.next_s == START_S + MINUTE


def test_live_job_skips_a_due_time_and_an_ended_one_does_not(store: Store, launcher: Launcher, clock: Hands) -> None:
    made, scheduler = add(store), Scheduler(store, launches=launcher)
    scheduler.step()
    clock.time_s += MINUTE
    scheduler.step()
    store.jobs.set_status(1, JobStatus.FAILED)
    clock.time_s += MINUTE
    scheduler.step()
    assert list_outcomes(store, made) == [
        (0.0, DueOutcome.STARTED, 1), (60.0, DueOutcome.SKIPPED, None), (120.0, DueOutcome.STARTED, 2),
    ]  # fmt: skip


def test_queued_due_time_starts_once_the_previous_job_has_ended(store: Store, launcher: Launcher, clock: Hands) -> None:
    made, scheduler = add(store, overlap=Overlap.QUEUE), Scheduler(store, launches=launcher)
    for _ in range(3):
        scheduler.step()
        clock.time_s += MINUTE
    assert [outcome for _, outcome, _ in list_outcomes(store, made)] == [
        DueOutcome.STARTED, DueOutcome.WAITING, DueOutcome.SKIPPED,
    ]  # fmt: skip
    clock.time_s -= 30.0
    store.jobs.set_status(1, JobStatus.SUCCEEDED)
    scheduler.step()
    scheduler.step()
    assert list_outcomes(store, made)[1] == (60.0, DueOutcome.STARTED, 2)
    assert store.jobs.count() == 2


@pytest.mark.parametrize("when", ["plan", "submit"])
def test_refusal_is_recorded_and_the_schedule_continues(
    store: Store, launcher: Launcher, clock: Hands, when: str
) -> None:
    made, scheduler = add(store), Scheduler(store, launches=launcher)

    def refuse(schedule: JobSchedule) -> None:
        raise NoOfferError("nothing fits") if when == "plan" else LimitError("over the budget")

    setattr(launcher, f"on_{when}", refuse)
    scheduler.step()
    setattr(launcher, f"on_{when}", lambda schedule: None)
    clock.time_s += MINUTE
    scheduler.step()
    first, second = store.schedules.list_due_times(made)
    assert (first.outcome, first.detail) == (
        DueOutcome.REFUSED, "nothing fits" if when == "plan" else "over the budget",
    )  # fmt: skip
    assert (second.outcome, second.job_id) == (DueOutcome.STARTED, 1)


@pytest.mark.parametrize("error", [StateError("the disk is full"), RuntimeError("a bug")])
def test_failure_delays_one_schedule_only_and_loses_no_due_time(
    store: Store, launcher: Launcher, clock: Hands, error: Exception
) -> None:
    bad, good = add(store, "a"), add(store, "b")

    def fail(schedule: JobSchedule) -> None:
        if schedule.name == "a" and clock.now_s() < START_S + 10:
            raise error

    launcher.on_submit = fail
    scheduler = Scheduler(store, launches=launcher)
    scheduler.step()
    assert list_outcomes(store, bad) == [] and list_outcomes(store, good) == [(0.0, DueOutcome.STARTED, 1)]
    clock.time_s += 59.0
    scheduler.step()
    assert list_outcomes(store, bad) == [(0.0, DueOutcome.STARTED, 2)]


def test_many_due_schedules_let_the_process_renew_its_lease(store: Store, launcher: Launcher, clock: Hands) -> None:
    """Planning blocks the process; other controllers would take over all its jobs."""
    for number in range(10):
        add(store, f"j{number}")

    def plan(schedule: JobSchedule) -> None:
        clock.time_s += STEP_S_MAX * 0.6

    launcher.on_plan = plan
    scheduler = Scheduler(store, launches=launcher)
    waits, counts = [], []
    while not counts or counts[-1] < 10:
        waits.append(scheduler.step())
        counts.append(store.jobs.count())
    assert counts == [2, 4, 6, 8, 10] and max(waits[:-1]) < POLL_S


def test_two_controllers_at_one_due_time_start_one_job(store: Store, open_store: OpenStore, launcher: Launcher) -> None:
    made, other = add(store), open_store()
    second = Scheduler(other, launches=Launcher(other))
    launcher.on_plan = lambda schedule: (second.step(), None)[1]  # while the first one plans
    Scheduler(store, launches=launcher).step()
    assert list_outcomes(store, made) == [(0.0, DueOutcome.STARTED, 1)] and store.jobs.count() == 1


@pytest.mark.parametrize("change", ["pause", "remove"])
def test_schedule_that_is_paused_or_removed_meanwhile_starts_nothing(
    store: Store, launcher: Launcher, change: str
) -> None:
    made = add(store)
    launcher.on_plan = lambda schedule: getattr(store.schedules, change)(schedule)
    Scheduler(store, launches=launcher).step()
    assert store.jobs.count() == 0 and list_outcomes(store, made) == []


def test_clock_that_was_ahead_starts_no_due_time_twice(store: Store, launcher: Launcher, clock: Hands) -> None:
    made, scheduler = add(store), Scheduler(store, launches=launcher)
    scheduler.step()
    store.jobs.set_status(1, JobStatus.SUCCEEDED)
    store.schedules.pause(made)
    store.schedules.resume(made, START_S)  # as after a clock that was set back
    scheduler.step()
    assert store.jobs.count() == 1 and list_outcomes(store, made) == [(0.0, DueOutcome.STARTED, 1)]
    clock.time_s += MINUTE
    scheduler.step()
    assert store.jobs.count() == 2


def test_schedule_ends_at_until(store: Store, launcher: Launcher, clock: Hands) -> None:
    spec = ScheduleSpec(cron="* * * * *", until="2027-01-15T08:01")
    store.schedules.add("j", TASK, spec, next_s=START_S)
    scheduler = Scheduler(store, launches=launcher)
    for number in range(1, 5):
        scheduler.step()
        store.jobs.set_status(number, JobStatus.SUCCEEDED)
        clock.time_s += MINUTE
    found = store.schedules.get("j")
    assert store.jobs.count() == 2 and found is not None and found.next_s is None
    assert not store.schedules.has_active()


def test_daemon_stays_while_a_schedule_is_active_and_starts_its_jobs(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    stage.scheduler = Scheduler(stage.store, launches=Launcher(stage.store))
    now_s = stage.clock.now_s()
    first_s = now_s - now_s % MINUTE + MINUTE
    until = "2999-01-01"
    made = stage.store.schedules.add("j", TASK, ScheduleSpec(cron="* * * * *", until=until), next_s=first_s)

    async def end() -> None:
        await stage.clock.sleep(200.0)
        for job in stage.store.jobs.list():
            stage.store.jobs.set_status(job.id, JobStatus.CANCELLED)
        stage.store.schedules.remove(made)

    class Waits:
        def __init__(self, job_id: int) -> None:
            self.job_id = job_id

        async def step(self) -> float:
            job = stage.store.jobs.get(self.job_id)
            return math.inf if job is None or job.status.is_terminal else 1.0

        async def rest(self, wait_s: float, wake: object) -> None:
            await stage.clock.sleep(wait_s)

    class EveryJob(dict[int, Waits]):
        def __missing__(self, job_id: int) -> Waits:
            return Waits(job_id)

    stage.controllers = EveryJob()  # type: ignore[assignment]
    end_s = stage.run(end)
    assert end_s > 200.0
    assert stage.store.jobs.count() == 1, "the later due times are skipped, as it is alive"
