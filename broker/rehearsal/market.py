"""Simulate the spot availability of places: intervals from a seed or from recorded availability. Pure."""

from __future__ import annotations

import math
import random
import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from broker.lab.traces import Trace
from broker.spot.hazard import find_hazard_per_node_hour
from broker.types import Offer

FULL_SHARE = 0.2  # of places, at the start; recorded zones range from 0.02 to 0.89
FULL_HOURS = 1.0  # mean time for which a place stays full; recorded means range from ten minutes to several hours
PERIODS_MAX = 100_000


@dataclass(frozen=True, kw_only=True)
class MarketPeriod:
    """The interval from `start_s` to `end_s`, in seconds since the market's start, of one state of a place."""

    start_s: float
    end_s: float
    is_open: bool


class PlaceMarket(Protocol):
    """A source of availability for each location at any time from the market's start."""

    def find_period(self, offer: Offer, at_s: float) -> MarketPeriod:
        """Return the interval that contains `at_s`, in seconds after the market's start."""


@dataclass(kw_only=True)
class SeededMarket:
    """A source of intervals drawn at random, reproducible by seed.

    A place closes at the hazard that the price book gives for one node, and stays closed for an hour on average; a
    fifth of the places start closed.
    """

    seed: int
    full_share: float = FULL_SHARE
    full_hours: float = FULL_HOURS
    _periods: dict[tuple[str, ...], list[MarketPeriod]] = field(default_factory=dict)
    _draws: dict[tuple[str, ...], random.Random] = field(default_factory=dict)

    def find_period(self, offer: Offer, at_s: float) -> MarketPeriod:
        """Return the open or closed period at `at_s`, drawn from seed and place."""
        key = name_place(offer)
        periods = self._periods.get(key)
        if periods is None:
            draw = self._draws[key] = random.Random(f"{self.seed}:{'/'.join(key)}")
            periods = self._periods[key] = [
                self._draw_period(offer, draw, 0.0, is_open=draw.random() >= self.full_share)
            ]
        while periods[-1].end_s <= at_s:
            assert len(periods) < PERIODS_MAX, "periods are hours, and rehearsals days"
            last = periods[-1]
            periods.append(self._draw_period(offer, self._draws[key], last.end_s, is_open=not last.is_open))
        return next(period for period in reversed(periods) if period.start_s <= at_s)

    def _draw_period(self, offer: Offer, draw: random.Random, start_s: float, *, is_open: bool) -> MarketPeriod:
        hazard = find_hazard_per_node_hour(offer.interruption_band)
        mean_hours = (1 / hazard if hazard > 0 else math.inf) if is_open else self.full_hours
        hours = draw.expovariate(1 / mean_hours) if mean_hours < math.inf else math.inf
        return MarketPeriod(start_s=start_s, end_s=start_s + max(hours * 3600, 60.0), is_open=is_open)


@dataclass(frozen=True, kw_only=True)
class ReplayedMarket:
    """Recordings, replayed in a loop. A zone without a recording gets another zone's, always the same one."""

    traces: Sequence[Trace]
    seed: int = 0

    def find_period(self, offer: Offer, at_s: float) -> MarketPeriod:
        """Return the recorded period at `at_s`; the recording repeats."""
        trace, begin_hours = self.find_recording(offer)
        hour = begin_hours + at_s / 3600
        cycle = hour // trace.hours
        start, end, is_open = _find_change(trace, hour - cycle * trace.hours)
        offset = cycle * trace.hours - begin_hours
        return MarketPeriod(start_s=(start + offset) * 3600, end_s=(end + offset) * 3600, is_open=is_open)

    def find_recording(self, offer: Offer) -> tuple[Trace, float]:
        """Return a recording and its hour at the market's start: 0 for the zone's own, so that zones stay in sync."""
        own = self._list_own(offer)
        draw = random.Random(f"{self.seed}:{'/'.join(name_place(offer))}")
        trace = draw.choice(own or list(self.traces))
        return trace, draw.uniform(0, trace.hours) if not own or self.seed else 0.0

    def _list_own(self, offer: Offer) -> list[Trace]:
        """List the recordings of the zone, or of a region without zones: of these machines if there are any.

        `broker traces record` names them `aws-us-east-1a-p3.2xlarge`, public collections `us-east-1a_v100_1`.
        """
        place = re.compile(rf"(?<![a-z0-9]){re.escape(offer.zone or offer.region)}(?![a-z0-9])")
        own = [trace for trace in self.traces if place.search(trace.name)]
        return [trace for trace in own if trace.name.endswith(f"-{offer.instance_type}".replace("/", "-"))] or own


def _find_change(trace: Trace, hour: float) -> tuple[float, float, bool]:
    """Return start and end (infinite if it never ends) of the interval that contains `hour`, and whether it is open."""
    changes = trace.changes
    if len(changes) == 1:
        return 0.0, math.inf, changes[0][1]
    index = bisect_right(changes, (hour, True)) - 1
    end = changes[index + 1][0] if index + 1 < len(changes) else trace.hours
    if end == trace.hours and changes[0][1] == changes[index][1]:
        end += changes[1][0]  # it continues at the start of the next repetition
    return changes[index][0], end, changes[index][1]


def name_place(offer: Offer) -> tuple[str, ...]:
    """Return cloud, region, zone and instance type: the unit in which the market opens and closes."""
    return (offer.cloud, offer.region, offer.zone or "", offer.instance_type)
