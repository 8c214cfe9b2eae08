"""The page of places: stays, preemptions, refusals and prices over the last days."""

from __future__ import annotations

from dataclasses import replace

import pytest

from broker.dashboard.place_history import SHOWN_DAYS, read_places
from broker.dashboard.place_page import draw_days, show_places
from broker.types import EventKind, Placement
from broker.types.outcomes import make_event
from broker.wording import make_place
from tests.dashboard.conftest import HOSTILE, OFFER, Story

SOLD = "p4d.24xlarge"  # in every price book


def refuse(story: Story, placement: Placement) -> None:
    event = make_event(EventKind.PLACE_REFUSED, place=make_place(placement), took_s=2.0, error=HOSTILE)
    story.add_event(1, event)


def test_stays_and_preemptions_of_a_place_are_drawn(story: Story) -> None:
    (place,) = read_places(story.context)
    assert [span.is_preempted for span in place.spans] == [False, True]  # newest first
    assert (place.row.zone, place.row.preemptions, place.refused_s) == (OFFER.zone, 1, ())
    drawn = draw_days([place], story.now_s)
    assert drawn.count('class="spot"') == 2 + 1 and drawn.count("<line") - drawn.count('class="grid"') == 1


def test_a_refused_place_is_listed_without_any_stay_and_with_its_price(story: Story) -> None:
    sold = replace(OFFER, cloud="aws", region="us-east-1", zone="us-east-1a", instance_type=SOLD)
    refuse(story, Placement(offer=sold, is_spot=True, node_count=1, other_zones=("us-east-1b",)))
    refuse(story, Placement(offer=sold, is_spot=True, node_count=1))
    refuse(story, Placement(offer=sold, is_spot=False, node_count=1))  # on-demand says nothing about spot
    found = {each.row.zone: each for each in read_places(story.context) if each.row.cloud == "aws"}
    assert {zone: len(each.refused_s) for zone, each in found.items()} == {"us-east-1a": 2, "us-east-1b": 1}
    assert all(each.row.stays == 0 and each.row.hazard_per_hour is None for each in found.values())
    (offer, *_) = [
        each for each in story.context.market.book.find_prices(SOLD)
        if each.region == "us-east-1" and each.zone in (None, "us-east-1a")
    ]  # fmt: skip
    assert found["us-east-1a"].ondemand_usd_hour == offer.ondemand_usd_hour
    shown = show_places(list(found.values()), [], story.now_s)
    assert "us-east-1b" in shown and "<script" not in shown


def test_what_is_older_than_the_shown_days_counts_in_the_sums_only(
    story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(story, Placement(offer=OFFER, is_spot=True, node_count=1))
    story.store.jobs.put_attempt(
        replace(story.store.jobs.get(1).attempts[1], lost_s=story.now_s, ended_s=story.now_s)  # type: ignore[union-attr]
    )
    later_s = story.now_s + (SHOWN_DAYS + 1) * 86400
    monkeypatch.setattr("broker.clock.SystemClock.now_s", lambda clock: later_s)
    (place,) = read_places(story.context)
    assert place.row.stays == 2 and place.spans == () and place.refused_s == ()
    assert "There was no spot activity in the last 14 days" in show_places([place], [], later_s)
