"""The omniscient optimum: against an exhaustive search over ticks, and below every policy."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from broker.lab.markets import make_site
from broker.lab.offline_optimum import find_optimum, list_intervals
from broker.lab.optimum_bound import IDLE, PricedIntervals, PricedPlan
from broker.lab.replay import Case, replay
from broker.lab.traces import Trace, make_default_traces
from broker.spot.policies import ORACLES, load_policy
from tests.tiers import examples


def trace_of(counts: list[int], name: str = "t") -> Trace:
    return Trace(name=name, gap_hours=1.0, counts=tuple(counts))


def search_ticks(
    zones: list[list[int]],
    prices: list[float],
    work: int,
    deadline: int,
    start: int,
    ratios: list[list[float]] | None = None,
) -> float:
    """Search every plan that decides tick by tick. Starts and work are whole ticks, so a finer plan saves at most the
    unused part of the last tick. `ratios` scales the price of each zone tick by tick."""

    @cache
    def best(tick: int, left: int, mode: int, owed: int) -> float:
        if left <= 0:
            return 0.0
        if tick == deadline:
            return float("inf")
        found = best(tick + 1, left, -2, 0)
        for option in range(-1, len(zones)):
            if option >= 0 and not zones[option][tick % len(zones[option])]:
                continue
            usd = 1.0 if option < 0 else prices[option] * (ratios[option][tick] if ratios else 1.0)
            debt = owed if option == mode else start
            after = (left, debt - 1) if debt else (left - 1, 0)
            found = min(found, usd + best(tick + 1, after[0], option, after[1]))
        return found

    return best(0, work, -2, 0)


def test_faster_on_demand_is_used_where_the_cheapest_would_be_late() -> None:
    closed = trace_of([0] * 14)
    slow = make_site(closed, start_hours=1.0, ondemand_usd_hour=1.0)
    fast = replace(make_site(closed, start_hours=1.0, ondemand_usd_hour=3.0), spot_speed=2.0, ondemand_speed=2.0)
    dear = replace(make_site(closed, start_hours=1.0, ondemand_usd_hour=9.0), spot_speed=2.0, ondemand_speed=2.0)
    assert find_optimum([slow, fast, dear], work_hours=8.0, deadline_hours=9.0) == pytest.approx(9.0)
    assert find_optimum([slow, fast, dear], work_hours=8.0, deadline_hours=8.0) == pytest.approx(15.0)
    assert find_optimum([slow], work_hours=8.0, deadline_hours=8.0) == math.inf


bits = st.lists(st.integers(0, 1), min_size=14, max_size=14)


@settings(max_examples=examples(150), deadline=None)
@given(bits, st.integers(2, 9), st.integers(0, 2), st.integers(0, 5))
def test_one_zone_equals_an_exhaustive_search(counts: list[int], work: int, start: int, slack: int) -> None:
    site = make_site(trace_of(counts), start_hours=start, spot_usd_hour=0.3)
    deadline = min(work + start + slack, 14)
    found = find_optimum([site], work_hours=work, deadline_hours=deadline)
    assert found == pytest.approx(search_ticks([counts], [0.3], work, deadline, start), rel=3e-4)


@settings(max_examples=examples(60), deadline=None)
@example(
    [0] * 5 + [1] * 5 + [0, 0, 1, 1], [0] * 10 + [1, 1, 0, 0], 8, 0, 0.5
)  # the more expensive zone is needed for only an hour
@given(bits, bits, st.integers(2, 8), st.integers(0, 2), st.sampled_from((0.3, 0.5, 1.2)))
def test_two_zones_equal_an_exhaustive_search(
    one: list[int], two: list[int], work: int, start: int, usd_hour: float
) -> None:
    sites = [
        make_site(trace_of(one), start_hours=start, spot_usd_hour=0.3),
        make_site(trace_of(two), start_hours=start, spot_usd_hour=usd_hour),
    ]
    found = find_optimum(sites, work_hours=work, deadline_hours=14)
    assert found == pytest.approx(search_ticks([one, two], [0.3, usd_hour], work, 14, start), rel=3e-4)


ratios = st.lists(st.sampled_from((1.0, 1.5, 2.0, 4.0)), min_size=14, max_size=14)


@settings(max_examples=examples(60), deadline=None)
@given(bits, bits, ratios, ratios, st.integers(2, 8), st.integers(0, 2))
def test_the_optimum_equals_an_exhaustive_search_where_prices_move(
    one: list[int], two: list[int], first: list[float], second: list[float], work: int, start: int
) -> None:
    """Work bought at one price is never returned at another. Where prices move, a run's end is not trimmed, so a plan
    may have one tick too many."""
    sites = [
        make_site(
            Trace(name=name, gap_hours=1.0, counts=tuple(counts), prices=tuple(prices)), start_hours=start,
            spot_usd_hour=0.3 * prices[0],
        )
        for name, counts, prices in (("one", one, first), ("two", two, second))
    ]  # fmt: skip
    found = find_optimum(sites, work_hours=work, deadline_hours=14)
    best = search_ticks([one, two], [0.3, 0.3], work, 14, start, [first, second])
    assert best * (1 - 3e-4) <= found <= best + 0.3 * 4


@pytest.mark.parametrize(("deadline", "from_hour"), [(60.0, 54.0), (60.0, 143.0), (43.0, 28.0)])
def test_a_coarse_search_exceeds_a_fine_one_by_its_tolerance_at_most(deadline: float, from_hour: float) -> None:
    sites = [make_site(each, start_hours=1 / 12, spot_usd_hour=0.1) for each in make_default_traces()]
    coarse, fine = (
        find_optimum(sites, work_hours=40, deadline_hours=deadline, from_hour=from_hour, tolerance=tolerance)
        for tolerance in (3e-3, 1e-3)
    )
    assert fine * (1 - 1e-3) <= coarse <= fine * (1 + 4e-3)


def test_two_plans_are_joined_at_the_interval_where_the_work_suffices() -> None:
    """Work of 6 h in ten hours at 0.3: one plan idles, the other one runs ten hours."""
    use = (0, 1.0, 0.0, 0.3, 0.3)
    intervals = PricedIntervals([[use]] * 10, {0: 0.0})
    idle = PricedPlan(modes=(IDLE,) * 10, work=0.0, usd=0.0)
    busy = intervals.follow_bound(1.0, intervals.bound_to_go(1.0))
    assert (busy.modes, busy.work, busy.usd) == ((0,) * 10, 10.0, pytest.approx(3.0))
    assert idle.find_price(busy) == pytest.approx(0.3)
    first = next(intervals.join(busy, idle, 6.0, 0.0))
    assert first == (0,) * 6 + (IDLE,) * 4


def test_a_pause_that_costs_less_than_a_start_is_filled() -> None:
    """An hour at 0.5 between hours at 0.1, work worth 0.4: running through it costs 0.1, a start costs 0.2."""
    cheap, expensive = (0, 1.0, 0.5, 0.1, 0.1), (0, 1.0, 0.5, 0.5, 0.5)
    intervals = PricedIntervals([[cheap], [cheap], [expensive], [cheap], [cheap]], {0: 0.5})
    plan = intervals.follow_bound(0.4, intervals.bound_to_go(0.4))
    assert plan.modes == (0,) * 5
    assert plan.work == pytest.approx(4.5) and plan.usd == pytest.approx(0.9)


def test_the_optimum_over_synthetic_markets_pays_at_least_the_lowest_price() -> None:
    sites = [make_site(each, start_hours=1 / 12, spot_usd_hour=0.1) for each in make_default_traces()]
    lowest = min(usd for each in list_intervals(sites, 228.0, 60.0) for _, usd in each.open_sites)
    assert find_optimum(sites, work_hours=40, deadline_hours=60, from_hour=228.0) >= lowest * 40


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(st.integers(0, 1), min_size=5, max_size=60), st.floats(1.1, 2.0), st.sampled_from((0.05, 0.3, 0.7)),
    st.sampled_from(("on-demand", "greedy", "uniform-progress", "next-spot")),
)  # fmt: skip
def test_no_policy_is_cheaper(counts: list[int], slack: float, start: float, name: str) -> None:
    trace = Trace(name="t", gap_hours=0.4, counts=tuple(counts))
    sites = (make_site(trace, start_hours=start),)
    case = Case(sites=sites, work_hours=10, deadline_hours=10 * slack)
    best = find_optimum(sites, work_hours=10, deadline_hours=10 * slack)
    assert replay(case, load_policy(name), is_oracle=name in ORACLES).usd >= best * (1 - 3e-4)


def test_an_infeasible_deadline_has_no_optimum() -> None:
    site = make_site(trace_of([0]), start_hours=1)
    assert find_optimum([site], work_hours=10, deadline_hours=10.5) == float("inf")
    assert find_optimum([site], work_hours=10, deadline_hours=11) == pytest.approx(11)


def test_intervals_cover_the_time_and_repeat_with_the_recording() -> None:
    site = make_site(trace_of([1, 1, 0]), start_hours=0)
    found = list_intervals([site], 1.0, 5.0)
    assert [(each.from_hours, each.to_hours, bool(each.open_sites)) for each in found] == [
        (0, 1, True), (1, 2, False), (2, 4, True), (4, 5, False),
    ]  # fmt: skip
