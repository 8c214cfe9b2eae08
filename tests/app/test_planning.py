"""Notes about a plan, before anything is launched."""

from __future__ import annotations

from typing import Any

import pytest

from broker.app.planning import warn_of_small_memory
from broker.types import Estimate, Offer, Origin, Placement, Plan, Quantity, Resources, Task

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
