"""Notes about a plan, before anything is launched."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from broker.app.container import Context
from broker.app.planning import (
    check_place,
    check_plans,
    plan_launch,
    warn_of_missing_image,
    warn_of_more_nodes,
    warn_of_small_memory,
)
from broker.errors import NoOfferError, TaskError
from broker.task.loader import load_tasks_text
from broker.types import (
    Cluster,
    ClusterStatus,
    Estimate,
    Node,
    NodeState,
    Offer,
    Origin,
    Placement,
    Plan,
    Quantity,
    Resources,
    Task,
)

HERE = Origin(file="task.yaml", line=2, column=3)


def make_plan(asked: Resources, **offer: Any) -> Plan:
    values = {"cloud": "aws", "region": "r", "zone": None, "instance_type": "i", "vcpus": 2, "memory_gib": 0.5, **offer}
    placement = Placement(offer=Offer(**values), is_spot=False, node_count=1)
    return Plan(
        task=Task(resources=(asked,)), estimates=(Estimate(placement=placement),), rejections=(), prices_as_of="",
        reason="",
    )  # fmt: skip


def test_cheapest_machine_with_too_little_memory_has_a_note() -> None:
    said = warn_of_small_memory(make_plan(Resources(cpus=Quantity(value=2), origin=HERE)))
    assert said is not None and said.startswith("task.yaml:2:3: without `memory`, the cheapest machine has 0.5 GiB")
    assert "`memory: 8+`" in said


@pytest.mark.parametrize(
    ("asked", "offer"),
    [
        (Resources(memory_gib=Quantity(value=0.5)), {}),
        (Resources(memory_gib_per_vcpu=0.25), {}),
        (Resources(instance_type="i"), {}),
        (Resources(), {"memory_gib": 2.0}),
        (Resources(), {"cloud": "local"}),
        (Resources(), {"accelerator": "T4", "accelerator_count": 1}),
    ],
)
def test_memory_that_the_task_chose_has_none(asked: Resources, offer: dict[str, Any]) -> None:
    assert warn_of_small_memory(make_plan(asked, **offer)) is None


def test_run_on_more_nodes_than_its_task_requests_has_a_note() -> None:
    placement = make_plan(Resources()).choice.placement
    node = Node(id="n", cloud="aws", owner="o", cluster="dev", attempt=1, rank=0, state=NodeState.RUNNING)
    nodes = tuple(replace(node, id=f"n{rank}", rank=rank) for rank in range(3))
    cluster = Cluster(name="dev", status=ClusterStatus.UP, placement=placement, attempt=1, nodes=nodes)
    assert warn_of_more_nodes(Task(num_nodes=2), cluster) == (
        "the run uses all 3 nodes of cluster `dev`; the task requests 2"
    )
    assert warn_of_more_nodes(Task(num_nodes=3), cluster) is None


V100 = {"region": "us-east-1", "instance_type": "p3.2xlarge", "accelerator": "V100", "accelerator_count": 1}


def test_machine_for_which_the_cloud_has_no_image_has_one_note(tmp_path: Path) -> None:
    notes: list[str] = []
    plan = make_plan(Resources(accelerator="V100", accelerator_count=1, origin=HERE), **V100)
    check_plans([plan], home=tmp_path, is_launch=False, note=notes.append)
    assert notes == [
        "note: task.yaml:2:3: a launch requires `image_id`: AWS publishes no image with a driver for p3.2xlarge: Volta "
        "requires NVIDIA's proprietary driver, R580 or older"
    ]
    in_container = make_plan(Resources(image_id="docker:ubuntu:24.04"), **V100)
    assert warn_of_missing_image(in_container, tmp_path) is not None
    (tmp_path / "aws.toml").write_text('images = {"eu-west-1" = "ami-1"}')
    assert warn_of_missing_image(plan, tmp_path) is not None, "an image of another region"
    (tmp_path / "aws.toml").write_text("damaged")
    assert warn_of_missing_image(plan, tmp_path) is not None


@pytest.mark.parametrize(
    ("asked", "offer"),
    [
        (Resources(image_id="ami-0123"), V100),
        (Resources(), {**V100, "cloud": "gcp", "instance_type": "n1-standard-8+1xV100"}),
        (Resources(), {**V100, "instance_type": "p4d.24xlarge", "accelerator": "A100"}),
        (Resources(), {**V100, "region": "eu-west-1"}),
    ],
)
def test_machine_with_an_image_has_none(asked: Resources, offer: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "aws.toml").write_text('images = {"eu-west-1" = "ami-1"}')
    assert warn_of_missing_image(make_plan(asked, **offer), tmp_path) is None


@pytest.mark.parametrize(
    ("mounts", "line"),
    [("/data: .", 1), ("/out: {source: 's3://bucket', mode: MOUNT}", 2), ("~/data: .", 0), ("data: .", 0)],
)
def test_target_that_local_nodes_do_not_have_is_refused_before_there_is_a_cluster(mounts: str, line: int) -> None:
    (task,) = load_tasks_text(f"file_mounts:\n  {mounts}\nrun: x", "task.yaml")
    check_place(task, {"aws"}, is_launch=True, note=print)
    if not line:
        check_place(task, {"local"}, is_launch=True, note=print)
        return
    with pytest.raises(TaskError) as caught:
        check_place(task, {"local"}, is_launch=True, note=print)
    (issue,) = caught.value.issues
    assert "is outside the home folders" in issue.message and (issue.file, issue.line) == ("task.yaml", line)


def test_hint_offers_this_machine_only_where_its_local_cloud_is_on() -> None:
    def refuse(task: Task, **options: object) -> Plan:
        raise NoOfferError("no offer fits")

    for clouds, expected in (
        ({"aws": 1}, "usable: `aws`; plan on every cloud with `--dryrun`"),
        ({}, "usable: no cloud; plan on every cloud with `--dryrun`"),
        (
            {"local": 1},
            "usable: `local`; plan on every cloud with `--dryrun`, or run on this machine with `--infra local`",
        ),
    ):
        with pytest.raises(NoOfferError) as raised:
            plan_launch(cast(Context, SimpleNamespace(plan=refuse, clouds=clouds)), Task(run="true"))
        assert raised.value.hints[0] == expected
