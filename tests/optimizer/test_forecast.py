"""The forecast of a plan: what the choice comes to under the production policy."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from broker.errors import NoOfferError
from broker.optimizer.explain import lift_limits
from broker.optimizer.forecast import (
    CostForecast,
    ForecastEstimates,
    find_deadline_chances,
    forecast_plan,
    list_influences,
)
from broker.optimizer.infeasible import explain_infeasible
from broker.spot.hazard import Observation
from broker.types import AcceleratorFigures
from broker.types.forecasts import BegunStart
from tests.optimizer.market import offer, plan, read

TASK = "resources: {accelerators: H100:8}\ngoal: {work: 40h, deadline: 60h, budget: 1000}"
SPOT_ONLY = "resources: {accelerators: H100:8, use_spot: true}\ngoal: {work: 40h, deadline: 60h, confidence: 0.3}"


def forecast(task: str = TASK, **options: object) -> CostForecast:
    found = forecast_plan(plan(task, [offer()], **options))
    assert found is not None
    return found


def test_recorded_markets_make_spot_more_expensive_than_its_published_band() -> None:
    chosen = plan(TASK, [offer(interruption_band=5.0)])
    found = forecast_plan(chosen)
    assert found is not None
    assert found.preemptions > 1
    assert found.usd.p10 < found.usd.p50 < found.usd.p90
    assert found.usd.p10 >= 40 * 10.0, "no run costs less than its work without a preemption"
    assert found.hours.p10 >= 40.0
    assert found.usd_mean > 1.5 * 40 * 10.0
    assert found.usd_mean == chosen.choice.expected_usd, "what is ranked is what is shown"
    assert found.hours.p90 <= 60.0


def test_spot_alone_may_miss_the_deadline_that_on_demand_keeps() -> None:
    alone, both = forecast(SPOT_ONLY), forecast()
    assert alone.deadline_chance is not None and 0.3 < alone.deadline_chance < 0.9
    assert alone.ondemand_hours == 0 and not alone.has_fallback
    assert both.deadline_chance == 1.0 and both.has_fallback and both.ondemand_hours > 0


def test_an_on_demand_choice_is_not_forecast_by_spot_markets() -> None:
    assert forecast_plan(plan(TASK.replace("1000", "5000"), [offer(spot_usd_hour=None)])) is None
    assert forecast_plan(plan("resources: {accelerators: H100:8, use_spot: true}", [offer()])) is None


def test_a_larger_budget_is_kept_more_often() -> None:
    chances = [forecast(TASK.replace("1000", str(budget))).budget_chance or 0.0 for budget in (800, 900, 1000, 2500)]
    assert chances == sorted(chances)
    assert chances[0] < 0.8 < chances[-1]


def test_every_price_scales_the_cost_and_nothing_else() -> None:
    one = forecast()
    double = forecast_plan(plan(TASK.replace("1000", "9000"), [offer(spot_usd_hour=20.0, ondemand_usd_hour=80.0)]))
    assert double is not None
    assert double.usd_mean == pytest.approx(2 * one.usd_mean)
    assert double.hours == one.hours


def test_own_preemptions_at_the_place_raise_the_forecast() -> None:
    place, zones = ("aws", "us-east-1", "us-east-1a", "big"), [offer(zone="us-east-1a")]
    free = TASK.replace(", budget: 1000", "")
    stormy = forecast_plan(plan(free, zones, history={place: Observation(preemptions=40.0, node_hours=40.0)}))
    calm = forecast_plan(plan(free, zones, history={place: Observation(preemptions=0.0, node_hours=500.0)}))
    assert stormy is not None and calm is not None
    assert calm.usd_mean < forecast().usd_mean < stormy.usd_mean


def test_preemptions_of_one_place_are_not_expected_at_another_of_the_same_cloud() -> None:
    zones = {region: offer(region=region, zone=f"{region}a") for region in ("us-east-1", "eu-west-1")}
    history = {
        ("aws", "us-east-1", "us-east-1a", "big"): Observation(preemptions=40.0, node_hours=40.0),
        ("aws", "eu-west-1", "eu-west-1a", "big"): Observation(preemptions=0.0, node_hours=500.0),
    }
    for offers in (list(zones.values()), list(zones.values())[::-1]):
        made = plan(TASK.replace(", budget: 1000", ""), offers, history=history)
        usd = {each.placement.offer.region: each.expected_usd for each in made.estimates if each.placement.is_spot}
        assert usd["eu-west-1"] < usd["us-east-1"]
        assert made.choice.placement.offer.region == "eu-west-1"


def test_more_places_at_a_similar_price_lower_the_cost_and_expensive_ones_do_not_count() -> None:
    zones = [offer(zone=f"us-east-1{letter}") for letter in "abc"]
    near = forecast_plan(plan(TASK, zones))
    dear = forecast_plan(plan(TASK, [zones[0], *(offer(zone=f"x{i}", spot_usd_hour=39.0) for i in range(5))]))
    assert near is not None and dear is not None
    assert (near.places, dear.places) == (3, 1)
    assert near.usd_mean < dear.usd_mean


def test_influences_are_listed_by_the_change_they_make() -> None:
    chosen = plan(TASK, [offer()])
    found = forecast_plan(chosen)
    assert found is not None
    changes = [abs(each.usd_mean - found.usd_mean) for each in list_influences(chosen)]
    assert len(changes) >= 4 and changes[0] > 0
    assert changes == sorted(changes, reverse=True)


def test_the_cheapest_on_demand_gang_is_the_fallback_whatever_its_machines() -> None:
    other = offer(cloud="lambda", region="us-west-1", instance_type="other", ondemand_usd_hour=22.0, spot_usd_hour=None)
    found = forecast_plan(plan(TASK, [offer(), other]))
    assert found is not None and found.ondemand_usd == pytest.approx(22.0 * (40 + 90 / 3600)), (
        "lambda bills 90 s of the start"
    )
    assert found.usd_mean < forecast().usd_mean


def test_refusals_raise_the_cost_of_spot_only_if_all_places_refused() -> None:
    offers = [offer(zone="us-east-1a"), offer(zone="us-east-1b")]
    own, some, none = (
        forecast_plan(plan(TASK, offers, is_refused=lambda each, zones=zones: each.offer.zone in zones))
        for zones in ((), ("us-east-1a",), ("us-east-1a", "us-east-1b"))
    )
    assert own is not None and some is not None and none is not None
    assert own.usd_mean == some.usd_mean < none.usd_mean


def test_spot_is_never_chosen_while_on_demand_would_cost_less() -> None:
    """The note of `plan` about cheaper on-demand never applies where both models compete."""
    draw = random.Random(7)
    noted = 0
    for _ in range(60):
        offers = [
            offer(region=f"r{i}", ondemand_usd_hour=40.0, spot_usd_hour=40.0 * draw.uniform(0.2, 1.2))
            for i in range(draw.randint(1, 7))
        ]
        goal = f"{{work: {draw.randint(2, 200)}h, deadline: {draw.randint(202, 600)}h}}"
        made = plan(f"resources: {{accelerators: H100:8}}\nnum_nodes: {draw.choice((1, 16))}\ngoal: {goal}", offers)
        found = forecast_plan(made)
        noted += found is not None
        assert found is None or not found.is_costlier_than_on_demand(made.hour_value_usd or 0.0)
    assert 10 < noted < 60


def test_spot_alone_that_would_often_be_late_is_refused_with_its_chance() -> None:
    task = read(SPOT_ONLY.replace("0.3", "0.9"))
    with pytest.raises(NoOfferError, match=r"nearest [\d.]+ h expected, \d\d % chance") as caught:
        plan(task, [offer()])
    error = explain_infeasible(caught.value, task, lambda changed: plan(changed, [offer()]))
    assert error.hints[0].startswith("extend the deadline")
    assert error.hints[1].startswith("drop `use_spot: true`, so that on-demand can take over in time: 2 placements fit")


def test_cheap_spot_is_not_refused_for_the_deadline_that_it_keeps_with_more_places() -> None:
    """One place is the cheapest strategy, and too often late; six places keep the deadline for little more."""
    cheap = [offer(zone=f"us-east-1{zone}", spot_usd_hour=10.0 + number) for number, zone in enumerate("abcdef")]
    dear = [offer(region="eu-west-1", zone=f"eu-west-1{zone}", spot_usd_hour=25.0) for zone in "abcdef"]
    task = SPOT_ONLY.replace("0.3", "0.9").replace("deadline: 60h", "deadline: 60h, hour_value: 0")
    made = plan(task, [*cheap, *dear])
    assert made.choice.placement.usd_hour == 10.0 and (made.choice.deadline_chance or 0.0) >= 0.9
    assert (made.choice.expected_usd or 0.0) < plan(task, dear).choice.expected_usd  # type: ignore[operator]
    listed = plan(lift_limits(read(task)), [*cheap, *dear])
    assert listed.choice.deadline_chance == made.choice.deadline_chance, "both show the chance of the same strategy"
    relaxed = plan(task.replace("0.9", "0.3"), [*cheap, *dear]).choice
    assert (relaxed.expected_usd or 0.0) <= (made.choice.expected_usd or 0.0)


def test_what_is_shown_beside_a_plan_has_as_many_places_as_the_plan() -> None:
    """With 0.3 required, fewer places suffice than with the default of 0.9."""
    offers = [offer(zone=f"us-east-1{zone}", spot_usd_hour=10.0 + number) for number, zone in enumerate("abcdef")]
    task = SPOT_ONLY.replace("deadline: 60h", "deadline: 60h, hour_value: 0")
    made, listed = plan(task, offers), plan(lift_limits(read(task)), offers)
    found = [forecast_plan(each) for each in (made, listed, plan(task.replace("0.3", "0.9"), offers))]
    places = [each.places for each in found if each is not None]
    assert places[0] == places[1] < places[2]


def test_the_chances_of_a_deadline_are_those_of_the_plan_made_for_it() -> None:
    made = plan(TASK.replace("budget: 1000", "hour_value: 0"), [offer()])
    assert made.choice.placement.is_spot
    alone = forecast(SPOT_ONLY).deadline_chance
    assert find_deadline_chances(made, work_hours=40.0, deadline_hours=60.0) == (1.0, alone)
    later = forecast(SPOT_ONLY.replace("60h", "90h")).deadline_chance
    assert find_deadline_chances(made, work_hours=40.0, deadline_hours=90.0) == (1.0, later)
    assert alone is not None and later is not None and alone < later
    # 39 h are too short even on-demand: nothing to continue on, and the chance is that of spot.
    together, least = find_deadline_chances(made, work_hours=40.0, deadline_hours=39.0)
    assert together == least and least is not None and least < 0.01
    # Half the work is done and half the time: on-demand takes 20 h.
    met, alone = find_deadline_chances(made, work_hours=20.0, deadline_hours=21.0)
    assert met == 1.0 and alone is not None and alone < 1.0
    assert find_deadline_chances(made, work_hours=0.0, deadline_hours=1.0) == (1.0, 1.0)
    assert find_deadline_chances(made, work_hours=1.0, deadline_hours=0.0) == (0.0, 0.0)


def test_a_fallback_that_is_too_slow_for_the_deadline_gives_no_certainty() -> None:
    """Spot runs on faster machines than the on-demand gang that the plan lists."""
    figures = {
        name: AcceleratorFigures(name=name, memory_gib=80, bf16_dense_tflops=peak)
        for name, peak in (("H100", 900.0), ("A100", 300.0))
    }
    offers = [offer(ondemand_usd_hour=None), offer(accelerator="A100", spot_usd_hour=None, instance_type="old")]
    text = 'resources: {accelerators: {A100: 8, H100: 8}}\ngoal: {work: {hours: 40, "on": "H100:8"}, deadline: 500h}'
    made = plan(text, offers, figures=figures)
    assert made.choice.placement.is_spot and made.estimates[-1].expected_hours == pytest.approx(120, rel=0.05)
    together, alone = find_deadline_chances(made, work_hours=40.0, deadline_hours=110.0)
    assert together == alone and alone is not None and 0 < alone < 1
    assert find_deadline_chances(made, work_hours=40.0, deadline_hours=130.0)[0] == 1.0


def test_an_on_demand_choice_meets_a_deadline_or_does_not() -> None:
    made = plan(TASK.replace("1000", "5000"), [offer(spot_usd_hour=None)])
    chances = [
        find_deadline_chances(made, work_hours=20.0, deadline_hours=hours) for hours in (20.05, 20.1)
    ]  # half the work, and one start
    assert chances == [(0.0, None), (1.0, None)]
    begun = BegunStart(hours=1 / 12, is_spot=False)  # its machines are up
    assert find_deadline_chances(made, work_hours=20.0, deadline_hours=20.01, begun=begun) == (1.0, None)
    assert find_deadline_chances(made, work_hours=20.0, deadline_hours=19.99, begun=begun) == (0.0, None)
    other = replace(begun, is_spot=True)  # on-demand is still to start
    assert find_deadline_chances(made, work_hours=20.0, deadline_hours=20.05, begun=other) == (0.0, None)


def test_machines_that_are_up_have_their_start_behind_them() -> None:
    """Twenty hours of work, a start of 5 minutes, and a deadline in 20 h and 1 minute."""
    made = plan(TASK.replace("budget: 1000", "hour_value: 0"), [offer()])
    assert made.choice.placement.is_spot
    left_hours = 20.0 + 1 / 60

    def find(begun: BegunStart) -> tuple[float, float | None]:
        return find_deadline_chances(made, work_hours=20.0, deadline_hours=left_hours, begun=begun)

    none, spot, sure = (
        find(BegunStart(hours=hours, is_spot=kind)) for hours, kind in ((0, True), (1 / 12, True), (1 / 12, False))
    )
    assert sure == (1.0, none[1]), "on-demand runs, and finishes in time"
    assert none[1] is not None and spot[1] is not None
    assert none[0] == none[1] <= spot[1] == spot[0] < 1.0, "on-demand could not start in time any more"


def test_on_demand_of_a_faster_kind_keeps_the_deadline_of_slow_spot() -> None:
    figures = {
        name: AcceleratorFigures(name=name, memory_gib=80, bf16_dense_tflops=peak)
        for name, peak in (("H100", 900.0), ("A100", 300.0))
    }
    slow = offer(accelerator="A100", ondemand_usd_hour=None, spot_usd_hour=1.0, instance_type="old")
    text = 'resources: {accelerators: {A100: 8, H100: 8}}\ngoal: {work: {hours: 40, "on": "H100:8"}, deadline: 500h}'
    made = plan(text, [slow, offer(spot_usd_hour=None)], figures=figures)
    assert made.choice.placement.offer is slow
    together, alone = find_deadline_chances(made, work_hours=40.0, deadline_hours=110.0)
    assert together == 1.0, "40 h on H100"
    assert alone is not None and alone < 0.1, "120 h on A100"


def test_a_plan_from_another_process_keeps_its_forecast() -> None:
    made = plan(TASK, [offer()])
    sent = ForecastEstimates(made.estimates[:2])
    sent.forecast = forecast()
    assert forecast_plan(replace(made, estimates=sent)) == forecast()
