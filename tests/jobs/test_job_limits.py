"""`max_duration`: counted from the first machines, kept through recoveries, absences and clocks that are set."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from broker.app.overrides import NO_OVERRIDES, Overrides, read_tasks
from broker.errors import TaskError, UsageError
from broker.jobs.acquisition import Acquisition
from broker.jobs.job_limits import GAP_S_MAX, JobLimits, find_save_s
from broker.state.store import Store
from broker.task.loader import load_tasks_text
from broker.types import (
    Attempt,
    Cluster,
    ClusterStatus,
    EventKind,
    Goal,
    Job,
    JobStatus,
    Outcome,
    OutcomeKind,
    Placement,
    Task,
)
from tests.simulation.world import SimulatedGang, World, make_offer
from tests.state.samples import NODE, START_S, Hands

HOUR = 3600.0
PLACEMENT = Placement(offer=make_offer("east1a"), is_spot=True, node_count=1)


class Killed(Exception):
    """The end of a controller's process."""


class Stage:
    """One job of two hours; `begin` starts its attempts."""

    def __init__(self, folder: Path, *, limit_s: float | None = 2 * HOUR) -> None:
        self.clock = Hands()
        self.store = Store(folder / "state.db", clock=self.clock)
        self.job_id = self.store.jobs.add("j", Task(max_duration_s=limit_s)).id
        self.limits = JobLimits(self.store, self.clock)

    @property
    def job(self) -> Job:
        found = self.store.jobs.get(self.job_id)
        assert found is not None
        return found

    def begin(self, number: int = 1) -> None:
        now_s = self.clock.now_s()
        self.store.jobs.put_attempt(
            Attempt(job_id=self.job_id, number=number, cluster=f"c{number}", placement=PLACEMENT, started_s=now_s)
        )

    def find(self) -> OutcomeKind | None:
        breach = self.limits.find_breach(self.job)
        return breach.kind if breach else None

    def run(self, duration_s: float) -> None:
        """Let time pass for a controller that looks every few seconds."""
        for _ in range(round(duration_s / 10)):
            self.clock.time_s += 10.0
            self.find()


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


def test_wait_before_the_first_machines_does_not_count(stage: Stage) -> None:
    stage.clock.time_s += 100 * HOUR
    assert stage.find() is None
    stage.begin()
    stage.clock.time_s += 1.9 * HOUR
    assert stage.find() is None


def test_budget_is_used_up_when_it_is_spent_and_the_lease_never_becomes_none(tmp_path: Path) -> None:
    """An agent reads a lease of 0 as no lease: its node would run for good."""
    stage = Stage(tmp_path, limit_s=HOUR)
    task = replace(stage.job.task, goal=Goal(budget_usd=2.0))
    job = replace(stage.job, task=task)
    cluster = Cluster(name="c1", placement=PLACEMENT, status=ClusterStatus.UP, attempt=1, job_id=job.id)
    stage.store.clusters.put(replace(cluster, created_s=stage.clock.now_s()))
    stage.store.bills.record(replace(NODE, cluster="c1", usd_hour=2.0, created_s=stage.clock.now_s()))
    stage.begin()
    job = replace(stage.job, task=task)
    stage.clock.time_s += 3599.0
    assert stage.limits.find_lease_s(job, cluster) == pytest.approx(1.0)
    stage.clock.time_s += 1.0
    breach = stage.limits.find_breach(job)
    assert breach is not None and breach.kind is OutcomeKind.BUDGET_EXCEEDED
    assert stage.limits.find_lease_s(job, cluster) == 1.0


@pytest.mark.parametrize(("limit_s", "save_s"), [(2 * HOUR, 60.0), (300.0, 30.0), (60.0, 6.0)])
def test_program_is_told_to_save_before_the_end(tmp_path: Path, limit_s: float, save_s: float) -> None:
    stage = Stage(tmp_path, limit_s=limit_s)
    stage.begin()
    assert find_save_s(limit_s) == save_s
    stage.clock.time_s = START_S + limit_s - save_s - 1.0
    assert stage.find() is None
    stage.clock.time_s += 1.0
    breach = stage.limits.find_breach(stage.job)
    assert breach is not None and (breach.kind, breach.grace_s) == (OutcomeKind.MAX_DURATION_EXCEEDED, save_s)


def test_recoveries_count_and_no_attempt_starts_after_the_end(stage: Stage) -> None:
    stage.begin()
    stage.store.jobs.put_attempt(replace(stage.job.attempts[0], outcome=Outcome(kind=OutcomeKind.PREEMPTED)))
    stage.clock.time_s += 1.5 * HOUR
    stage.begin(2)
    assert stage.find() is None
    stage.clock.time_s += 0.5 * HOUR
    assert stage.find() is OutcomeKind.MAX_DURATION_EXCEEDED


def test_absence_of_the_broker_counts(stage: Stage) -> None:
    stage.begin()
    stage.find()
    stage.clock.time_s += 3 * HOUR
    assert JobLimits(stage.store, stage.clock).find_breach(stage.job) is not None
    breach = stage.limits.find_breach(stage.job)
    assert breach is not None and breach.grace_s == 0.0, "no time is left to save"


def test_clock_that_is_set_back_does_not_prolong_the_job(stage: Stage) -> None:
    stage.begin()
    stage.run(HOUR)
    stage.clock.time_s -= 24 * HOUR
    stage.run(HOUR - find_save_s(2 * HOUR) - 2 * GAP_S_MAX)
    assert stage.find() is None
    stage.run(2 * GAP_S_MAX + 10.0)
    assert stage.find() is OutcomeKind.MAX_DURATION_EXCEEDED


def test_without_a_limit_nothing_ends_the_job(tmp_path: Path) -> None:
    stage = Stage(tmp_path, limit_s=None)
    stage.begin()
    stage.clock.time_s += 1e7
    assert stage.find() is None


def play(folder: Path, limit_s: float) -> World:
    """Run a job of 600 steps, half a second each, to its end."""
    world = World(folder)
    world.gang.steps = 600
    world.job_id = world.store.jobs.add("long", replace(world.task, max_duration_s=limit_s)).id
    controller = world.make_controller()

    async def act() -> None:
        while (wait_s := await controller.step()) < 1e9:
            await world.clock.sleep(wait_s)

    world.clock.run(act)
    return world


def test_job_ends_in_time_with_an_outcome_of_its_own(tmp_path: Path) -> None:
    world = play(tmp_path, 120.0)
    job = world.get_job()
    assert (job.status, job.outcome_kind) == (JobStatus.FAILED, OutcomeKind.MAX_DURATION_EXCEEDED)
    assert job.failure == "its `max_duration` of 2m 00s has passed; its checkpoints are kept"
    bills = world.store.bills.list()
    assert bills and all(bill.ended_s is not None for bill in bills)
    billed_s = max(bill.ended_s or 0.0 for bill in bills) - job.attempts[0].started_s
    assert billed_s <= 120.0, "nothing is billed beyond the limit"
    assert [event.kind for event in world.store.events.list(job_id=job.id)].count(EventKind.ENDED) == 1


def test_program_that_succeeds_while_it_is_told_to_save_is_not_ended_by_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cancel = SimulatedGang.cancel

    async def arrive_late(self: SimulatedGang, cluster: Cluster, run_id: int) -> None:
        self.steps = self._measure(self._runs[cluster.name, run_id])[0]  # it was at its last step
        await cancel(self, cluster, run_id)

    monkeypatch.setattr(SimulatedGang, "cancel", arrive_late)
    job = play(tmp_path, 120.0).get_job()
    assert (job.status, job.outcome_kind, job.failure) == (JobStatus.SUCCEEDED, OutcomeKind.SUCCEEDED, "")


def test_node_is_given_no_longer_lease_than_the_job_has_left(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.gang.steps = 600
    world.job_id = world.store.jobs.add("long", replace(world.task, max_duration_s=600.0)).id
    leases: list[tuple[float, float]] = []
    start = world.gang.start

    async def note(*arguments: object, **named: object) -> None:
        lease_s = named["lease_s"]
        assert isinstance(lease_s, float)
        leases.append((world.clock.now_s() - world.get_job().attempts[0].started_s, lease_s))
        await start(*arguments, **named)  # type: ignore[arg-type]

    world.gang.start = note  # type: ignore[method-assign]
    controller = world.make_controller()

    async def act() -> None:
        while not leases:
            await controller.step()

    world.clock.run(act)
    assert all(used_s + lease_s <= 600.0 + 1e-6 for used_s, lease_s in leases)


def test_program_is_not_started_after_the_end_on_machines_that_a_killed_controller_requested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their creation is where the time begins, although the attempt was never recorded."""
    world = World(tmp_path)
    world.job_id = world.store.jobs.add("long", replace(world.task, max_duration_s=120.0)).id
    started: list[int] = []

    async def start(cluster: Cluster, *arguments: object, **named: object) -> None:
        started.append(cluster.attempt)

    monkeypatch.setattr(world.gang, "start", start)

    def die(*arguments: object) -> Attempt:
        raise Killed

    async def act() -> None:
        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(Acquisition, "_record", die)
            await world.make_controller().step()
        await world.clock.sleep(200.0)
        controller = world.make_controller()
        while (wait_s := await controller.step()) < 1e9:
            await world.clock.sleep(wait_s)

    world.clock.run(act)
    assert not started
    assert world.get_job().outcome_kind is OutcomeKind.MAX_DURATION_EXCEEDED
    assert all(bill.ended_s is not None for bill in world.store.bills.list())


# -- how it is written ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected_s"), [("2h", 7200.0), ("1h30m", 5400.0), ("90", 90.0), ("off", None), ("'off'", None)]
)
def test_task_file_accepts_durations_and_the_spelling_of_dstack(text: str, expected_s: float | None) -> None:
    (task,) = load_tasks_text(f"run: x\nmax_duration: {text}", "t.yaml")
    assert task.max_duration_s == expected_s


@pytest.mark.parametrize("text", ["30s", "never", "0"])
def test_task_file_refuses_unusable_durations(text: str) -> None:
    with pytest.raises(TaskError, match="max_duration"):
        load_tasks_text(f"run: x\nmax_duration: {text}", "t.yaml")


def test_max_duration_flag_overrides_the_task_file(tmp_path: Path) -> None:
    path = tmp_path / "t.yaml"
    path.write_text("run: x\nmax_duration: 2h\n")
    found = [
        read_tasks([str(path)], overrides)[0].max_duration_s
        for overrides in (NO_OVERRIDES, Overrides(max_duration="6h"), Overrides(max_duration="off"))
    ]
    assert found == [7200.0, 21600.0, None]
    with pytest.raises(UsageError, match="at least 1m"):
        read_tasks([str(path)], Overrides(max_duration="5s"))
