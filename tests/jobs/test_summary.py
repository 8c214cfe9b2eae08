"""The summary of a job's run, counted by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from broker.jobs.summary import AttemptSteps, RunSummary, measure_lost_s, summarize
from broker.state.history import StepRange
from broker.types import Attempt, Job, JobStatus, Placement, Progress, Task
from tests.simulation.world import make_offer

OFFER = replace(make_offer("east1a"), ondemand_usd_hour=3.0, spot_usd_hour=1.0)
PLACEMENT = Placement(offer=OFFER, is_spot=True, node_count=2)
# Submitted at 1000; runs 1100 to 1500; lost; runs again 1600 to 2000; first new step at 1650.
FIRST = Attempt(
    job_id=1, number=1, cluster="c", placement=PLACEMENT, started_s=1050.0, running_s=1100.0,
    resumed_s=1110.0, lost_s=1500.0, ended_s=1520.0, usd=0.5,
)  # fmt: skip
SECOND = Attempt(
    job_id=1, number=2, cluster="c", placement=PLACEMENT, started_s=1540.0, running_s=1600.0,
    resumed_s=1650.0, ended_s=2000.0, usd=0.25,
)  # fmt: skip
STEPS = {
    1: StepRange(first_step=1, last_step=60, checkpoint_step=40),
    2: StepRange(first_step=41, last_step=100, checkpoint_step=100),
}


def sum_up(
    *attempts: Attempt, steps: dict[int, StepRange] = STEPS, ended_s: float | None = 2000.0, step: int | None = 100
) -> RunSummary:
    job = Job(
        id=1, name="j", status=JobStatus.SUCCEEDED, task=Task(), submitted_s=1000.0, ended_s=ended_s,
        progress=None if step is None else Progress(step=step, total=120),
    )  # fmt: skip
    return summarize(job, attempts, steps, paid_usd=0.75, ondemand_usd=2.25, now_s=2500.0)


def test_a_job_with_one_preemption_by_hand() -> None:
    assert sum_up(FIRST, SECOND) == RunSummary(
        steps=100,
        steps_total=120,
        steps_lost=20,
        recoveries=1,
        recovery_s=150.0,
        total_s=1000.0,
        useful_s=pytest.approx((420.0 + 400.0) * 100 / 120),
        paid_usd=0.75,
        ondemand_usd=2.25,
        attempts=(
            AttemptSteps(number=1, first_step=1, last_step=60, checkpoint_step=40, steps_lost=20),
            AttemptSteps(number=2, first_step=41, last_step=100, checkpoint_step=100, steps_lost=0),
        ),
    )


def test_a_job_that_still_runs_counts_up_to_now() -> None:
    found = sum_up(FIRST, replace(SECOND, ended_s=None), ended_s=None)
    assert found.total_s == 1500.0
    assert found.useful_s == pytest.approx((420.0 + 900.0) * 100 / 120)


def test_attempts_that_end_after_their_job_count_until_its_end() -> None:
    assert sum_up(replace(FIRST, ended_s=2100.0), steps={}).useful_s == 900.0


def test_lost_steps_without_a_reported_checkpoint_are_those_seen_again() -> None:
    old = StepRange(first_step=1, last_step=60, checkpoint_step=None)
    assert sum_up(FIRST, SECOND, steps={1: old, 2: STEPS[2]}).steps_lost == 20
    assert sum_up(FIRST, SECOND, steps={1: old}).steps_lost == 0
    assert sum_up(FIRST, SECOND, steps={2: STEPS[2]}).steps_lost == 0
    skipped = StepRange(first_step=70, last_step=80, checkpoint_step=None)
    assert sum_up(FIRST, SECOND, steps={1: old, 2: skipped}).steps_lost == 0
    ahead = StepRange(first_step=1, last_step=60, checkpoint_step=61)
    assert sum_up(FIRST, SECOND, steps={1: ahead}).steps_lost == 0


def test_a_recovery_ends_with_the_first_step_or_else_with_the_start() -> None:
    assert sum_up(FIRST, replace(SECOND, resumed_s=None)).recovery_s == 100.0
    assert sum_up(replace(FIRST, lost_s=None), SECOND).recovery_s == 130.0
    assert sum_up(replace(FIRST, lost_s=None, ended_s=None), SECOND).recovery_s == 0.0
    assert sum_up(replace(FIRST, lost_s=1700.0), SECOND).recovery_s == 0.0


def test_an_attempt_that_never_started_is_not_a_recovery() -> None:
    never = Attempt(job_id=1, number=2, cluster="c", placement=PLACEMENT, started_s=1530.0, ended_s=1535.0)
    found = sum_up(FIRST, never, replace(SECOND, number=3))
    assert (found.recoveries, found.recovery_s) == (1, 150.0)
    assert sum_up().recoveries == 0


def test_without_steps_all_running_time_is_useful() -> None:
    found = sum_up(FIRST, SECOND, steps={}, step=None)
    assert (found.steps, found.steps_total, found.useful_s) == (0, None, 820.0)


def test_lost_work_is_the_time_of_the_steps_that_were_lost() -> None:
    first = replace(FIRST, running_s=1000.0, resumed_s=None, lost_s=2000.0)  # 60 steps in 1,000 s, the last 20 lost
    assert measure_lost_s([(first, STEPS[1]), (SECOND, STEPS[2])]) == pytest.approx(20 * 1000 / 60)
    assert (
        measure_lost_s([(first, STEPS[1])]) == 0.0
    )  # nothing is known to be lost before the next attempt's first step
    third = StepRange(first_step=101, last_step=103, checkpoint_step=None)
    assert measure_lost_s([(first, STEPS[1]), (SECOND, STEPS[2]), (SECOND, third)]) == pytest.approx(20 * 1000 / 60)
