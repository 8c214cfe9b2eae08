"""Options of the adaptive policy among several places, and of running on-demand machines."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from broker.lab.markets import make_site
from broker.lab.replay import Case, replay
from broker.lab.traces import Trace
from broker.spot.policies import load_policy
from broker.spot.policies.base import JobView, Move, Stay
from tests.spot.test_policies import make_candidate

decide = load_policy("adaptive")
SURE = make_candidate("a", is_spot=False)
CHEAP = make_candidate("a", is_spot=True, usd=0.2, is_open=False, age_hours=8.0)
DEAR = make_candidate("b", is_spot=True, usd=1.2, age_hours=8.0)


@pytest.mark.parametrize("left", [30.0, 27.0, 25.0, 24.2])
@pytest.mark.parametrize("current", [None, 0])
def test_open_spot_above_the_price_of_on_demand_changes_no_decision(left: float, current: int | None) -> None:
    view = JobView(work_left_hours=24, time_left_hours=left, work_hours=24, deadline_hours=30.0, current=current)
    alone, beside = decide(view, [SURE, CHEAP]), decide(view, [SURE, CHEAP, DEAR])
    assert type(beside) is type(alone)
    ways = ("on-demand now", "waiting")
    weighed = [{name: dict(each.weighed).get(name) for name in ways} for each in (alone, beside)]
    assert weighed[1] == pytest.approx(weighed[0])


def test_a_job_beside_open_but_expensive_spot_costs_what_it_does_without_that_place() -> None:
    """Spot at 0.2 opens after 10 h, for most of the time: on-demand begins before all the slack is spent."""
    counts = [0] * 20 + [int(tick % 14 > 1) for tick in range(80)]
    cheap = make_site(Trace(name="a", gap_hours=0.5, counts=tuple(counts)), spot_usd_hour=0.2, start_hours=0.05)
    dear = make_site(Trace(name="b", gap_hours=0.5, counts=(1,) * 100), spot_usd_hour=1.2, start_hours=0.05)
    case = Case(sites=(cheap,), work_hours=24, deadline_hours=30.0, save_every_hours=0.1)
    alone, beside = replay(case, decide), replay(replace(case, sites=(cheap, dear)), decide)
    assert not beside.is_late
    assert beside.usd == pytest.approx(alone.usd, rel=0.01)


def test_open_spot_that_bridges_the_wait_for_a_cheaper_place_is_preferred_to_on_demand() -> None:
    """At half the price of on-demand, the open place costs less until the cheaper one opens."""
    bridge = replace(DEAR, placement=make_candidate("b", is_spot=True, usd=0.4).placement)
    view = JobView(work_left_hours=24, time_left_hours=25.0, work_hours=24, deadline_hours=30.0)
    found = decide(view, [SURE, CHEAP, bridge])
    assert isinstance(found, Move) and found.target is bridge


def test_on_demand_with_unsaved_work_is_late_only_if_all_of_it_takes_too_long() -> None:
    """3 of the 10 h since the last checkpoint are done, and a notice saves them: 2.4 of 9.5 h are spare."""
    opened = make_candidate("a", is_spot=True, usd=0.2, age_hours=8.0)
    view = JobView(
        work_left_hours=10, time_left_hours=9.5, work_hours=20, deadline_hours=30.0, current=0,
        unsaved_hours=3.0, save_every_hours=4.0, saves_on_notice=True,
    )  # fmt: skip
    found = decide(view, [SURE, opened])
    assert isinstance(found, Move) and found.target is opened
    unsaved = decide(replace(view, saves_on_notice=False), [SURE, opened])
    assert isinstance(unsaved, Stay) and "already late" not in unsaved.reason, "in time, without room for a loss"
    late = decide(replace(view, time_left_hours=6.9), [SURE, opened])
    assert isinstance(late, Stay) and late.reason == "on-demand, already late" and late.hours == math.inf


def test_moves_after_changing_prices_cost_a_bounded_amount_beyond_on_demand() -> None:
    """Two places take turns at 0.1 and 0.9 USD every 2 h; a move costs 1.5 h of start and 0.5 USD of egress."""
    turns = [tuple((0.1, 0.9)[(tick // 2 + first) % 2] for tick in range(400)) for first in (0, 1)]
    sites = tuple(
        make_site(
            Trace(name=name, gap_hours=1.0, counts=(1,) * 400, prices=prices), spot_usd_hour=prices[0], start_hours=1.5
        )
        for name, prices in zip("ab", turns, strict=True)
    )
    case = Case(sites=sites, work_hours=40, deadline_hours=300.0, save_every_hours=0.5, move_usd=((0, 0.5), (0.5, 0)))
    found = replay(case, decide)
    move_usd = 0.5 + 1.5 * 0.9 + 1.5  # to spot, and back to on-demand
    assert not found.is_late
    assert found.usd < 41.5 + 3 * move_usd
