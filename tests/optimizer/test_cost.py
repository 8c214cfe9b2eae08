"""The expected course and price of a run, on spot and on demand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.lab.markets import make_site
from broker.lab.replay import Case, replay
from broker.lab.traces import Trace
from broker.optimizer.billing import bill_recovery_s
from broker.optimizer.cost import GangPrices, SpotInputs, find_budget_chance, price_run, run_on_demand, run_on_spot
from broker.optimizer.data_cost import DataCost
from broker.spot.market_model import MarketEvidence
from broker.spot.policies import load_policy
from broker.types import CheckpointSpec
from tests.tiers import examples

SPEC = CheckpointSpec(stall_s=10, restart_s=300)
BASE = SpotInputs(work_hours=40.0, checkpoint=SPEC, recovery_hours=0.1, unbilled_hours=0.02)
DUE = replace(BASE, deadline_hours=60.0, has_fallback=True)
PRICES = GangPrices(spot_usd_hour=10.0, ondemand_usd_hour=40.0)
DATA = DataCost(start_usd=1.0, finish_usd=2.0, checkpoint_usd=0.01, restore_usd=0.5, storage_usd_hour=0.1)
inputs = st.builds(
    SpotInputs,
    work_hours=st.floats(1, 300),
    checkpoint=st.just(SPEC),
    recovery_hours=st.floats(0.02, 3),
    unbilled_hours=st.floats(0, 0.02),
    band_hazard=st.floats(0, 0.05),
    deadline_hours=st.none() | st.floats(2, 900),
    has_fallback=st.booleans(),
    places=st.integers(1, 6),
    evidence=st.builds(MarketEvidence, is_open=st.sampled_from([None, True, False])),
)
some = settings(deadline=None, max_examples=examples(40))


@given(inputs)
@some
def test_the_ranked_mean_is_the_mean_of_the_runs_that_are_shown(given: SpotInputs) -> None:
    course, runs = run_on_spot(given), given.list_runs()
    assert course.hours == pytest.approx(runs.mean(lambda run: run.hours), rel=0.02)
    shown = runs.mean(lambda run: price_run(run, PRICES, DATA, course.checkpoints))
    assert price_run(course, PRICES, DATA, course.checkpoints) == pytest.approx(shown, rel=0.02)


@given(inputs)
@some
def test_the_terms_add_up_to_the_hours_and_none_is_negative(given: SpotInputs) -> None:
    course = run_on_spot(given)
    terms = (course.stall_hours, course.lost_hours, course.starting_hours, course.waiting_hours)
    assert min(*terms, course.spot_hours, course.ondemand_hours, course.preemptions) >= 0
    if course.starting_hours > 0:
        assert sum(terms) + course.work_hours == pytest.approx(course.hours)


def test_more_places_cost_less_and_wait_less() -> None:
    courses = [run_on_spot(replace(DUE, places=count)) for count in (1, 3, 6)]
    usd = [price_run(each, PRICES, DATA, each.checkpoints) for each in courses]
    assert usd == sorted(usd, reverse=True)
    assert courses[0].waiting_hours > courses[-1].waiting_hours


def test_a_higher_interruption_band_preempts_more_and_costs_more() -> None:
    calm, wild = run_on_spot(replace(BASE, band_hazard=0.001)), run_on_spot(replace(BASE, band_hazard=0.05))
    assert wild.preemptions > calm.preemptions + 1
    assert wild.spot_hours > calm.spot_hours
    assert wild.hazard == pytest.approx(calm.hazard + 0.049)


def test_without_checkpoints_long_work_on_spot_never_ends() -> None:
    never = CheckpointSpec(every_s=400 * 3600)
    course = run_on_spot(replace(BASE, work_hours=200.0, checkpoint=never))
    assert course.hours > 1e6


def test_start_up_beyond_the_recorded_range_is_counted_at_every_start() -> None:
    one, three = (run_on_spot(replace(BASE, recovery_hours=hours)) for hours in (1.0, 3.0))
    assert three.spot_hours > one.spot_hours + 1.9 * one.preemptions


@given(inputs, st.none() | st.floats(0.1, 48))
@some
def test_no_run_is_shorter_than_its_work_and_first_start_or_bills_more_than_it_lasts(
    given: SpotInputs, every_hours: float | None
) -> None:
    """With starts of hours, hours between checkpoints, or both."""
    spec = SPEC if every_hours is None else CheckpointSpec(every_s=every_hours * 3600, stall_s=10)
    given = replace(given, checkpoint=spec, unbilled_hours=0.0)
    for run in given.list_runs().runs:
        assert run.hours >= 0.999 * given.work_hours + given.recovery_hours - 1e-6
        assert run.spot_hours + run.ondemand_hours <= run.hours * (1 + 1e-6)
        assert run.spot_hours + run.ondemand_hours >= 0.999 * given.work_hours


@pytest.mark.parametrize(
    ("work", "slack", "recovery", "every", "has_spot"),
    [
        (1 / 6, 2 / 60, 5 / 60, None, False),
        (24, 0.45, 0.1, 3.0, False),
        (24, 3.3, 0.1, 3.0, True),
        (1, 1, 0.1, None, True),
    ],
)
def test_spot_is_counted_on_only_with_time_for_a_start_that_fails(
    work: float, slack: float, recovery: float, every: float | None, has_spot: bool
) -> None:
    """The policy starts on spot only if on-demand is in time after a loss just before the first checkpoint."""
    spec = SPEC if every is None else CheckpointSpec(every_s=every * 3600, stall_s=10)
    given = replace(
        DUE, work_hours=work, checkpoint=spec, recovery_hours=recovery, deadline_hours=work + recovery + slack, places=3
    )
    assert (run_on_spot(given).spot_hours > 0.1 * work) is has_spot
    site = make_site(Trace(name="t", gap_hours=1.0, counts=(1,) * 100), start_hours=recovery)
    case = Case(
        sites=(site,), work_hours=work, deadline_hours=work + recovery + slack, save_every_hours=given.every_hours
    )
    assert (replay(case, load_policy("adaptive")).spot_hours > 0.1 * work) is has_spot


def test_a_job_without_checkpoints_continues_on_demand_once_its_slack_is_used_up() -> None:
    """12 h of work in 40 h, started over after each preemption: spot for at most 28 h, then on-demand."""
    spec = CheckpointSpec(every_s=12 * 3600)
    course = run_on_spot(replace(DUE, work_hours=12.0, checkpoint=spec, deadline_hours=40.0))
    assert course.hours <= 40.0
    assert course.spot_hours + course.ondemand_hours <= course.hours
    assert course.ondemand_hours > 2


def test_a_deadline_without_fallback_has_a_chance_and_with_one_is_certain_or_hopeless() -> None:
    alone = replace(DUE, has_fallback=False)
    chances = [replace(alone, deadline_hours=hours).find_deadline_chance() or 0.0 for hours in (41, 50, 80, 400)]
    assert chances == sorted(chances)
    assert chances[0] < 0.3
    assert chances[-1] > 0.9
    assert DUE.find_deadline_chance() == 1.0
    assert replace(DUE, deadline_hours=40.05).find_deadline_chance() == 0.0
    assert BASE.find_deadline_chance() is None


def test_only_a_job_with_fallback_shows_when_it_switches() -> None:
    assert run_on_spot(DUE).switch_after_hours == pytest.approx(60 - 40 - 0.1, abs=1.5)
    assert run_on_spot(replace(DUE, has_fallback=False)).switch_after_hours is None


def test_on_demand_stalls_only_where_the_task_fixes_an_interval() -> None:
    assert run_on_demand(10.0, CheckpointSpec()).hours == 10
    assert run_on_demand(10.0, CheckpointSpec(every_s=3600, stall_s=36)).hours == pytest.approx(10.1)
    assert run_on_demand(10.0, SPEC, deadline_hours=9.0).deadline_chance == 0.0


def test_the_first_start_on_demand_takes_time_and_money_and_may_miss_the_deadline() -> None:
    course = run_on_demand(10.0, SPEC, deadline_hours=10.0, recovery_hours=0.1, recovery_billed_hours=0.08)
    assert (course.hours, course.ondemand_hours, course.deadline_chance) == (pytest.approx(10.1), 10.08, 0.0)
    assert price_run(course, PRICES, DATA, course.checkpoints) == pytest.approx(10.08 * 40 + 1 + 2 + 10.1 * 0.1)
    assert run_on_demand(10.0, SPEC, deadline_hours=10.1, recovery_hours=0.1).deadline_chance == 1.0
    assert course.scale_hours(0.5) == pytest.approx(5.1)
    done = run_on_demand(0.0, SPEC, deadline_hours=0.0, recovery_hours=0.1, recovery_billed_hours=0.08)
    assert (done.hours, done.ondemand_hours, done.deadline_chance) == (0.0, 0.0, 1.0)


@pytest.mark.parametrize("spare_hours", [-0.01, 0.0, 0.01])
def test_a_run_that_has_no_time_for_spot_is_the_run_on_demand(spare_hours: float) -> None:
    """One model: work and stalls of 40.4 h and a start of 0.1 h, whichever of both forecasts them."""
    fixed = CheckpointSpec(every_s=3600, stall_s=36)
    limit = 40.4 + 0.1 + spare_hours
    given = replace(DUE, checkpoint=fixed, deadline_hours=limit)
    alone = run_on_demand(40.0, fixed, deadline_hours=limit, recovery_hours=0.1, recovery_billed_hours=0.08)
    assert given.find_deadline_chance() == alone.deadline_chance == float(spare_hours >= 0)
    if spare_hours <= 0:
        spot = run_on_spot(given)
        assert (spot.hours, spot.spot_hours) == (pytest.approx(alone.hours), 0.0)
        assert (spot.ondemand_hours, spot.starting_hours) == pytest.approx((alone.ondemand_hours, alone.starting_hours))


def test_a_preemption_loses_half_an_interval_of_work() -> None:
    hourly = replace(BASE, checkpoint=replace(SPEC, every_s=3600.0))
    assert (hourly.every_hours, hourly.lost_hours) == (1.0, 0.5)
    assert replace(hourly, work_hours=0.5).lost_hours == 0.25, "no interval is longer than the work"


def test_a_budget_that_is_met_exactly_is_kept() -> None:
    alone = run_on_demand(40.0, SPEC)
    usd = price_run(alone, PRICES, DATA, alone.checkpoints)
    chances = [find_budget_chance(alone, PRICES, DATA, budget) for budget in (usd - 0.01, usd, usd + 0.01)]
    assert chances == [0.0, 1.0, 1.0]


def test_budget_chance_grows_with_the_budget() -> None:
    course = run_on_spot(DUE)
    chances = [find_budget_chance(course, PRICES, DATA, budget) for budget in (300, 600, 1000, 3000)]
    assert chances == sorted(chances)
    assert chances[0] < 0.1 < 0.9 < chances[-1]
    fixed = run_on_demand(10.0, SPEC)
    assert [find_budget_chance(fixed, PRICES, DATA, budget) for budget in (399.0, 405.0)] == [0.0, 1.0]


def test_a_lost_machine_is_not_billed_and_clouds_start_the_clock_at_different_times() -> None:
    assert bill_recovery_s("runpod", 1, 300, 0) == 270  # one node: nothing runs until the loss is detected
    assert bill_recovery_s("runpod", 4, 300, 0) == 292.5  # of four nodes, three are billed meanwhile
    assert bill_recovery_s("lambda", 1, 300, 0) < bill_recovery_s("aws", 1, 300, 0)
    assert bill_recovery_s("aws", 1, 0, 60) == 60  # reading a checkpoint back is always billed


def test_a_job_that_will_not_need_on_demand_shows_no_switch_to_it() -> None:
    assert run_on_spot(replace(DUE, deadline_hours=4000.0)).switch_after_hours is None
