"""Compute which of a cluster's accelerators a run reserves, so that several runs can share a node."""

from __future__ import annotations

import json
from typing import Any

from broker.errors import UsageError
from broker.frozen import frozen
from broker.task.accelerators import find_maker
from broker.types import Cluster, Resources, Task

CLOUD_SPELLINGS = {"aws": "AWS", "gcp": "GCP", "oci": "OCI", "do": "DO", "ibm": "IBM", "runpod": "RunPod"}
# The variable that limits a program to some of a node's accelerators, by maker. Accelerators of other makers are not
# shared (TPUs also need their topology, Neuron counts cores): a run on them gets the whole node.
VARIABLES = {"nvidia": "CUDA_VISIBLE_DEVICES", "amd": "HIP_VISIBLE_DEVICES"}


@frozen
class Reservation:
    """`count` of the `card_count` accelerators of each node; below 1 it is a fraction of one.

    `variable` limits a program to its own accelerators. `text` is the reservation in task syntax, such as `T4:0.5`.
    """

    count: float
    card_count: int
    variable: str
    text: str


def find_reservation(task: Task, cluster: Cluster) -> Reservation | None:
    """Return the task's reservation; None if the run gets whole nodes, such as a task without accelerators.

    Among the alternatives that fit the cluster, one that requests exactly a node's accelerators is preferred, then the
    first. Raises UsageError if none fits, because such a run would never start.
    """
    offer = cluster.placement.offer
    requested = [resources for resources in task.resources if resources.accelerator]
    fitting = [resources for resources in requested if _fits(resources, offer.accelerator, offer.accelerator_count)]
    if not fitting:
        if len(requested) < len(task.resources) or not requested:
            return None
        needs = " or ".join(f"{resources.accelerator}:{resources.accelerator_count:g}" for resources in requested)
        has = f"{offer.accelerator}:{offer.accelerator_count:g}" if offer.accelerator else "no accelerators"
        raise UsageError(
            f"the task requests {needs} on each node, but the nodes of cluster `{cluster.name}` have {has}",
            hints=["change `accelerators`, or bring up another cluster with `broker launch TASK.yaml -c NAME`"],
        )
    assert offer.accelerator is not None, "it fits"
    exact = (resources for resources in fitting if resources.accelerator_count == offer.accelerator_count)
    chosen = next(exact, fitting[0])
    variable = VARIABLES.get(find_maker(offer.accelerator))
    if variable is None:
        return None
    # A cloud may sell a fraction of a card as one device: half of the request is then half of that device.
    part = min(offer.accelerator_count, 1.0)
    count = chosen.accelerator_count / part if chosen.accelerator_count < 1 else chosen.accelerator_count
    return Reservation(
        count=count,
        card_count=max(1, round(offer.accelerator_count)),
        variable=variable,
        text=f"{offer.accelerator}:{chosen.accelerator_count:g}",
    )


def count_gpus(task: Task, cluster: Cluster, reserved: Reservation | None) -> float:
    """Return the number of a node's GPUs that the program may use."""
    offer, requested = cluster.placement.offer, task.resources[0]
    if reserved is not None:
        return reserved.count
    if offer.accelerator:
        return offer.accelerator_count
    return requested.accelerator_count if requested.accelerator else 0


def describe_cluster(cluster: Cluster) -> str:
    """Return the place of a cluster as JSON: `SKYPILOT_CLUSTER_INFO`, with SkyPilot's spelling of clouds."""
    offer = cluster.placement.offer
    cloud = CLOUD_SPELLINGS.get(offer.cloud, offer.cloud.capitalize())
    return json.dumps({"cluster_name": cluster.name, "cloud": cloud, "region": offer.region, "zone": offer.zone})


def describe_turn(reserved: Reservation | None) -> dict[str, Any]:
    """Describe the accelerators that the run waits for on each node, for `agent_turn.py`."""
    if reserved is None:
        return {"count": None}
    return {"count": reserved.count, "card_count": reserved.card_count, "variable": reserved.variable}


def _fits(requested: Resources, accelerator: str | None, count: float) -> bool:
    return (
        requested.accelerator is not None
        and accelerator is not None
        and requested.accelerator.lower() == accelerator.lower()
        and requested.accelerator_count <= count
    )
