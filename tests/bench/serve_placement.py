"""Replay the placement of replicas on recordings of spot markets, and compare it with a bound that knows the future.

Real decisions (`place_replicas`, `decide`) over a replayed market: a spot replica is lost when its zone closes, is
requested again where spot is open, has machines after `ACQUIRE_HOURS` and is ready after `COLD_START_HOURS`. Hazards
are learned from the recording up to the present, beginning with one loss in `PRIOR_HOURS`.

The bound: in each tick, `needed` replicas in the cheapest zone that was open for a whole cold start, otherwise
on-demand; the dearest ticks that the asked share of time allows are left out. No schedule with that share of time costs
less, as every ready replica is paid for in that tick, and is on-demand or in a zone that was open for a cold start.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from broker.lab.traces import Trace, make_default_traces, parse_trace
from broker.serve.placement import SpotPlace, place_replicas
from broker.serve.reconciling import ReplicaView, Slot, decide

COLD_START_HOURS, ACQUIRE_HOURS = 10 / 60, 3 / 60
PRIOR_HOURS = 10.0
SPOT_SHARE = 0.35  # of the on-demand price where none is recorded
REPLACE_HOURS = 6.0  # between two placements


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Shares of time with at least 3 and all 4 replicas ready, and the cost over that of 4 on-demand ones."""

    three_ready: float
    four_ready: float
    cost: float


@dataclass
class _Replica:
    number: int
    slot: Slot
    zone: str | None = None  # None: on-demand, or lost
    since: float = 0.0  # hours; when its machines were asked for
    is_lost: bool = False


@dataclass
class Market:
    """Aligned zones. Prices are over the on-demand price."""

    zones: Sequence[Trace]
    losses: dict[str, int] = field(default_factory=dict)
    open_hours: dict[str, float] = field(default_factory=dict)

    @property
    def gap_hours(self) -> float:
        return self.zones[0].gap_hours

    @property
    def ticks(self) -> int:
        return min(len(each.counts) for each in self.zones)

    def is_open(self, zone: Trace, tick: int) -> bool:
        return zone.counts[tick] >= zone.gang

    def read_price(self, zone: Trace, tick: int) -> float:
        return zone.prices[tick] / zone.ondemand_usd_hour if zone.prices and zone.ondemand_usd_hour else SPOT_SHARE

    def observe(self, tick: int) -> None:
        """Learn from this tick."""
        for zone in self.zones:
            if tick and self.is_open(zone, tick - 1):
                self.open_hours[zone.name] = self.open_hours.get(zone.name, 0.0) + self.gap_hours
                self.losses[zone.name] = self.losses.get(zone.name, 0) + (not self.is_open(zone, tick))

    def list_places(self, tick: int) -> list[SpotPlace]:
        return [
            SpotPlace(
                slot=Slot(is_spot=True, region=zone.name, zone=zone.name),
                usd_hour=self.read_price(zone, tick),
                losses_per_hour=(self.losses.get(zone.name, 0) + 1)
                / (self.open_hours.get(zone.name, 0.0) + PRIOR_HOURS),
            )
            for zone in self.zones
            if self.is_open(zone, tick)
        ]


def read_market(folder: Path | None) -> Market:
    """Read the aligned recordings of a folder; generated ones without it."""
    if folder is None:
        return Market(zones=make_default_traces(6, 1))
    return Market(zones=[parse_trace(each.read_bytes(), each.stem) for each in sorted(folder.glob("*.json"))])


def replay(market: Market, *, needed: int, availability: float, has_fallback: bool = True) -> Outcome:
    """Replay a service that asks for `needed` replicas with this availability."""
    market = Market(zones=market.zones)
    replicas: list[_Replica] = []
    slots: Sequence[Slot] = ()
    placed, drawn, paid, three, four = -1e9, 0, 0.0, 0, 0
    by_name = {each.name: each for each in market.zones}
    for tick in range(market.ticks):
        hour = tick * market.gap_hours
        market.observe(tick)
        for each in replicas:
            if each.zone and not market.is_open(by_name[each.zone], tick):
                each.zone, each.is_lost = None, True
        if hour - placed >= REPLACE_HOURS:
            found = place_replicas(
                needed, market.list_places(tick), ondemand_usd_hour=1.0, cold_start_hours=COLD_START_HOURS,
                availability=availability,
            )  # fmt: skip
            slots, placed = found.slots, hour
        for each in replicas:
            if each.is_lost and (place := _choose_place(market, tick, replicas)):
                each.zone, each.since = place, hour
                each.is_lost = False
        views = [_view(each, hour) for each in replicas]
        step = decide(slots, views, version=1, has_fallback=has_fallback)
        replicas = [each for each in replicas if each.number not in step.drain]
        for slot in step.start:
            drawn += 1
            replicas.append(_Replica(number=drawn, slot=slot, zone=slot.zone, since=hour))
        ready = sum(_view(each, hour).is_ready for each in replicas)
        three, four = three + (ready >= 3), four + (ready >= 4)
        for each in replicas:
            if not each.is_lost:
                paid += market.read_price(by_name[each.zone], tick) if each.zone else 1.0
    return Outcome(three_ready=three / market.ticks, four_ready=four / market.ticks, cost=paid / (4 * market.ticks))


def _choose_place(market: Market, tick: int, replicas: Sequence[_Replica]) -> str | None:
    """Return the open zone with the fewest replicas, of those the cheapest; None where all are closed."""
    counts = {each.name: sum(replica.zone == each.name for replica in replicas) for each in market.zones}
    is_open = [each for each in market.zones if market.is_open(each, tick)]
    best = min(is_open, key=lambda each: (counts[each.name], market.read_price(each, tick)), default=None)
    return best.name if best else None


def _view(each: _Replica, hour: float) -> ReplicaView:
    is_up = not each.is_lost and hour - each.since >= COLD_START_HOURS
    is_waiting = each.is_lost or (bool(each.slot.is_spot) and hour - each.since < ACQUIRE_HOURS and each.since > 0)
    return ReplicaView(number=each.number, version=1, slot=each.slot, is_ready=is_up, is_lost=is_waiting)


def find_bound(market: Market, *, needed: int, share: float) -> float:
    """Return the least cost over that of 4 on-demand replicas with `needed` ready for this share of time."""
    span = max(1, round(COLD_START_HOURS / market.gap_hours))
    costs = []
    for tick in range(market.ticks):
        usable = [
            market.read_price(zone, tick) for zone in market.zones
            if all(market.is_open(zone, back) for back in range(max(0, tick - span), tick + 1))
        ]  # fmt: skip
        costs.append(needed * min([1.0, *usable]))
    kept = sorted(costs)[: int(len(costs) * share)]
    return sum(kept) / (4 * market.ticks)
