"""Every file here is a claim about the planner: offers, a task, what must be chosen, and why.

`offers` are rows over `defaults`; `task` is a task file; `expect` holds what must be true of the plan, or `error`, a
text that the refusal must contain.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from broker.errors import NoOfferError
from broker.optimizer.planner import make_plan
from broker.task.loader import load_tasks_text
from broker.types import AcceleratorFigures, DataSet, EgressPrice, Estimate, Offer, Plan, Task

FILES = sorted(Path(__file__).parent.glob("*.yaml"))
MACHINE = {
    "region": "r", "zone": None, "instance_type": "box", "vcpus": 96, "memory_gib": 768, "accelerator": "H100",
    "accelerator_count": 8, "accelerator_memory_gib": 80, "spot_usd_hour": None, "ondemand_usd_hour": None,
}  # fmt: skip
FIGURES = {
    name: AcceleratorFigures(name=name, memory_gib=80, bf16_dense_tflops=peak)
    for name, peak in (("H100", 900.0), ("A100", 300.0), ("L4", 100.0))
}


def read_scenario(path: Path) -> dict[str, Any]:
    data: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return data


def read_task(data: dict[str, Any]) -> Task:
    from dataclasses import replace

    (task,) = load_tasks_text(yaml.safe_dump({"run": "x", **data["task"]}, sort_keys=False), "scenario")
    inputs, outputs = (
        tuple(DataSet(url=url, size_gib=gib) for url, gib in data.get(name, {}).items())
        for name in ("inputs", "outputs")
    )
    return replace(task, inputs=inputs, outputs=outputs) if inputs or outputs else task


def make(data: dict[str, Any]) -> Plan:
    offers = [Offer(**{**MACHINE, **data.get("defaults", {}), **row}) for row in data["offers"]]
    egress = [EgressPrice(**row) for row in data.get("egress", [])]
    return make_plan(read_task(data), offers, prices_as_of="2026-01-01", figures=FIGURES, egress=egress)


def describe(estimate: Estimate) -> dict[str, Any]:
    offer = estimate.placement.offer
    return {
        "cloud": offer.cloud, "region": offer.region, "zone": offer.zone, "instance_type": offer.instance_type,
        "accelerator": offer.accelerator, "strategy": estimate.strategy, "usd_hour": estimate.placement.usd_hour,
        "node_count": estimate.placement.node_count, "expected_usd": estimate.expected_usd,
        "expected_hours": estimate.expected_hours, "deadline_chance": estimate.deadline_chance,
    }  # fmt: skip


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_scenario(path: Path) -> None:
    data = read_scenario(path)
    expect = dict(data["expect"])
    if "error" in expect:
        with pytest.raises(NoOfferError) as caught:
            make(data)
        for text in [expect["error"]] if isinstance(expect["error"], str) else expect["error"]:
            assert text in caught.value.message
        return
    plan = make(data)
    order = expect.pop("order", None)
    if order is not None:
        assert [each.placement.offer.cloud for each in plan.estimates][: len(order)] == order
    left_out = expect.pop("left_out", None)
    if left_out is not None:
        assert {each.filter: each.count for each in plan.rejections} == left_out
    found = describe(plan.choice)
    for name, value in expect.items():
        assert found[name] == (pytest.approx(value, rel=0.005) if isinstance(value, float) else value), name


def test_there_are_scenarios_and_each_says_why() -> None:
    assert len(FILES) >= 15
    for path in FILES:
        assert len(read_scenario(path)["why"].split()) >= 5, path
