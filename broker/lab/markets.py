"""Markets of a replay: places with their recordings and prices at any hour."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from functools import cached_property

from broker.lab.traces import Trace
from broker.types import Offer, Placement


@dataclass(frozen=True, kw_only=True)
class Site:
    """A place where the gang may run on spot according to `trace`, or on-demand at any time.

    If the trace has prices, the spot price is `spot` times their ratio to the first one. The recording repeats at its
    end.
    """

    trace: Trace
    spot: Placement
    ondemand: Placement
    start_hours: float
    spot_speed: float = 1.0
    ondemand_speed: float = 1.0

    @cached_property
    def steps(self) -> tuple[tuple[float, bool, Placement], ...]:
        """Return (hour, is open, spot placement at its price) at the start of the recording and at each change."""
        hours = sorted({hour for hour, _ in self.trace.changes} | {hour for hour, _ in self.trace.price_changes})
        opens, prices = dict(self.trace.changes), dict(self.trace.price_changes)
        first = self.trace.prices[0] if self.trace.prices else 0.0
        placed = dict[float, Placement]()
        is_open, ratio = False, 1.0
        steps = []
        for hour in hours:
            is_open = opens.get(hour, is_open)
            if first > 0 and hour in prices:
                ratio = prices[hour] / first
            if ratio not in placed:
                placed[ratio] = _scale(self.spot, ratio)
            steps.append((hour, is_open, placed[ratio]))
        return tuple(steps)

    @cached_property
    def _hours(self) -> tuple[float, ...]:
        return tuple(hour for hour, _, _ in self.steps)

    def find_step(self, hour: float) -> int:
        """Return the number of the step at `hour`; numbers keep counting through repetitions."""
        cycle, rest = divmod(hour, self.trace.hours)
        index = bisect_right(self._hours, rest + 1e-9) - 1
        return int(cycle) * len(self.steps) + index

    def read_step(self, number: int) -> tuple[float, bool, Placement]:
        """Return (hour, is open, placement) of a step."""
        cycle, index = divmod(number, len(self.steps))
        hour, is_open, placement = self.steps[index]
        return cycle * self.trace.hours + hour, is_open, placement

    def closes_at(self, number: int) -> float:
        """Return when an open step closes; infinite if it never does."""
        for ahead in range(number + 1, number + 1 + len(self.steps)):
            hour, is_open, _ = self.read_step(ahead)
            if not is_open:
                return hour
        return float("inf")


def make_site(
    trace: Trace,
    *,
    ondemand_usd_hour: float = 1.0,
    spot_usd_hour: float = 1 / 3.1,
    start_hours: float,
    region: str = "",
    cloud: str = "trace",
) -> Site:
    """Make a site with one fictitious instance type. The default price ratio is that of a V100 on AWS in 2023."""
    offer = Offer(
        cloud=cloud,
        region=region or trace.name,
        zone=trace.name,
        instance_type="trace",
        vcpus=0,
        memory_gib=0,
        ondemand_usd_hour=ondemand_usd_hour,
        spot_usd_hour=spot_usd_hour,
    )
    return Site(
        trace=trace,
        spot=Placement(offer=offer, is_spot=True, node_count=1),
        ondemand=Placement(offer=offer, is_spot=False, node_count=1),
        start_hours=start_hours,
    )


def _scale(placement: Placement, ratio: float) -> Placement:
    price = placement.offer.spot_usd_hour
    assert price is not None
    return replace(placement, offer=replace(placement.offer, spot_usd_hour=price * ratio))
