"""Forecast the load for the time at which a replica that is requested now will be ready. Pure.

The trend is the median of the slopes between all pairs of the means of the last 15 minutes (Theil and Sen), if it is
significant by the test of Mann and Kendall and has not ended: a sudden step is no trend, and least squares
would continue it upwards.
The means are of whole minutes, because requests per second are counted over a minute.

2.0, 3.0, ..., 11.0 requests/s, cold start 5 minutes  ->  16.0
10, 12, 9, 11, 10, 9, 12, 10 requests/s               ->  no trend: the present load
5, 5, 5, 5, 9, 9, 9, 9 requests/s                     ->  no trend
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

from broker.frozen import frozen
from broker.serve.scaling import Demand

MINUTE_S = 60.0
MINUTES_MAX = 15
# In standard deviations of Kendall's statistic without a trend: 1 in 700 exceeds it. At least seven minutes are needed.
DEVIATIONS_MIN = 3.0
RECENT = 5  # minutes in which at least half of the trend must still be there
RATIO_MAX = 2.0  # of the present load: a forecast is a guess, and replicas are paid for


@frozen
class LoadMinute:
    """The mean load of a minute."""

    qps: float
    in_flight: float


class LoadForecaster:
    """Collects the load of the last minutes, and forecasts that of the next ones."""

    def __init__(self) -> None:
        self.minutes: tuple[LoadMinute, ...] = ()
        self._begin_s: float | None = None
        self._seen: list[Demand] = []

    def observe(self, demand: Demand, *, now_s: float) -> None:
        """Add a measured load. An unknown load or a gap starts over, because a trend across it would be invented."""
        if not demand.is_known or (self._begin_s is not None and not 0 <= now_s - self._begin_s < 2 * MINUTE_S):
            self.minutes, self._begin_s, self._seen = (), None, []
            if not demand.is_known:
                return
        if self._begin_s is not None and now_s - self._begin_s >= MINUTE_S:
            mean = LoadMinute(
                qps=statistics.fmean(each.qps for each in self._seen),
                in_flight=statistics.fmean(each.in_flight for each in self._seen),
            )
            self.minutes = (*self.minutes, mean)[-MINUTES_MAX:]
            self._begin_s, self._seen = None, []
        self._begin_s = now_s if self._begin_s is None else self._begin_s
        self._seen.append(demand)

    def forecast(self, demand: Demand, *, lead_s: float) -> Demand:
        """Return the load in `lead_s` seconds: at least the present one, because a forecast only adds replicas."""
        return forecast_demand(self.minutes, demand, lead_s=lead_s)


def forecast_demand(minutes: Sequence[LoadMinute], demand: Demand, *, lead_s: float) -> Demand:
    """Return the load in `lead_s` seconds, at least the present one and at most `RATIO_MAX` times it."""
    return replace(
        demand,
        qps=_extrapolate([each.qps for each in minutes], demand.qps, lead_s / MINUTE_S),
        in_flight=_extrapolate([each.in_flight for each in minutes], demand.in_flight, lead_s / MINUTE_S),
    )


def _extrapolate(values: Sequence[float], present: float, lead: float) -> float:
    """Return the value `lead` minutes after the last one, no further ahead than there are values."""
    count = len(values)
    rises = sum((later > earlier) - (later < earlier) for earlier, later in combinations(values, 2))
    if count < 2 or rises < DEVIATIONS_MIN * math.sqrt(count * (count - 1) * (2 * count + 5) / 18):
        return present
    slope = _find_slope(values)
    if _find_slope(values[-RECENT:]) < slope / 2:
        return present
    level = statistics.median(value - slope * time for time, value in enumerate(values))
    ahead = level + slope * (count - 1 + min(lead, count))
    return max(present, min(ahead, RATIO_MAX * present))


def _find_slope(values: Sequence[float]) -> float:
    """Return the median of the slopes between all pairs of values."""
    pairs = combinations(enumerate(values), 2)
    return statistics.median((later - earlier) / (end - begin) for (begin, earlier), (end, later) in pairs)
