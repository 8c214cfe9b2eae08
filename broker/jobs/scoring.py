"""Compare the forecasts made at submission with the jobs that have ended since. Pure.

An interval is widened only on evidence: at least `JOBS_MIN` jobs, of which so few lie within the 80 % interval that
the probability of this by chance is at most 10 %. The factor is the one with which the interval would have contained
its share (split conformal prediction, J. Lei and others, "Distribution-Free Predictive Inference for Regression",
2018).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from broker.frozen import frozen
from broker.types.forecasts import QUANTILES, ForecastRecord

JOBS_MIN = 10
LEVELS = (0.5, 0.8, 0.9)
LEVEL = 0.8  # of p10 to p90, the displayed interval
CHANCE_MAX = 0.1
FACTOR_MAX = 4.0
WAITED_HOURS_MAX = 0.1  # shorter waits for other jobs, such as a daemon's start, change nothing
WIDTH_MIN = 0.01  # share of the median: a narrower half of an interval counts as this wide
MEDIAN = QUANTILES.index(0.5)

Metric = tuple[Sequence[float], float]  # quantiles, and the actual value


@frozen
class JudgedForecast:
    """A forecast with the cost and time of the job, which has succeeded.

    Forecasts assume that the job can start at submission: `hours` excludes the `waited_hours` for which other jobs kept
    it from starting.
    """

    job_id: int
    name: str
    forecast: ForecastRecord
    usd: float
    hours: float
    waited_hours: float = 0.0

    @property
    def is_in_time(self) -> bool | None:
        """Whether the job met its deadline, which counts from submission; None without one."""
        limit = self.forecast.deadline_hours
        return None if limit is None else self.hours + self.waited_hours <= limit

    @property
    def is_comparable(self) -> bool:
        """Whether the job ran as forecast: not if it waited, and thus had less time than it was given."""
        return self.forecast.deadline_hours is None or self.waited_hours <= WAITED_HOURS_MAX


@frozen
class ForecastScore:
    """The calibration over `jobs` ended jobs. Coverage is by `LEVELS`; figures are None without jobs.

    `bias` is forecast mean over actual mean, minus 1. `brier` is the Brier score of the chance of meeting the deadline,
    over `deadline_jobs`. `interval_factor` widens the intervals of later plans.
    """

    jobs: int
    usd_coverage: tuple[float, ...] | None = None
    hours_coverage: tuple[float, ...] | None = None
    usd_bias: float | None = None
    hours_bias: float | None = None
    deadline_jobs: int = 0
    brier: float | None = None
    interval_factor: float = 1.0


def score_forecasts(ended: Sequence[JudgedForecast]) -> ForecastScore:
    """Score the forecasts of ended jobs; those of other conditions than they had are left out."""
    judged = [each for each in ended if each.is_comparable]
    if not judged:
        return ForecastScore(jobs=0)
    usd: list[Metric] = [(each.forecast.usd, each.usd) for each in judged]
    hours: list[Metric] = [(each.forecast.hours, each.hours) for each in judged]
    chances = [
        (each.forecast.deadline_chance, each.is_in_time)
        for each in judged
        if each.forecast.deadline_chance is not None and each.is_in_time is not None
    ]
    return ForecastScore(
        jobs=len(judged),
        usd_coverage=tuple(_cover(usd, level) for level in LEVELS),
        hours_coverage=tuple(_cover(hours, level) for level in LEVELS),
        usd_bias=_measure_bias(judged, lambda each: (each.forecast.usd_mean, each.usd)),
        hours_bias=_measure_bias(judged, lambda each: (each.forecast.hours_mean, each.hours)),
        deadline_jobs=len(chances),
        brier=sum((chance - came) ** 2 for chance, came in chances) / len(chances) if chances else None,
        interval_factor=max(find_interval_factor(usd), find_interval_factor(hours)),
    )


def find_interval_factor(metrics: Sequence[Metric]) -> float:
    """Return the factor for the 80 % interval that corrects overconfidence; 1 without evidence of overconfidence.

    Of 10 jobs, 5 within the interval are too few (probability 3 %), 6 are not (12 %). With 5, the factor is the
    9th smallest of the 10 distances to the median, in units of the interval's half-width.
    """
    count = len(metrics)
    if count < JOBS_MIN:
        return 1.0
    distances = sorted(_measure_distance(quantiles, actual) for quantiles, actual in metrics)
    inside = sum(each <= 1.0 for each in distances)
    if _chance_at_most(inside, count) > CHANCE_MAX:
        return 1.0
    rank = min(math.ceil(LEVEL * (count + 1)), count)
    return min(max(distances[rank - 1], 1.0), FACTOR_MAX)


def _cover(metrics: Sequence[Metric], level: float) -> float:
    low, high = (QUANTILES.index(round(each, 2)) for each in ((1 - level) / 2, (1 + level) / 2))
    return sum(quantiles[low] <= actual <= quantiles[high] for quantiles, actual in metrics) / len(metrics)


def _measure_bias(
    judged: Sequence[JudgedForecast], read: Callable[[JudgedForecast], tuple[float, float]]
) -> float | None:
    said, actual = (sum(values) for values in zip(*map(read, judged), strict=True))
    return said / actual - 1 if actual > 0 else None


def _measure_distance(quantiles: Sequence[float], actual: float) -> float:
    """Return the distance to the median, in units of that half of the 80 % interval."""
    middle = quantiles[MEDIAN]
    end = quantiles[QUANTILES.index(0.9 if actual > middle else 0.1)]
    return abs(actual - middle) / max(abs(end - middle), WIDTH_MIN * abs(middle), 1e-9)


def _chance_at_most(inside: int, count: int) -> float:
    """Return the probability that at most `inside` of `count` jobs lie within a correct interval."""
    return math.fsum(math.exp(_find_log_chance(k, count)) for k in range(inside + 1))


def _find_log_chance(k: int, count: int) -> float:
    """Return the logarithm of a binomial probability: the coefficients of a thousand jobs are too large for a float."""
    log_comb = math.lgamma(count + 1) - math.lgamma(k + 1) - math.lgamma(count - k + 1)
    return log_comb + k * math.log(LEVEL) + (count - k) * math.log(1 - LEVEL)
