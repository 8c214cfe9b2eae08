"""Which alternatives of a task compete, and which are tried before others."""

from __future__ import annotations

import pytest

from broker.optimizer.planner import make_plan
from broker.serve.reconciling import Slot
from broker.serve.replicas import ReplicaPorts, make_replica_task
from broker.task.accelerators import resolve_accelerators
from broker.task.codec import decode_task, encode_task
from broker.task.loader import load_tasks_text
from broker.task.override import override_resources
from broker.types import AcceleratorFigures, Offer, Resources, Service, ServiceSpec, Task

FIGURES = {name: AcceleratorFigures(name=name, memory_gib=gib) for name, gib in {"A100-80GB": 80, "H100": 80}.items()}
PRICES = {("aws", "A100-80GB"): 30.0, ("aws", "H100"): 50.0, ("gcp", "A100-80GB"): 20.0, ("gcp", "H100"): 60.0}
OFFERS = [
    Offer(
        cloud=cloud, region="r", zone="r-a", instance_type=f"{cloud}-{name}", vcpus=96, memory_gib=768,
        accelerator=name, accelerator_count=8, accelerator_memory_gib=80, ondemand_usd_hour=usd, spot_usd_hour=None,
    )
    for (cloud, name), usd in PRICES.items()
]  # fmt: skip


def load(resources: str) -> Task:
    (task,) = load_tasks_text(f"run: x\nresources: {resources}", "task.yaml")
    return task


def rank(task: Task) -> list[str]:
    plan = make_plan(resolve_accelerators(task, FIGURES), OFFERS, prices_as_of="2026-01-01")
    return [each.placement.offer.instance_type for each in plan.estimates]


@pytest.mark.parametrize(
    ("resources", "expected"),
    [
        ("{accelerators: {H100:8, A100-80GB:8}}", "gcp-A100-80GB aws-A100-80GB aws-H100 gcp-H100"),
        ("{accelerators: [H100:8, A100-80GB:8]}", "aws-H100 gcp-H100 gcp-A100-80GB aws-A100-80GB"),
        ("{accelerators: '80GB+:8'}", "gcp-A100-80GB aws-A100-80GB aws-H100 gcp-H100"),
        ("{accelerators: [H100:8, h100:8]}", "aws-H100 gcp-H100"),
        ("{accelerators: ['80GB+:8', '80GB+:8']}", "gcp-A100-80GB aws-A100-80GB aws-H100 gcp-H100"),
        ("{accelerators: ['80GB+:8']}", "gcp-A100-80GB aws-A100-80GB aws-H100 gcp-H100"),
        ("{accelerators: {H100:8, A100-80GB:8}, ordered: [{infra: aws}, {infra: gcp}]}",
         "aws-A100-80GB aws-H100 gcp-A100-80GB gcp-H100"),
        ("{ordered: [{infra: aws, accelerators: '80GB+:8'}, {infra: gcp, accelerators: H100:8}]}",
         "aws-A100-80GB aws-H100 gcp-H100"),
        ("{accelerators: [H100:8, A100-80GB:8], ordered: [{infra: gcp}, {infra: aws}]}",
         "gcp-H100 gcp-A100-80GB aws-H100 aws-A100-80GB"),
        ("{accelerators: [H100:8, A100-80GB:8], any_of: [{infra: gcp}, {infra: aws}]}",
         "aws-H100 gcp-H100 gcp-A100-80GB aws-A100-80GB"),
    ],
)  # fmt: skip
def test_equally_preferred_alternatives_compete(resources: str, expected: str) -> None:
    task = load(resources)
    assert rank(task) == expected.split()
    assert rank(decode_task(encode_task(task), {})) == expected.split()
    assert not task.notices


@pytest.mark.parametrize(
    "resources",
    [
        "{any_of: [{infra: aws, accelerators: [H100:8, A100-80GB:8]}, {infra: gcp, accelerators: H100:8}]}",
        "{accelerators: [H100:8, A100-80GB:8], any_of: [{infra: aws}, {infra: gcp, accelerators: H100:8}]}",
    ],
)
def test_a_list_that_orders_nothing_is_noted(resources: str) -> None:
    task = load(resources)
    assert rank(task) == ["aws-A100-80GB", "aws-H100", "gcp-H100"]
    (notice,) = task.notices
    assert notice.message == "`accelerators`: the order of the list has no effect in `any_of`"
    assert not notice.blocks_launch


def test_regions_of_images_compete_in_an_order_of_pricing_models() -> None:
    task = load(
        "{image_id: {us-east-1: ami-1, us-west-2: ami-2}, ordered: [{infra: aws, use_spot: true}, {infra: aws}]}"
    )
    first, second, *others = task.list_preferences()
    assert first == second < others[0] == others[1]


def test_alternatives_without_a_preference_keep_their_order() -> None:
    """As stored by an earlier version, or made in Python."""
    resources = tuple(Resources(cloud=cloud, accelerator="H100", accelerator_count=8) for cloud in ("gcp", "aws"))
    assert rank(Task(run="x", resources=resources, is_ordered=True)) == ["gcp-H100", "aws-H100"]


def test_accelerators_of_a_replica_compete_in_its_region_before_others() -> None:
    task = load("{accelerators: {H100:8, A100-80GB:8}}")
    service = Service(name="web", uid="u", version=1, host="h", port=1, created_s=0.0)
    made = make_replica_task(
        service, Task(run="x", resources=task.resources, service=ServiceSpec()),
        Slot(is_spot=False, region="r", zone="r-a"), number=1,
        ports=ReplicaPorts(program=8080, entrance=19443), secrets={},
    )  # fmt: skip
    first, second, *others = made.list_preferences()
    assert [each.zone for each in made.resources] == ["r-a", "r-a", None, None]
    assert first == second < others[0] == others[1]


def test_a_replica_is_not_moved_into_a_zone_that_its_alternative_excludes() -> None:
    places = [("r", "r-a"), ("r", "r-b"), ("r", None), ("s", None), (None, None)]
    resources = tuple(Resources(cloud="aws", region=region, zone=zone) for region, zone in places)
    service = Service(name="web", uid="u", version=1, host="h", port=1, created_s=0.0)
    made = make_replica_task(
        service, Task(run="x", resources=resources, service=ServiceSpec()),
        Slot(is_spot=True, region="r", zone="r-a"), number=1,
        ports=ReplicaPorts(program=8080, entrance=19443), secrets={},
    )  # fmt: skip
    found = [(each.region, each.zone) for each in made.resources]
    assert found[:3] == [("r", "r-a")] * 3, "the first, the third and the last allow the slot"
    assert found[3:] == [("r", "r-b"), ("r", None), ("s", None), (None, None)]


def test_a_flag_for_the_accelerators_leaves_one_alternative_of_a_list() -> None:
    task = override_resources(load("{accelerators: [H100:8, A100-80GB:8]}"), accelerators="H100:8")
    assert [(each.accelerator, each.preference) for each in task.resources] == [("H100", 0)]
    either = override_resources(load("{accelerators: [H100:8, A100-80GB:8]}"), accelerators="80GB+:8")
    assert rank(either) == ["gcp-A100-80GB", "aws-A100-80GB", "aws-H100", "gcp-H100"]
