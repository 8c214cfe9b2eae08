"""Forecasts of jobs: as displayed, and as stored for comparison with the outcome."""

from __future__ import annotations

from broker.frozen import frozen

QUANTILES = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95)


@frozen
class ForecastRecord:
    """The forecast at submission: quantiles, at `QUANTILES`, of USD and of hours from submission to end.

    Intervals are those of the market model, not widened by the results of earlier jobs.
    """

    usd: tuple[float, ...]
    hours: tuple[float, ...]
    usd_mean: float
    hours_mean: float
    deadline_hours: float | None = None
    deadline_chance: float | None = None


@frozen
class Range:
    """The 10th, 50th and 90th percentiles."""

    p10: float
    p50: float
    p90: float


@frozen
class BegunStart:
    """The hours of a plan's first start that running machines have completed, and whether they are on spot."""

    hours: float = 0.0
    is_spot: bool = True


NOT_BEGUN = BegunStart()


@frozen
class JobForecast:
    """The expected total cost of a live job, and its remaining hours. The chance is None without a deadline."""

    usd: Range  # including the cost so far
    hours_left: Range
    deadline_chance: float | None
    interval_factor: float
    preemptions: float = 0.0  # expected in the remaining hours; 0 from an older server
