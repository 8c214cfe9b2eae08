"""Plans and clusters for tests: only the cloud matters."""

from __future__ import annotations

from typing import Any

from broker.optimizer.planner import make_plan
from broker.types import CheckpointSpec, Cluster, ClusterStatus, Offer, Placement, Plan, Resources, Task


def make_offer(cloud: str) -> Offer:
    return Offer(
        cloud=cloud, region="r", zone="r-a", instance_type="m", vcpus=4, memory_gib=16, ondemand_usd_hour=1.0,
        spot_usd_hour=0.3,
    )  # fmt: skip


def make_task(to: str | None = "s3://testbed/runs", **fields: Any) -> Task:
    clouds = ("aws", "gcp", "local")
    resources = tuple(Resources(cloud=cloud) for cloud in clouds)  # the local cloud is used only on request
    return Task(name="t", resources=resources, run="python -m trainers.lm", checkpoint=CheckpointSpec(to=to), **fields)


def plan_on(task: Task, *clouds: str) -> Plan:
    offers = [make_offer(cloud) for cloud in clouds]
    return make_plan(task, offers, prices_as_of="2026-01-01", usable_clouds=frozenset(clouds))


def make_cluster(cloud: str, **fields: Any) -> Cluster:
    placement = Placement(offer=make_offer(cloud), is_spot=True, node_count=1)
    return Cluster(name="c", status=ClusterStatus.UP, placement=placement, attempt=1, **fields)
