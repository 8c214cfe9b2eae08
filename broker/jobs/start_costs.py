"""Measure the time that a job's program takes at each start before the first new step, and its cost. Pure."""

from __future__ import annotations

from broker.frozen import frozen
from broker.types import Attempt, Job
from broker.types.forecasts import JobForecast


@frozen
class StartCost:
    """The part of a job's starts that depends on its program: `setup`, loading data, restoring the checkpoint.

    It lasts from the start of the program to its first new step: `mean_s` on average over `count` starts, during which
    `paid_usd` was paid for machines. `starts_left` starts are expected until the job ends; at the price of its newest
    placement, this part of them will cost `left_usd`. Both are None for an ended job and without a forecast.
    """

    count: int
    mean_s: float
    paid_usd: float
    starts_left: float | None = None
    left_usd: float | None = None


def measure_start_cost(job: Job, forecast: JobForecast | None) -> StartCost | None:
    """Measure the starts of a job; None before its program has reported a first step."""
    times = [(each, each.resumed_s - each.running_s) for each in job.attempts if each.resumed_s and each.running_s]
    if not times:
        return None
    mean_s = sum(lasted_s for _, lasted_s in times) / len(times)
    found = StartCost(
        count=len(times),
        mean_s=mean_s,
        paid_usd=sum(lasted_s / 3600 * each.placement.usd_hour for each, lasted_s in times),
    )
    if forecast is None:
        return found
    newest = job.attempts[-1]
    starts_left = forecast.preemptions + _is_start_ahead(newest)
    return StartCost(
        count=found.count,
        mean_s=mean_s,
        paid_usd=found.paid_usd,
        starts_left=starts_left,
        left_usd=starts_left * mean_s / 3600 * newest.placement.usd_hour,
    )


def _is_start_ahead(newest: Attempt) -> bool:
    """Return whether the job has no working or starting machines."""
    return newest.ended_s is not None or newest.lost_s is not None
