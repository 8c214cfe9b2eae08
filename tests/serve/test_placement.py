"""Placement for an availability, against enumeration of every outcome."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.serve.error_budget import SPENT_SHARE, ErrorBudget
from broker.serve.placement import SpotPlace, observe_places, place_replicas
from broker.serve.reconciling import ON_DEMAND, ReplicaView, Slot
from broker.spot.market_model import TOGETHER_SHARE

COLD_START_HOURS = 0.2


def make_place(zone: str, usd_hour: float, losses: float, *, region: str = "", open_hours: float = 0.0) -> SpotPlace:
    slot = Slot(is_spot=True, region=region or zone, zone=zone)
    return SpotPlace(slot=slot, usd_hour=usd_hour, losses_per_hour=losses, open_hours=open_hours)


A, B, C = (make_place(zone, 0.3, 0.2) for zone in "abc")


def measure(slots: list[Slot], places: list[SpotPlace], count: int) -> float:
    """Enumerate which regions and which places are lost; return the chance of enough replicas."""
    regions = list(dict.fromkeys(each.slot.region for each in places))
    shocks = []
    for region in regions:
        hazards = [each.hazard for each in places if each.slot.region == region]
        shocks.append(TOGETHER_SHARE * min(hazards) if len(hazards) > 1 else 0.0)
    own = [each.hazard - shocks[regions.index(each.slot.region)] for each in places]
    chance = 0.0
    for lost in itertools.product((False, True), repeat=len(regions) + len(places)):
        weight = 1.0
        for is_lost, hazard in zip(lost, [*shocks, *own], strict=True):
            survival = math.exp(-hazard * COLD_START_HOURS)
            weight *= 1 - survival if is_lost else survival
        gone = {place.slot for place, is_lost in zip(places, lost[len(regions) :], strict=True) if is_lost}
        gone |= {each.slot for each in places if lost[regions.index(each.slot.region)]}
        chance += weight * (sum(slot not in gone for slot in slots) >= count)
    return chance


def test_the_example_of_the_module() -> None:
    found = place_replicas(2, [A, B], ondemand_usd_hour=1.0, cold_start_hours=0.1, availability=0.99)
    assert found.usd_hour == pytest.approx(1.2) and len(found.slots) == 4
    assert found.availability == pytest.approx(0.9997, abs=1e-4)


def test_low_availability_takes_the_cheapest_spot_and_a_high_one_ends_at_on_demand() -> None:
    cheap = place_replicas(2, [A, B, C], ondemand_usd_hour=1.0, cold_start_hours=0.1, availability=0.5)
    assert cheap.usd_hour == pytest.approx(0.6)
    dear = place_replicas(
        2, [make_place("a", 0.9, 50.0)], ondemand_usd_hour=1.0, cold_start_hours=1, availability=0.999
    )
    assert dear.slots == (ON_DEMAND,) * 2


def test_the_users_bounds_are_respected() -> None:
    found = place_replicas(
        2, [A, B, C], ondemand_usd_hour=1.0, cold_start_hours=0.1, availability=0.5, ondemand_min=1, spare_min=2
    )
    assert found.slots.count(ON_DEMAND) >= 1 and len(found.slots) >= 4


def test_no_replicas_and_no_locations_are_valid() -> None:
    assert place_replicas(0, [A], ondemand_usd_hour=1, cold_start_hours=1, availability=0.9).slots == ()
    assert len(place_replicas(3, [], ondemand_usd_hour=1, cold_start_hours=1, availability=0.9).slots) == 3


def test_no_on_demand_offer_leaves_spot_alone() -> None:
    found = place_replicas(2, [A, B], ondemand_usd_hour=math.inf, cold_start_hours=0.2, availability=0.99)
    assert len(found.slots) >= 2 and ON_DEMAND not in found.slots


def test_place_that_stayed_open_needs_less_insurance_than_a_new_one() -> None:
    def place(open_hours: float) -> float:
        held = make_place("a", 0.3, 0.5, open_hours=open_hours)
        return place_replicas(
            3, [held, B], ondemand_usd_hour=1.0, cold_start_hours=COLD_START_HOURS, availability=0.99
        ).usd_hour

    assert place(50.0) == pytest.approx(0.9) and place(0.0) > 1.2


def test_replicas_are_spread_over_regions_rather_than_over_zones_of_one() -> None:
    near = [make_place("a", 0.3, 0.5, region="r"), make_place("b", 0.3, 0.5, region="r")]
    far = make_place("c", 0.3, 0.5, region="s")
    found = place_replicas(2, [*near, far], ondemand_usd_hour=1.0, cold_start_hours=0.2, availability=0.97)
    assert found.slots.count(far.slot) == 2


def test_place_of_lost_replicas_is_left_out_until_one_runs_there() -> None:
    lost = ReplicaView(number=1, version=1, slot=A.slot, is_lost=True)
    running = ReplicaView(number=2, version=1, slot=A.slot, open_hours=3.0)
    assert [each.slot for each in observe_places([A, B], [lost])] == [B.slot]
    assert observe_places([A, B], [lost, running])[0].open_hours == 3.0


def test_many_replicas_are_placed_in_blocks_and_none_is_short() -> None:
    places = [make_place(zone, 0.3 + 0.01 * index, 0.5) for index, zone in enumerate("abcdefgh")]
    for count in (8, 9, 20, 100):
        found = place_replicas(count, places, ondemand_usd_hour=1.0, cold_start_hours=0.2, availability=0.99)
        assert len(found.slots) >= count and found.availability >= 0.99


prices = st.sampled_from([0.2, 0.3, 0.5])
hazards = st.sampled_from([0.01, 0.3, 2.0])
ages = st.sampled_from([0.0, 1.0, 20.0])
drawn_places = st.lists(st.tuples(prices, hazards, ages, st.sampled_from("rs")), max_size=3)


def make_places(drawn: list[tuple[float, float, float, str]]) -> list[SpotPlace]:
    return [
        make_place(str(index), usd_hour, losses, region=region, open_hours=open_hours)
        for index, (usd_hour, losses, open_hours, region) in enumerate(drawn)
    ]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3), drawn_places, st.sampled_from([0.8, 0.95, 0.999]))
def test_chance_is_true_and_no_other_set_costs_less_with_its_penalty(
    count: int, drawn: list[tuple[float, float, float, str]], availability: float
) -> None:
    places = make_places(drawn)
    found = place_replicas(
        count, places, ondemand_usd_hour=1.0, cold_start_hours=COLD_START_HOURS, availability=availability
    )
    assert measure(list(found.slots), places, count) == pytest.approx(found.availability)
    penalty = count * min((each.usd_hour for each in places), default=0.0) / (SPENT_SHARE * (1 - availability))
    best = found.usd_hour + penalty * (1 - found.availability)
    for counts in itertools.product(range(count + 1), repeat=len(places)):
        for ondemand in range(max(0, count - sum(counts)), count + 1):
            slots = [each.slot for each, number in zip(places, counts, strict=True) for _ in range(number)]
            usd_hour = ondemand + sum(each.usd_hour * n for each, n in zip(places, counts, strict=True))
            miss = 1 - measure([*slots, *[ON_DEMAND] * ondemand], places, count)
            assert usd_hour + penalty * miss >= best - 1e-9


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 5), drawn_places, st.lists(st.floats(0.1, 0.9999), min_size=2, max_size=2), st.integers(0, 2),
    st.floats(0, 100), st.floats(0, 1),
)  # fmt: skip
def test_higher_availability_never_buys_less_and_never_too_few(
    count: int, drawn: list[tuple[float, float, float, str]], asked: list[float], spare: int, hours: float, share: float
) -> None:
    low, high = (
        place_replicas(
            count, make_places(drawn), ondemand_usd_hour=1.0, cold_start_hours=COLD_START_HOURS, availability=each,
            spare_min=spare, budget=ErrorBudget(),
        )
        for each in sorted(asked)
    )  # fmt: skip
    assert high.availability >= low.availability - 1e-9 and high.usd_hour >= low.usd_hour - 1e-9
    budget = ErrorBudget(hours=hours, short_hours=share * hours)
    spent = place_replicas(
        count, make_places(drawn), ondemand_usd_hour=1.0, cold_start_hours=COLD_START_HOURS, availability=asked[0],
        spare_min=spare, budget=budget,
    )  # fmt: skip
    for found in (low, high, spent):
        assert count + spare <= len(found.slots) <= count * (1 + len(drawn)) + max(count, spare)
        assert found.slots.count(ON_DEMAND) <= count + spare
