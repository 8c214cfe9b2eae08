"""Replay the placement of replicas on recordings of spot markets, and compare it with a bound that knows the future.

Real decisions (`place_replicas`, `ErrorBudget`, `decide`, `find_hazard`) over a replayed market. A service knows what
broker knows: the zones' prices, what its own replicas met, and refusals. A spot replica is lost when its zone closes.
One that is requested in a closed zone is refused, and the zone is not requested again for ten minutes, doubled with
each further refusal as in production. One that is granted is ready after the cold start.

The bound: in each tick, `needed` replicas in the cheapest zone that was open for a whole cold start, otherwise
on-demand; the dearest ticks that the asked share of time allows are left out. No schedule with that share of time costs
less, as every ready replica is paid for in that tick, and is on-demand or in a zone that was open for a cold start.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from broker.lab.traces import Trace, make_default_traces, parse_trace
from broker.provision.refusals import CAPACITY_REFUSAL_S, REFUSAL_S_MAX
from broker.serve.error_budget import ErrorBudget
from broker.serve.placement import SpotPlace, count_ondemand, observe_places, place_replicas
from broker.serve.reconciling import ON_DEMAND, ReplicaView, Slot, decide
from broker.serve.slots import LOST_S
from broker.spot.market_model import MarketEvidence, find_hazard
from broker.state.refusals import FORGIVEN_AFTER_S

COLD_START_HOURS = 10 / 60
SPOT_SHARE = 0.35  # of the on-demand price where none is recorded
PLACE_EVERY_HOURS = 10 / 60  # and whenever a replica is lost or becomes ready

Hazard = Callable[[float, float], float]  # losses and hours in a zone -> losses per hour


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Shares of time with at least n replicas ready, by n, and the mean price over that of one on-demand replica."""

    ready: Sequence[float]
    usd_hour: float
    ondemand_mean: float
    spot_mean: float

    def share_ready(self, count: int) -> float:
        return self.ready[count] if count < len(self.ready) else 0.0


@dataclass
class _Zone:
    """A zone, and what the service has met there."""

    trace: Trace
    slot: Slot
    losses: float = 0.0
    hours: float = 0.0
    refused_until: float = -1.0  # hours
    lost_until: float = -1.0
    refusals: int = 0

    def is_open(self, tick: int) -> bool:
        return self.trace.counts[tick] >= self.trace.gang

    def read_price(self, tick: int) -> float:
        trace = self.trace
        return trace.prices[tick] / trace.ondemand_usd_hour if trace.prices and trace.ondemand_usd_hour else SPOT_SHARE

    def refuse(self, hour: float) -> None:
        if hour > self.refused_until + FORGIVEN_AFTER_S / 3600:
            self.refusals = 0
        lasts_s = min(CAPACITY_REFUSAL_S * 2**self.refusals, REFUSAL_S_MAX)
        self.refused_until, self.refusals = hour + lasts_s / 3600, self.refusals + 1


@dataclass(frozen=True, kw_only=True)
class Market:
    """Aligned zones. Prices are over the on-demand price."""

    zones: Sequence[Trace]

    @property
    def gap_hours(self) -> float:
        return self.zones[0].gap_hours

    @property
    def ticks(self) -> int:
        return min(len(each.counts) for each in self.zones)


@dataclass
class _Service:
    """A service over a replayed market."""

    market: Market
    needed: int
    availability: float
    cold_start_hours: float
    hazard: Hazard
    zones: dict[Slot, _Zone] = field(init=False)
    replicas: list[ReplicaView] = field(default_factory=list)
    slots: Sequence[Slot] = ()
    budget: ErrorBudget = field(default_factory=ErrorBudget)
    placed: float = -1e9  # hour of the last placement
    drawn: int = 0
    was_ready: bool = False

    def __post_init__(self) -> None:
        slots = [Slot(is_spot=True, region=find_region(each.name), zone=each.name) for each in self.market.zones]
        self.zones = {slot: _Zone(trace, slot) for slot, trace in zip(slots, self.market.zones, strict=True)}

    def step(self, tick: int) -> None:
        """Move to this tick, lose what is lost there, and reconcile until no request is refused."""
        hour, gap = tick * self.market.gap_hours, self.market.gap_hours
        before = [(each.number, each.is_ready) for each in self.replicas]
        self.replicas = [self._advance(each, tick, gap) for each in self.replicas]
        is_changed = before != [(each.number, each.is_ready) for each in self.replicas]
        is_changed |= any(each.is_lost for each in self.replicas)
        self._observe_budget(gap)
        is_refused = is_changed or hour - self.placed >= PLACE_EVERY_HOURS - 1e-9
        for _ in range(1 + len(self.zones)):  # at most every zone refuses
            if is_refused:
                self._place(tick, hour)
            is_refused = self._reconcile(tick, hour)
            if not is_refused:
                return

    def _advance(self, each: ReplicaView, tick: int, gap: float) -> ReplicaView:
        age = each.open_hours + gap
        if (zone := self.zones.get(each.slot)) is None:
            return replace(each, open_hours=age, is_ready=age >= self.cold_start_hours - 1e-9)
        zone.hours += gap
        if zone.is_open(tick):
            return replace(each, open_hours=age, is_ready=age >= self.cold_start_hours - 1e-9)
        zone.losses += 1
        zone.lost_until = tick * gap + LOST_S / 3600
        return replace(each, is_lost=True, is_ready=False)

    def _observe_budget(self, gap: float) -> None:
        is_ready = sum(each.is_ready for each in self.replicas) >= self.needed
        self.was_ready |= is_ready
        if self.was_ready:  # the first start is not a shortage
            self.budget = self.budget.observe(gap, is_short=not is_ready)

    def _place(self, tick: int, hour: float) -> None:
        self.placed = hour
        places = [
            SpotPlace(
                slot=each.slot,
                usd_hour=each.read_price(tick),
                losses_per_hour=self.hazard(each.losses, round(each.hours)),
            )
            for each in self.zones.values()
            if hour >= each.refused_until
        ]
        lost = [each.slot for each in self.zones.values() if hour < each.lost_until]
        self.slots = place_replicas(
            self.needed, observe_places(places, self.replicas, lost), ondemand_usd_hour=1.0,
            cold_start_hours=self.cold_start_hours, availability=self.availability,
            ondemand_present=count_ondemand(self.replicas), budget=self.budget,
        ).slots  # fmt: skip

    def _reconcile(self, tick: int, hour: float) -> bool:
        """Start and drain; return whether a request was refused."""
        step = decide(self.slots, self.replicas, version=1, needed=self.needed)
        self.replicas = [each for each in self.replicas if each.number not in step.drain]
        is_refused = False
        for slot in step.start:
            zone = self.zones.get(slot)
            if zone is not None and not zone.is_open(tick):
                if hour >= zone.refused_until:
                    zone.refuse(hour)
                is_refused = True
                continue
            self.drawn += 1
            self.replicas.append(ReplicaView(number=self.drawn, version=1, slot=slot))
        return is_refused


def read_market(folder: Path | None) -> Market:
    """Read the aligned recordings of a folder; generated ones without it."""
    if folder is None:
        return Market(zones=make_default_traces(6, 1))
    return Market(zones=[parse_trace(each.read_bytes(), each.stem) for each in sorted(folder.glob("*.json"))])


def find_region(zone: str) -> str:
    """Return the region of an AWS or GCP zone: `us-east-1` of `us-east-1a`, `us-east4` of `us-east4-a`."""
    return zone[:-1].rstrip("-")


def find_recorded_hazard(losses: float, hours: float) -> float:
    """Return the hazard that a plan would assume after these observations."""
    return find_hazard(1, MarketEvidence(preemptions=losses, gang_hours=hours))


def replay(
    market: Market,
    *,
    needed: int,
    availability: float,
    cold_start_hours: float = COLD_START_HOURS,
    hazard: Hazard = find_recorded_hazard,
) -> Outcome:
    """Replay a service that asks for `needed` replicas with this availability."""
    service = _Service(
        market=market, needed=needed, availability=availability, cold_start_hours=cold_start_hours, hazard=hazard
    )
    ready, paid, ondemand, spot = [0] * (needed + 1), 0.0, 0, 0
    for tick in range(market.ticks):
        service.step(tick)
        count = sum(each.is_ready for each in service.replicas)
        for index in range(min(count, needed) + 1):
            ready[index] += 1
        for each in service.replicas:
            zone = service.zones.get(each.slot)
            paid += 1.0 if zone is None else 0.0 if each.is_lost else zone.read_price(tick)
            ondemand, spot = ondemand + (each.slot == ON_DEMAND), spot + (each.slot != ON_DEMAND)
    ticks = market.ticks
    return Outcome(
        ready=[each / ticks for each in ready], usd_hour=paid / ticks, ondemand_mean=ondemand / ticks,
        spot_mean=spot / ticks,
    )  # fmt: skip


def find_bound(market: Market, *, needed: int, share: float, cold_start_hours: float = COLD_START_HOURS) -> float:
    """Return the least mean price, over that of one on-demand replica, with `needed` ready for this share of time."""
    span = max(1, round(cold_start_hours / market.gap_hours))
    zones = [_Zone(each, Slot(is_spot=True)) for each in market.zones]
    costs = []
    for tick in range(market.ticks):
        usable = [
            zone.read_price(tick) for zone in zones
            if all(zone.is_open(back) for back in range(max(0, tick - span), tick + 1))
        ]  # fmt: skip
        costs.append(needed * min([1.0, *usable]))
    kept = sorted(costs)[: int(len(costs) * share)]
    return sum(kept) / market.ticks
