"""The cost of a job's starts, counted by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from broker.app.job_sentences import describe_starts
from broker.jobs.start_costs import StartCost, measure_start_cost
from broker.types import Attempt, Job, JobStatus, Placement, Task
from broker.types.forecasts import JobForecast, Range
from tests.simulation.world import make_offer

OFFER = replace(make_offer("east1a"), ondemand_usd_hour=9.0, spot_usd_hour=3.0)
PLACEMENT = Placement(offer=OFFER, is_spot=True, node_count=2)
# 10 and 20 minutes from the program's start to its first new step, at 6 USD an hour.
FIRST = Attempt(
    job_id=1, number=1, cluster="c", placement=PLACEMENT, started_s=0.0, running_s=300.0, resumed_s=900.0,
    lost_s=5000.0, ended_s=5010.0,
)  # fmt: skip
SECOND = replace(FIRST, number=2, started_s=6000.0, running_s=6300.0, resumed_s=7500.0, lost_s=None, ended_s=None)


def make_job(*attempts: Attempt) -> Job:
    return Job(id=1, name="j", status=JobStatus.RUNNING, task=Task(), submitted_s=0.0, attempts=attempts)


def forecast(preemptions: float) -> JobForecast:
    usd = Range(p10=1.0, p50=2.0, p90=3.0)
    return JobForecast(usd=usd, hours_left=usd, deadline_chance=None, interval_factor=1.0, preemptions=preemptions)


def test_the_starts_of_a_running_job_by_hand() -> None:
    found = measure_start_cost(make_job(FIRST, SECOND), forecast(4.0))
    assert found is not None
    assert (found.count, found.mean_s, found.starts_left) == (2, 900.0, 4.0)
    assert found.paid_usd == pytest.approx(3.0) and found.left_usd == pytest.approx(4.0 * 0.25 * 6.0)


def test_a_job_without_machines_has_one_more_start_ahead() -> None:
    found = measure_start_cost(make_job(FIRST), forecast(4.0))
    assert found is not None and found.starts_left == 5.0


def test_a_start_without_a_first_step_is_not_measured() -> None:
    assert measure_start_cost(make_job(replace(FIRST, resumed_s=None)), forecast(4.0)) is None
    found = measure_start_cost(make_job(FIRST, replace(SECOND, resumed_s=None)), forecast(4.0))
    assert found is not None and (found.count, found.mean_s) == (1, 600.0)


def test_why_says_what_half_the_setup_would_save() -> None:
    found = measure_start_cost(make_job(FIRST, SECOND), forecast(4.0))
    assert found is not None
    assert describe_starts(found) == (
        "`setup`, data and restore took 15m 00s at each of 2 starts; if they took half as long, the 4.0 starts still "
        "expected would cost 3.00 USD less"
    )


def test_why_says_what_the_setups_of_an_ended_job_cost() -> None:
    found = measure_start_cost(make_job(FIRST), None)
    assert found is not None
    assert describe_starts(found) == "`setup`, data and restore took 10m 00s at its start and cost 1.00 USD"


def test_why_is_silent_where_a_shorter_setup_saves_less_than_a_cent() -> None:
    assert describe_starts(StartCost(count=1, mean_s=2.0, paid_usd=0.001)) == ""
    assert describe_starts(StartCost(count=1, mean_s=2.0, paid_usd=1.0, starts_left=1.0, left_usd=0.001)) == ""
