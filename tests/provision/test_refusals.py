"""The scope and duration of each kind of refusal, and the retry budget of a cloud."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from broker.errors import CapacityError, CloudError, QuotaError, ThrottledError, TransientError
from broker.provision.refusals import FAILURE_REFILL_S, FAILURES_MAX, PROBE_S, UnavailableOffers
from broker.state.refusals import Refusal
from broker.state.store import Store
from broker.types import Placement
from tests.simulation.world import make_offer
from tests.state.samples import Hands

OFFER = make_offer("east1a")
PLACEMENT = Placement(offer=OFFER, is_spot=True, node_count=2)
OTHER_ZONE = replace(PLACEMENT, offer=replace(OFFER, zone="east1b"))
OTHER_REGION = replace(PLACEMENT, offer=replace(OFFER, region="west1", zone="west1a"))
ON_DEMAND = replace(PLACEMENT, is_spot=False)
OTHER_KIND = replace(PLACEMENT, offer=replace(OFFER, instance_type="another"))


@pytest.fixture
def clock() -> Hands:
    return Hands()


@pytest.fixture
def store(tmp_path: Path, clock: Hands) -> Store:
    return Store(tmp_path / "state.db", clock=clock)


@pytest.fixture
def memory(store: Store) -> UnavailableOffers:
    return UnavailableOffers(store)


def refuse(memory: UnavailableOffers, error: CloudError, *, is_region_wide: bool = False) -> Refusal:
    memory.refuse(PLACEMENT, error, is_region_wide=is_region_wide)
    (found,) = memory.list_active()
    return found


def test_place_that_is_full_for_days_is_refused_like_any_other(
    memory: UnavailableOffers, store: Store, clock: Hands
) -> None:
    """After 1,025 refusals, about two days, each search that met another one ended with an OverflowError."""
    refuse(memory, CapacityError("full", scope="zone"))
    store.execute("UPDATE refusals SET count = 1100")
    clock.time_s += 130.0
    found = refuse(memory, CapacityError("still full", scope="zone"))
    assert found.reason == "still full" and found.expires_s == clock.time_s + 4 * 3600.0


def covers(memory: UnavailableOffers, *placements: Placement) -> list[bool]:
    active = memory.list_active()
    return [bool(memory.list_covering(each, active)) for each in placements]


EVERYWHERE = (PLACEMENT, OTHER_ZONE, OTHER_REGION, ON_DEMAND, OTHER_KIND)


@pytest.mark.parametrize(
    ("error", "is_region_wide", "closed", "lasts_s", "reask_s"),
    [
        (CapacityError("full", scope="zone"), False, (True, False, False), 600.0, 30.0),
        (CapacityError("full", scope="region"), False, (True, True, False), 600.0, 30.0),
        (CapacityError("full", scope="cloud"), False, (True, True, True), 600.0, 30.0),
        (QuotaError("no quota"), False, (True, True, False), 3600.0, 3600.0),
        (ThrottledError("slow down"), False, (True, True, False), 60.0, 30.0),
        (TransientError("no answer"), False, (True, False, False), 60.0, 30.0),
        (TransientError("no answer"), True, (True, True, False), 60.0, 30.0),
        (CapacityError("full", scope="zone"), True, (True, False, False), 600.0, 30.0),
    ],
)
def test_each_kind_of_refusal_covers_its_own_scope(
    memory: UnavailableOffers,
    clock: Hands,
    error: CloudError,
    is_region_wide: bool,
    closed: tuple[bool, bool, bool],
    lasts_s: float,
    reask_s: float,
) -> None:
    found = refuse(memory, error, is_region_wide=is_region_wide)
    assert covers(memory, *EVERYWHERE) == [*closed, False, False]
    assert (found.expires_s - clock.now_s(), found.reask_s - clock.now_s()) == (lasts_s, reask_s)
    assert found.reason == error.message


def test_a_refusal_keeps_its_hints(memory: UnavailableOffers) -> None:
    assert refuse(memory, QuotaError("no quota", hints=("ask for more",))).hints == ("ask for more",)


def test_repeated_refusals_double_up_to_four_hours_and_full_placements_are_retried_within_two_minutes(
    memory: UnavailableOffers, clock: Hands
) -> None:
    held, pauses = [], []
    for _ in range(7):
        found = refuse(memory, CapacityError("full", scope="zone"))
        held.append(found.expires_s - clock.now_s())
        pauses.append(memory.measure_reask_s(PLACEMENT))
        clock.time_s = found.expires_s
    assert held == [600.0, 1200.0, 2400.0, 4800.0, 9600.0, 14400.0, 14400.0]
    assert pauses == [30.0, 45.0, 67.5, 101.25, 120.0, 120.0, 120.0]


def test_a_refusal_of_joined_zones_covers_each_of_them(memory: UnavailableOffers) -> None:
    memory.refuse(replace(PLACEMENT, other_zones=("east1b",)), CapacityError("full", scope="zone"))
    assert covers(memory, PLACEMENT, OTHER_ZONE) == [True, True]
    assert len(memory.list_active()) == 2


def test_a_last_resort_of_joined_zones_waits_for_the_last_zone(memory: UnavailableOffers, clock: Hands) -> None:
    both = replace(PLACEMENT, other_zones=("east1b",))
    assert memory.measure_reask_s(both) == 0.0
    memory.refuse(PLACEMENT, CapacityError("full", scope="zone"))
    clock.time_s += 10.0
    memory.refuse(OTHER_ZONE, CapacityError("full", scope="zone"))
    assert [memory.measure_reask_s(each) for each in (PLACEMENT, OTHER_ZONE, both)] == [20.0, 30.0, 30.0]
    clock.time_s += 25.0
    assert [memory.measure_reask_s(each) for each in (PLACEMENT, OTHER_ZONE, both)] == [0.0, 5.0, 5.0]


def test_other_searches_wait_for_the_probe_and_a_success_releases_them(memory: UnavailableOffers, clock: Hands) -> None:
    memory.refuse(PLACEMENT, CapacityError("full", scope="zone"))
    clock.time_s += 600.0
    assert covers(memory, PLACEMENT) == [False]
    memory.begin(replace(OTHER_ZONE, other_zones=("east1a",)))
    assert covers(memory, PLACEMENT) == [True]
    assert memory.measure_reask_s(PLACEMENT) == PROBE_S == 120.0
    memory.clear(PLACEMENT)
    assert covers(memory, PLACEMENT) == [False]


def test_sixty_failures_pass_at_once_then_one_every_two_seconds(memory: UnavailableOffers, clock: Hands) -> None:
    for _ in range(int(FAILURES_MAX)):
        assert memory.measure_wait_s("x") == 0.0
        memory.note_failed_call("x")
    assert memory.measure_wait_s("x") == FAILURE_REFILL_S == 2.0
    assert memory.measure_wait_s("y") == 0.0
    clock.time_s += 2.0
    assert memory.measure_wait_s("x") == 0.0
    memory.note_failed_call("x")
    assert memory.measure_wait_s("x") == 2.0
    assert FAILURES_MAX == 60.0 and not math.isinf(memory.measure_wait_s("x"))
