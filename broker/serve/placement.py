"""Choose spot and on-demand replicas for an availability. Pure.

Replicas of one zone and machine are lost together: of 2,635 recorded interruptions of one type in one zone, 92 % came
within three minutes of each other (Spot-and-Scoot, 2026). So a place is lost as a whole, or not at all, and places are
independent. A place that has stayed open is safer than one that has just opened; see `SpotPlace.hazard`.

The set minimizes USD per hour plus a penalty times the chance that fewer than `count` replicas survive a cold start,
which is the share of time with fewer than `count` ready. The penalty is the price of `count` spot replicas, divided by
the share of time that the service spends: a second set of them pays off if it lowers the chance by more than that.

    2 ready 99 % of the time, cold start 0.1 h, on-demand at 1 USD; new a and b, in two regions, 0.2 losses/h at 0.3 USD
    spent share 0.5 %, penalty 120 USD/h; lost in a cold start: 1.7 % of a, 1.7 % of b
    a a        0.60 USD   a lost                      1.7 %    0.60 + 2.00 = 2.60
    a b b      0.90 USD   b lost leaves one           1.7 %    0.90 + 2.00 = 2.90
    a a b b    1.20 USD   both places must be lost    0.03 %   1.20 + 0.03 = 1.23   <- least

A move has a cost as well: a healthy replica that another one replaces is paid for until the latter is ready and the
requests of the former have ended. So a move pays off if that is less than its gain over `GAIN_HOURS`.

    1 replica runs in b at 0.30 USD, cold start 0.1 h, drain 0.03 h: a move costs 13 % of the price of its target
    a at 0.28 USD   saves 0.02 USD/h, costs 0.04   b
    a at 0.25 USD   saves 0.05 USD/h, costs 0.03   a
    b is lost       a replacement is not a move    a, at either price
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from broker.frozen import frozen
from broker.serve.error_budget import ErrorBudget, find_allowed_share
from broker.serve.reconciling import DRAIN_S_MAX, ON_DEMAND, ReplicaView, Slot
from broker.spot.market_model import TOGETHER_SHARE

PLACES_MAX = 6  # those in use, then the cheapest; the time of the search is exponential in their number
HOLD_HOURS = 2.0  # over which the hazard of a place is averaged
# The gain of a move counts over this time, after which other losses and prices lead to another choice. The shorter, the
# fewer moves: on the AWS development recordings, 3 of 4 replicas cost 0.531 with 2 h, 0.504 with 1 h, 0.493 with 0.7 h.
GAIN_HOURS = 1.0
UNITS_MAX = 8  # more replicas are placed in blocks, so that the search stays small


@frozen
class SpotPlace:
    """A zone and machine that sells spot, with losses per hour of a replica that has just started there.

    `open_hours`: for how long a replica of the service has run there. `present`: how many run or start there.
    `start_hours`: from a request there to readiness; None: as long as the service's other replicas take. `is_full`: it
    refused another machine, so that it gets no more replicas than `present`.
    """

    slot: Slot
    usd_hour: float
    losses_per_hour: float
    open_hours: float = 0.0
    present: int = 0
    start_hours: float | None = None
    is_full: bool = False

    @property
    def hazard(self) -> float:
        """Return the mean losses per hour over the next `HOLD_HOURS`, until the first one.

        After t hours it is one loss in the time in which one was expected plus the time without any: 1 / (1 / h + t).
        The hazard falls like this in recorded markets because each alternates between calm and volatile periods: in
        seven families of recordings, a weight of 0.8 to 1.2 losses fits best, whichever family is left out. The mean
        includes the calm hours after the risky first ones. Without them, a service on expensive spot would stay
        on-demand and never learn that a place is calm.
        """
        if self.losses_per_hour <= 0:
            return 0.0
        present = 1 / (1 / self.losses_per_hour + self.open_hours)
        return math.log1p(present * HOLD_HOURS) / HOLD_HOURS


@frozen
class ReplicaPlacement:
    """A set of slots, its price, and the chance that enough of them are ready throughout a cold start."""

    slots: tuple[Slot, ...]
    usd_hour: float
    availability: float


def place_replicas(
    count: int,
    places: Sequence[SpotPlace],
    *,
    ondemand_usd_hour: float,
    cold_start_hours: float,
    availability: float,
    ondemand_min: int = 0,
    spare_min: int = 0,
    ondemand_present: int = 0,
    budget: ErrorBudget = ErrorBudget(),
) -> ReplicaPlacement:
    """Return the set with the least price, penalty and cost of moves.

    Without present replicas, a higher availability never buys a lower chance or price. `ondemand_min` and `spare_min`
    bound the search; `budget` raises or lowers the penalty. Exact for the places considered, and for up to 8 replicas;
    beyond that, places hold multiples of a block.
    """
    kept = _choose_places(places)
    block = max(1, math.ceil(count / UNITS_MAX))
    search = _ReplicaSearch(
        needed=count,
        block=block,
        places=kept,
        cold_start_hours=cold_start_hours,
        ondemand_usd_hour=ondemand_usd_hour,
        penalty=_find_penalty(count, kept, availability) * budget.find_pressure(availability),
        ondemand_min=ondemand_min,
        least=count + spare_min,
        ondemand_present=ondemand_present,
    )
    counts, ondemand = search.run()
    spot = [each.slot for each, units in zip(kept, counts, strict=True) for _ in range(units * block)]
    usd_hour = sum(each.usd_hour * units * block for each, units in zip(kept, counts, strict=True))
    return ReplicaPlacement(
        slots=(*[ON_DEMAND] * ondemand, *spot),
        usd_hour=usd_hour + (ondemand * ondemand_usd_hour if ondemand else 0.0),  # the price may be infinite
        availability=1 - search.find_miss(counts, ondemand),
    )


def observe_places(
    places: Sequence[SpotPlace],
    replicas: Sequence[ReplicaView],
    lost_before: Collection[Slot] = (),
    starts_s: Mapping[Slot, float] = MappingProxyType({}),
) -> list[SpotPlace]:
    """Return the places with the replicas that are there, without those whose replicas are all lost.

    `lost_before`: places of recently lost replicas, which may no longer be among `replicas`. `starts_s`: seconds to
    readiness, where they are known.
    """
    running = dict[Slot, float]()
    for each in replicas:
        if each.slot.is_spot and not each.is_lost:
            running[each.slot] = max(running.get(each.slot, 0.0), each.open_hours)
    lost = {*lost_before, *(each.slot for each in replicas if each.is_lost)} - running.keys()
    present = Counter(each.slot for each in replicas if not (each.is_lost or each.is_draining))
    return [
        replace(
            each,
            open_hours=running.get(each.slot, 0.0),
            present=present[each.slot],
            start_hours=starts_s[each.slot] / 3600 if each.slot in starts_s else None,
        )
        for each in places
        if each.slot not in lost
    ]


def count_ondemand(replicas: Sequence[ReplicaView]) -> int:
    """Return the on-demand replicas that run or start."""
    return sum(each.slot == ON_DEMAND and not (each.is_lost or each.is_draining) for each in replicas)


def _find_penalty(count: int, places: Sequence[SpotPlace], availability: float) -> float:
    """Return USD per hour with too few replicas."""
    return count * min((each.usd_hour for each in places), default=0.0) / find_allowed_share(availability)


class _ReplicaSearch:
    """Branch and bound over the number of replicas by place, in blocks, and over the number of on-demand ones."""

    def __init__(
        self,
        *,
        needed: int,
        block: int,
        places: Sequence[SpotPlace],
        cold_start_hours: float,
        ondemand_usd_hour: float,
        penalty: float,
        ondemand_min: int,
        least: int,
        ondemand_present: int,
    ) -> None:
        self._needed, self._block, self._least, self._ondemand_min = needed, block, least, ondemand_min
        self._ondemand_usd_hour, self._penalty = ondemand_usd_hour, penalty
        self._units_max = math.ceil(needed / block)
        self._present, self._ondemand_present = [each.present for each in places], ondemand_present
        self._room = [math.ceil(each.present / block) if each.is_full else self._units_max for each in places]
        drain_hours = DRAIN_S_MAX / 3600
        self._move_share = (cold_start_hours + drain_hours) / GAIN_HOURS
        self._move_shares = [(_read_start(each, cold_start_hours) + drain_hours) / GAIN_HOURS for each in places]
        self._prices = [each.usd_hour * block for each in places]
        self._region_ends, self._shocks, self._survival = _split_hazards(places, cold_start_hours)
        self._better = [_list_better(places, own, self._survival, self._move_shares) for own in range(len(places))]
        ondemand = max(least, ondemand_min)
        usd_hour = ondemand * ondemand_usd_hour if ondemand else 0.0
        none = (0,) * len(places)
        self._best = usd_hour + self._price_moves(none, ondemand), 0.0, none, ondemand

    def run(self) -> tuple[tuple[int, ...], int]:
        """Return the units by place, and the number of on-demand replicas."""
        self._extend((), 0.0, [1.0], [1.0])
        return self._best[2], self._best[3]

    def find_miss(self, counts: Sequence[int], ondemand: int) -> float:
        """Return the chance that fewer than the needed replicas survive."""
        before = chances = [1.0]
        for own, units in enumerate(counts):
            before, chances = self._add_place(before, chances, own, units)
        return self._sum_misses(chances, ondemand)

    def _extend(self, head: tuple[int, ...], usd_hour: float, before: list[float], chances: list[float]) -> None:
        """Try every number at the next place. A set whose price alone exceeds the best one is not extended."""
        own = len(head)
        if own == len(self._prices):
            self._finish(head, usd_hour, chances)
            return
        most = min([self._units_max, self._room[own], *[head[index] for index in self._better[own]]])
        floor = self._ondemand_min * self._ondemand_usd_hour if self._ondemand_min else 0.0
        for units in range(most + 1):
            price = usd_hour + units * self._prices[own]
            if price + floor > self._best[0]:
                break
            self._extend((*head, units), price, *self._add_place(before, chances, own, units))

    def _finish(self, counts: tuple[int, ...], usd_hour: float, chances: Sequence[float]) -> None:
        spot = sum(counts) * self._block
        for ondemand in range(max(self._ondemand_min, self._least - spot), max(self._needed, self._ondemand_min) + 1):
            price = usd_hour + (ondemand * self._ondemand_usd_hour if ondemand else 0.0)
            if price > self._best[0]:
                return
            miss = self._sum_misses(chances, ondemand)
            cost = price + self._penalty * miss
            if cost <= self._best[0]:  # otherwise, moves need no price
                cost += self._price_moves(counts, ondemand)
                self._best = min(self._best, (cost, miss, counts, ondemand))

    def _price_moves(self, counts: Sequence[int], ondemand: int) -> float:
        """Return USD per hour for the moves to this set. A start without a healthy replica to give up is not a move."""
        starts, surplus, usd_hour = 0, self._ondemand_present - ondemand, 0.0
        if surplus < 0:
            starts, surplus, usd_hour = -surplus, 0, -surplus * self._ondemand_usd_hour * self._move_share
        shares = self._move_shares
        for units, present, price, share in zip(counts, self._present, self._prices, shares, strict=True):
            more = units * self._block - present
            starts += max(0, more)
            surplus += max(0, -more)
            usd_hour += max(0, more) * price / self._block * share
        return usd_hour * min(1.0, surplus / starts) if starts and surplus else 0.0

    def _sum_misses(self, chances: Sequence[float], ondemand: int) -> float:
        """Return the chance of fewer than the needed replicas, given the chance of each number of spot units."""
        units = max(0, math.ceil((self._needed - ondemand) / self._block))
        return sum(chances[:units])

    def _add_place(
        self, before: list[float], chances: list[float], own: int, units: int
    ) -> tuple[list[float], list[float]]:
        """Return the chance of each number of survivors before this place's region, and with this place.

        The place is lost as a whole or not at all; after the last place of a region, so is the region.
        """
        if units:
            survival = self._survival[own]
            longer = [each * (1 - survival) for each in chances] + [0.0] * units
            for ready, each in enumerate(chances):
                longer[ready + units] += each * survival
            chances = longer
        if not self._region_ends[own]:
            return before, chances
        shock = self._shocks[own]
        mixed = [each * (1 - shock) for each in chances]
        for ready, each in enumerate(before):
            mixed[ready] += each * shock
        return mixed, mixed


def _choose_places(places: Sequence[SpotPlace]) -> list[SpotPlace]:
    """Return the places in use and the cheapest others, by region; in a region, the cheapest and safest first."""

    def rank(each: SpotPlace) -> tuple[float, float]:
        return each.usd_hour, each.hazard

    kept = sorted(places, key=lambda each: (each.open_hours <= 0 and not each.present, *rank(each)))[:PLACES_MAX]
    regions = list(dict.fromkeys(each.slot.region for each in kept))
    return sorted(kept, key=lambda each: (regions.index(each.slot.region), *rank(each)))


def _split_hazards(places: Sequence[SpotPlace], hours: float) -> tuple[list[bool], list[float], list[float]]:
    """Return three values by place, to combine the loss of a region with the loss of a single place.

    They are: whether the place is the last of its region, the chance that the region is lost, and the chance that the
    place survives otherwise. The chance that a place survives both is that of its own hazard.
    """
    ends, shocks, survival = list[bool](), list[float](), list[float]()
    for index, each in enumerate(places):
        region = [other for other in places if other.slot.region == each.slot.region]
        together = TOGETHER_SHARE * min(other.hazard for other in region) if len(region) > 1 else 0.0
        ends.append(index + 1 == len(places) or places[index + 1].slot.region != each.slot.region)
        shocks.append(-math.expm1(-together * _find_restart(places, region, hours)))
        survival.append(math.exp(-(each.hazard - together) * _find_restart(places, [each], hours)))
    return ends, shocks, survival


def _find_restart(places: Sequence[SpotPlace], lost: Sequence[SpotPlace], hours: float) -> float:
    """Return the hours until lost replicas are replaced: those of a start in the cheapest other place.

    On the AWS development recordings with starts of 5 and 25 minutes in every other zone, 3 replicas cost 0.66 of
    on-demand like this, and 0.86 with the median of all starts (99.6 and 99.8 % ready, 99.5 % asked).
    """
    others = [(each.usd_hour, _read_start(each, hours)) for each in places if each not in lost and not each.is_full]
    return min(others)[1] if others else hours


def _read_start(place: SpotPlace, hours: float) -> float:
    return hours if place.start_hours is None else place.start_hours


def _list_better(
    places: Sequence[SpotPlace], own: int, survival: Sequence[float], move_shares: Sequence[float]
) -> list[int]:
    """Return the earlier places that hold as many replicas or more in some best set.

    Exchanging the numbers of two places of one region never raises price, risk or moves, if the larger number goes to
    the place that is no more expensive, no less safe, starts no slower, has no fewer replicas, and is not full.
    """
    place = places[own]
    return [
        index for index, each in enumerate(places[:own])
        if each.slot.region == place.slot.region and each.usd_hour <= place.usd_hour
        and survival[index] >= survival[own] and move_shares[index] <= move_shares[own]
        and each.present >= place.present and not each.is_full
    ]  # fmt: skip
