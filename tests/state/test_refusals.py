"""Refusals: their coverage, their duration, the launches that may ask meanwhile, and their end."""

from __future__ import annotations

from dataclasses import replace

import pytest

from broker.state.refusals import FORGIVEN_AFTER_S, Refusal
from broker.state.store import Store
from tests.simulation.world import make_offer
from tests.state.samples import PLACEMENT, START_S, Hands

OFFER = make_offer("east1a")


def make(**fields: object) -> Refusal:
    whole = Refusal(
        cloud=OFFER.cloud, region=OFFER.region, zone=OFFER.zone or "", instance_type=OFFER.instance_type,
        is_spot=True, expires_s=1.0, reason="full",
    )  # fmt: skip
    return replace(whole, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["region", "zone", "instance_type"])
def test_an_empty_part_covers_all_and_another_covers_nothing(name: str) -> None:
    assert make().covers(PLACEMENT) and make(**{name: ""}).covers(PLACEMENT)
    assert not make(**{name: "another"}).covers(PLACEMENT)
    assert not make(cloud="").covers(PLACEMENT) and not make(is_spot=False).covers(PLACEMENT)
    nowhere = replace(PLACEMENT, offer=replace(OFFER, zone=None))
    assert make(zone="").covers(nowhere) and not make().covers(nowhere)


def refuse(store: Store, lasts_s: float = 100.0, zone: str | None = "east1a", **more: object) -> Refusal:
    store.refusals.add(
        OFFER.cloud, OFFER.region, zone, OFFER.instance_type, True, lasts_s, "full", **more  # type: ignore[arg-type]
    )  # fmt: skip
    return next(each for each in store.refusals.list_active(store.clock.now_s()) if each.zone == (zone or ""))


def test_a_stored_refusal_is_read_back(store: Store) -> None:
    found = refuse(store, hints=("ask for more", "or less"), reask_after_s=30.0)
    assert found == make(expires_s=START_S + 100.0, reask_s=START_S + 30.0, hints=("ask for more", "or less"))
    assert refuse(store, zone=None).hints == ()
    assert [each.zone for each in store.refusals.list_active(START_S + 99.0)] == ["east1a", ""]
    assert store.refusals.list_active(START_S + 100.0) == []


def test_a_refusal_without_a_maximum_does_not_grow(store: Store, clock: Hands) -> None:
    for _ in range(3):
        assert refuse(store).expires_s == clock.now_s() + 100.0
        clock.time_s += 100.0


def test_a_role_maximum_below_the_request_leaves_the_duration(store: Store) -> None:
    assert refuse(store, lasts_s_max=10.0).expires_s == START_S + 100.0


def test_the_only_place_is_retried_with_growing_delays(store: Store, clock: Hands) -> None:
    pauses = []
    for _ in range(5):
        found = refuse(store, 600.0, lasts_s_max=9999.0, reask_after_s=30.0, reask_after_s_max=100.0)
        pauses.append(found.reask_s - clock.now_s())
        clock.time_s = found.reask_s
    assert pauses == [30.0, 45.0, 67.5, 100.0, 100.0]
    assert refuse(store, 5.0, zone="b", reask_after_s=30.0).reask_s == clock.now_s() + 5.0, "it has ended by then"


def test_answers_to_requests_sent_before_a_refusal_count_with_it(store: Store, clock: Hands) -> None:
    more = {"lasts_s_max": 9999.0, "reask_after_s": 30.0}
    refuse(store, **more)
    clock.time_s += 29.9
    assert refuse(store, **more).expires_s == clock.now_s() + 100.0
    clock.time_s += 30.0
    assert refuse(store, **more).expires_s == clock.now_s() + 200.0


def test_a_refusal_long_after_the_last_one_is_the_first_again(store: Store, clock: Hands) -> None:
    refuse(store, lasts_s_max=9999.0)
    clock.time_s += 100.0 + FORGIVEN_AFTER_S - 1.0
    assert refuse(store, lasts_s_max=9999.0).expires_s == clock.now_s() + 200.0
    clock.time_s += 200.0 + FORGIVEN_AFTER_S
    assert refuse(store, lasts_s_max=9999.0).expires_s == clock.now_s() + 100.0


def test_a_probe_holds_all_others_up_as_long_as_it_lasts(store: Store, clock: Hands) -> None:
    store.refusals.begin_probe(PLACEMENT, lasts_s=50.0)
    assert store.refusals.list_active(clock.now_s()) == [], "nothing to probe"
    refuse(store)
    refuse(store, zone="elsewhere")
    clock.time_s += 100.0
    assert store.refusals.list_active(clock.now_s()) == []
    store.refusals.begin_probe(PLACEMENT, lasts_s=50.0)
    (held,) = store.refusals.list_active(clock.now_s())
    assert (held.zone, held.probed_until_s) == ("east1a", clock.now_s() + 50.0)
    clock.time_s += 50.0
    assert store.refusals.list_active(clock.now_s()) == []
    clock.time_s += FORGIVEN_AFTER_S
    store.refusals.begin_probe(PLACEMENT, lasts_s=50.0)
    assert store.refusals.list_active(clock.now_s()) == [], "forgotten by then"


def test_a_gang_that_came_up_clears_refusals_of_its_place_and_wider_ones_only(store: Store) -> None:
    refuse(store)
    refuse(store, zone=None)
    refuse(store, zone="elsewhere")
    store.refusals.clear(replace(PLACEMENT, is_spot=False))
    assert len(store.refusals.list_active(START_S)) == 3
    store.refusals.clear(PLACEMENT)
    assert [each.zone for each in store.refusals.list_active(START_S)] == ["elsewhere"]
