"""Convert an instance as EC2 describes it to a Node."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from broker.clouds.aws import tags
from broker.types import Node, NodeEnd, NodeState

# A machine that is shutting down still computes: it is not TERMINATED yet, and not RUNNING: it cannot be relied on.
STATES = {
    "pending": NodeState.PENDING,
    "running": NodeState.RUNNING,
    "stopping": NodeState.PENDING,
    "stopped": NodeState.STOPPED,
    "shutting-down": NodeState.PENDING,
    "terminated": NodeState.TERMINATED,
}
REASONS = {  # EC2 user guide, "Why Amazon EC2 terminated your instance"
    "Server.SpotInstanceTermination": NodeEnd.PREEMPTED,
    "Server.SpotInstanceShutdown": NodeEnd.PREEMPTED,
    "Client.UserInitiatedShutdown": NodeEnd.TERMINATED,
    "Client.InstanceInitiatedShutdown": NodeEnd.LEASE,  # or DONE: only our agent shuts a node down from inside
}
ENDED_AT = re.compile(r"\((\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) (?:GMT|UTC)\)")


def read_nodes(instances: Iterable[Mapping[str, Any]], *, region: str, user: str) -> list[Node]:
    """Read instances of several gangs of one region, skipping those without our tags."""
    gangs: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for instance in instances:
        found = tags.read_tags(instance)
        if tags.OWNER in found:
            gangs[found.get(tags.TOKEN, "")].append(instance)
    return [
        read_node(instance, rank=rank, region=region, user=user)
        for gang in gangs.values()
        for instance, rank in zip(gang, rank_gang(gang), strict=True)
    ]


def rank_gang(gang: Sequence[Mapping[str, Any]]) -> list[int]:
    """Rank nodes by their tags (fleets), or by their place in the launch that created all.

    A fleet whose ranks were never written, because its creator died, is ranked by instance id, as its creator would
    have done.
    """
    order = sorted(instance["InstanceId"] for instance in gang)
    ranks = []
    for instance in gang:
        found = tags.read_tags(instance)
        if found.get(tags.RANK, "").isdecimal():
            ranks.append(int(found[tags.RANK]))
        elif tags.FLEET in found:
            ranks.append(order.index(instance["InstanceId"]))
        else:
            ranks.append(int(instance.get("AmiLaunchIndex", 0)))
    return ranks


def read_node(instance: Mapping[str, Any], *, rank: int, region: str, user: str) -> Node:
    """Convert an instance of DescribeInstances or RunInstances to a node; unknown states count as PENDING."""
    found = tags.read_tags(instance)
    name = instance.get("State", {}).get("Name", "pending")
    state = STATES.get(name, NodeState.PENDING)
    private, public = instance.get("PrivateIpAddress", ""), instance.get("PublicIpAddress", "")
    reachable = (public or private) if name == "running" else ""
    is_ended = state is NodeState.TERMINATED
    return Node(
        id=instance["InstanceId"],
        cloud="aws",
        owner=found.get(tags.OWNER, ""),
        cluster=found.get(tags.CLUSTER, ""),
        attempt=int(found.get(tags.ATTEMPT, "0")),
        rank=rank,
        state=state,
        address=private,
        region=region,
        zone=instance.get("Placement", {}).get("AvailabilityZone"),
        token=found.get(tags.TOKEN, ""),
        is_spot=instance.get("InstanceLifecycle") == "spot",
        usd_hour=float(found.get(tags.USD_HOUR, "0")),
        created_s=read_time_s(instance.get("LaunchTime")),
        ended_s=find_end_s(instance) if is_ended or state is NodeState.STOPPED else None,  # neither is billed
        reason=find_reason(instance) if is_ended else "",
        handle=f"ssh://{user}@{reachable}:22" if reachable else "",
    )


def read_time_s(value: datetime | None) -> float:
    """Return seconds since the epoch, 0 if EC2 does not state the time."""
    return value.timestamp() if value else 0.0


def find_reason(instance: Mapping[str, Any]) -> str:
    """Return why an instance ended: a `NodeEnd` if the code is known, otherwise EC2's code."""
    code = instance.get("StateReason", {}).get("Code", "")
    return REASONS.get(code, code or "terminated")


def find_end_s(instance: Mapping[str, Any]) -> float | None:
    """Read when an instance ended. EC2 reports it in one place only: in brackets after the reason, and not always."""
    match = ENDED_AT.search(instance.get("StateTransitionReason", ""))
    if not match:
        return None
    return datetime.strptime(match[1], "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC).timestamp()
