"""Forecasts of a task with several kinds of machines count on a change between them, as a managed job makes it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from broker.optimizer.forecast import CostForecast, forecast_plan
from broker.types import AcceleratorFigures, Estimate, Offer
from tests.optimizer.market import offer, plan

H100 = offer(region="us-east-1", instance_type="h", ondemand_usd_hour=40.0, spot_usd_hour=10.0)
A100 = offer(
    region="us-west-2", instance_type="a", accelerator="A100", ondemand_usd_hour=24.0, spot_usd_hour=9.0,
)  # fmt: skip
FIGURES = {
    "H100": AcceleratorFigures(name="H100", memory_gib=80, bf16_dense_tflops=989.0, memory_bandwidth_gbs=3350.0),
    "A100": AcceleratorFigures(name="A100", memory_gib=80, bf16_dense_tflops=312.0, memory_bandwidth_gbs=2039.0),
}
GOAL = "goal: {work: 40h, deadline: 60h, confidence: 0.01, hour_value: 0}"
A_SPOT, A_ONDEMAND = "{accelerators: A100:8, use_spot: true}", "{accelerators: A100:8, use_spot: false}"
H_SPOT, H_ONDEMAND = "{accelerators: H100:8, use_spot: true}", "{accelerators: H100:8, use_spot: false}"


def find(
    kind: str, *alternatives: str, key: str = "any_of", more: str = GOAL, offers: tuple[Offer, ...] = ()
) -> Estimate:
    """Return the estimate of a kind on spot in the plan of a task with these alternatives."""
    text = f"resources: {{{key}: [{', '.join(alternatives)}]}}\n{more}"
    made = plan(text, list(offers or (A100, H100)), figures=FIGURES)
    return next(each for each in made.estimates if each.placement.is_spot and each.placement.offer.accelerator == kind)


def test_on_demand_of_another_kind_is_the_fallback_of_spot() -> None:
    alone, both = find("A100", A_SPOT), find("A100", A_SPOT, H_ONDEMAND)
    assert alone.deadline_chance is not None and alone.deadline_chance < 0.9
    assert both.deadline_chance == 1.0
    assert both.breakdown is not None and both.breakdown.ondemand_hours > 0
    assert find("A100", A_SPOT, H_ONDEMAND, key="ordered").deadline_chance == alone.deadline_chance


def test_cheaper_on_demand_of_another_kind_lowers_the_cost_of_spot() -> None:
    own, other = find("H100", H_SPOT, H_ONDEMAND), find("H100", H_SPOT, H_ONDEMAND, A_ONDEMAND)
    assert other.breakdown is not None and own.breakdown is not None
    assert own.breakdown.ondemand_usd_hour == pytest.approx(40.0)
    assert other.breakdown.ondemand_usd_hour == pytest.approx(24.0)
    assert (other.expected_usd or 0.0) < (own.expected_usd or 0.0)


def test_slower_on_demand_of_another_kind_is_no_fallback() -> None:
    """It would have to begin earlier than the replays, which continue at the same speed, assume."""
    goal = "goal: {work: {hours: 16, on: H100:8}, deadline: 60h, confidence: 0.01, hour_value: 0}"
    own, other = (find("H100", H_SPOT, H_ONDEMAND, *more, more=goal) for more in ((), (A_ONDEMAND,)))
    assert other.breakdown == own.breakdown
    slow = find("A100", A_SPOT, H_ONDEMAND, more=goal)
    assert slow.deadline_chance == 1.0, "the faster kind is in time whenever the slower one would be"


def test_spot_of_another_kind_is_a_candidate_place() -> None:
    offers = [A100, replace(H100, spot_usd_hour=9.0)]
    made = [
        forecast_plan(plan(f"resources: {{any_of: [{', '.join(each)}]}}\n{GOAL}", offers, figures=FIGURES))
        for each in ((A_SPOT,), (A_SPOT, H_SPOT))
    ]
    one, two = made
    assert isinstance(one, CostForecast) and isinstance(two, CostForecast)
    assert (one.places, two.places) == (1, 2)
    assert two.waiting_hours < one.waiting_hours and two.usd_mean < one.usd_mean


def test_program_for_the_same_ranks_changes_only_between_equal_numbers_of_accelerators() -> None:
    ranks = f"{GOAL}\ncheckpoint: {{same_ranks: true}}"
    four = H_ONDEMAND.replace("H100:8", "H100:4")
    half = offer(region="us-east-1", instance_type="h4", accelerator_count=4, ondemand_usd_hour=20.0)
    alone = find("A100", A_SPOT, more=ranks)
    assert find("A100", A_SPOT, four, more=ranks, offers=(A100, half)).deadline_chance == alone.deadline_chance
    assert find("A100", A_SPOT, four, offers=(A100, half)).deadline_chance == 1.0
    assert find("A100", A_SPOT, H_ONDEMAND, more=ranks).deadline_chance == 1.0


def test_price_limit_of_an_alternative_holds_for_its_machines_only() -> None:
    dear = "{accelerators: H100:8, use_spot: false, max_hourly_cost: 30}"
    alone = find("A100", A_SPOT)
    assert find("A100", A_SPOT, dear).deadline_chance == alone.deadline_chance
    wide = dear.replace("30", "50")
    assert find("A100", A_SPOT, wide).deadline_chance == 1.0
