"""Durations of the open and closed periods of a market, by age of the period.

A period is a stretch of time in which a market stays open or closed. For each age class, the hours of exposure and the
number of periods that ended are kept: sufficient statistics for any hazard that depends on age, and they add up.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass

# Lower bounds of the age classes, hours. Recorded periods last from one sample (half a minute) to weeks: about three
# classes per decade.
AGES = (0.0, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 24.0)
# The assumed age of a period whose beginning was not observed: a random moment falls mostly into long periods.
MET_HOURS = 5.0
HALF_LIFE_HOURS = 24.0  # half-life of the observations of a market that is watched live
_NONE = (0.0,) * len(AGES)


@dataclass(frozen=True, kw_only=True, slots=True)
class Durations:
    """Exposure hours and observed ends of open and of closed periods, by class of `AGES`."""

    open_hours: tuple[float, ...] = _NONE
    open_ends: tuple[float, ...] = _NONE
    closed_hours: tuple[float, ...] = _NONE
    closed_ends: tuple[float, ...] = _NONE

    def with_period(self, hours: float, *, is_open: bool, from_hours: float = 0.0, is_ended: bool = True) -> Durations:
        """Return a copy with a period of `hours`, watched from age `from_hours`, censored unless `is_ended`."""
        lived, ends = (self.open_hours, self.open_ends) if is_open else (self.closed_hours, self.closed_ends)
        lived, ends = _add(lived, ends, from_hours, hours, is_ended=is_ended)
        if is_open:
            return Durations(
                open_hours=lived, open_ends=ends, closed_hours=self.closed_hours, closed_ends=self.closed_ends
            )
        return Durations(open_hours=self.open_hours, open_ends=self.open_ends, closed_hours=lived, closed_ends=ends)

    def discount(self, hours: float) -> Durations:
        """Return the observations discounted by `hours` because the behaviour of a market changes from day to day."""
        share = 0.5 ** (hours / HALF_LIFE_HOURS)
        return Durations(
            open_hours=tuple(each * share for each in self.open_hours),
            open_ends=tuple(each * share for each in self.open_ends),
            closed_hours=tuple(each * share for each in self.closed_hours),
            closed_ends=tuple(each * share for each in self.closed_ends),
        )

    def count_reached(self, from_hours: float, to_hours: float) -> tuple[float, float]:
        """Count the finished open periods that reached the class of `from_hours`, and that of `to_hours`."""
        first, then = find_class(from_hours), find_class(to_hours)
        return (sum(self.open_ends[first:]), sum(self.open_ends[then:])) if then > first else (0.0, 0.0)

    def __add__(self, other: Durations) -> Durations:
        return Durations(
            open_hours=_sum(self.open_hours, other.open_hours),
            open_ends=_sum(self.open_ends, other.open_ends),
            closed_hours=_sum(self.closed_hours, other.closed_hours),
            closed_ends=_sum(self.closed_ends, other.closed_ends),
        )


NOTHING_SEEN = Durations()


def find_class(age_hours: float) -> int:
    """Return the index of the age class in `AGES`."""
    return bisect_right(AGES, age_hours) - 1


def list_hours_by_class(from_hours: float, to_hours: float) -> list[tuple[int, float]]:
    """List (class, hours) for each age class that a period passes through between two ages."""
    found = []
    index = find_class(from_hours)
    while index < len(AGES) and from_hours < to_hours:
        end = AGES[index + 1] if index + 1 < len(AGES) else math.inf
        found.append((index, min(end, to_hours) - from_hours))
        from_hours, index = end, index + 1
    return found


def _add(
    lived: tuple[float, ...], ends: tuple[float, ...], from_hours: float, to_hours: float, *, is_ended: bool
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    hours = list(lived)
    for index, part in list_hours_by_class(from_hours, to_hours):
        hours[index] += part
    if not is_ended:
        return tuple(hours), ends
    counts = list(ends)
    counts[find_class(max(to_hours - 1e-6, 0.0))] += 1  # a period that ends where a class begins has no exposure in it
    return tuple(hours), tuple(counts)


def _sum(one: tuple[float, ...], other: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(a + b for a, b in zip(one, other, strict=True))
