"""The value function: properties that hold for any market, and cases with a known solution."""

from __future__ import annotations

import itertools
import math

import pytest

from broker.spot.durations import AGES
from broker.spot.prior import MEASURED, scale_hazards
from broker.spot.value_function import ValueFunction
from broker.spot.value_tables import ValueParameters


def solve(*, hazard: float | None = None, reopening: float | None = None, **facts: float) -> ValueFunction:
    known = {"spot_price": 0.3, "start_hours": 0.1, "work_hours": 24.0, "spare_hours": 24.0, **facts}
    opened = MEASURED.open_hazards if hazard is None else (hazard,) * len(AGES)
    closed = MEASURED.closed_hazards if reopening is None else (reopening,) * len(AGES)
    return ValueFunction(ValueParameters(open_hazards=opened, closed_hazards=closed, **known))


def test_spot_that_never_closes_costs_its_price() -> None:
    function = solve(hazard=0.0)
    for work in (1.0, 10.0, 24.0):
        assert function.run.read(0, function.locate(work, 5.0)) == pytest.approx(0.3 * work, rel=1e-6)
        assert function.enter_usd(0, work, 5.0) == pytest.approx(0.3 * (work + 0.1), rel=1e-6)


def test_with_a_market_that_never_opens_only_on_demand_is_used() -> None:
    function = solve(reopening=0.0)
    for spare in (0.0, 3.0, 20.0):
        assert function.idle_closed.read(0, function.locate(10.0, spare)) == pytest.approx(10.1, rel=1e-3)


def test_values_do_not_depend_on_the_order_in_which_they_are_asked() -> None:
    """Only the nodes up to the asked point are solved."""
    points = [(2.0, 1.0), (20.0, 0.3), (5.0, 20.0), (23.0, 23.0), (0.5, 0.1)]
    grown, direct = solve(), solve()
    ahead = {point: grown.enter_usd(3, *point, seen=(1.0, 1.0)) for point in points}
    assert {point: direct.enter_usd(3, *point, seen=(1.0, 1.0)) for point in points[::-1]} == ahead
    small = solve()
    small.locate(2.0, 1.0)
    assert 0 < sum(small.solved) < sum(grown.solved) / 2


def test_without_spare_time_on_demand_starts_at_once() -> None:
    function = solve()
    assert function.idle_open.read(0, function.locate(10.0, 0.0)) == pytest.approx(10.1)
    assert function.ondemand_closed.read(0, function.locate(10.0, 0.0)) == pytest.approx(10.0)


def test_more_time_less_work_and_running_machines_never_cost_more() -> None:
    function = solve()
    spares, works = (0.0, 0.3, 1.0, 4.0, 12.0, 24.0), (0.5, 2.0, 8.0, 24.0)
    for table in (
        function.run,
        function.idle_open,
        function.idle_closed,
        function.ondemand_open,
        function.ondemand_closed,
    ):
        for age in range(len(AGES)):
            for work in works:
                by_spare = [table.read(age, function.locate(work, spare)) for spare in spares]
                assert (
                    by_spare == sorted(by_spare, reverse=True)
                    or max(after - before for before, after in itertools.pairwise(by_spare)) < 0.02 * work
                )  # waiting has a small price
            for spare in spares:
                by_work = [table.read(age, function.locate(work, spare)) for work in works]
                assert by_work == sorted(by_work)
    for work in works:
        point = function.locate(work, 4.0)
        assert function.run.read(3, point) <= function.idle_open.read(3, point) + 1e-6


def test_calmer_markets_lower_prices_and_more_locations_cost_less() -> None:
    def worth(function: ValueFunction) -> float:
        return function.idle_open.read(2, function.locate(20.0, 5.0))

    stormy = ValueFunction(
        ValueParameters(
            open_hazards=scale_hazards(MEASURED.open_hazards, (3.0, 3.0)), closed_hazards=MEASURED.closed_hazards,
            spot_price=0.3, start_hours=0.1, work_hours=24.0, spare_hours=24.0,
        )
    )  # fmt: skip
    plain = solve()
    assert worth(plain) < worth(stormy)
    assert worth(solve(spot_price=0.2)) < worth(plain)
    assert worth(solve(second_chance=0.9)) < worth(plain)
    assert worth(solve(start_hours=0.5)) > worth(plain)


def test_a_two_state_market_with_free_starts_and_much_time_is_all_spot() -> None:
    function = solve(hazard=0.5, reopening=0.5, start_hours=0.005, work_hours=8.0, spare_hours=48.0)
    assert function.idle_open.read(0, function.locate(8.0, 48.0)) == pytest.approx(0.3 * 8, rel=0.1)


def test_waiting_with_little_spare_time_is_worth_no_more_than_on_demand() -> None:
    """A start on spot is no longer safe there, so the value jumps, and interpolation must not smooth the jump."""
    for start in (0.1, 0.5):
        function = solve(start_hours=start)
        for spare in (0.3 * start, 0.9 * start, start):
            assert function.wait_closed.read(0, function.locate(10.0, spare)) == pytest.approx(10.0 + start, rel=2e-3)
        assert function.wait_closed.read(0, function.locate(10.0, 3 * start)) < 10.0


def test_on_demand_kept_for_now_is_never_worth_what_leaving_it_at_once_is() -> None:
    """Otherwise rounding would decide between the two, and an old open market would never be entered."""
    function = solve(start_hours=0.2)
    for age in range(5, len(AGES)):
        entered, kept = function.enter_usd(age, 20.0, 6.0), function.keep_open.read(age, function.locate(20.0, 6.0))
        assert entered < kept - 0.02
        assert function.ondemand_open.read(age, function.locate(20.0, 6.0)) <= kept


def test_a_start_that_outlasts_young_spells_is_expected_to_be_lost_in_a_storm() -> None:
    calm, stormy = solve(start_hours=0.5, hazard=0.01), solve(start_hours=0.5, hazard=6.0)
    assert calm.starts[-1].survive == pytest.approx(math.exp(-0.005), rel=1e-3)
    assert stormy.starts[-1].survive == pytest.approx(math.exp(-3.0), rel=0.15)
    assert stormy.starts[-1].lost_hours < 0.2 < calm.starts[-1].lost_hours


def test_a_start_while_machines_run_loses_only_the_part_that_does_not_overlap() -> None:
    """On a spot that never closes: 0.2 h of work on-demand during the start, then 0.3 h of start without work."""
    for overlap in (0.2, 0.5):
        function = solve(hazard=0.0, start_hours=0.5, overlap_hours=overlap)
        assert function.enter_beside_usd(0, 10.0, 5.0) == pytest.approx(
            overlap + 0.3 * (10.0 + 0.5 - overlap), rel=1e-4
        )
        assert function.enter_usd(0, 10.0, 5.0) == pytest.approx(0.3 * (10.0 + 0.5), rel=1e-4)
    plain = solve(start_hours=0.5)
    assert plain.enter_beside_usd(3, 10.0, 5.0) == plain.enter_usd(3, 10.0, 5.0)


def test_on_demand_costs_less_the_more_of_a_later_start_overlaps() -> None:
    for spare in (0.6, 2.0, 8.0):
        found = [
            function.ondemand_open.read(3, function.locate(10.0, spare))
            for function in (solve(start_hours=0.5, overlap_hours=overlap) for overlap in (0.0, 0.25, 0.5))
        ]
        assert found == sorted(found, reverse=True) and found[0] > found[-1] + 0.01


def test_market_that_closes_during_a_start_leaves_running_machines_at_work() -> None:
    """A start as long as the overlap is lost for its price alone, so it is worth trying with no time to spare."""
    function = solve(hazard=3.0, reopening=0.1, start_hours=0.2, overlap_hours=0.2)
    on_demand = function.ondemand_closed.read(0, function.locate(10.0, 1.0))
    assert function.enter_beside_usd(0, 10.0, 1.0) < on_demand + 0.2 * 0.3
    assert function.enter_usd(0, 10.0, 1.0) > on_demand
