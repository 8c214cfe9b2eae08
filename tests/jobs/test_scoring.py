"""Scores of own forecasts, on records whose calibration is known."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from broker.jobs.scoring import JOBS_MIN, JudgedForecast, find_interval_factor, score_forecasts
from broker.types.forecasts import ForecastRecord

USD = (80.0, 85.0, 93.0, 100.0, 107.0, 115.0, 120.0)
HOURS = (8.0, 8.5, 9.3, 10.0, 10.7, 11.5, 12.0)


def judge(usd: float, hours: float = 10.0, *, chance: float | None = 0.75) -> JudgedForecast:
    forecast = ForecastRecord(
        usd=USD, hours=HOURS, usd_mean=101.0, hours_mean=10.0, deadline_hours=11.0, deadline_chance=chance
    )
    return JudgedForecast(job_id=1, name="train", forecast=forecast, usd=usd, hours=hours)


def test_coverage_bias_and_brier_score_of_four_jobs() -> None:
    found = score_forecasts([judge(100), judge(90, 9.0), judge(118, 12.5), judge(150, 10.5)])
    assert found.usd_coverage == (0.25, 0.5, 0.75)  # within 93-107, 85-115, 80-120
    assert found.hours_coverage == (0.5, 0.75, 0.75)
    assert found.usd_bias == pytest.approx(404 / 458 - 1)
    assert found.brier == pytest.approx((3 * 0.25**2 + 0.75**2) / 4)
    assert found.interval_factor == 1.0  # four jobs are not enough evidence


def test_jobs_without_a_deadline_are_not_in_the_brier_score() -> None:
    found = score_forecasts([judge(100, chance=None), judge(100)])
    assert (found.deadline_jobs, found.brier) == (1, pytest.approx(0.0625))
    assert score_forecasts([]).usd_coverage is None


def test_a_chance_without_its_deadline_is_left_out() -> None:
    whole = judge(100)
    odd = replace(whole, forecast=replace(whole.forecast, deadline_hours=None))
    found = score_forecasts([odd, whole])
    assert (found.jobs, found.deadline_jobs, found.brier) == (2, 1, pytest.approx(0.0625))


def test_jobs_that_waited_for_others_do_not_widen_intervals() -> None:
    """The second task of a pipeline: 30 h after its submission, but 10 h after the first one had ended."""
    waited = replace(judge(100, 10.0), waited_hours=20.0)
    timeless = replace(waited, forecast=replace(waited.forecast, deadline_hours=None, deadline_chance=None))
    found = score_forecasts([timeless] * JOBS_MIN)
    assert (found.jobs, found.hours_coverage, found.interval_factor) == (JOBS_MIN, (1.0, 1.0, 1.0), 1.0)
    assert waited.is_in_time is False  # the deadline of 11 h counts from submission
    assert score_forecasts([waited] * JOBS_MIN).jobs == 0  # it had less time than its forecast assumed
    assert score_forecasts([replace(waited, waited_hours=0.05)]).jobs == 1


@pytest.mark.parametrize(("inside", "factor"), [(0.8, 1.0), (0.7, 2.0)])
def test_thousands_of_ended_jobs_are_scored(inside: float, factor: float) -> None:
    """Each submission scores them: from 1,030 on, all of them failed with an OverflowError."""
    metrics = [(USD, 101.0 if number < inside * 3000 else 130.0) for number in range(3000)]
    assert find_interval_factor(metrics) == pytest.approx(factor)


def test_intervals_widen_only_on_evidence_of_overconfidence() -> None:
    inside, outside = (USD, 101.0), (USD, 130.0)  # 130 is twice as far from the median as p90
    assert find_interval_factor([outside] * (JOBS_MIN - 1)) == 1.0
    assert find_interval_factor([inside] * 6 + [outside] * 4) == 1.0
    assert find_interval_factor([inside] * 5 + [outside] * 5) == pytest.approx(2.0)
    assert find_interval_factor([(USD, 1000.0)] * 10) == 4.0
    assert find_interval_factor([(USD, 70.0)] * 10) == pytest.approx(2.0)


def test_the_factor_makes_intervals_hold_their_share() -> None:
    """Of jobs that vary twice as much as was said, the widened interval holds about 80 %."""
    draw = random.Random(7)

    def vary(scale: float) -> float:
        return 100 + draw.gauss(0, scale * 15 / 1.2816)  # p10 to p90 is 85 to 115

    factor = find_interval_factor([(USD, vary(2.0)) for _ in range(200)])
    held = sum(abs(vary(2.0) - 100) <= 15 * factor for _ in range(2000)) / 2000
    assert held == pytest.approx(0.8, abs=0.06)
    assert find_interval_factor([(USD, vary(1.0)) for _ in range(200)]) == 1.0
