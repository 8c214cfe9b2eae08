"""Exact decisions and figures of the spot policies, worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from broker.lab.markets import make_site
from broker.lab.replay import Case, replay
from broker.lab.traces import make_default_traces
from broker.spot.durations import AGES, NOTHING_SEEN, Durations
from broker.spot.evaluation import BEHIND_GAIN_HOURS, SPOT, MarketEvaluation
from broker.spot.forecast import read_market
from broker.spot.policies import load_policy
from broker.spot.policies.base import Candidate, JobView, Move, Stay, Wait, find_fallback, find_safe_hours
from broker.spot.prior import MEASURED, fit_prior
from tests.spot.test_policies import make_candidate, view_of

SURE = make_candidate(is_spot=False)
OPEN = make_candidate(is_spot=True, usd=0.3, age_hours=9.0)
CLOSED = make_candidate(is_spot=True, usd=0.3, is_open=False, age_hours=1.0)


def test_greedy_waits_until_the_point_of_no_return_and_then_stays_on_demand() -> None:
    """10 h of work and a start of 0.1 h: with 12 h left there are 1.9 h to spare."""
    decide = load_policy("greedy")
    wait = decide(view_of(10, 12), [CLOSED, SURE])
    assert isinstance(wait, Wait) and wait.hours == pytest.approx(1.9)
    assert isinstance(decide(view_of(10, 12, current=1), [OPEN, SURE]), Stay), "not back to spot"
    for left, target in ((10.1, SURE), (10.25, OPEN)):
        found = decide(view_of(10, left), [OPEN, SURE])
        assert isinstance(found, Move) and found.target is target
    for spot in (OPEN, CLOSED):
        short = decide(view_of(10, 10.15), [spot, SURE])
        assert isinstance(short, Wait) and short.hours == pytest.approx(0.05), "too short for a start on spot"
    kept = decide(view_of(10, 10.6, current=0, save_every_hours=0.5), [OPEN, SURE])
    assert isinstance(kept, Stay) and kept.hours == pytest.approx(0.5), "on spot while there is time to spare"
    only = decide(view_of(10, None), [OPEN, replace(OPEN, is_open=False)])
    assert isinstance(only, Move) and only.target is OPEN
    assert isinstance(decide(view_of(10, None, current=0), [OPEN, OPEN]), Stay)
    assert decide(view_of(10, 12), [SURE]) == Move(target=SURE, reason="spot is not offered")


def test_uniform_progress_leaves_on_demand_only_with_two_starts_to_spare() -> None:
    """On-demand runs, so its own start of 0.1 h counts as saved: spare + 0.1 must reach two starts of spot."""
    decide = load_policy("uniform-progress")
    for left, is_moved in ((10.25, True), (10.15, False)):
        view = JobView(work_left_hours=10, time_left_hours=left, work_hours=10, deadline_hours=20, current=1)
        found = decide(view, [OPEN, SURE])
        assert isinstance(found, Move) is is_moved, left
    idle = JobView(work_left_hours=10, time_left_hours=10.25, work_hours=10, deadline_hours=20)
    slow = replace(OPEN, start_hours=0.12)
    found = decide(idle, [slow, SURE])
    assert isinstance(found, Move) and found.target is slow, "one start is enough where nothing runs"


def test_uniform_progress_waits_exactly_until_it_falls_to_its_line() -> None:
    """Half of the work is done after 8 of 20 h: the line is at 5 h of work in 2 more hours."""
    decide = load_policy("uniform-progress")
    view = JobView(work_left_hours=5, time_left_hours=12, work_hours=10, deadline_hours=20)
    found = decide(view, [CLOSED, SURE])
    assert isinstance(found, Wait) and found.hours == pytest.approx(2.0)
    late = decide(replace(view, time_left_hours=10.0), [CLOSED, SURE])
    assert isinstance(late, Move) and late.target is SURE
    assert isinstance(decide(replace(view, time_left_hours=10.0, current=1), [CLOSED, SURE]), Stay)


def test_next_spot_takes_only_periods_that_pay_for_their_start() -> None:
    """A start of 0.1 h at 0.8 USD/h pays when h x 0.8 < (h - 0.1) x 1, beyond half an hour; from on-demand, whose own
    start is lost as well, beyond one hour."""
    decide = load_policy("next-spot")

    def enters(hours: float, **facts: object) -> bool:
        spot = make_candidate(is_spot=True, usd=0.8, age_hours=1.0, closes_in_hours=hours)
        found = decide(view_of(10, 30, **facts), [spot, SURE])
        return isinstance(found, Move) and found.target is spot

    assert [enters(hours) for hours in (0.45, 0.55)] == [False, True]
    assert [enters(hours, current=1) for hours in (0.95, 1.05)] == [False, True]


@pytest.mark.parametrize(
    ("exposed", "starting", "speed", "left", "hours"),
    [
        (0.5, 0.0, 1.0, 12.0, 1.9),  # work may be lost at any time: as long as there is time to spare
        (0.0, 0.0, 1.0, 12.0, math.inf),  # none is ever lost, and spot is as fast
        (0.0, 0.0, 0.5, 12.0, 3.8),  # half as fast: an hour uses up half an hour
        (0.0, 1.0, 0.5, 12.0, 2.8),  # a start of 1 h leaves 0.9 h, which last for 1.8 h of work
        (0.0, 2.5, 0.5, 12.0, 1.9),  # the start alone is too long
        (0.5, 0.0, 1.0, 10.1, 0.0),  # no time to spare
    ],
)
def test_a_job_may_stay_on_spot_until_on_demand_must_start(
    exposed: float, starting: float, speed: float, left: float, hours: float
) -> None:
    view = view_of(10, left, save_every_hours=exposed, starting_hours=starting)
    found = find_safe_hours(view, replace(OPEN, speed=speed), SURE)
    assert found == pytest.approx(hours)


def read(**facts: object) -> Candidate:
    return make_candidate(is_spot=True, usd=0.5, **facts)


def test_the_chance_of_being_open_starts_at_the_state_of_now_and_ends_at_the_share_of_open_hours() -> None:
    opened, closed = (read_market(read(is_open=state, age_hours=2.0), SURE, MEASURED) for state in (True, False))
    assert (opened.expect_open(0.0), closed.expect_open(0.0)) == (1.0, 0.0)
    for market in (opened, closed):
        share = market.mean_open_hours / (market.mean_open_hours + market.mean_closed_hours)
        assert market.expect_open(1e6) == pytest.approx(share)
    chances = [opened.expect_open(hours) for hours in (0.0, 0.5, 1.0, 5.0)]
    assert chances == sorted(chances, reverse=True)


def test_hours_of_observation_without_a_change_lengthen_the_expected_period() -> None:
    short, long = (read_market(read(age_hours=age), SURE, MEASURED) for age in (1.0, 101.0))
    assert long.mean_open_hours - short.mean_open_hours > 50
    blind = read_market(read(age_hours=101.0, met_hours=100.0), SURE, MEASURED)
    assert blind.mean_open_hours < long.mean_open_hours, "the first 100 hours were not observed"
    assert blind.watched_hours == pytest.approx(1.0)


def test_periods_add_up_and_open_ones_are_kept_apart_from_closed_ones() -> None:
    """3 h and 0.3 h open, 0.15 h closed, which continues; then 0.3 h closed, of which the first 0.1 h are unseen."""
    seen = NOTHING_SEEN.with_period(3.0, is_open=True).with_period(0.3, is_open=True)
    seen = seen.with_period(0.15, is_open=False, is_ended=False).with_period(0.3, is_open=False, from_hours=0.1)
    for found, expected in (
        (seen.open_hours, {0.0: 0.2, 0.1: 0.2, 0.2: 0.4, 0.5: 0.5, 1.0: 1.0, 2.0: 1.0}),
        (seen.open_ends, {0.2: 1.0, 2.0: 1.0}),
        (seen.closed_hours, {0.0: 0.1, 0.1: 0.15, 0.2: 0.1}),
        (seen.closed_ends, {0.2: 1.0}),
    ):
        assert found == pytest.approx([expected.get(age, 0.0) for age in AGES])
    assert (seen + seen).open_hours == pytest.approx([2 * each for each in seen.open_hours])


def test_a_market_with_notice_of_its_end_is_used_only_if_it_outlives_two_starts() -> None:
    assert [read_market(read(closes_in_hours=each), SURE, MEASURED).outlives_start for each in (0.19, 0.21, None)] == [
        False,
        True,
        True,
    ]
    near, far = (read_market(read(closes_in_hours=each), SURE, MEASURED) for each in (0.01, 50.0))
    assert near.rate(1.0, 10.0) > 90 > far.rate(1.0, 10.0)


def test_the_price_of_an_hour_of_work_has_losses_and_the_move_spread_over_the_stay() -> None:
    market = read_market(read(age_hours=9.0, move_usd=2.0), SURE, MEASURED)
    without = market.rate(0.0, 1e-3)
    assert without == pytest.approx(0.5 + 2.0 / 0.1), "a stay counts as a tenth of an hour at least"
    assert market.rate(0.0, 1.0) == pytest.approx(0.5 + 2.0 / min(market.stay_hours, 1.0))
    assert market.rate(3.0, 1.0) - market.rate(0.0, 1.0) == pytest.approx(3 * market.hazard)


def make_durations(*, open_hours: float, open_ends: float) -> Durations:
    zeros = (0.0,) * (len(AGES) - 1)
    return Durations(
        open_hours=(open_hours, *zeros), open_ends=(open_ends, *zeros), closed_hours=(200.0, *zeros),
        closed_ends=(20.0, *zeros),
    )  # fmt: skip


def test_recordings_weigh_the_same_whatever_their_length_unless_they_say_next_to_nothing() -> None:
    """100 h with 10 ends and 1,000 h with 300 ends: hazards of 0.1 and 0.3 have the mean 0.2."""
    one, ten = make_durations(open_hours=100, open_ends=10), make_durations(open_hours=1000, open_ends=300)
    fitted = fit_prior([one, ten])
    assert fitted.open_hazards[0] == pytest.approx(0.2, rel=0.01)
    assert fitted.closed_hazards[0] == pytest.approx(0.1, rel=0.01)
    scrap = make_durations(open_hours=0.01, open_ends=1)
    assert fit_prior([one, scrap]).open_hazards[0] < 2.0, "not the mean with 100 ends an hour"


def test_a_fallback_is_the_cheapest_in_time_else_the_fastest() -> None:
    """10 h of work: at half the speed they take 20.1 h for 8 USD, at full speed 10.1 h for 10 USD."""
    slow = make_candidate(is_spot=False, usd=0.4, speed=0.5)
    for left, target in ((20.2, slow), (20.0, SURE), (5.0, SURE), (None, slow)):
        assert find_fallback(view_of(10, left), [SURE, OPEN, slow]) is target
    far = replace(slow, move_usd=3.0)
    assert find_fallback(view_of(10, 30), [SURE, far]) is SURE, "its egress makes it more expensive"
    assert find_fallback(view_of(10, 20.2, look_hours=0.2), [SURE, slow]) is SURE, "a fault may be noticed late"
    assert find_fallback(view_of(10, 20.2), [OPEN]) is None
    saved = view_of(10, 15.2, unsaved_hours=2.5)
    assert find_fallback(saved, [SURE, slow]) is SURE
    assert find_fallback(replace(saved, saves_on_notice=True), [SURE, slow]) is slow, "a notice saves 2.5 h of work"


def test_a_market_changes_at_first_at_the_rate_of_its_present_state() -> None:
    soon = 1e-6
    opened = read_market(read(age_hours=2.0), SURE, MEASURED)
    assert (1 - opened.expect_open(soon)) / soon == pytest.approx(1 / opened.mean_open_hours, rel=1e-3)
    closed = read_market(read(is_open=False, age_hours=2.0), SURE, MEASURED)
    assert closed.expect_open(soon) / soon == pytest.approx(1 / closed.mean_closed_hours, rel=1e-3)


def test_calm_hours_slow_the_pace_of_the_ages_at_which_they_were_watched() -> None:
    young, old = MEASURED.learn_open(NOTHING_SEEN, (0.0, 0.5))
    assert young < old <= 1.0
    young, old = MEASURED.learn_open(NOTHING_SEEN, (20.0, 80.0))
    assert old < young <= 1.0


@pytest.mark.parametrize(
    ("usd", "move_usd", "work", "share"),
    [
        (0.5, 0.0, 10.0, 1.0),  # the best itself saves half
        (0.75, 0.0, 10.0, 0.5),
        (0.995, 0.0, 10.0, 0.02),  # open is better than nothing
        (1.5, 0.0, 10.0, 0.02),
        (0.25, 0.0, 10.0, 1.0),
        (0.5, 0.025, 0.1, 0.5),  # a move for a quarter of the price of a stay of 0.1 h leaves half of the saving
        (0.5, 9.0, 0.1, 0.0),
        (0.5, 0.25, 1.0, 0.5),  # spread over an hour
    ],
)
def test_a_market_appeals_by_its_share_of_the_best_saving(
    usd: float, move_usd: float, work: float, share: float
) -> None:
    best = read_market(read(age_hours=9.0), SURE, MEASURED)
    other = read_market(make_candidate("b", is_spot=True, usd=usd, age_hours=9.0, move_usd=move_usd), SURE, MEASURED)
    assert other.rate_saving(best, work) == pytest.approx(share)


def test_where_spot_saves_nothing_only_markets_without_a_move_appeal() -> None:
    best = read_market(make_candidate(is_spot=True, usd=1.0), SURE, MEASURED)
    near, far = (
        read_market(make_candidate("b", is_spot=True, usd=1.0, move_usd=each), SURE, MEASURED) for each in (0.0, 0.1)
    )
    assert (near.rate_saving(best, 10.0), far.rate_saving(best, 10.0)) == (1.0, 0.0)


def test_on_spot_a_job_awaits_the_cheapest_closed_place_below_its_own_price_and_the_cheapest_nearer_one() -> None:
    def sell(name: str, price: float, move: float, *, is_open: bool = False, age: float = 1.0) -> Any:
        candidate = SimpleNamespace(name=name, is_open=is_open, age_hours=age)
        return SimpleNamespace(price=price, move_price=move, candidate=candidate)

    def list_awaited(*closed: Any, is_open: bool = True, work: float = 10.0) -> list[str]:
        here = sell("here", 0.5, 1.0, is_open=is_open)
        values: Any = SimpleNamespace(find=lambda market, *, is_alone: is_alone)
        unread: Any = None
        scale = MarketEvaluation(
            view=unread, fallback=unread, markets=(here, sell("dear", 0.4, 0.9, is_open=True), *closed),
            values=values, best=here, basis=here, spare=1.0, work=work,
        )  # fmt: skip
        awaited: Any = scale._awaited
        assert all(is_alone is True for _, is_alone in awaited)
        return [market.candidate.name for market, _ in awaited]

    assert list_awaited(sell("same", 0.5, 1.0), sell("dearer", 0.6, 2.0)) == [], "no gain to wait for"
    assert list_awaited(sell("cheap", 0.3, 3.0), sell("near", 0.9, 0.0)) == ["cheap", "near"]
    assert list_awaited(sell("both", 0.3, 0.0), sell("second", 0.4, 0.0)) == ["both"]
    # The move is spread over the work: 0.1 + 5 / 10 is more than 0.4 + 0 / 10, and 0.1 + 5 / 100 is less.
    assert list_awaited(sell("far", 0.1, 5.0), sell("slow", 0.4, 1.0)) == ["slow"]
    assert list_awaited(sell("far", 0.1, 5.0), sell("slow", 0.4, 1.0), work=100.0) == ["far"]
    assert list_awaited(sell("far", 0.1, 1.1), sell("slow", 0.4, 1.0), work=0.2) == ["slow"]
    assert list_awaited(sell("a", 0.1, 1.005), sell("b", 0.2, 1.0), work=0.0) == ["a"], (
        "less than 0.1 h counts as 0.1 h"
    )
    assert list_awaited(sell("old", 0.3, 1.0, age=9.0), sell("young", 0.3, 1.0, age=2.0)) == ["young"]
    assert list_awaited(sell("cheap", 0.3, 0.0), is_open=False) == []


def test_a_start_considers_the_cheapest_for_all_the_work_and_the_cheapest_near_the_data() -> None:
    def sell(name: str, price: float, move: float, *, is_open: bool = True, age: float = 1.0) -> Any:
        candidate = SimpleNamespace(name=name, is_open=is_open, age_hours=age, speed=1.0)
        return SimpleNamespace(price=price, move_price=move, candidate=candidate)

    class Weighing(MarketEvaluation):
        """Notes the places that are weighed."""

        def _weigh_options(self, current: Any, ahead: float) -> dict[str, float]:
            weighed.append(self.best.candidate.name)
            return {SPOT: self.best.price}

        _has_kinds = False

        def _list_best_of_kinds(self) -> list[Any]:
            return []

    unread: Any = None
    weighed: list[str] = []
    first = sell("first", 0.5, 1.0)

    def list_weighed(*others: Any, work: float = 100.0) -> tuple[str, set[str]]:
        weighed.clear()
        scale = Weighing(
            view=unread, fallback=unread, markets=(first, *others), values=unread, best=first, basis=first, spare=1.0,
            work=work,
        )  # fmt: skip
        return scale.find_entry(None).best.candidate.name, set(weighed)

    near, dear = sell("near", 0.6, 0.0), sell("dear", 0.7, 0.0)
    assert list_weighed(dear, near) == ("first", {"first", "near"})
    assert list_weighed(sell("far", 0.3, 9.0), near) == ("far", {"first", "far", "near"}), "39 is less than 51"
    assert list_weighed(sell("far", 0.3, 9.0), near, work=1.0) == ("first", {"first", "near"})
    assert list_weighed(sell("closed", 0.1, 0.0, is_open=False), dear) == ("first", {"first", "dear"})
    assert list_weighed(sell("young", 0.4, 0.0), sell("old", 0.4, 0.0, age=9.0), work=1.0) == ("old", {"first", "old"})


def test_a_start_that_overlaps_needs_less_time_to_spare_while_machines_work() -> None:
    """10 h of work, 0.06 h to spare: too little for a start of 0.1 h, unless half of it overlaps."""
    old = replace(OPEN, age_hours=30.0)
    for name in ("adaptive", "uniform-progress"):
        decide = load_policy(name)
        for overlap, is_moved in ((0.0, False), (0.05, name == "adaptive")):
            view = JobView(work_left_hours=10, time_left_hours=10.16, work_hours=10, deadline_hours=20, current=1)
            found = decide(view, [replace(old, overlap_hours=overlap), SURE])
            assert isinstance(found, Move) is is_moved, (name, overlap)
    starting = JobView(
        work_left_hours=10, time_left_hours=10.16, work_hours=10, deadline_hours=20, current=1, starting_hours=0.05
    )
    found = load_policy("adaptive")(starting, [replace(old, overlap_hours=0.05), SURE])
    assert isinstance(found, Stay), "machines that start do no work meanwhile"


@pytest.mark.parametrize(("count", "gain"), [(1, 0.0), (2, BEHIND_GAIN_HOURS)])
def test_behind_uniform_progress_waiting_must_gain_more_if_several_markets_change_together(
    count: int, gain: float
) -> None:
    """The same job and markets, at the same time to spare, with a later and an earlier line of uniform progress."""
    closed = [make_candidate(zone, is_spot=True, usd=0.3, is_open=False, age_hours=0.3) for zone in ("a", "b")[:count]]
    waits = []
    for slack in (2.0, 20.0):
        view = JobView(work_left_hours=10, time_left_hours=12.1, work_hours=20, deadline_hours=20.1 + slack)
        found = load_policy("adaptive")(view, [*closed, SURE])
        waits.append(dict(found.weighed)["waiting"] - dict(found.weighed)["on-demand now"])
    assert waits[1] == pytest.approx(waits[0] + gain, abs=0.015)


def test_running_on_demand_moves_once_spot_is_not_expected_back_and_the_saving_pays_for_the_egress() -> None:
    """40 h of work, at 1.3 USD an hour here or 1.0 far away: 12 USD less if spot never opens again."""

    def list_candidates(age_hours: float, move_usd: float) -> list[Candidate]:
        return [
            make_candidate("a", is_spot=True, usd=0.3, is_open=False, age_hours=age_hours),
            make_candidate("a", is_spot=False, usd=1.3),
            make_candidate("b", is_spot=True, usd=0.3, is_open=False, age_hours=age_hours, move_usd=move_usd),
            make_candidate("b", is_spot=False, usd=1.0, move_usd=move_usd),
        ]

    view = JobView(work_left_hours=40, time_left_hours=50, work_hours=48, deadline_hours=60, current=1)
    decide = load_policy("adaptive")
    for age_hours, move_usd, is_moved in ((30.0, 2.0, True), (30.0, 11.0, False), (0.3, 8.0, False)):
        candidates = list_candidates(age_hours, move_usd)
        found = decide(view, candidates)
        assert isinstance(found, Move) is is_moved, (age_hours, move_usd)
        assert not isinstance(found, Move) or found.target is candidates[3]
    stay = decide(view, list_candidates(0.3, 8.0))
    assert stay.hours <= 1.0, "asked again while spot stays closed"
    starting = replace(view, starting_hours=0.05)
    assert isinstance(decide(starting, list_candidates(30.0, 2.0)), Stay)


def test_an_hour_that_is_worth_much_is_not_spent_waiting() -> None:
    """10 h of work with 16 h left, spot closed for an hour: waiting saves 0.7 USD for each hour of work on spot."""
    decide = load_policy("adaptive")
    view = replace(view_of(10, 16), work_hours=10.0, deadline_hours=16.0, spent_usd=0.0)
    candidates = [CLOSED, SURE]
    for value, is_waiting in ((None, True), (0.0, True), (0.05, True), (2.0, False)):
        found = decide(replace(view, hour_value_usd=value), candidates)
        assert isinstance(found, Wait) is is_waiting, value
        if isinstance(found, Move):
            assert found.target is SURE, "as it was offered, at its own price"
    opened = decide(replace(view, hour_value_usd=2.0), [OPEN, SURE])
    assert isinstance(opened, Move) and opened.target is OPEN, "spot does the work in the same time"


def test_the_value_of_an_hour_trades_cost_for_time_and_never_the_deadline() -> None:
    trace = make_default_traces()[0]
    case = Case(sites=(make_site(trace, start_hours=0.1),), work_hours=20.0, deadline_hours=30.0)
    found = {value: replay(replace(case, hour_value_usd=value), load_policy("adaptive")) for value in (None, 0.02, 2.0)}
    cheap, same, fast = found.values()
    assert same.usd == pytest.approx(cheap.usd, rel=0.02), "the default is 2 % of on-demand"
    assert fast.hours < cheap.hours and fast.usd > cheap.usd
    assert fast.usd + 2.0 * fast.hours < cheap.usd + 2.0 * cheap.hours
    assert not any(each.is_late for each in found.values())


@pytest.mark.parametrize("worth_usd", [None, 0.0, 2.0])
@pytest.mark.parametrize("left", [20.0, 10.05, -1.0])
def test_machines_that_cost_nothing_are_used_at_once_and_kept(left: float, worth_usd: float | None) -> None:
    """Own machines are on-demand at 0 USD unless their price is set."""
    decide, free = load_policy("adaptive"), make_candidate("own", is_spot=False, usd=0.0)
    view = replace(view_of(10, left), hour_value_usd=worth_usd, spent_usd=0.0)
    for spot in (OPEN, CLOSED, replace(OPEN, placement=make_candidate(is_spot=True, usd=0.0).placement)):
        for places in ([spot, free], [spot, SURE, free]):
            found = decide(view, places)
            assert isinstance(found, Move) and found.target is free
            assert isinstance(decide(replace(view, current=len(places) - 1), places), Stay)
    paid = decide(replace(view, current=0), [OPEN, free])
    assert isinstance(paid, Stay if left == 20.0 else Move), "running machines are kept while there is time to spare"


def test_a_job_without_work_left_or_with_a_deadline_in_the_past_has_a_decision() -> None:
    decide = load_policy("adaptive")
    for work, left in ((0.0, 5.0), (0.0, -5.0), (1e-9, 1e-9), (5.0, -100.0)):
        for current in (None, 0, 1):
            found = decide(view_of(work, left, current=current), [OPEN, SURE])
            assert not math.isnan(found.hours) and found.hours >= 0
            assert isinstance(found, Move) is (current is None or (current == 0 and left <= 1e-9))


@pytest.mark.parametrize("start_hours", [0.1, 0.3])
@pytest.mark.parametrize("work", [0.0, 0.001, 0.05, 0.15, 0.3])
def test_a_job_with_little_work_left_starts_instead_of_waiting_for_the_end_of_its_slack(
    work: float, start_hours: float
) -> None:
    """Whatever the job waits for, it has to start once; here spot is open at the price that it would wait for."""
    opened, shut, sure = (replace(each, start_hours=start_hours) for each in (OPEN, CLOSED, SURE))
    for places in ([opened, sure], [opened, shut, sure], [replace(opened, is_watched=False), shut, sure]):
        found = load_policy("adaptive")(view_of(work, 5), places)
        assert isinstance(found, Move) and found.target is places[0]
        costs = dict(found.weighed)
        assert costs["spot now"] == pytest.approx(0.3 * (start_hours + work), abs=0.01)
        assert costs["spot now"] <= min(costs.values())
    waits = load_policy("adaptive")(view_of(work + 0.3, 20), [shut, sure])
    assert isinstance(waits, Wait), "spot is likely to open in time, at a third of the price"


def test_of_on_demand_machines_that_are_equally_late_the_cheapest_is_taken() -> None:
    dear = make_candidate("b", is_spot=False, usd=3.0)
    for places in ([dear, SURE], [SURE, dear]):
        assert find_fallback(view_of(10, 5), places) is SURE
    fast = replace(dear, start_hours=0.05)
    assert find_fallback(view_of(10, 5), [SURE, fast]) is fast
