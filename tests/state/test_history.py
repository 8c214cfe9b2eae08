"""The spot history: the lifetimes of our own spot machines become evidence about places, which fades with time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from broker.spot.durations import NOTHING_SEEN
from broker.state.history import HALF_LIFE_DAYS, PERIOD_DAYS, SpotStay, gather_durations, weigh_stays
from broker.state.store import Store
from broker.types import Attempt, Outcome, OutcomeKind, Placement, Task
from tests.simulation.world import make_offer
from tests.state.conftest import OpenStore
from tests.state.samples import START_S, Hands

OFFER = make_offer("east1a")
PLACE = (OFFER.cloud, OFFER.region, OFFER.zone, OFFER.instance_type)
SPOT = Placement(offer=OFFER, is_spot=True, node_count=2)
HOUR_S, DAY_S = 3600.0, 86400.0
NOW_S = START_S
STAY = SpotStay(place=PLACE, node_count=2, begin_s=NOW_S - 3 * HOUR_S, end_s=NOW_S, is_preempted=True)


@pytest.fixture
def store(open_store: OpenStore) -> Store:
    made = open_store()
    made.jobs.add("j", Task())
    return made


def put(
    store: Store, number: int, *, placement: Placement = SPOT, started_s: float = NOW_S - HOUR_S, **ends: object
) -> None:
    attempt = Attempt(job_id=1, number=number, cluster="c", placement=placement, started_s=started_s)
    store.jobs.put_attempt(replace(attempt, **ends))  # type: ignore[arg-type]


def test_stays_are_those_on_spot_newest_first_and_end_when_the_nodes_were_lost(store: Store) -> None:
    put(
        store,
        1,
        outcome=Outcome(kind=OutcomeKind.PREEMPTED),
        lost_s=NOW_S - 30.0,
        ended_s=NOW_S - 10.0,
    )
    put(store, 2, outcome=Outcome(kind=OutcomeKind.MOVED), ended_s=NOW_S - 20.0)
    put(store, 3)
    put(store, 4, placement=replace(SPOT, is_spot=False))
    put(store, 5, started_s=NOW_S - 91 * DAY_S)
    put(store, 6, outcome=Outcome(kind=OutcomeKind.TAKEN_DOWN), ended_s=NOW_S - 5.0)
    found = store.history.list_stays()
    assert [(stay.end_s - NOW_S, stay.is_preempted, stay.is_over) for stay in found] == [
        (-5.0, False, True),
        (0.0, False, False),
        (-20.0, False, True),
        (-30.0, True, True),
    ]
    assert {(stay.place, stay.node_count, stay.begin_s) for stay in found} == {(PLACE, 2, NOW_S - HOUR_S)}


def test_sums_by_place_are_those_of_the_stays(store: Store) -> None:
    elsewhere = replace(SPOT, offer=replace(OFFER, zone=None))
    put(store, 1, outcome=Outcome(kind=OutcomeKind.PREEMPTED), lost_s=NOW_S - 30.0, ended_s=NOW_S - 10.0)
    put(store, 2, outcome=Outcome(kind=OutcomeKind.MOVED), ended_s=NOW_S - 20.0)
    put(store, 3, started_s=NOW_S + HOUR_S)  # the clock was set back since
    put(store, 4, placement=elsewhere)
    put(store, 5, placement=replace(SPOT, is_spot=False))
    stays = store.history.list_stays()
    sums = {each.place: each for each in store.history.sum_stays()}
    assert set(sums) == {stay.place for stay in stays} == {PLACE, (*PLACE[:2], None, PLACE[3])}
    for place, each in sums.items():
        own = [stay for stay in stays if stay.place == place]
        assert (each.stays, each.preemptions) == (len(own), sum(stay.is_preempted for stay in own))
        assert each.hours == pytest.approx(sum(stay.hours for stay in own))
    assert (sums[PLACE].stays, sums[PLACE].preemptions) == (3, 1)


def test_a_stay_weighs_its_node_hours_and_half_as_much_two_weeks_later() -> None:
    fresh = weigh_stays([STAY], now_s=NOW_S)[PLACE]
    assert (fresh.preemptions, fresh.node_hours) == (1.0, 6.0)
    old = weigh_stays([STAY], now_s=NOW_S + HALF_LIFE_DAYS * DAY_S)[PLACE]
    assert (old.preemptions, old.node_hours) == (pytest.approx(0.5), pytest.approx(3.0))
    both = weigh_stays([STAY, replace(STAY, is_preempted=False)], now_s=NOW_S)[PLACE]
    assert (both.preemptions, both.node_hours) == (1.0, 12.0)
    ahead = weigh_stays([STAY], now_s=NOW_S - DAY_S)[PLACE]
    assert ahead.node_hours == 6.0, "a clock that was set back makes nothing weigh more"
    assert HALF_LIFE_DAYS == 14.0


def test_a_stay_of_zero_length_has_no_weight() -> None:
    backwards = replace(STAY, begin_s=NOW_S + HOUR_S)
    assert backwards.hours == 0.0
    assert weigh_stays([backwards], now_s=NOW_S)[PLACE].node_hours == 0.0


def test_durations_come_from_stays_that_ended_within_a_week() -> None:
    found = gather_durations([STAY], now_s=NOW_S)[PLACE]
    assert found == NOTHING_SEEN + NOTHING_SEEN.with_period(3.0, is_open=True, is_ended=True)
    left = gather_durations([replace(STAY, is_preempted=False)], now_s=NOW_S)[PLACE]
    assert left == NOTHING_SEEN + NOTHING_SEEN.with_period(3.0, is_open=True, is_ended=False)
    faded = gather_durations([STAY], now_s=NOW_S + 5 * HOUR_S)[PLACE]
    assert faded == NOTHING_SEEN + NOTHING_SEEN.with_period(3.0, is_open=True, is_ended=True).discount(5.0)
    edge_s = NOW_S + PERIOD_DAYS * DAY_S
    assert gather_durations([STAY], now_s=edge_s) and not gather_durations([STAY], now_s=edge_s + 1.0)
    assert not gather_durations([replace(STAY, is_over=False)], now_s=NOW_S)
    assert not gather_durations([replace(STAY, begin_s=NOW_S)], now_s=NOW_S)


def test_durations_of_one_location_add_up() -> None:
    one = NOTHING_SEEN.with_period(3.0, is_open=True, is_ended=True)
    assert gather_durations([STAY, STAY], now_s=NOW_S)[PLACE] == NOTHING_SEEN + one + one


def test_evidence_is_read_again_once_it_is_too_old_and_when_the_clock_was_set_back(store: Store, clock: Hands) -> None:
    assert store.history.read(age_s_max=60.0) == {}
    put(store, 1)
    assert store.history.read(age_s_max=60.0) == {}
    assert list(store.history.read()) == [PLACE]
    put(store, 2, placement=replace(SPOT, offer=replace(OFFER, zone="east1b")))
    clock.time_s += 59.0
    assert len(store.history.read(age_s_max=60.0)) == 1
    clock.time_s += 1.0
    assert len(store.history.read(age_s_max=60.0)) == 2
    put(store, 3, placement=replace(SPOT, offer=replace(OFFER, zone="east1c")))
    clock.time_s -= 3600.0
    assert len(store.history.read(age_s_max=60.0)) == 3
