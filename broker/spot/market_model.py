"""Posterior over recorded spot markets given the observations, and the distribution of a job's outcome.

A market is assumed to behave like one of the recorded ones (`broker.spot.recorded_runs`); it is unknown which, so each
has a weight. The prior weighs each family of recordings by the square root of its number of recordings. Two kinds of
evidence multiply the weights: preemptions in the hours that the user's gangs ran there, and the answer to the last
request for spot capacity. The forecast is the mixture of the runs.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from operator import attrgetter

from broker.frozen import frozen
from broker.spot.recorded_runs import (
    STARTS_HOURS,
    BoundedHours,
    CellShares,
    RecordedRun,
    Scenario,
    average_cells,
    interpolate_mean,
    interpolate_runs,
    read_cells,
    read_scenarios,
)

# A recorded market's rate holds only on average, as storms come and go: the rate over a given period is Gamma with this
# shape, so its number of preemptions is negative binomial.
PACE_SHAPE = 2.0
# Places of one region and machine may close together. This is the probability that a group of places behaves like one
# of the next smaller recorded size, and so on down to a single place.
TOGETHER_SHARE = 0.15
# The next family of groups may be unlike all known ones. With this probability, everything that a run of several places
# takes beyond its work is multiplied by five, and it is divided by five with the probability that preserves the mean.
# It was 10 % with two families to forecast from (decision 101). The probability that one more family lies beyond all n
# known ones is 2 / (n + 1); a family left out is now forecast from seven (decision 357).
UNLIKE_FACTOR, UNLIKE_SHARE = 5.0, 0.04


@frozen
class MarketEvidence:
    """Observations of a market: `preemptions` of whole gangs in `gang_hours` on spot.

    `is_open` says whether the last request for spot capacity succeeded; None if there was none.
    """

    preemptions: float = 0.0
    gang_hours: float = 0.0
    is_open: bool | None = None


NOTHING = MarketEvidence()


@frozen
class RunDistribution:
    """Runs and their weights, which add up to 1. They come from `scenario_count` recorded scenarios."""

    runs: Sequence[RecordedRun]
    weights: Sequence[float]
    scenario_count: int

    def mean(self, value: Callable[[RecordedRun], float]) -> float:
        """Return the weighted mean of a value over all recorded runs."""
        return sum(weight * value(run) for run, weight in zip(self.runs, self.weights, strict=True))

    def average(self) -> RecordedRun:
        """Return the weighted mean run."""
        return RecordedRun(
            spot_hours=self.mean(attrgetter("spot_hours")),
            ondemand_hours=self.mean(attrgetter("ondemand_hours")),
            hours=self.mean(attrgetter("hours")),
            preemptions=self.mean(attrgetter("preemptions")),
        )

    def chance(self, claim: Callable[[RecordedRun], bool]) -> float:
        """Return the probability of a claim; never 0 or 1 because there are only a few hundred scenarios."""
        found = sum(weight for run, weight in zip(self.runs, self.weights, strict=True) if claim(run))
        least = 1 / (self.scenario_count + 2)
        return min(max(found, least), 1 - least)

    def quantiles(self, value: Callable[[RecordedRun], float], shares: Sequence[float]) -> list[float]:
        """Return the quantiles of `value` at `shares`, interpolated linearly between runs."""
        ranked = sorted((value(run), weight) for run, weight in zip(self.runs, self.weights, strict=True))
        middles, below = [], 0.0
        for _, weight in ranked:
            middles.append(below + weight / 2)
            below += weight
        return [_read_between(middles, [each for each, _ in ranked], share) for share in shares]


def forecast_run(
    *,
    work_hours: float,
    deadline_hours: float | None,
    start_hours: float,
    places: int = 1,
    evidence: MarketEvidence = NOTHING,
    scenarios: Sequence[Scenario] | None = None,
) -> RunDistribution:
    """Forecast the job over `places` candidate places; without a deadline it stays on spot."""
    kept = _choose_scenarios(places, evidence, scenarios)
    total = sum(weight for _, weight in kept)
    runs = interpolate_runs(
        [each for each, _ in kept], work_hours=work_hours, deadline_hours=deadline_hours, start_hours=start_hours
    )
    weights = [weight / total for _, weight in kept]
    found = list(zip(runs, weights, strict=True))
    if places > 1:
        found = [
            (spread, weight * share)
            for run, weight in found
            for spread, share in _spread(run, base_hours=work_hours + start_hours, deadline_hours=deadline_hours)
        ]
    return RunDistribution(
        runs=[run for run, _ in found], weights=[weight for _, weight in found], scenario_count=len(runs)
    )


def _spread(run: RecordedRun, *, base_hours: float, deadline_hours: float | None) -> list[tuple[RecordedRun, float]]:
    """Return the run with more, with fewer and with the same losses, and their shares, which preserve its mean.

    Beyond `base_hours` of work and first start, all of a run grows by one factor, as far as the deadline allows.
    """
    billed = run.spot_hours + run.ondemand_hours
    base = min(base_hours, billed)
    factor, more, switched = UNLIKE_FACTOR, run.hours - base, run.ondemand_hours - (billed - base)
    if deadline_hours is not None and more > 1e-9:
        factor = min(factor, max((deadline_hours - base) / more, 1.0))
    if switched > 1e-9:  # on-demand hours cannot exceed the billed hours
        factor = min(factor, max(base / switched, 1.0))
    less = 1 / UNLIKE_FACTOR
    less_share = UNLIKE_SHARE * (factor - 1) / (1 - less)
    if less_share <= 0:
        return [(run, 1.0)]

    def scale(by: float) -> RecordedRun:
        ondemand = by * run.ondemand_hours
        return RecordedRun(
            spot_hours=base + by * (billed - base) - ondemand,
            ondemand_hours=ondemand,
            hours=base + by * (run.hours - base),
            preemptions=by * run.preemptions,
        )

    return [(scale(factor), UNLIKE_SHARE), (scale(less), less_share), (run, 1 - UNLIKE_SHARE - less_share)]


@lru_cache(maxsize=256)
def find_hazard(places: int = 1, evidence: MarketEvidence = NOTHING) -> float:
    """Return the posterior mean of preemptions of a gang per hour on spot."""
    kept = _choose_scenarios(places, evidence, None)
    return sum(weight * _preemption_rate(each) for each, weight in kept) / sum(weight for _, weight in kept)


def forecast_mean(
    *,
    work_hours: float,
    deadline_hours: float | None,
    start_hours: float,
    places: int = 1,
    evidence: MarketEvidence = NOTHING,
) -> RecordedRun:
    """Return the mean of `forecast_run`, ten times as fast unless start-up takes longer than in the recorded runs."""
    if start_hours > STARTS_HOURS[-1]:  # extrapolated runs are bounded one by one
        return forecast_run(
            work_hours=work_hours,
            deadline_hours=deadline_hours,
            start_hours=start_hours,
            places=places,
            evidence=evidence,
        ).average()
    mean = interpolate_mean(
        _average(places, evidence), work_hours=work_hours, deadline_hours=deadline_hours, start_hours=start_hours
    )
    if deadline_hours is None or deadline_hours - start_hours <= work_hours:
        return mean
    hours = _bound_hours(places, evidence)
    return replace(
        mean, hours=hours.mean(work_hours=work_hours, deadline_hours=deadline_hours, start_hours=start_hours)
    )


@lru_cache(maxsize=256)
def _bound_hours(places: int, evidence: MarketEvidence) -> BoundedHours:
    kept = _choose_scenarios(places, evidence, None)
    total = sum(weight for _, weight in kept)
    return BoundedHours([each for each, _ in kept], [weight / total for _, weight in kept])


@lru_cache(maxsize=256)
def _average(places: int, evidence: MarketEvidence) -> tuple[CellShares, ...]:
    sizes = _weigh_places(places, sorted({each.places for each in read_scenarios()}))
    return average_cells([(_average_size(size, evidence), share) for size, share in sizes])


@lru_cache(maxsize=256)
def _average_size(size: int, evidence: MarketEvidence) -> tuple[CellShares, ...]:
    group = [each for each in read_scenarios() if each.places == size]
    weights = weigh_scenarios(group, evidence)
    return average_cells([(read_cells(each), weight) for each, weight in zip(group, weights, strict=True)])


def _choose_scenarios(
    places: int, evidence: MarketEvidence, scenarios: Sequence[Scenario] | None
) -> list[tuple[Scenario, float]]:
    """Return the scenarios of non-negligible weight, and their weights."""
    table = read_scenarios() if scenarios is None else scenarios
    found = list[tuple[Scenario, float]]()
    for size, share in _weigh_places(places, sorted({each.places for each in table})):
        group = [each for each in table if each.places == size]
        weights = weigh_scenarios(group, evidence)
        found += [(each, share * weight) for each, weight in zip(group, weights, strict=True)]
    return [(each, weight) for each, weight in found if weight > 1e-6]


def weigh_scenarios(scenarios: Sequence[Scenario], evidence: MarketEvidence) -> list[float]:
    """Return the posterior weight of each scenario; they add up to 1."""
    sizes = Counter(each.family for each in scenarios)
    logs = [_log_evidence(each, evidence) for each in scenarios]
    best = max(logs)
    weights = [math.exp(log - best) / math.sqrt(sizes[each.family]) for each, log in zip(scenarios, logs, strict=True)]
    total = sum(weights)
    return [weight / total for weight in weights]


def _log_evidence(scenario: Scenario, evidence: MarketEvidence) -> float:
    found = 0.0
    if evidence.gang_hours > 0 and scenario.places == 1:  # history of one place misleads where the job can move
        expected = _preemption_rate(scenario) * evidence.gang_hours
        found += evidence.preemptions * math.log(expected / (PACE_SHAPE + expected))
        found -= PACE_SHAPE * math.log1p(expected / PACE_SHAPE)
    if evidence.is_open is not None and scenario.is_open is not evidence.is_open:
        found -= 3.0  # finite: the answer may be out of date
    return found


def _preemption_rate(scenario: Scenario) -> float:
    """Return preemptions per hour on spot, with half a preemption added so that the rate is never zero."""
    return (scenario.preempted + 0.5) / (scenario.spot_hours + 1.0)


def _weigh_places(places: int, sizes: Sequence[int]) -> list[tuple[int, float]]:
    """Interpolate log-linearly between the recorded group sizes; move `TOGETHER_SHARE` of each to the next smaller."""
    index = min(bisect_left(sizes, places), len(sizes) - 1)
    found = dict.fromkeys(sizes, 0.0)
    if places <= sizes[0] or places >= sizes[index]:
        found[sizes[index]] = 1.0
    else:
        share = math.log(places / sizes[index - 1]) / math.log(sizes[index] / sizes[index - 1])
        found[sizes[index - 1]], found[sizes[index]] = 1 - share, share
    for smaller, size in reversed(list(itertools.pairwise(sizes))):
        moved = TOGETHER_SHARE * found[size]
        found[smaller], found[size] = found[smaller] + moved, found[size] - moved
    return [(size, share) for size, share in found.items() if share > 0]


def _read_between(points: Sequence[float], values: Sequence[float], share: float) -> float:
    index = bisect_left(points, share)
    if index == 0:
        return values[0]
    if index == len(points):
        return values[-1]
    low, high = points[index - 1], points[index]
    return values[index - 1] + (values[index] - values[index - 1]) * (share - low) / max(high - low, 1e-12)
