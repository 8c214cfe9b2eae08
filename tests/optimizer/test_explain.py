"""Why a task is infeasible, why a cheaper placement was rejected, and the frontier between cost and time."""

from __future__ import annotations

import pytest

from broker.errors import NoOfferError
from broker.optimizer.explain import lift_limits, list_losers, show_chance
from broker.optimizer.infeasible import explain_infeasible
from broker.optimizer.pareto import find_frontier
from broker.types import AcceleratorFigures, Offer, Plan, Task
from tests.optimizer.market import offer, plan, read

OFFERS = [
    offer("aws", "us-east-1", spot_usd_hour=18.0),
    offer("gcp", "europe-west4", spot_usd_hour=22.0, ondemand_usd_hour=60.0),
    offer("gcp", "europe-west4", accelerator_count=4, spot_usd_hour=9.0, instance_type="half"),
]
FIGURES = {
    name: AcceleratorFigures(name=name, memory_gib=80, bf16_dense_tflops=peak)
    for name, peak in (("H100", 900.0), ("A100", 300.0))
}


def explain(text: str, offers: list[Offer] = OFFERS) -> NoOfferError:
    """Return the error, after trying every hint in it."""
    task = read(text)
    with pytest.raises(NoOfferError) as caught:
        plan(task, offers)

    def try_plan(changed: Task) -> Plan:
        return plan(changed, offers)

    return explain_infeasible(caught.value, task, try_plan)


def test_hint_names_the_limit_to_drop_and_the_resulting_cost() -> None:
    error = explain("resources: {accelerators: H100:8, region: mars, use_spot: true}")
    assert error.hints[0] == (
        "drop `region: mars`: 2 placements fit, cheapest aws us-east-1 big at 18.00 USD/h per node"
    )
    assert "region" in error.message
    assert "3 offers excluded" in error.message or "2 offers excluded" in error.message


def test_hint_for_a_price_cap() -> None:
    offers = [offer(spot_usd_hour=18.0, ondemand_usd_hour=40.0)]
    task = read("resources: {accelerators: H100:8, use_spot: true}")
    from dataclasses import replace

    capped = replace(task, resources=tuple(replace(each, usd_hour_max=10.0) for each in task.resources))
    with pytest.raises(NoOfferError) as caught:
        plan(capped, offers)
    assert "nearest aws us-east-1 at 18.00 USD/h" in caught.value.message
    assert "at most 10 USD/h per node" in caught.value.message
    error = explain_infeasible(caught.value, capped, lambda changed: plan(changed, offers))
    assert "--max-price" in error.hints[0]


def test_deadline_hint_is_the_shortest_that_can_be_met() -> None:
    text = "resources: {accelerators: H100:8, use_spot: false}\ngoal: {work: 100h, deadline: 50h}"
    error = explain(text)
    assert error.hints[0] == "extend the deadline: `deadline: 100.1h` can be met"
    assert plan(text.replace("50h", "100.1h"), OFFERS).choice
    with pytest.raises(NoOfferError):  # the start takes 5 minutes
        plan(text.replace("50h", "100h"), OFFERS)


def test_budget_hint_has_the_cost() -> None:
    error = explain("resources: {accelerators: H100:8}\ngoal: {work: 100h, budget: 10}")
    assert error.hints[0].startswith("raise `budget`: 4 placements fit, cheapest aws us-east-1")
    assert "USD expected" in error.hints[0]


def test_two_changes_are_combined_if_one_is_not_enough() -> None:
    error = explain("resources: {accelerators: H100:8, region: mars, cpus: 900+}")
    assert error.hints[0].startswith("drop `region: mars` and drop `cpus: 900+`")


def test_every_filter_reports_its_count_and_nearest_miss() -> None:
    error = explain("resources: {accelerators: H100:2, cloud: gcp}")
    assert [line.split()[0] for line in error.message.splitlines()[1:]] == ["cloud", "accelerator"]
    assert "nearest H100:4 (half)" in error.message


@pytest.mark.parametrize(
    ("resources", "expected"),
    [
        ("accelerators: H100:64", "nearest H100:8"),
        ("accelerators: H100:3", "nearest H100:4"),
        ("accelerators: H100:8, cpus: 900+", "nearest 208 vCPU"),
        ("accelerators: H100:8, memory: 9000+", "nearest 1800 GiB"),
    ],
)
def test_nearest_miss_is_the_nearest_and_not_the_cheapest(resources: str, expected: str) -> None:
    large = {"spot_usd_hour": 30.0, "ondemand_usd_hour": 60.0}
    offers = [
        offer(instance_type="one", accelerator_count=1, vcpus=26, memory_gib=200, spot_usd_hour=2.0),
        offer(instance_type="four", accelerator_count=4, vcpus=104, memory_gib=800, spot_usd_hour=9.0),
        offer(instance_type="small", accelerator_count=8, vcpus=64, memory_gib=500),
        offer(instance_type="large", accelerator_count=8, vcpus=208, memory_gib=1800, **large),
    ]
    with pytest.raises(NoOfferError) as caught:
        plan(f"resources: {{{resources}}}", offers)
    assert expected in caught.value.message


def test_rejected_placement_names_the_cause_of_its_cost() -> None:
    slow = offer("aws", accelerator="A100", instance_type="old", spot_usd_hour=5.0, ondemand_usd_hour=15.0)
    fast = offer("gcp", spot_usd_hour=10.0)
    text = "resources: {accelerators: {A100: 8, H100: 8}, use_spot: true}\ngoal: {work: {hours: 90, on: A100:8}}"
    made = plan(text, [slow, fast], figures=FIGURES)
    assert made.choice.placement.offer is fast
    (loser,) = list_losers(made, plan(lift_limits(made.task), [slow, fast], figures=FIGURES))
    assert loser.estimate.placement.offer is slow
    assert loser.reason.startswith("3.0 times slower; ")
    assert loser.reason.endswith("USD to finish")


def test_rejected_placement_that_is_late_gives_that_reason() -> None:
    """On-demand of the fast machines cannot save a job that spends its time on slow spot."""
    offers = [offer("aws", accelerator="A100", instance_type="old", ondemand_usd_hour=None), offer(spot_usd_hour=None)]
    text = 'resources: {accelerators: {A100: 8, H100: 8}}\ngoal: {work: {hours: 100, "on": H100:8}, deadline: 101h}'
    made = plan(text.replace("101h", "101h, confidence: 0.99"), offers, figures=FIGURES)
    assert made.choice.strategy == "on-demand"
    (loser,) = list_losers(made, plan(lift_limits(made.task), offers, figures=FIGURES))
    assert "meets the deadline with" in loser.reason
    assert "99.0 % is required" in loser.reason


def test_without_work_no_cheaper_hourly_price_loses() -> None:
    made = plan("resources: {accelerators: H100:8}", OFFERS)
    assert list_losers(made, made) == []


def test_frontier_has_only_undominated_placements() -> None:
    offers = [
        offer("aws", accelerator="A100", instance_type="old", spot_usd_hour=2.0, ondemand_usd_hour=15.0),
        offer("gcp", spot_usd_hour=10.0, ondemand_usd_hour=30.0),
        offer("oci", spot_usd_hour=11.0, ondemand_usd_hour=50.0),
    ]
    text = "resources: {accelerators: {A100: 8, H100: 8}}\ngoal: {work: {hours: 90, on: A100:8}}"
    made = plan(text, offers, figures=FIGURES)
    frontier = find_frontier(made.estimates)
    assert frontier[0] is made.choice
    pairs = [(each.expected_usd or 0.0, each.expected_hours or 0.0) for each in frontier]
    assert pairs == sorted(pairs)
    assert [hours for _, hours in pairs] == sorted((hours for _, hours in pairs), reverse=True)
    for each in made.estimates:
        point = each.expected_usd or 0.0, each.expected_hours or 0.0
        assert any(usd <= point[0] and hours <= point[1] * (1 + 1e-9) for usd, hours in pairs)


@pytest.mark.parametrize(
    ("chance", "shown"), [(1.0, "100.0 %"), (0.99999, ">99.9 %"), (0.9, "90.0 %"), (0.0001, "<0.1 %"), (0.0, "0.0 %")]
)
def test_a_chance_never_rounds_to_certainty(chance: float, shown: str) -> None:
    assert show_chance(chance) == shown


def test_a_machine_with_a_lower_hourly_price_that_costs_more_loses_by_its_largest_cause() -> None:
    """Three times slower costs more than the transfer of its data; a limit that it violates comes first."""
    offers = [
        offer("gcp", accelerator="A100", instance_type="old", spot_usd_hour=None, ondemand_usd_hour=30.0),
        offer("aws", instance_type="new", spot_usd_hour=None, ondemand_usd_hour=40.0),
    ]
    text = (
        "resources: {accelerators: {A100: 8, H100: 8}}\ninputs: {s3://data: 100GB}\n"
        'goal: {work: {hours: 90, "on": "A100:8"}, hour_value: 0%s}'
    )

    def find_reason(limits: str) -> str:
        made = plan(text % limits, offers, figures=FIGURES)
        (loser,) = list_losers(made, plan(lift_limits(made.task), offers, figures=FIGURES))
        return loser.reason

    assert find_reason("") == "3.0 times slower; 2,714.88 USD to finish"
    assert find_reason(", budget: 2000") == "2,714.88 USD expected, which exceeds the budget"
    assert find_reason(", deadline: 50h") == "meets the deadline with 0.0 %; 90.0 % is required"
    assert find_reason(", deadline: 50h, budget: 2000") == (
        "meets the deadline with 0.0 %; 90.0 % is required; 2,714.88 USD expected, which exceeds the budget"
    )
