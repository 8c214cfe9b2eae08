"""The ranking, on offers small enough to check by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.errors import NoOfferError
from broker.optimizer.filters import find_alternative
from broker.optimizer.planner import make_plan
from broker.optimizer.ranking import SAME_SCORE
from broker.task.loader import load_tasks_text
from broker.types import AcceleratorFigures, Offer, Plan

prices = st.floats(0.1, 100)


def offer(cloud: str = "aws", region: str = "us-east-1", **fields: object) -> Offer:
    defaults: dict[str, object] = {
        "zone": None, "instance_type": "big", "vcpus": 96, "memory_gib": 768, "accelerator": "H100",
        "accelerator_count": 8, "accelerator_memory_gib": 80, "ondemand_usd_hour": 40.0, "spot_usd_hour": 10.0,
    }  # fmt: skip
    return Offer(cloud=cloud, region=region, **{**defaults, **fields})  # type: ignore[arg-type]


def plan(text: str, offers: list[Offer], **options: object) -> Plan:
    (task,) = load_tasks_text(f"{text}\nrun: x", "train.yaml")
    return make_plan(task, offers, prices_as_of="2026-01-01", **options)  # type: ignore[arg-type]


H100 = "resources: {accelerators: H100:8, use_spot: true}"


def test_without_work_the_cheapest_hour_wins() -> None:
    chosen = plan(H100, [offer("gcp", spot_usd_hour=9.0), offer("aws", spot_usd_hour=8.0)]).choice
    assert chosen.placement.offer.cloud == "aws"
    assert chosen.expected_usd is None


def test_often_interrupted_machine_loses_to_a_slightly_more_expensive_calm_one() -> None:
    wild = offer("aws", spot_usd_hour=10.0, interruption_band=100)
    calm = offer("gcp", spot_usd_hour=10.01, interruption_band=5)
    text = f"{H100}\nnum_nodes: 16\ngoal: {{work: 100h}}\ncheckpoint: {{stall: 5m, restart: 30m}}"
    assert plan(H100, [wild, calm]).choice.placement.offer is wild
    assert plan(text, [wild, calm]).choice.placement.offer is calm


def test_goal_considers_on_demand_too_and_a_tight_deadline_chooses_it() -> None:
    base = "resources: {accelerators: H100:8}\nnum_nodes: 64\ncheckpoint: {stall: 60s, restart: 2h}\ngoal: "
    loose = plan(base + "{work: 100h, deadline: 60d}", [offer(interruption_band=100)])
    tight = plan(base + "{work: 100h, deadline: 102.5h, confidence: 0.99}", [offer(interruption_band=100)])
    assert loose.choice.placement.is_spot
    assert not tight.choice.placement.is_spot
    assert tight.choice.deadline_chance == 1.0
    with pytest.raises(NoOfferError, match="deadline"):  # 2 h to start, and 100 h of work
        plan(base + "{work: 100h, deadline: 101h}", [offer(interruption_band=100)])


def test_budget_is_never_exceeded() -> None:
    with pytest.raises(NoOfferError, match="budget"):
        plan("resources: {accelerators: H100:8}\ngoal: {work: 100h, budget: 10}", [offer()])


def test_local_cloud_is_never_chosen_unless_named() -> None:
    local = offer("local", spot_usd_hour=0.01)
    assert plan(H100, [local, offer("aws")]).choice.placement.offer.cloud == "aws"
    with pytest.raises(NoOfferError):
        plan(H100, [local])


def test_ordered_alternatives_keep_their_order() -> None:
    offers = [offer("aws"), offer("gcp", accelerator="A100", spot_usd_hour=1.0)]
    text = "resources: {accelerators: [H100:8, A100:8], use_spot: true}"
    assert plan(text, offers).choice.placement.offer.accelerator == "H100"


def test_error_names_place_filters_and_nearest() -> None:
    with pytest.raises(NoOfferError) as caught:
        plan("resources:\n  accelerators: H100:4\n  region: mars", [offer(), offer(accelerator_count=4)])
    assert "train.yaml:2:3" in caught.value.message
    assert "accelerator count" in caught.value.message
    assert "nearest us-east-1" in caught.value.message


def test_unusable_and_refused_places_are_left_out() -> None:
    offers = [offer("aws", spot_usd_hour=1.0), offer("gcp", spot_usd_hour=2.0), offer("oci", spot_usd_hour=3.0)]
    usable = frozenset({"gcp", "oci"})
    assert plan(H100, offers, usable_clouds=usable).choice.placement.offer.cloud == "gcp"
    refused = plan(H100, offers, usable_clouds=usable, avoid=lambda each: each.offer.cloud == "gcp")
    assert refused.choice.placement.offer.cloud == "oci"


def test_work_measured_on_one_accelerator_scales_to_another() -> None:
    text = "resources: {accelerators: H100:8}\ngoal: {work: {hours: 90, on: A100:8}}"
    peaks = {"H100": 900.0, "A100": 300.0}
    figures = {
        name: AcceleratorFigures(name=name, memory_gib=80, bf16_dense_tflops=peak) for name, peak in peaks.items()
    }
    hours = plan(text, [offer(spot_usd_hour=None)], figures=figures).choice.expected_hours
    assert hours == pytest.approx(30, rel=0.05)


@given(st.lists(st.tuples(prices, prices, st.sampled_from([None, 5, 20, 100])), min_size=1, max_size=8), st.booleans())
def test_choice_is_the_minimum_of_all_estimates(rows: list[tuple[float, float, float | None]], has_work: bool) -> None:
    offers = [
        offer(region=f"r{i}", ondemand_usd_hour=a, spot_usd_hour=b, interruption_band=band)
        for i, (a, b, band) in enumerate(rows)
    ]
    made = plan("resources: {accelerators: H100:8}\ngoal: " + ("{work: 50h}" if has_work else "{}"), offers)
    scores = [each.placement.usd_hour for each in made.estimates]
    if has_work:
        assert made.hour_value_usd is not None
        scores = [
            (each.expected_usd or 0) + made.hour_value_usd * (each.expected_hours or 0) for each in made.estimates
        ]
    assert scores[1:] == sorted(scores[1:])
    assert scores[0] <= min(scores) * SAME_SCORE
    assert len(scores) == 2 * len(rows)


def test_each_placement_has_its_alternative_and_one_that_fits_two_has_the_first() -> None:
    text = "{accelerators: H100:8, any_of: [{use_spot: false}, {use_spot: true}, {use_spot: true, disk_size: 9}]}"
    made = plan(f"resources: {text}", [offer(), offer("gcp")])
    assert len(made.estimates) == 4
    for each in made.estimates:
        assert each.placement.alternative == int(each.placement.is_spot)
        assert each.placement.get_resources(made.task).use_spot is each.placement.is_spot
        assert find_alternative(made.task, each.placement) == each.placement.alternative


@pytest.mark.parametrize("kind", ["ordered", "any_of"])
@pytest.mark.parametrize("is_spot_first", [False, True])
def test_the_chance_of_a_placement_does_not_depend_on_the_alternatives_before_it(
    kind: str, is_spot_first: bool
) -> None:
    goal = "\ngoal: {work: 40h, deadline: 44h, confidence: 0.01}"
    alone = "{accelerators: H100:8, use_spot: true, infra: aws/us-east-1}"
    saved = "{accelerators: H100:8, infra: aws/us-west-2}"
    listed = f"{alone}, {saved}" if is_spot_first else f"{saved}, {alone}"
    made = plan(f"resources:\n  {kind}: [{listed}]{goal}", [offer(), offer(region="us-west-2")])
    chances = {each.placement.offer.region: each.deadline_chance for each in made.estimates if each.placement.is_spot}
    assert chances["us-west-2"] == 1.0, "on-demand takes over in time"
    own = plan(f"resources: {alone}{goal}", [offer()]).choice.deadline_chance
    assert own is not None and own < 0.5
    # Alternatives in order are tried one after the other; otherwise the job may change to on-demand of the other one.
    assert chances["us-east-1"] == (own if kind == "ordered" else 1.0)


def test_a_placement_of_another_task_takes_the_first_alternative_that_admits_it() -> None:
    made = plan("resources: {accelerators: [A100:8, H100:8]}", [offer()])
    assert made.choice.placement.alternative == 1
    (other,) = load_tasks_text("resources: {any_of: [{accelerators: T4}, {cpus: 4+}, {accelerators: H100:8}]}", "t")
    assert find_alternative(other, made.choice.placement) == 1
    (small,) = load_tasks_text("resources: {accelerators: T4}", "t")
    assert find_alternative(small, made.choice.placement) == 0
    assert made.choice.placement.get_resources(small) == small.resources[0], "it has since lost its second alternative"


def test_an_hour_is_worth_a_share_of_the_on_demand_price_unless_the_task_says_otherwise() -> None:
    text = "resources: {accelerators: H100:8}\nnum_nodes: 2\ngoal: {work: 100h%s}"
    assert plan(text % "", [offer()]).hour_value_usd == pytest.approx(0.02 * 2 * 40)
    assert plan(text % ", hour_value: 7.5", [offer()]).hour_value_usd == 7.5
    assert plan("resources: {accelerators: H100:8}", [offer()]).hour_value_usd is None
    spot = text.replace("H100:8", "H100:8, use_spot: true")
    assert plan(spot % "", [offer()]).hour_value_usd == pytest.approx(1.6), "the price counts even if not asked for"


def test_a_higher_value_of_an_hour_chooses_the_faster_machine() -> None:
    offers = [
        offer(accelerator="A100", instance_type="old", spot_usd_hour=None, ondemand_usd_hour=10.0),
        offer(instance_type="new", spot_usd_hour=None, ondemand_usd_hour=40.0),
    ]
    figures = {
        name: AcceleratorFigures(name=name, memory_gib=80, bf16_dense_tflops=peak)
        for name, peak in (("H100", 900.0), ("A100", 300.0))
    }
    text = 'resources: {accelerators: {A100: 8, H100: 8}}\ngoal: {work: {hours: 90, "on": "A100:8"}, hour_value: %s}'
    chosen = [plan(text % value, offers, figures=figures).choice.placement.offer.accelerator for value in (0, 50)]
    assert chosen == ["A100", "H100"]


def test_within_one_percent_of_the_best_the_faster_is_chosen() -> None:
    slow = offer(accelerator="A100", instance_type="old", spot_usd_hour=None, ondemand_usd_hour=10.0)
    figures = {
        name: AcceleratorFigures(name=name, memory_gib=80, bf16_dense_tflops=peak)
        for name, peak in (("H100", 900.0), ("A100", 300.0))
    }
    text = 'resources: {accelerators: {A100: 8, H100: 8}}\ngoal: {work: {hours: 90, "on": "A100:8"}, hour_value: 0}'
    speed = plan(text, [offer(spot_usd_hour=None)], figures=figures).choice.expected_hours or 0.0
    for over, name in ((1.005, "H100"), (1.02, "A100")):
        fast = offer(spot_usd_hour=None, ondemand_usd_hour=10.0 * 90 / speed * over)
        assert plan(text, [slow, fast], figures=figures).choice.placement.offer.accelerator == name
