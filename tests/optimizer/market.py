"""Offers and plans for the optimizer's tests."""

from __future__ import annotations

from broker.optimizer.planner import make_plan
from broker.task.loader import load_tasks_text
from broker.types import Offer, Plan, Task


def offer(cloud: str = "aws", region: str = "us-east-1", **fields: object) -> Offer:
    defaults: dict[str, object] = {
        "zone": None, "instance_type": "big", "vcpus": 96, "memory_gib": 768, "accelerator": "H100",
        "accelerator_count": 8, "accelerator_memory_gib": 80, "ondemand_usd_hour": 40.0, "spot_usd_hour": 10.0,
    }  # fmt: skip
    return Offer(cloud=cloud, region=region, **{**defaults, **fields})  # type: ignore[arg-type]


def read(text: str) -> Task:
    (task,) = load_tasks_text(f"{text}\nrun: x", "train.yaml")
    return task


def plan(task: str | Task, offers: list[Offer], **options: object) -> Plan:
    found = read(task) if isinstance(task, str) else task
    return make_plan(found, offers, prices_as_of="2026-01-01", **options)  # type: ignore[arg-type]
