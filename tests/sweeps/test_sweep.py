"""Sweeps: what is drawn, what is stopped early, and a command that is killed at every action."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from broker.app.container import Context
from broker.app.sweeping import SweepDriver, SweepRequest, SweepView
from broker.errors import BrokerError, StateError, UsageError
from broker.runtime.reports import parse_progress
from broker.sweeps.asha import Records, is_kept, list_rungs, record
from broker.sweeps.board import Board, decide, decode, encode, find_best, is_cancelled, list_failures, rank
from broker.sweeps.space import NumberRange, draw, parse_parameter, parse_parameters
from broker.task.loader import load_tasks_text
from broker.types import Job, JobStatus, Progress, Task
from tests.batch.killed_command import KilledError, Killer, World

TOTAL = 81
PLANTED = 2.1e-3  # the best learning rate
PARAMETERS = ("lr=1e-4..1e-2:log", "seed=0,1,2")


def test_ranges_are_stratified_and_lists_are_used_equally_often() -> None:
    drawn = draw(parse_parameters(PARAMETERS), runs=64, seed=0)
    places = sorted(math.log10(float(each["lr"]) / 1e-4) / 2 for each in drawn)
    assert all(index / 64 <= place < (index + 1) / 64 + 1e-6 for index, place in enumerate(places))
    assert sorted(sum(each["seed"] == value for each in drawn) for value in "012") == [21, 21, 22]
    assert drawn == draw(parse_parameters(PARAMETERS), runs=64, seed=0)
    assert drawn != draw(parse_parameters(PARAMETERS), runs=64, seed=1)


def test_lists_alone_are_combined_in_full() -> None:
    parameters = parse_parameters(["a=1,2", "b=x,y,z"])
    assert len({tuple(each.values()) for each in draw(parameters, runs=None, seed=0)}) == 6


def test_whole_numbers_include_both_ends() -> None:
    drawn = draw([parse_parameter("layers=2..4:int")], runs=9, seed=0)
    assert sorted(each["layers"] for each in drawn) == ["2", "2", "2", "3", "3", "3", "4", "4", "4"]


@pytest.mark.parametrize(
    ("text", "low", "high"), [("x=.1..5", 0.1, 5.0), ("x=-.5...5", -0.5, 0.5), ("x=1.5e-3..2", 0.0015, 2.0)]
)
def test_bound_that_begins_with_a_point_is_a_bound(text: str, low: float, high: float) -> None:
    found = parse_parameter(text)
    assert isinstance(found, NumberRange) and (found.low, found.high) == (low, high)


@pytest.mark.parametrize(
    "text",
    [
        "lr",
        "lr=",
        "1r=2",
        "lr=0..1:log",
        "lr=2..1",
        "n=1.5..3:int",
        "lr=1,1",
        "lr=a..b",
        "lr=1..inf",
        "l r=1",
        "lr=1..2:cube",
    ],
)
def test_invalid_parameters_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        draw(parse_parameters([text]), runs=2, seed=0)


@pytest.mark.parametrize(
    "text", ["x=1234567..1234569", "x=0.12345649..1", "x=1..1.0000004", "x=100000.1..100000.2:log", "x=-3..-2.9999999"]
)
def test_values_of_a_range_are_inside_it_and_differ(text: str) -> None:
    parameter = parse_parameter(text)
    assert isinstance(parameter, NumberRange)
    values = [parameter.place(number / 8) for number in range(8)]
    assert all(parameter.low <= float(value) <= parameter.high for value in values)
    assert len({float(value) for value in values}) == 8


@pytest.mark.parametrize("runs", [2, 4, 11, 12])
def test_no_configuration_runs_twice_while_there_are_others(runs: int) -> None:
    for seed in range(20):
        drawn = draw(parse_parameters(["a=1,2", "b=x,y", "c=p,q,r"]), runs=runs, seed=seed)
        assert len(drawn) == runs and len({tuple(each.items()) for each in drawn}) == runs
        if runs in (2, 4, 12):
            assert sum(each["a"] == "1" for each in drawn) == runs / 2


def test_a_range_needs_a_number_of_runs() -> None:
    with pytest.raises(UsageError, match="requires `--runs`"):
        draw(parse_parameters(PARAMETERS), runs=None, seed=0)
    with pytest.raises(UsageError, match="twice"):
        parse_parameters(["a=1", "a=2"])


def test_the_worked_example_of_the_rule() -> None:
    assert list_rungs(810) == [30, 90, 270] and list_rungs(2) == [] and list_rungs(9) == [1, 3]
    records, is_first = record({}, [30, 90], 0, 31, 2.9)
    records, is_second = record(records, [30, 90], 1, 30, 3.4)
    records, is_third = record(records, [30, 90], 2, 35, 2.7)
    assert (is_first, is_second, is_third) == (True, False, True)
    assert record(records, [30, 90], 2, 80, 9.9) == (records, True)  # recorded once a rung
    assert not is_kept({0: 1.0, 1: math.nan}, 1) and not is_kept({0: math.nan, 1: 2.0}, 0)
    of_four = {0: 4.0, 1: 3.0, 2: 2.0, 3: 1.0}
    assert [run for run in of_four if is_kept(of_four, run)] == [2, 3], "the best third, rounded up"


def test_a_run_that_has_diverged_is_stopped() -> None:
    """The store cannot hold NaN: a run without a loss would never be compared, and be paid for to its end."""
    jobs = {}
    for run, loss in enumerate([2.0, math.nan, math.inf, None]):
        reported = parse_progress({"step": 30, "total": 810, "loss": loss})
        stored = msgspec.json.decode(msgspec.json.encode(reported), type=Progress)
        task = Task(name="s", run="x")
        jobs[run] = Job(id=run, name="s", status=JobStatus.RUNNING, task=task, submitted_s=0.0, progress=stored)
    step = decide(Board(), jobs, runs=4, parallel=4, early="asha")
    assert step.stops == (1, 2), "not a program that reports no loss"
    assert decode(encode(step.board)).stopped == step.board.stopped


def test_runs_first_observed_late_do_not_stop_those_that_reach_a_rung_in_time() -> None:
    """After the command was away, the runs that went on have the better losses of their later steps."""
    rungs = list_rungs(810)
    records: Records = {}
    for run, step in enumerate([300, 500, 700, 810]):
        records, _ = record(records, rungs, run, step, 1.0 / step)
    assert set(records) == {270} and set(records[270]) == {0, 1, 2}, "a finished run has no loss at a rung"
    records, is_continued = record(records, rungs, 4, 30, 2.5)
    assert is_continued and records[30] == {4: 2.5}


def make_run(
    run: int, status: JobStatus, *, loss: float | None = None, step: int = 0, is_cancelled: bool = False
) -> Job:
    progress = Progress(step=step, total=810, loss=loss) if step else None
    return Job(
        id=run + 1, name="s", status=status, task=Task(name="s", run="x"), submitted_s=0.0, progress=progress,
        cancel_requested=is_cancelled,
    )  # fmt: skip


def test_a_stopped_run_makes_room_before_its_machines_are_gone_and_is_cancelled_once() -> None:
    board = Board(stopped={0: 30, 1: 30})
    jobs = {
        0: make_run(0, JobStatus.RUNNING, loss=9.0, step=40, is_cancelled=True),
        1: make_run(1, JobStatus.RUNNING, loss=9.0, step=40),
    }
    step = decide(board, jobs, runs=6, parallel=2, early="asha")
    assert (step.starts, step.stops, step.is_over) == ((2, 3), (1,), False)


def test_a_program_is_at_fault_if_its_runs_of_this_command_have_all_failed_without_a_step() -> None:
    failed = {run: make_run(run, JobStatus.FAILED) for run in range(3)}
    assert [job.id for job in list_failures(failed, after=0)] == [1, 2, 3]
    assert not list_failures(failed, after=1), "the first one failed under an earlier command"
    assert not list_failures({**failed, 3: make_run(3, JobStatus.RUNNING, step=5)}, after=0), "another one works"


def test_a_sweep_is_cancelled_with_all_runs_that_it_did_not_stop_itself() -> None:
    live, cancelled = make_run(1, JobStatus.RUNNING), make_run(2, JobStatus.CANCELLED)
    board = Board(stopped={0: 30})
    jobs = {0: make_run(0, JobStatus.CANCELLED, step=40), 1: live, 2: cancelled, 3: make_run(3, JobStatus.SUCCEEDED)}
    assert not is_cancelled(board, jobs, before=[0, 3]), "early stopping and success are no wish of the user"
    assert not is_cancelled(board, jobs, before=[0, 1, 2])
    assert is_cancelled(board, jobs, before=[0, 2, 3])


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "3",
        "{}",
        '{"records": {}}',
        '{"records": [], "stopped": {}}',
        '{"records": {"x": {}}, "stopped": {}}',
    ],
)
def test_a_damaged_record_of_a_sweep_is_a_state_error(text: str) -> None:
    with pytest.raises(StateError, match="the record of the sweep is damaged"):
        decode(text)


def test_the_record_of_a_sweep_is_read_as_it_was_written() -> None:
    board = Board(records={9: {0: 0.5, 3: math.inf}, 27: {3: 0.25}}, stopped={0: 9})
    assert decode(encode(board)) == board and decode(None) == Board()


def test_the_best_run_has_a_loss_and_runs_that_got_further_are_ranked_before_others() -> None:
    done = JobStatus.SUCCEEDED
    jobs = {
        0: make_run(0, done, loss=math.nan, step=810),
        1: make_run(1, done, loss=2.0, step=810),
        2: make_run(2, JobStatus.RUNNING, loss=1.0, step=100),
        3: make_run(3, JobStatus.RUNNING, loss=1.5, step=300),
        4: make_run(4, JobStatus.FAILED, loss=0.1, step=500),
        5: make_run(5, JobStatus.CANCELLED, loss=9.0, step=30),
    }
    assert find_best(jobs) == 1 and rank(jobs, {5: 30}) == [1, 0, 3, 2, 5, 4]
    assert find_best({0: jobs[0]}) is None


class SweepWorld(World):
    """Each second, every live run does a few steps; its loss falls to a floor that depends on its learning rate."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / "home", self.train)
        self.steps = 0

    def train(self, context: Context, job: Job) -> None:
        before = job.progress.step if job.progress else 0
        pace = random.Random(f"{job.task.envs['lr']} {before}").randint(1, 4)
        step = min(TOTAL, before + pace)
        self.steps += step - before
        context.store.jobs.set_progress(job.id, Progress(step=step, total=TOTAL, loss=compute_loss(job, step)))
        if step == TOTAL:
            context.store.jobs.set_status(job.id, JobStatus.SUCCEEDED)

    def run(self, killer: Killer, *, runs: int = 64, parallel: int = 8) -> tuple[SweepDriver, SweepView]:
        context = self.open(killer)
        try:
            (task,) = load_tasks_text("name: s\nresources: {infra: local}\nrun: train $lr\n", "task.yaml")
            request = SweepRequest(task=task, parameters=PARAMETERS, runs=runs, parallel=parallel, early="asha")
            driver = SweepDriver(context, request)
            live = []

            async def follow() -> SweepView:
                view = None
                async for view in driver.follow():
                    live.append(sum(not job.status.is_terminal for job in view.jobs.values()))
                assert view is not None
                return view

            view = asyncio.run(follow())
            assert max(live) <= 2 * parallel  # at most `parallel` in addition to those being stopped
            return driver, view
        finally:
            context.close()


class FailingWorld(SweepWorld):
    """Every program fails before its first step."""

    def train(self, context: Context, job: Job) -> None:
        context.store.jobs.set_status(job.id, JobStatus.FAILED)


class CancellingWorld(SweepWorld):
    """The user cancels the jobs of the sweep as soon as they run."""

    def train(self, context: Context, job: Job) -> None:
        context.store.jobs.request_cancel(job.id)
        context.store.jobs.set_status(job.id, JobStatus.CANCELLED)


@pytest.mark.parametrize(
    ("make_world", "message"),
    [
        (FailingWorld, "4 runs failed and none has reported a step; 60 runs"),
        (CancellingWorld, "was cancelled; 60 runs"),
    ],
)
def test_no_further_run_starts_after_the_first_have_all_failed_or_were_cancelled(
    make_world: type[SweepWorld], message: str, tmp_path: Path
) -> None:
    world = make_world(tmp_path)
    with pytest.raises(BrokerError, match=message):
        world.run(Killer(None), parallel=4)
    with pytest.raises(BrokerError, match=message.replace("60", "56")):
        world.run(Killer(None), parallel=4)  # the same command starts others


def test_one_cancelled_run_makes_room_for_the_next(tmp_path: Path) -> None:
    class OneCancelled(SweepWorld):
        def train(self, context: Context, job: Job) -> None:
            if job.id == 1:
                context.store.jobs.request_cancel(job.id)
                context.store.jobs.set_status(job.id, JobStatus.CANCELLED)
            else:
                super().train(context, job)

    _, view = OneCancelled(tmp_path).run(Killer(None), runs=4, parallel=2)
    assert len(view.jobs) == 4 and view.is_over


def test_two_commands_that_drive_one_sweep_keep_the_records_of_both(tmp_path: Path) -> None:
    """The second command takes a whole step between the first one's look at the board and its own step."""

    class InterruptedDriver(SweepDriver):
        def _read_board(self) -> Board:
            board = super()._read_board()
            while interruptions:
                interruptions.pop()()
            return board

    interruptions: list[Callable[[], object]] = []
    world = SweepWorld(tmp_path)
    context = world.open(Killer(None))
    (task,) = load_tasks_text("name: s\nresources: {infra: local}\nrun: train $lr\n", "task.yaml")
    request = SweepRequest(task=task, parameters=PARAMETERS, runs=3, parallel=3, early="asha")
    first, second = InterruptedDriver(context, request), SweepDriver(context, request)
    jobs = first.advance().jobs

    def report(run: int, loss: float) -> None:
        context.store.jobs.set_status(jobs[run].id, JobStatus.RUNNING)
        context.store.jobs.set_progress(jobs[run].id, Progress(step=3, total=TOTAL, loss=loss))

    def step_of_the_second() -> None:
        report(1, 2.0)
        report(2, 3.0)
        second.advance()

    report(0, 1.0)
    interruptions.append(step_of_the_second)
    first.advance()
    world.run_jobs(context)
    view = first.advance()
    assert set(view.stopped) == {1, 2} and all(view.jobs[run].status is JobStatus.CANCELLED for run in (1, 2))
    board = decode(context.store.meta.get(f"sweep:{first.group}"))
    assert board.records == {3: {0: 1.0, 1: 2.0, 2: 3.0}}
    context.close()


def compute_loss(job: Job, step: int) -> float:
    distance = math.log10(float(job.task.envs["lr"]) / PLANTED)
    noise = random.Random(f"{job.task.envs['lr']} {step}").gauss(0.0, 0.002)
    return 1.0 + distance**2 + 3.0 * math.exp(-step / 15) + noise


def test_sixty_four_runs_find_the_planted_best_in_two_fifths_of_the_work(tmp_path: Path) -> None:
    world = SweepWorld(tmp_path)
    driver, view = world.run(Killer(None))
    best = find_best(view.jobs)
    assert best is not None and rank(view.jobs, view.stopped)[0] == best
    assert abs(math.log10(float(driver.configurations[best]["lr"]) / PLANTED)) <= 0.06
    assert world.steps <= 0.4 * 64 * TOTAL
    assert len(view.jobs) == 64 and view.is_over
    for run, job in view.jobs.items():
        assert (job.status is JobStatus.CANCELLED) == (run in view.stopped)


def kill_at(folder: Path, action: int) -> bool:
    world, killer = SweepWorld(folder), Killer(action)
    try:
        world.run(killer, runs=6, parallel=2)
    except KilledError:
        world.run_jobs(world.open(Killer(None)))  # the jobs continue meanwhile
    driver, view = world.run(Killer(None), runs=6, parallel=2)
    assert len(view.jobs) == 6 and view.is_over and find_best(view.jobs) is not None
    assert len({job.id for job in view.jobs.values()}) == len({job.name for job in view.jobs.values()}) == 6
    for run, job in view.jobs.items():
        assert job.task.envs["lr"] == driver.configurations[run]["lr"]
        assert (job.status is JobStatus.CANCELLED) == (run in view.stopped)
    return killer.actions >= action


@pytest.mark.parametrize("action", [0, 1, 6, 11])
def test_a_sweep_killed_at_one_action_is_continued_by_the_same_command(tmp_path: Path, action: int) -> None:
    assert kill_at(tmp_path, action)


@pytest.mark.long
def test_a_sweep_killed_at_any_action_is_continued_by_the_same_command(tmp_path: Path) -> None:
    for action in range(200):
        folder = tmp_path / str(action)
        folder.mkdir()
        if not kill_at(folder, action):
            assert action >= 20
            return
    raise AssertionError("a sweep of six runs has fewer actions")
