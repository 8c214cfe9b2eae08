"""Placement for an availability, against enumeration of every outcome."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.serve.placement import ReplicaPlacement, SpotPlace, place_replicas
from broker.serve.reconciling import Slot


def make_place(zone: str, usd_hour: float, losses: float) -> SpotPlace:
    return SpotPlace(slot=Slot(is_spot=True, region="r", zone=zone), usd_hour=usd_hour, losses_per_hour=losses)


A, B, C = (make_place(zone, 0.3, 0.2) for zone in "abc")


def measure(found: ReplicaPlacement, places: list[SpotPlace], count: int, cold_start_hours: float) -> float:
    """Enumerate which places are lost."""
    chance = 0.0
    for lost in itertools.product((False, True), repeat=len(places)):
        weight = 1.0
        gone = set()
        for place, is_lost in zip(places, lost, strict=True):
            survival = math.exp(-place.losses_per_hour * cold_start_hours)
            weight *= 1 - survival if is_lost else survival
            gone |= {place.slot} if is_lost else set()
        chance += weight * (sum(slot not in gone for slot in found.slots) >= count)
    return chance


def test_the_example_of_the_module() -> None:
    found = place_replicas(2, [A, B], ondemand_usd_hour=1.0, cold_start_hours=0.1, availability=0.99)
    assert found.usd_hour == pytest.approx(1.2) and len(found.slots) == 4
    assert found.availability == pytest.approx(0.9996, abs=1e-4)


def test_low_availability_takes_the_cheapest_spot_and_a_high_one_ends_at_on_demand() -> None:
    cheap = place_replicas(2, [A, B, C], ondemand_usd_hour=1.0, cold_start_hours=0.1, availability=0.5)
    assert cheap.usd_hour == pytest.approx(0.6)
    dear = place_replicas(
        2, [make_place("a", 0.9, 50.0)], ondemand_usd_hour=1.0, cold_start_hours=1, availability=0.999
    )
    assert dear.slots == (Slot(is_spot=False),) * 2


def test_bounds_of_the_user_are_kept() -> None:
    found = place_replicas(
        2, [A, B, C], ondemand_usd_hour=1.0, cold_start_hours=0.1, availability=0.5, ondemand_min=1, spare_min=2
    )
    assert sum(each.is_spot is False for each in found.slots) >= 1 and len(found.slots) >= 4


def test_no_replica_and_no_place_are_fine() -> None:
    assert place_replicas(0, [A], ondemand_usd_hour=1, cold_start_hours=1, availability=0.9).slots == ()
    assert len(place_replicas(3, [], ondemand_usd_hour=1, cold_start_hours=1, availability=0.9).slots) == 3


prices = st.sampled_from([0.2, 0.3, 0.5])
hazards = st.sampled_from([0.01, 0.3, 2.0])


@settings(max_examples=60)
@given(st.integers(1, 3), st.lists(st.tuples(prices, hazards), max_size=3), st.sampled_from([0.8, 0.95, 0.999]))
def test_chance_is_true_and_no_cheaper_set_reaches_it(
    count: int, drawn: list[tuple[float, float]], availability: float
) -> None:
    places = [make_place(str(index), usd_hour, losses) for index, (usd_hour, losses) in enumerate(drawn)]
    found = place_replicas(count, places, ondemand_usd_hour=1.0, cold_start_hours=0.2, availability=availability)
    assert measure(found, places, count, 0.2) == pytest.approx(found.availability)
    assert found.availability >= availability
    for counts in itertools.product(range(count + 1), repeat=len(places)):
        for ondemand in range(count + 1):
            slots = [each.slot for each, number in zip(places, counts, strict=True) for _ in range(number)]
            usd_hour = ondemand + sum(each.usd_hour * n for each, n in zip(places, counts, strict=True))
            other = ReplicaPlacement(
                slots=(*slots, *[Slot(is_spot=False)] * ondemand), usd_hour=usd_hour, availability=0.0
            )
            if usd_hour < found.usd_hour - 1e-9:
                assert measure(other, places, count, 0.2) < availability
