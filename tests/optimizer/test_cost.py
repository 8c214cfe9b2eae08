"""Expected hours and dollars: limits computed by hand, and simulations of the same process."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.optimizer.billing import bill_recovery_s
from broker.optimizer.cost import (
    RunInputs,
    expected_hours,
    run_on_demand,
    run_on_spot,
    run_on_spot_then_on_demand,
)
from broker.spot.interval import best_interval_s
from broker.types import CheckpointSpec

SAMPLES = 4000


@given(st.floats(1, 1000), st.floats(1e-5, 0.5), st.floats(1e-5, 0.5), st.floats(1, 600), st.floats(0, 3600))
def test_more_hazard_never_takes_less_time(work: float, one: float, two: float, stall: float, restart: float) -> None:
    low, high = sorted((one, two))
    tau = best_interval_s(stall, low)
    slow = expected_hours(work, high, tau, stall, restart)
    assert expected_hours(work, low, tau, stall, restart) <= slow * (1 + 1e-9)


@given(st.floats(1, 1000), st.floats(10, 36000), st.floats(0, 60))
def test_without_hazard_only_the_stalls_are_added(work: float, tau: float, stall: float) -> None:
    exact = work * (1 + stall / tau)
    assert expected_hours(work, 0, tau, stall, 300) == pytest.approx(exact)
    assert expected_hours(work, 1e-9, tau, stall, 300) == pytest.approx(exact, rel=1e-3)


@given(st.floats(1e-4, 0.5), st.floats(1, 300))
def test_daly_interval_is_near_the_best_of_a_grid(hazard: float, stall: float) -> None:
    best = min(expected_hours(100, hazard, 10 * 1.15**k, stall, 300) for k in range(60))
    assert expected_hours(100, hazard, best_interval_s(stall, hazard), stall, 300) <= best * 1.02


def test_recoveries_that_can_be_struck_change_little() -> None:
    """Daly's model has exp(H R) / H where ours has 1/H + R: they differ by less than (H R)^2."""
    work, hazard, tau, stall, restart = 100.0, 0.05, 3600.0, 30.0, 900.0
    ours = expected_hours(work, hazard, tau, stall, restart)
    dalys = work / (tau / 3600) * math.exp(hazard * restart / 3600) / hazard * math.expm1(hazard * (tau + stall) / 3600)
    assert ours == pytest.approx(dalys, rel=(hazard * restart / 3600) ** 2)
    assert ours <= dalys


@dataclass
class Run:
    """One simulated run: hours and billed hours at each price."""

    hours: float = 0.0
    spot_hours: float = 0.0
    ondemand_hours: float = 0.0


def simulate(draw: random.Random, terms: RunInputs, segments: int, switch_after: float | None) -> Run:
    """Simulate stretch by stretch; leave spot after the preemption that brings the losses over `switch_after`."""
    tau, stall = terms.every_hours, terms.checkpoint.stall_s / 3600
    run, lost, left = Run(), 0.0, segments
    while left:
        strike = draw.expovariate(terms.hazard)
        if strike >= tau + stall:
            run.hours += tau + stall
            run.spot_hours += tau + stall
            left -= 1
            continue
        run.hours += strike + terms.recovery_hours
        run.spot_hours += strike
        lost += strike + terms.recovery_hours
        if switch_after is not None and lost > switch_after:
            run.hours += left * tau
            run.ondemand_hours += left * tau + terms.recovery_billed_hours
            return run
        run.spot_hours += terms.recovery_billed_hours
    return run


def make_terms(hazard: float, deadline: float | None, work: float = 24.0) -> RunInputs:
    spec = CheckpointSpec(stall_s=60, restart_s=900)
    return RunInputs(
        work_hours=work, hazard=hazard, checkpoint=spec, recovery_hours=0.25, recovery_billed_hours=0.2,
        deadline_hours=deadline,
    )  # fmt: skip


@pytest.mark.parametrize("hazard", [0.01, 0.1, 0.5])
def test_spot_agrees_with_a_simulation(hazard: float) -> None:
    loose = make_terms(hazard, 30.0)
    segments = max(1, round(24 / loose.every_hours))
    terms = make_terms(hazard, 30.0, work=segments * loose.every_hours)  # whole stretches, as in the simulation
    course = run_on_spot(terms)
    draw = random.Random(3)
    runs = [simulate(draw, terms, segments, None) for _ in range(SAMPLES)]
    assert course.hours == pytest.approx(sum(run.hours for run in runs) / SAMPLES, rel=0.01)
    assert course.spot_hours == pytest.approx(sum(run.spot_hours for run in runs) / SAMPLES, rel=0.01)
    assert course.deadline_chance == pytest.approx(sum(run.hours <= 30 for run in runs) / SAMPLES, abs=0.034)
    parts = course.work_hours + course.stall_hours + course.lost_hours + course.preemptions * course.recovery_hours
    assert parts == pytest.approx(course.hours)


@pytest.mark.parametrize(("hazard", "deadline"), [(0.05, 26.5), (0.1, 28.0), (0.1, 32.0), (0.5, 34.0)])
def test_spot_then_on_demand_agrees_with_a_simulation_and_is_never_late(hazard: float, deadline: float) -> None:
    loose = make_terms(hazard, deadline)
    segments = max(1, round(24 / loose.every_hours))
    terms = make_terms(hazard, deadline, work=segments * loose.every_hours)
    course = run_on_spot_then_on_demand(terms)
    assert course is not None
    assert course.switch_after_hours is not None
    draw = random.Random(4)
    runs = [simulate(draw, terms, segments, course.switch_after_hours) for _ in range(SAMPLES)]
    assert max(run.hours for run in runs) <= deadline + 1e-9
    assert course.hours == pytest.approx(sum(run.hours for run in runs) / SAMPLES, rel=0.01)
    assert course.spot_hours == pytest.approx(sum(run.spot_hours for run in runs) / SAMPLES, rel=0.02)
    assert course.ondemand_hours == pytest.approx(sum(run.ondemand_hours for run in runs) / SAMPLES, rel=0.06, abs=0.15)
    switched = sum(run.ondemand_hours > 0 for run in runs) / SAMPLES
    assert course.switch_chance == pytest.approx(switched, abs=0.034)


def test_without_room_for_one_loss_nothing_starts_on_spot() -> None:
    assert run_on_spot_then_on_demand(make_terms(0.1, 24.3)) is None
    assert run_on_spot_then_on_demand(make_terms(0.1, None)) is None


def test_much_slack_makes_the_switch_the_same_as_spot() -> None:
    spot, switching = run_on_spot(make_terms(0.1, 500.0)), run_on_spot_then_on_demand(make_terms(0.1, 500.0))
    assert switching is not None
    assert switching.hours == pytest.approx(spot.hours)
    assert switching.spot_hours == pytest.approx(spot.spot_hours)
    assert switching.ondemand_hours == pytest.approx(0, abs=1e-6)


def test_on_demand_stalls_only_where_the_task_fixes_an_interval() -> None:
    free = RunInputs(work_hours=10, hazard=0, checkpoint=CheckpointSpec(), recovery_hours=0, recovery_billed_hours=0)
    assert run_on_demand(free).hours == 10
    fixed = CheckpointSpec(every_s=3600, stall_s=36)
    saving = RunInputs(work_hours=10, hazard=0, checkpoint=fixed, recovery_hours=0, recovery_billed_hours=0)
    assert run_on_demand(saving).hours == pytest.approx(10.1)


def test_deadline_chance_is_a_chance_and_grows_with_time() -> None:
    courses = [run_on_spot(make_terms(0.01, deadline, work=100.0)) for deadline in (99, 103, 104, 110, 200)]
    chances = [course.deadline_chance or 0.0 for course in courses]
    assert chances[0] == 0
    assert chances == sorted(chances)
    assert chances[-1] == pytest.approx(1)


def test_spot_that_never_gets_through_a_stretch_has_no_finite_cost() -> None:
    terms = RunInputs(
        work_hours=100, hazard=100, checkpoint=CheckpointSpec(every_s=36_000), recovery_hours=0.1,
        recovery_billed_hours=0.1, deadline_hours=1000,
    )  # fmt: skip
    course = run_on_spot(terms)
    assert math.isinf(course.hours)
    assert course.deadline_chance == 0


def test_a_lost_machine_is_not_billed_and_clouds_start_the_clock_at_different_times() -> None:
    assert bill_recovery_s("runpod", 1, 300, 0) == 270  # one node: nothing runs until the loss is detected
    assert bill_recovery_s("runpod", 4, 300, 0) == 292.5  # of four nodes, three are billed meanwhile
    assert bill_recovery_s("lambda", 1, 300, 0) < bill_recovery_s("aws", 1, 300, 0)
    assert bill_recovery_s("aws", 1, 0, 60) == 60  # reading a checkpoint back is always billed
