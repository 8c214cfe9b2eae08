"""A place where the job does not run is open or refused according to the last request."""

from __future__ import annotations

from broker.jobs.availability import Availability, name_place, update_availability
from broker.spot.durations import MET_HOURS
from broker.types import Attempt, Outcome, OutcomeKind, Placement
from tests.simulation.world import make_offer

SPOT = Placement(offer=make_offer("east1a"), is_spot=True, node_count=2)
PLACE = name_place(SPOT)
MET_S = MET_HOURS * 3600
Known = dict[tuple[str, str, str | None, str], Availability]


def look(before: Known, now_s: float, *, is_open: bool, attempts: tuple[Attempt, ...] = ()) -> Known:
    live = attempts[-1] if attempts and attempts[-1].lost_s is None else None
    return update_availability(before, [(PLACE, is_open)], attempts, live=live, now_s=now_s)


def attempt(started_s: float, lost_s: float | None = None, kind: OutcomeKind = OutcomeKind.PREEMPTED) -> Attempt:
    return Attempt(
        job_id=1, number=1, cluster="c", placement=SPOT, started_s=started_s, lost_s=lost_s,
        outcome=Outcome(kind=kind) if lost_s else None,
    )  # fmt: skip


def test_observed_availability_is_assumed_to_have_lasted_for_a_while() -> None:
    for is_open in (True, False):
        found = look({}, 1e5, is_open=is_open)[PLACE]
        assert (found.is_open, found.since_s, found.met_s) == (is_open, 1e5 - MET_S, 1e5)


def test_a_location_that_refuses_again_was_never_open() -> None:
    known = look({}, 1e5, is_open=False)
    asked_again = look(known, 1e5 + 600, is_open=True)
    assert asked_again[PLACE].is_open and asked_again[PLACE].since_s == 1e5 + 600, "no earlier start is known"
    assert look(asked_again, 1e5 + 660, is_open=False)[PLACE].since_s == known[PLACE].since_s


def test_a_place_that_was_open_and_is_refused_may_have_closed_a_while_ago() -> None:
    found = look(look({}, 1e5, is_open=True), 2e5, is_open=False)[PLACE]
    assert (found.is_open, found.since_s, found.met_s) == (False, 2e5 - MET_S, 2e5)


def test_a_location_with_nodes_is_observed_from_their_start() -> None:
    known = look({}, 1e5, is_open=True)
    here = look(known, 1e5 + 900, is_open=True, attempts=(attempt(1e5 + 300),))
    assert (here[PLACE].since_s, here[PLACE].met_s) == (known[PLACE].since_s, 1e5 + 300)
    later = look(here, 1e5 + 9000, is_open=True, attempts=(attempt(1e5 + 300),))
    assert later == here
    after_refusal = look(look({}, 1e5, is_open=False), 2e5, is_open=True, attempts=(attempt(2e5),))
    assert after_refusal[PLACE].since_s == 2e5, "it opened only now"


def test_a_place_that_preempted_the_nodes_counts_as_refused_without_a_request() -> None:
    ran = (attempt(1e5),)
    here = look(look({}, 1e5, is_open=True), 1.5e5, is_open=True, attempts=ran)
    lost = (attempt(1e5, lost_s=2e5),)
    found = look(here, 2e5 + 20, is_open=True, attempts=lost)
    assert found[PLACE].is_open and found[PLACE].since_s == 2e5 + 20, "it may be requested; a new open period begins"
    refused = look(found, 2e5 + 60, is_open=False, attempts=lost)
    assert not refused[PLACE].is_open and refused[PLACE].since_s == 2e5
    forgetful = look({}, 2e5 + 60, is_open=False, attempts=lost)
    assert forgetful[PLACE].since_s == 2e5, "a new controller reads it from the attempts"


def test_a_place_whose_cluster_a_user_took_down_stays_open() -> None:
    here = look({}, 1e5, is_open=True, attempts=(attempt(1e5),))
    down = (attempt(1e5, lost_s=2e5, kind=OutcomeKind.TAKEN_DOWN),)
    found = look(here, 2e5 + 20, is_open=True, attempts=down)[PLACE]
    assert found.is_open and found.since_s == here[PLACE].since_s
