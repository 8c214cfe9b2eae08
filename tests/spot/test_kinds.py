"""Machines of several speeds in one job: the cheapest work in time, and decisions of one kind unchanged."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from broker.lab.markets import make_site
from broker.lab.replay import Case, ReplayState, replay
from broker.lab.traces import Trace
from broker.spot.policies import load_policy
from broker.spot.policies.base import (
    Candidate,
    Decision,
    JobView,
    Move,
    Stay,
    find_fallback,
    is_safe_to_start,
    list_reserves,
    round_speed,
)
from tests.bench.bench_kinds import compare_kinds, make_kind, rate_setting
from tests.spot.test_policies import make_candidate, patterns
from tests.spot.test_value_function import solve
from tests.tiers import examples

DECIDE = load_policy("adaptive")


def make_kinds(
    *, fast_usd: float = 2.2, fast_spot_usd: float = 1.0, speed: float = 2.0, **facts: object
) -> list[Candidate]:
    """Slow spot and on-demand at 0.4 and 1 USD an hour, and fast ones."""
    return [
        make_candidate("slow", is_spot=True, usd=0.4, age_hours=9.0, **facts),
        make_candidate("slow", is_spot=False, usd=1.0),
        make_candidate("fast", is_spot=True, usd=fast_spot_usd, age_hours=9.0, speed=speed, **facts),
        make_candidate("fast", is_spot=False, usd=fast_usd, speed=speed),
    ]


def view_of(left: float, time_left: float, **facts: object) -> JobView:
    return JobView(work_left_hours=left, time_left_hours=time_left, work_hours=20, deadline_hours=40, **facts)  # type: ignore[arg-type]


# -- one kind -----------------------------------------------------------------------------------------------------


def record(case: Case) -> list[tuple[object, ...]]:
    """Replay a case, and list its decisions, each with the place of its target."""
    life, found = ReplayState(case, 0.0), []
    while not life.is_over:
        view, candidates = life.observe()
        decision = DECIDE(view, candidates)
        target = candidates.index(decision.target) if isinstance(decision, Move) else None
        found.append((type(decision), target, decision.reason, decision.hours, decision.weighed))
        life.follow(decision, candidates)
    return found


@settings(max_examples=examples(25), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    counts=patterns, more=patterns, speed=st.sampled_from((0.5, 2.0, 4.0)), slack=st.sampled_from((1.1, 1.5)),
    move_usd=st.sampled_from((0.0, 0.5)),
)  # fmt: skip
def test_a_job_whose_places_are_all_faster_decides_as_one_with_less_work(
    counts: list[int], more: list[int], speed: float, slack: float, move_usd: float
) -> None:
    """Equal speeds cancel out: 16 h of work at twice the speed are 8 h of work, with egress and losses, to the bit."""
    sites = tuple(
        make_site(Trace(name=name, gap_hours=1 / 6, counts=tuple(each)), start_hours=0.1)
        for name, each in (("a", counts), ("b", more))
    )
    plain = Case(
        sites=sites, work_hours=8.0, deadline_hours=8.0 * slack + 0.1, move_usd=((0.0, move_usd), (move_usd, 0.0))
    )
    quick = replace(
        plain, sites=tuple(replace(each, spot_speed=speed, ondemand_speed=speed) for each in sites),
        work_hours=8.0 * speed,
    )  # fmt: skip
    assert record(quick) == record(plain)


def test_speeds_within_the_step_of_rounding_are_one_kind() -> None:
    assert round_speed(1.0) == 1.0 and round_speed(1.02) == 1.0 and round_speed(0.98) == 1.0
    assert round_speed(2.0) == pytest.approx(2.0, rel=0.03)
    assert 0 < round_speed(0.0) < 0.02


# -- what the work costs, and what is in time ------------------------------------------------------------------------


def test_with_time_the_cheapest_work_is_chosen_not_the_cheapest_hour() -> None:
    """The fast spot costs 0.6 USD an hour: 0.3 per hour of work, where the slow one costs 0.4."""
    view = view_of(20, 60)
    for fast_spot_usd, zone in ((0.6, "fast"), (1.0, "slow")):
        found = DECIDE(view, make_kinds(fast_spot_usd=fast_spot_usd))
        assert isinstance(found, Move) and found.target.placement.offer.zone == zone


@pytest.mark.parametrize(("time_left", "zone"), [(25.0, "slow"), (20.2, "slow"), (15.0, "fast"), (10.2, "fast")])
def test_the_fallback_is_the_kind_that_is_cheapest_in_the_time_left(time_left: float, zone: str) -> None:
    """20 h of work: on-demand takes 20.1 h for 20.1 USD, or 10.1 h for 22.2 USD."""
    view, candidates = view_of(20, time_left), make_kinds(is_open=False)
    fallback = find_fallback(view, candidates)
    assert fallback is not None and fallback.placement.offer.zone == zone
    reserves = list_reserves(view, candidates, fallback)
    assert [each.placement.offer.zone for each in reserves] == (["slow", "fast"] if zone == "slow" else ["fast"])


def test_a_kind_that_is_slower_and_more_expensive_is_not_a_reserve() -> None:
    view, candidates = view_of(20, 60), make_kinds(fast_usd=1.8)
    fallback = find_fallback(view, candidates)
    assert fallback is not None and list_reserves(view, candidates, fallback) == [candidates[3]]


def test_fast_on_demand_in_reserve_lets_a_job_wait_where_the_slow_kind_alone_would_start() -> None:
    """The slow on-demand must start now. The fast one costs 2.1 USD more, and leaves 10 h for spot to open again."""
    view = view_of(20, 20.1)
    closed = [replace(each, is_open=False, age_hours=0.1) if each.is_spot else each for each in make_kinds()]
    alone = DECIDE(view, closed[:2])
    assert isinstance(alone, Move) and not alone.target.is_spot
    both = DECIDE(view, closed)
    assert not (isinstance(both, Move) and not both.target.is_spot)
    assert both.weighed and min(usd for _, usd in both.weighed) < 20.1


def test_a_job_on_slow_spot_stays_there_while_fast_on_demand_is_in_time() -> None:
    view = view_of(20, 20.1, current=0, save_every_hours=0.5)
    assert isinstance(DECIDE(view, make_kinds()[:2]), Move), "on-demand of its own kind must start now"
    found = DECIDE(view, make_kinds(fast_spot_usd=2.0))
    assert isinstance(found, Stay) and 0 < found.hours <= 10.0


def test_slow_spot_is_left_in_time_for_fast_on_demand() -> None:
    """20 h of work at half the speed of on-demand use up the spare time: each hour of it half an hour."""
    slow, fast = make_kinds()[0], make_kinds()[3]
    view = view_of(20, 12.1)
    found = DECIDE(view, [slow, fast])
    assert isinstance(found, Move) and found.target is slow
    assert found.hours == pytest.approx(0.1 + (2.0 - 0.1) / 0.5), "then on-demand must start"
    running = replace(view, current=0)
    assert isinstance(DECIDE(running, [slow, fast]), Stay)
    late = DECIDE(replace(running, time_left_hours=10.1), [slow, fast])
    assert isinstance(late, Move) and late.target is fast


def test_on_demand_that_turns_out_too_slow_is_left_for_a_kind_in_time() -> None:
    """10 h of work measured at 0.8 of the stated speed: 12.5 h for 12 h."""
    candidates = make_kinds(is_open=False)
    view = view_of(10, 12, current=1)
    assert isinstance(DECIDE(view, candidates), Stay)
    slower = [replace(each, speed=0.8) if each is candidates[1] else each for each in candidates]
    found = DECIDE(view, slower)
    assert isinstance(found, Move) and found.target is slower[3] and "late" in found.reason
    gone = DECIDE(replace(view, time_left_hours=4.0), slower)
    assert isinstance(gone, Stay) and "late" in gone.reason, "neither kind is in time"


def test_on_demand_moves_to_a_kind_whose_work_is_much_cheaper_once_spot_stays_closed() -> None:
    candidates = [
        replace(each, is_open=False, age_hours=30.0) if each.is_spot else each for each in make_kinds(fast_usd=1.2)
    ]
    found = DECIDE(view_of(20, 35, current=1), candidates)
    assert isinstance(found, Move) and found.target is candidates[3]
    dear = [replace(candidates[0]), candidates[1], candidates[2], make_kinds(fast_usd=2.0)[3]]
    assert not isinstance(DECIDE(view_of(20, 35, current=1), dear), Move)


def test_a_job_on_spot_moves_to_the_kind_whose_work_is_much_cheaper() -> None:
    view = view_of(20, 60, current=0)
    found = DECIDE(view, make_kinds(fast_spot_usd=0.3))
    assert isinstance(found, Move) and found.target.placement.offer.zone == "fast" and found.target.is_spot
    assert dict(found.weighed)["spot now"] < dict(found.weighed)["staying"]
    assert isinstance(DECIDE(view, make_kinds(fast_spot_usd=0.79)), Stay), "a saving of 1 % is not worth a start"


def test_a_slower_place_exposes_more_time_between_its_checkpoints() -> None:
    """A save takes 1 h on the fallback, so 2 h at half its speed."""
    slow, fast = make_kinds()[0], make_kinds()[3]
    view = view_of(20, 10.0 + 0.1 + 0.1 + 1.5, save_every_hours=1.0)
    assert is_safe_to_start(view, replace(slow, speed=2.0), fast)
    assert not is_safe_to_start(view, slow, fast)


# -- state values -----------------------------------------------------------------------------------------------------


def test_fast_spot_costs_the_same_for_the_work_and_more_for_the_start() -> None:
    function = solve(hazard=0.0, spot_speed=2.0)
    assert function.run.read(0, function.locate(10.0, 5.0)) == pytest.approx(3.0, rel=1e-6)
    assert function.enter_usd(0, 10.0, 5.0) == pytest.approx(0.3 * 10 + 0.6 * 0.1, rel=1e-6)


def test_faster_spot_is_interrupted_less_often_for_the_same_work_and_leaves_more_time() -> None:
    slow, even, fast = (solve(spot_speed=speed) for speed in (0.5, 1.0, 2.0))
    for work, spare in ((10.0, 1.0), (20.0, 4.0), (5.0, 0.4)):
        values = [each.run.read(3, each.locate(work, spare)) for each in (slow, even, fast)]
        assert values[0] > values[1] > values[2]


def test_slow_spot_without_time_to_spare_costs_on_demand() -> None:
    function = solve(hazard=0.0, spot_speed=0.5)
    assert function.run.read(0, function.locate(10.0, 0.0)) == pytest.approx(10.1, rel=0.02)
    # 4 h to spare are used up by 4 h of work, which takes 8 h.
    assert function.run.read(0, function.locate(10.0, 4.0)) == pytest.approx(4 * 0.3 + 6 + 0.1, rel=0.05)


# -- replays ----------------------------------------------------------------------------------------------------------


@settings(max_examples=examples(25), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    counts=patterns, more=patterns, slack=st.sampled_from((1.0, 1.3, 2.0, 2.6)), speed=st.sampled_from((1.6, 2.0, 3.0)),
    every=st.sampled_from((0.0, 0.3)), name=st.sampled_from(("adaptive", "adaptive", "greedy", "uniform-progress")),
)  # fmt: skip
def test_a_deadline_that_the_fastest_on_demand_can_meet_is_met(
    counts: list[int], more: list[int], slack: float, speed: float, every: float, name: str
) -> None:
    sites = [
        make_kind(
            Trace(name=kind, gap_hours=1 / 6, counts=tuple(each)), kind, speed=factor, ondemand_usd_hour=usd,
            spot_usd_hour=usd * 0.4, start_hours=0.1,
        )
        for kind, each, factor, usd in (("slow", counts, 1.0, 1.0), ("fast", more, speed, 1.2 * speed))
    ]  # fmt: skip
    case = Case(sites=tuple(sites), work_hours=8.0, deadline_hours=8.0 / speed * slack + 0.1, save_every_hours=every)
    assert not replay(case, load_policy(name)).is_late


def test_two_kinds_cost_no_more_than_the_better_one_alone() -> None:
    """`tests.bench.bench_kinds` plays more."""
    found = [[compare_kinds(seed, repeat) for repeat in range(2)] for seed in range(6)]
    assert not any(each.is_late for group in found for each in group)
    assert sum(map(rate_setting, found)) / len(found) <= 1.01


def test_decisions_on_two_kinds_are_repeatable() -> None:
    draw = random.Random(5)
    counts = [bit for _ in range(40) for bit in [draw.randint(0, 1)] * draw.choice((1, 3, 12))]
    sites = tuple(
        make_kind(
            Trace(name=kind, gap_hours=1 / 6, counts=tuple(counts[shift:] + counts[:shift])), kind, speed=speed,
            ondemand_usd_hour=speed, spot_usd_hour=0.4 * speed, start_hours=0.1,
        )
        for kind, shift, speed in (("slow", 0, 1.0), ("fast", 7, 2.0))
    )  # fmt: skip
    case = Case(sites=sites, work_hours=12.0, deadline_hours=14.0)
    first, second = record(case), record(case)
    assert first == second and all(math.isfinite(usd) for *_, weighed in first for _, usd in weighed)  # type: ignore[attr-defined]


def test_a_decision_names_the_cost_of_each_option_in_usd() -> None:
    """A job alone on on-demand at twice the speed: 20 h of work take 10 h, at 2.2 USD each."""
    closed = make_candidate("fast", is_spot=True, usd=1.0, speed=2.0, is_open=False, age_hours=30.0)
    found: Decision = DECIDE(view_of(20, 10.15), [closed, make_kinds()[3]])
    assert dict(found.weighed)["on-demand now"] == pytest.approx(10.1 * 2.2, rel=0.01)
