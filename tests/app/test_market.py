"""Plans from the shipped price book, of which only the cheapest of tens of thousands of offers are read."""

from __future__ import annotations

import pytest

from broker.app.market import Market
from broker.errors import NoOfferError
from broker.task.loader import load_tasks_text
from broker.types import Plan


@pytest.fixture(scope="module")
def market(tmp_path_factory: pytest.TempPathFactory) -> Market:
    return Market(tmp_path_factory.mktemp("cache"))


def plan(market: Market, text: str, *clouds: str) -> Plan:
    (task,) = load_tasks_text(f"{text}\nrun: x", "train.yaml")
    return market.plan(market.resolve(task), usable_clouds=frozenset(clouds) or None)


@pytest.mark.parametrize("cloud", ["lambda", "nebius", "seeweb", "verda", "oci", "aws"])
@pytest.mark.parametrize("resources", ["{}", "{cpus: 4+}", "{cpus: 2+, memory: 8+}"])
def test_only_cloud_is_planned_although_others_are_cheaper(market: Market, cloud: str, resources: str) -> None:
    """Thousands of machines of the large clouds cost less than each of a small cloud."""
    named = plan(market, f"resources: {{infra: {cloud}, {resources.strip('{}')}}}")
    assert plan(market, f"resources: {resources}", cloud).choice == named.choice


@pytest.mark.parametrize("ratio", [4, 6, 8, 12])
def test_rare_ratio_of_memory_is_found(market: Market, ratio: int) -> None:
    offer = plan(market, f"resources: {{cpus: 2+, memory: {ratio}x}}").choice.placement.offer
    assert offer.memory_gib >= ratio * offer.vcpus
    with pytest.raises(NoOfferError):
        plan(market, "resources: {cpus: 2+, memory: 1000x}")


def test_machines_with_little_memory_do_not_crowd_out_the_others(market: Market) -> None:
    found = {each.placement.offer.cloud for each in plan(market, "resources: {}").estimates}
    assert len(found) >= 4


def test_clouds_that_can_do_what_a_task_requires_are_planned(market: Market) -> None:
    """Most of the cheapest spot machines are of Azure, which has no fast networks."""
    resources = "cpus: 4+, use_spot: true, network_tier: best"
    named = plan(market, f"resources: {{{resources}, infra: aws}}")
    found = plan(market, f"resources: {{{resources}}}")
    assert sum(each.placement.offer.cloud == "aws" for each in found.estimates) > 100
    assert found.choice.placement.usd_hour <= named.choice.placement.usd_hour


@pytest.mark.parametrize(
    "resources", ["{infra: runpod, cpus: 4+}", "{infra: lambda, cpus: 16+}", "{infra: hyperbolic}"]
)
def test_cloud_with_gpus_only_is_planned_for_a_task_without(market: Market, resources: str) -> None:
    assert plan(market, f"resources: {resources}").choice.placement.offer.accelerator
    only = resources.partition(", ")[2].strip("}")
    cloud = resources.partition(": ")[2].partition(",")[0].strip("}")
    assert plan(market, f"resources: {{{only}}}", cloud).choice.placement.offer.cloud == cloud


def test_gpu_that_was_not_requested_is_not_paid_for_because_spot_is_missing(market: Market) -> None:
    """Nebius sells spot only for its machines with GPUs, which cost a hundred times as much."""
    with pytest.raises(NoOfferError) as caught:
        plan(market, "resources: {infra: nebius, cpus: 4+, use_spot: true}")
    assert any("`use_spot: false`" in hint for hint in caught.value.hints)


@pytest.mark.parametrize("place", ["lambda", "lambda/us-east-1"])
def test_hint_is_about_the_cloud_that_the_task_names(market: Market, place: str) -> None:
    """Thousands of cheaper machines of other clouds have six vCPUs or more."""
    with pytest.raises(NoOfferError) as caught:
        plan(market, f"resources: {{infra: {place}, cpus: 6}}")
    assert any("`cpus: 6+`" in hint and "cheapest lambda" in hint for hint in caught.value.hints)
