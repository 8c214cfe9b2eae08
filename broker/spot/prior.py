"""Hazards of a spot market by age of the period: a pooled prior, scaled by the observations of the market.

Markets differ far more in how fast they change than in how their hazards decline with age. The shape is therefore a
prior, and a market's own paces are factors on it, for open and for closed periods, young and old, learned online.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from broker.spot.durations import AGES, Durations, find_class, list_hours_by_class

OLD = find_class(1.0)  # the class from which periods count as old
# The number of ended periods that weigh as much as the prior. Recorded markets change pace from day to day, so a few
# periods say little about tomorrow, and closed ones less than open ones.
OPEN_WEIGHT, CLOSED_WEIGHT = 6.0, 16.0
EXPOSURE_HOURS = 12.0  # open or closed time from which a recording has its full weight in a prior
SPLIT_WEIGHT = 16.0  # ended periods of one age group that weigh as much as the pace common to all ages


@dataclass(frozen=True, kw_only=True)
class Prior:
    """Hazards per hour by age class; a weight is the number of ended periods that weigh as much as the prior."""

    open_hazards: tuple[float, ...]
    closed_hazards: tuple[float, ...]
    open_weight: float = OPEN_WEIGHT
    closed_weight: float = CLOSED_WEIGHT

    @cached_property
    def mean_open_hours(self) -> float:
        """Return the mean length of an open period under the prior alone."""
        return _mean_period_hours(self.open_hazards)

    @cached_property
    def mean_closed_hours(self) -> float:
        """Expected length of a closed period, from its beginning."""
        return _mean_period_hours(self.closed_hazards)

    def learn_open(self, seen: Durations, watched: tuple[float, float] | None = None) -> Paces:
        """Return the factors on `open_hazards` for young and for old periods: means of Gamma posteriors.

        `watched` is the range of ages over which the present open period was watched.
        """
        return _learn(self.open_hazards, seen.open_hours, seen.open_ends, watched, self.open_weight)

    def learn_closed(self, seen: Durations, watched: tuple[float, float] | None = None) -> Paces:
        """Return the factors on `closed_hazards` for young and for old periods, as `learn_open` does."""
        return _learn(self.closed_hazards, seen.closed_hours, seen.closed_ends, watched, self.closed_weight)


Paces = tuple[float, float]  # for young and for old periods


def scale_hazards(hazards: Sequence[float], paces: Paces) -> tuple[float, ...]:
    """Multiply the hazards of young and of old periods by their paces."""
    return tuple(hazard * paces[index >= OLD] for index, hazard in enumerate(hazards))


def _mean_period_hours(hazards: Sequence[float]) -> float:
    widths = [end - begin for begin, end in itertools.pairwise((*AGES, math.inf))]
    return live_through(zip(hazards, widths, strict=True))[0]


def live_through(parts: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """Return (mean lifetime, survival) of a period with a piecewise constant hazard; parts are (hazard, hours)."""
    alive, mean = 1.0, 0.0
    for hazard, hours in parts:
        rate = max(hazard, 1e-6)
        ended = -math.expm1(-rate * hours)
        mean += alive * ended / rate
        alive *= 1 - ended
    return mean, alive


def _learn(
    hazards: tuple[float, ...],
    hours: tuple[float, ...],
    ends: tuple[float, ...],
    watched: tuple[float, float] | None,
    weight: float,
) -> Paces:
    """Return one factor for young and one for old periods, shrunk to their common factor, itself shrunk to 1."""
    young_ends, old_ends, young, old = _count_ends(hazards, hours, ends)
    if watched:
        for index, lived in list_hours_by_class(*watched):
            if index < OLD:
                young += hazards[index] * lived
            else:
                old += hazards[index] * lived
    pace = (weight + young_ends + old_ends) / (weight + young + old)
    return (
        (SPLIT_WEIGHT * pace + young_ends) / (SPLIT_WEIGHT + young),
        (SPLIT_WEIGHT * pace + old_ends) / (SPLIT_WEIGHT + old),
    )


@lru_cache(maxsize=1024)  # the observations change only when a period ends
def _count_ends(
    hazards: tuple[float, ...], hours: tuple[float, ...], ends: tuple[float, ...]
) -> tuple[float, float, float, float]:
    """Count the observed ends of young and of old periods, and those expected from the hazards."""
    expected = [hazard * lived for hazard, lived in zip(hazards, hours, strict=True)]
    return sum(ends[:OLD]), sum(ends[OLD:]), sum(expected[:OLD]), sum(expected[OLD:])


def fit_prior(recordings: Sequence[Durations]) -> Prior:
    """Fit the pooled hazards of recordings.

    All weigh the same, regardless of their length, except those with less than `EXPOSURE_HOURS` of such periods, which
    weigh by their hours. A recording that was closed for half a minute in two days says next to nothing about
    reopening.
    """
    assert recordings
    opened, closed = (
        _pool([(each.open_hours, each.open_ends) for each in recordings]),
        _pool([(each.closed_hours, each.closed_ends) for each in recordings]),
    )
    return Prior(open_hazards=opened, closed_hazards=closed)


def _pool(recordings: Sequence[tuple[Sequence[float], Sequence[float]]]) -> tuple[float, ...]:
    lived, ended = [0.0] * len(AGES), [0.0] * len(AGES)
    for hours, ends in recordings:
        total = max(sum(hours), EXPOSURE_HOURS)
        for index in range(len(AGES)):
            lived[index] += hours[index] / total
            ended[index] += ends[index] / total
    overall = sum(ended) / max(sum(lived), 1e-9)
    return tuple((end + 0.01 * overall) / (live + 0.01) for live, end in zip(lived, ended, strict=True))


# Ends per hour by class of `AGES`, pooled from public recordings of AWS and GCP zones of 2022 to 2025 (the
# availability sets behind "Can't Be Late", NSDI 2024, and SkyNomad).
MEASURED = Prior(
    open_hazards=(0.188, 2.829, 0.98, 0.818, 0.524, 0.245, 0.133, 0.115, 0.032),
    closed_hazards=(0.3, 3.569, 1.191, 0.914, 0.539, 0.273, 0.157, 0.109, 0.031),
)
