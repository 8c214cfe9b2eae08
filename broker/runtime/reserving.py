"""What a run reserves of its cluster's accelerators, so that others run beside it."""

from __future__ import annotations

from typing import Any

from broker.errors import UsageError
from broker.nouns import noun
from broker.task.accelerators import find_maker
from broker.types import Cluster, Resources, Task

# By which variable a program sees some of a node's accelerators only. Others (TPUs need their topology as well,
# Neuron counts cores) are not shared: a run on them has the whole node.
VARIABLES = {"nvidia": "CUDA_VISIBLE_DEVICES", "amd": "HIP_VISIBLE_DEVICES"}


@noun
class Reservation:
    """`count` of the `card_count` accelerators of each node; below 1 it is a part of one.

    `variable`: which shows a program its own. `text`: as people write it, such as `T4:0.5`.
    """

    count: float
    card_count: int
    variable: str
    text: str


def find_reservation(task: Task, cluster: Cluster) -> Reservation | None:
    """Return what the task reserves; None for the whole of each node, as where it asks for no accelerator.

    Of its alternatives that fit the cluster the one counts that asks for exactly what a node has, else the first.
    Raises UsageError where none fits: such a run would never begin.
    """
    offer = cluster.placement.offer
    asked = [each for each in task.resources if each.accelerator]
    fitting = [each for each in asked if _fits(each, offer.accelerator, offer.accelerator_count)]
    if not fitting:
        if len(asked) < len(task.resources) or not asked:
            return None
        wanted = " or ".join(f"{each.accelerator}:{each.accelerator_count:g}" for each in asked)
        has = f"{offer.accelerator}:{offer.accelerator_count:g}" if offer.accelerator else "no accelerators"
        raise UsageError(
            f"the task asks for {wanted} on each node, and the nodes of cluster `{cluster.name}` have {has}",
            hints=["change `accelerators`, or bring up another cluster with `broker launch TASK.yaml -c NAME`"],
        )
    assert offer.accelerator is not None, "it fits"
    found = next((each for each in fitting if each.accelerator_count == offer.accelerator_count), fitting[0])
    variable = VARIABLES.get(find_maker(offer.accelerator))
    if variable is None:
        return None
    # A cloud may sell a part of a card as one device: half of it is half of that device.
    part = min(offer.accelerator_count, 1.0)
    count = found.accelerator_count / part if found.accelerator_count < 1 else found.accelerator_count
    return Reservation(
        count=count,
        card_count=max(1, round(offer.accelerator_count)),
        variable=variable,
        text=f"{offer.accelerator}:{found.accelerator_count:g}",
    )


def count_gpus(task: Task, cluster: Cluster, reserved: Reservation | None) -> float:
    """Of a node, as the program may use them."""
    offer, asked = cluster.placement.offer, task.resources[0]
    if reserved is not None:
        return reserved.count
    if offer.accelerator:
        return offer.accelerator_count
    return asked.accelerator_count if asked.accelerator else 0


def describe_turn(reserved: Reservation | None) -> dict[str, Any]:
    """For `agent_turn.py`: what the run waits for on each node."""
    if reserved is None:
        return {"count": None}
    return {"count": reserved.count, "card_count": reserved.card_count, "variable": reserved.variable}


def _fits(asked: Resources, accelerator: str | None, count: float) -> bool:
    return (
        asked.accelerator is not None
        and accelerator is not None
        and asked.accelerator.lower() == accelerator.lower()
        and asked.accelerator_count <= count
    )
