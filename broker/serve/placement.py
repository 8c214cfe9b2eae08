"""Choose spot and on-demand replicas for an availability. Pure.

The chance that a replica is lost during a cold start is 1 - exp(-hazard x cold start). Replicas of one zone and machine
are lost together: of 2,635 recorded interruptions of one type in one zone, 92 % came within three minutes of each other
(Spot-and-Scoot, 2026). So a place is lost as a whole, or not at all, and places are independent.

    2 of 2 ready at 99 %, cold start 0.1 h, places a and b with 0.2 losses/h at 0.3 USD, on-demand at 1 USD
    lost in a cold start: 2 % of a, 2 % of b
    a a        0.60 USD   both lost at 2 %             98.0 %
    a b b      0.90 USD   b lost leaves one            98.0 %
    a a b b    1.20 USD   both places must be lost     99.96 %   <- least cost of those at 99 %
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from broker.frozen import frozen
from broker.serve.reconciling import Slot

PLACES_MAX = 6  # the cheapest spot places; the search grows exponentially with them


@frozen
class SpotPlace:
    """A zone and machine that sells spot, with losses per hour of one replica there."""

    slot: Slot
    usd_hour: float
    losses_per_hour: float


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
) -> ReplicaPlacement:
    """Return the cheapest set in which `count` replicas are ready with this chance; on-demand alone always suffices.

    `ondemand_min` and `spare_min` bound the search. Exact for the places considered.
    """
    kept = sorted(places, key=lambda each: (each.usd_hour, each.losses_per_hour))[:PLACES_MAX]
    survival = [math.exp(-each.losses_per_hour * cold_start_hours) for each in kept]
    ondemand = max(count + spare_min, ondemand_min)
    best = _describe(kept, [0] * len(kept), ondemand, ondemand_usd_hour, 1.0)
    for counts in _list_counts(len(kept), count):
        chances = _count_survivors(counts, survival)
        for ondemand in range(ondemand_min, count + 1):
            if ondemand + sum(counts) < count + spare_min:
                continue
            chance = sum(chance for ready, chance in enumerate(chances) if ready + ondemand >= count)
            if chance >= availability:
                found = _describe(kept, counts, ondemand, ondemand_usd_hour, chance)
                best = min(best, found, key=lambda each: (each.usd_hour, -each.availability))
                break  # more on-demand ones only cost more
    return best


def _describe(
    places: Sequence[SpotPlace], counts: Sequence[int], ondemand: int, ondemand_usd_hour: float, chance: float
) -> ReplicaPlacement:
    spot = [each.slot for each, count in zip(places, counts, strict=True) for _ in range(count)]
    usd_hour = sum(each.usd_hour * count for each, count in zip(places, counts, strict=True))
    return ReplicaPlacement(
        slots=(*[Slot(is_spot=False)] * ondemand, *spot),
        usd_hour=usd_hour + (ondemand * ondemand_usd_hour if ondemand else 0.0),  # the price may be infinite
        availability=chance,
    )


def _list_counts(place_count: int, most: int) -> Iterator[tuple[int, ...]]:
    """Yield all numbers of replicas by place, each at most `most`, and at most three times as many in all."""

    def extend(head: tuple[int, ...], rest: int) -> Iterator[tuple[int, ...]]:
        if len(head) == place_count:
            yield head
            return
        for number in range(min(most, rest) + 1):
            yield from extend((*head, number), rest - number)

    return extend((), 3 * most)


def _count_survivors(counts: Sequence[int], survival: Sequence[float]) -> list[float]:
    """Return the chance of each number of surviving replicas."""
    chances = [1.0]
    for count, chance in zip(counts, survival, strict=True):
        longer = [0.0] * (len(chances) + count)
        for ready, each in enumerate(chances):
            longer[ready + count] += each * chance
            longer[ready] += each * (1 - chance)
        chances = longer
    return chances
