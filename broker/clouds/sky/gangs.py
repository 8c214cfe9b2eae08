"""One gang is one SkyPilot cluster: its name, what we remember of it, and how its nodes stand. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from typing import Any

from broker.errors import InvalidRequestError
from broker.nouns import noun
from broker.types import Node, NodeEnd, NodeRequest, NodeState

NAME = re.compile(r"b-(?P<owner>[0-9a-z-]+)-(?P<cloud>[a-z]+)-(?P<token>[0-9a-f]+)")
CLUSTER_LABEL, ATTEMPT_LABEL = "broker-cluster", "broker-attempt"
LAUNCHES = ("launch", "start")
LIVE, FAILED = ("PENDING", "RUNNING"), ("FAILED", "CANCELLED")  # of a request; the third is SUCCEEDED
# A cluster's words are SkyPilot's; what is INIT may be live or down, and only the agents on its nodes can tell.
STATES = {
    "INIT": NodeState.PENDING,
    "PENDING": NodeState.PENDING,
    "UP": NodeState.RUNNING,
    "AUTOSTOPPING": NodeState.RUNNING,
    "STOPPED": NodeState.STOPPED,
}


@noun
class SkyGang:
    """What we remember of one launch. `task` is what SkyPilot was given; `ended_s` is None while it lives."""

    name: str
    cloud: str
    owner: str
    cluster: str
    attempt: int
    token: str
    node_count: int
    region: str = ""
    zone: str | None = None
    is_spot: bool = False
    usd_hour: float = 0.0
    created_s: float = 0.0
    request_id: str = ""
    task: dict[str, Any] = field(default_factory=dict)
    reached_at: float = 0.0  # `Seen.launched_at` for which we know how to reach its nodes
    was_seen: bool = False
    was_up: bool = False
    addresses: tuple[str, ...] = ()
    is_down_asked: bool = False
    ended_s: float | None = None
    reason: str = ""


@noun
class Seen:
    """A cluster in SkyPilot's table."""

    name: str
    status: str
    cloud: str = ""
    region: str = ""
    nodes: int = 1
    labels: Mapping[str, str] = field(default_factory=dict)
    launched_at: float = 0.0
    addresses: Sequence[str] = ()  # by rank, as the nodes know each other
    why: str = ""


@noun
class Request:
    """One request to the API server; `cluster` is the name it is about."""

    id: str
    verb: str
    cluster: str
    status: str


@noun
class Look:
    clusters: Sequence[Seen] = ()
    requests: Sequence[Request] = ()

    def find(self, name: str) -> Seen | None:
        return next((each for each in self.clusters if each.name == name), None)

    def is_launching(self, name: str) -> bool:
        return any(each.cluster == name and each.verb in LAUNCHES and each.status in LIVE for each in self.requests)

    def read_status(self, request_id: str) -> str:
        """Empty where the server does not know it."""
        return next((each.status for each in self.requests if each.id == request_id), "")


def make_prefix(owner: str) -> str:
    return f"b-{owner}-"


def make_name(request: NodeRequest) -> str:
    return f"{make_prefix(request.owner)}{request.placement.offer.cloud}-{request.token}"


def make_gang(request: NodeRequest, *, task: dict[str, Any], now_s: float) -> SkyGang:
    placement = request.placement
    return SkyGang(
        name=make_name(request),
        cloud=placement.offer.cloud,
        owner=request.owner,
        cluster=request.cluster,
        attempt=request.attempt,
        token=request.token,
        node_count=placement.node_count,
        region=placement.offer.region,
        zone=placement.offer.zone,
        is_spot=placement.is_spot,
        usd_hour=placement.usd_hour / placement.node_count,
        created_s=now_s,
        task=task,
    )


def adopt(name: str, owner: str, seen: Seen | None) -> SkyGang | None:
    """A gang of ours that we do not remember: what its name and labels tell."""
    found = NAME.fullmatch(name)
    if found is None:
        return None
    labels = seen.labels if seen else {}
    attempt = labels.get(ATTEMPT_LABEL, "")
    return SkyGang(
        name=name,
        cloud=found["cloud"],
        owner=owner,
        cluster=labels.get(CLUSTER_LABEL, ""),
        attempt=int(attempt) if attempt.isdigit() else 0,
        token=found["token"],
        node_count=seen.nodes if seen else 1,
        region=seen.region if seen else "",
        created_s=seen.launched_at if seen else 0.0,
    )


def judge(gang: SkyGang, look: Look, *, now_s: float) -> tuple[SkyGang, NodeState | None]:
    """How a gang stands; None where nothing proves that SkyPilot ever heard of it.

    It has ended when its cluster has left SkyPilot's table, where it stays until it is confirmed gone, and nothing is
    on its way.
    """
    if gang.ended_s is not None:
        return gang, NodeState.TERMINATED
    seen = look.find(gang.name)
    if seen is not None:
        is_up = seen.status == "UP" or gang.was_up
        addresses = tuple(seen.addresses) or gang.addresses
        found = replace(gang, was_seen=True, was_up=is_up, addresses=addresses)
        return found, STATES.get(seen.status, NodeState.PENDING)
    if look.is_launching(gang.name):
        return gang, NodeState.PENDING
    status = look.read_status(gang.request_id)
    if not gang.was_seen and not status:
        return gang, None
    return replace(gang, ended_s=now_s, reason=_tell_end(gang, status)), NodeState.TERMINATED


def _tell_end(gang: SkyGang, status: str) -> str:
    if gang.is_down_asked:
        return NodeEnd.TERMINATED
    if gang.was_up or status == "SUCCEEDED":
        return NodeEnd.PREEMPTED if gang.is_spot else NodeEnd.LEASE  # nothing else takes a cluster that is up
    return "refused"


def is_broken(gang: SkyGang, look: Look) -> bool:
    """Whether a launch failed half-way and left something behind."""
    return (
        look.find(gang.name) is not None
        and not look.is_launching(gang.name)
        and not gang.was_up
        and look.read_status(gang.request_id) in FAILED
    )


def list_nodes_of(gang: SkyGang, state: NodeState) -> Sequence[Node]:
    return [
        Node(
            id=f"{gang.name}/{rank}",
            cloud=gang.cloud,
            owner=gang.owner,
            cluster=gang.cluster,
            attempt=gang.attempt,
            rank=rank,
            state=state,
            address=gang.addresses[rank] if rank < len(gang.addresses) else "",
            region=gang.region,
            zone=gang.zone,
            token=gang.token,
            is_spot=gang.is_spot,
            usd_hour=gang.usd_hour,
            created_s=gang.created_s,
            ended_s=gang.ended_s,
            reason=gang.reason,
            handle=f"sky://{gang.name}/{rank}",
        )
        for rank in range(gang.node_count)
    ]


def read_name(node_id: str) -> str:
    """The cluster of a node."""
    name = node_id.partition("/")[0]
    if not NAME.fullmatch(name):
        raise InvalidRequestError(f"`{node_id}` is no node of SkyPilot's")
    return name
