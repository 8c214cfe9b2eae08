"""The cause of a program's death by its exit code, and when the program is restarted."""

from __future__ import annotations

import pytest

from broker.jobs.deaths import (
    DEATHS_MAX,
    REWRITES_MAX,
    Headway,
    count_deaths,
    describe_cause,
    find_signal,
    is_restart_due,
    measure_headway,
)
from broker.state.history import StepRange
from broker.types import Attempt, JobRecovery, ObservedCheckpoints, Outcome, OutcomeKind, Placement
from tests.simulation.world import make_offer

PLACEMENT = Placement(offer=make_offer("east1a"), is_spot=True, node_count=2)


@pytest.mark.parametrize(
    ("code", "signal"), [(137, 9), (-9, 9), (134, 6), (-6, 6), (143, 15), (1, None), (75, None), (255, None)]
)
def test_death_by_a_signal_is_named_for_both_exit_code_forms(code: int, signal: int | None) -> None:
    assert find_signal(code) == signal


@pytest.mark.parametrize(
    ("code", "lines", "cause"),
    [
        (137, (), "SIGKILL: killed; running out of memory is the usual cause"),
        (-6, (), "SIGABRT: aborted, as by NCCL's watchdog or a failed CUDA assertion"),
        (139, (), "SIGSEGV: segmentation fault"),
        (143, (), "SIGTERM: terminated"),
        (127, (), "the command was not found"),
        (1, (), ""),
        (None, (), ""),
        (1, ("  exitcode  : -9 (pid: 71)",), "SIGKILL: killed; running out of memory is the usual cause"),
        (1, ("  traceback : Signal 6 (SIGABRT) received by PID 71",), "SIGABRT: aborted, as by NCCL's "
         "watchdog or a failed CUDA assertion"),
        (1, ("  exitcode  : -99 (pid: 71)",), ""),
        (1, ("torch.OutOfMemoryError: CUDA out of memory. Tried",), "out of GPU memory"),
    ],
)  # fmt: skip
def test_likely_cause_of_a_death(code: int | None, lines: tuple[str, ...], cause: str) -> None:
    assert describe_cause(code, lines) == cause


def make_attempt(number: int, returncode: int | None, saved: ObservedCheckpoints | None = None) -> Attempt:
    outcome = None if returncode is None else Outcome(kind=OutcomeKind.PROGRAM_FAILED, exit_code=returncode)
    cluster = f"c{number}"
    return Attempt(
        job_id=1, number=number, cluster=cluster, placement=PLACEMENT, started_s=0.0, outcome=outcome, checkpoints=saved
    )


def make_steps(*reached: tuple[int, int | None]) -> dict[int, StepRange]:
    return {
        number: StepRange(first_step=0, last_step=step, checkpoint_step=saved)
        for number, (step, saved) in enumerate(reached, start=1)
    }


def test_headway_is_the_furthest_step_that_was_seen_or_saved() -> None:
    steps = make_steps((40, None), (12, 50), (45, 40))
    assert [measure_headway(steps, until=number).step for number in (0, 1, 2, 3)] == [0, 40, 50, 50]


NUMBERED = [ObservedCheckpoints(number=each, time_s=9.0) for each in (100, 100, 300, 200)]
REWRITTEN = [ObservedCheckpoints(unnumbered_s=each, time_s=each) for each in (5.0, 5.0, 7.0, 8.0)]


def test_without_steps_headway_is_what_the_program_was_seen_to_save() -> None:
    attempts = [make_attempt(number, 1, saved) for number, saved in enumerate(NUMBERED, start=1)]
    found = [measure_headway({}, attempts, until=number) for number in (0, 1, 3, 4)]
    assert found == [Headway(), Headway(checkpoint=100), Headway(checkpoint=300), Headway(checkpoint=300)]
    rewritten = [make_attempt(1, 1, REWRITTEN[0]), make_attempt(2, None), make_attempt(3, 1)]
    assert measure_headway({}, rewritten, until=3) == Headway(unnumbered_s=5.0)
    assert measure_headway(make_steps((40, None)), attempts, until=4) == Headway(step=40), "reported steps decide alone"


def test_deaths_count_from_the_last_new_checkpoint() -> None:
    recovery, presents = JobRecovery(), (1, 2, 3, 4)
    numbered = [make_attempt(number, 1, saved) for number, saved in enumerate(NUMBERED, start=1)]
    assert [count_deaths(recovery, numbered, {}, present=each) for each in presents] == [1, 2, 1, 2]
    rewritten = [make_attempt(number, 1, saved) for number, saved in enumerate(REWRITTEN, start=1)]
    assert [count_deaths(recovery, rewritten, {}, present=each) for each in presents] == [1, 2, 1, 1]
    counts = [count_deaths(recovery, rewritten, {}, present=each, is_numbered=True) for each in presents]
    assert counts == [1, 2, 3, 4], "a file without a number does not show how far the program is"


def test_an_observed_checkpoint_is_progress_as_a_step_is() -> None:
    default = JobRecovery()
    numbered, rewritten = Headway(checkpoint=100), Headway(unnumbered_s=5.0)
    assert [is_restart_due(default, 1, deaths=each, headway=numbered) for each in (2, 3)] == [True, False]
    due = [is_restart_due(default, 1, rewrites=each, headway=rewritten) for each in (REWRITES_MAX - 1, REWRITES_MAX)]
    assert due == [True, False]


def test_deaths_count_from_the_last_headway() -> None:
    recovery = JobRecovery(recover_on_exit_codes=(75,))
    attempts = [make_attempt(number, code) for number, code in enumerate((1, 137, None, 75, 1), start=1)]
    steps = make_steps((40, None), (60, None), (55, 50), (60, None), (58, None))
    counts = [count_deaths(recovery, attempts, steps, present=number) for number in (1, 2, 5)]
    assert counts == [1, 1, 2], "neither a preemption nor a listed code is a death"


def test_the_task_overrides_the_default() -> None:
    listed = JobRecovery(recover_on_exit_codes=(75,), max_restarts_on_errors=0)
    assert is_restart_due(listed, 75, failures=99, deaths=99)
    assert not is_restart_due(listed, 137, deaths=1, headway=Headway(40))
    counted = JobRecovery(max_restarts_on_errors=2)
    assert [is_restart_due(counted, 1, failures=each, deaths=9) for each in (0, 1, 2)] == [True, True, False]


def test_by_default_a_program_is_restarted_only_if_it_makes_progress() -> None:
    default = JobRecovery()
    assert [is_restart_due(default, 1, deaths=each, headway=Headway(7)) for each in range(1, DEATHS_MAX + 1)] == [
        True, True, False,
    ]  # fmt: skip
    assert not is_restart_due(default, 1, keeps_checkpoints=True), "a typo is not worth a second try"
    assert is_restart_due(default, 137, keeps_checkpoints=True)
    assert not is_restart_due(default, 137), "without checkpoints all would be done again"
