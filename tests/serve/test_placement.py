"""Placement for an availability, against enumeration of every outcome."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.serve.error_budget import SPENT_SHARE, ErrorBudget
from broker.serve.placement import GAIN_HOURS, SpotPlace, count_ondemand, observe_places, place_replicas
from broker.serve.reconciling import DRAIN_S_MAX, ON_DEMAND, ReplicaView, Slot
from broker.spot.market_model import TOGETHER_SHARE
from tests.tiers import examples

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
    groups = [[each for each in places if each.slot.region == region] for region in regions]
    restarts = [find_restart(places, group) for group in (*groups, *([each] for each in places))]
    chance = 0.0
    for lost in itertools.product((False, True), repeat=len(regions) + len(places)):
        weight = 1.0
        for is_lost, hazard, hours in zip(lost, [*shocks, *own], restarts, strict=True):
            survival = math.exp(-hazard * hours)
            weight *= 1 - survival if is_lost else survival
        gone = {place.slot for place, is_lost in zip(places, lost[len(regions) :], strict=True) if is_lost}
        gone |= {each.slot for each in places if lost[regions.index(each.slot.region)]}
        chance += weight * (sum(slot not in gone for slot in slots) >= count)
    return chance


def find_restart(places: list[SpotPlace], lost: list[SpotPlace]) -> float:
    """Return the hours of a start in the cheapest place that is not lost."""
    others = sorted((each.usd_hour, find_start(each)) for each in places if each not in lost and not each.is_full)
    return others[0][1] if others else COLD_START_HOURS


def find_start(place: SpotPlace) -> float:
    return COLD_START_HOURS if place.start_hours is None else place.start_hours


def test_the_example_of_the_module() -> None:
    found = place_replicas(2, [A, B], ondemand_usd_hour=1.0, cold_start_hours=0.1, availability=0.99)
    assert found.usd_hour == pytest.approx(1.2) and len(found.slots) == 4
    assert found.availability == pytest.approx(0.9997, abs=1e-4)


def test_a_move_has_to_pay_off_within_an_hour_and_a_replacement_does_not() -> None:
    def choose(usd_hour: float, *, present: int) -> Slot:
        places = [make_place("a", usd_hour, 0.2), replace(make_place("b", 0.3, 0.2), present=present)]
        (slot,) = place_replicas(
            1, places, ondemand_usd_hour=1.0, cold_start_hours=0.1, availability=0.5
        ).slots  # fmt: skip
        return slot

    assert choose(0.28, present=1) == B.slot and choose(0.25, present=1) == A.slot
    assert choose(0.28, present=0) == A.slot


def test_present_replicas_are_those_that_run_or_start() -> None:
    replicas = [
        ReplicaView(number=1, version=1, slot=A.slot, open_hours=1.0), ReplicaView(number=2, version=1, slot=A.slot),
        ReplicaView(number=3, version=1, slot=A.slot, is_draining=True),
        ReplicaView(number=4, version=1, slot=A.slot, is_lost=True), ReplicaView(number=5, version=1, slot=ON_DEMAND),
        ReplicaView(number=6, version=1, slot=ON_DEMAND, is_draining=True),
    ]  # fmt: skip
    assert [each.present for each in observe_places([A, B], replicas, {A.slot, C.slot})] == [2, 0]
    assert count_ondemand(replicas) == 1
    assert observe_places([A, B], [], {A.slot}) == [B], "lost a while ago, and its replica is gone"
    starts = [each.start_hours for each in observe_places([A, B], [], starts_s={B.slot: 900.0})]
    assert starts == [None, 0.25], "known for the place where replicas have started"


def test_spare_replicas_depend_on_the_time_of_a_start_where_lost_ones_are_replaced() -> None:
    def place(start_hours: float | None) -> list[str | None]:
        places = [A, replace(B, usd_hour=0.31, start_hours=start_hours)]
        found = place_replicas(2, places, ondemand_usd_hour=1.0, cold_start_hours=0.05, availability=0.99)
        return [each.zone for each in found.slots]

    assert place(None) == ["a", "a", "b", "b"], "as long as elsewhere: each place insures the other"
    assert place(0.01) == ["a", "a"], "a lost one is soon replaced in b"


def test_move_to_a_place_with_slow_starts_costs_more() -> None:
    def choose(start_hours: float | None) -> Slot:
        places = [replace(A, usd_hour=0.25, start_hours=start_hours), replace(B, present=1)]
        return place_replicas(1, places, ondemand_usd_hour=1.0, cold_start_hours=0.1, availability=0.5).slots[0]

    assert choose(None) == A.slot and choose(0.5) == B.slot


def test_full_place_keeps_its_replicas_and_gets_no_other() -> None:
    """It would be refused there and start elsewhere, which is another choice, and would be made again and again."""

    def place(count: int, *, is_full: bool, present: int = 1) -> list[str | None]:
        places = [replace(make_place("a", 0.1, 0.2), present=present, is_full=is_full), B]
        found = place_replicas(count, places, ondemand_usd_hour=1.0, cold_start_hours=0.1, availability=0.5)
        return sorted(each.zone or "" for each in found.slots)

    assert place(3, is_full=False) == ["a", "a", "a"] and place(3, is_full=True) == ["a", "b", "b"]
    assert place(20, is_full=True, present=6).count("a") == 6, "in blocks of three"
    assert place(2, is_full=True, present=0) == ["b", "b"]


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


def test_many_replicas_are_placed_and_none_is_short() -> None:
    places = [make_place(zone, 0.3 + 0.01 * index, 0.5) for index, zone in enumerate("abcdefgh")]
    for count in (8, 9, 100):
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


@settings(max_examples=examples(60), deadline=None)
@given(
    st.integers(1, 3), drawn_places, st.sampled_from([0.8, 0.95, 0.999]),
    st.lists(st.integers(0, 2), min_size=4, max_size=4),
    st.lists(st.sampled_from([None, 0.05, 1.0]), min_size=3, max_size=3),
    st.lists(st.booleans(), min_size=3, max_size=3),
)  # fmt: skip
def test_chance_is_exact_and_no_other_set_costs_less_with_its_penalty_and_moves(
    count: int,
    drawn: list[tuple[float, float, float, str]],
    availability: float,
    present: list[int],
    starts: list[float | None],
    full: list[bool],
) -> None:
    places = [
        replace(each, present=seen, start_hours=start, is_full=is_full)
        for each, seen, start, is_full in zip(make_places(drawn), present[1:], starts, full, strict=False)
    ]
    found = place_replicas(
        count, places, ondemand_usd_hour=1.0, cold_start_hours=COLD_START_HOURS, availability=availability,
        ondemand_present=present[0],
    )  # fmt: skip
    assert measure(list(found.slots), places, count) == pytest.approx(found.availability)
    penalty = count * min((each.usd_hour for each in places), default=0.0) / (SPENT_SHARE * (1 - availability))

    def price_moves(slots: list[Slot]) -> float:
        offered = [make_place("", 1.0, 0.0), *places]
        offered[0] = replace(offered[0], slot=ON_DEMAND, present=present[0])
        starts = [max(0, slots.count(each.slot) - each.present) for each in offered]
        surplus = sum(max(0, each.present - slots.count(each.slot)) for each in offered)
        hours = [(find_start(each) + DRAIN_S_MAX / 3600) / GAIN_HOURS for each in offered]
        usd_hour = sum(n * each.usd_hour * share for n, each, share in zip(starts, offered, hours, strict=True))
        return usd_hour * min(sum(starts), surplus) / max(sum(starts), 1)

    best = found.usd_hour + penalty * (1 - found.availability) + price_moves(list(found.slots))
    rooms = [range((min(count, each.present) if each.is_full else count) + 1) for each in places]
    assert all(found.slots.count(each.slot) in room for each, room in zip(places, rooms, strict=True))
    for counts in itertools.product(*rooms):
        for ondemand in range(max(0, count - sum(counts)), count + 1):
            slots = [each.slot for each, number in zip(places, counts, strict=True) for _ in range(number)]
            usd_hour = ondemand + sum(each.usd_hour * n for each, n in zip(places, counts, strict=True))
            slots += [ON_DEMAND] * ondemand
            miss = 1 - measure(slots, places, count)
            assert usd_hour + penalty * miss + price_moves(slots) >= best - 1e-9


@settings(max_examples=examples(60), deadline=None)
@given(
    st.integers(1, 5), drawn_places, st.lists(st.floats(0.1, 0.9999), min_size=2, max_size=2), st.integers(0, 2),
    st.floats(0, 100), st.floats(0, 1),
)  # fmt: skip
def test_higher_availability_never_buys_fewer_replicas_and_never_too_few(
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
