"""One gang is one SkyPilot cluster: its name, our record of it, and the state of its nodes. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from typing import Any

from broker.errors import InvalidRequestError
from broker.frozen import frozen
from broker.types import Node, NodeEnd, NodeRequest, NodeState

NAME = re.compile(r"b-(?P<owner>[0-9a-z-]+)-(?P<cloud>[a-z]+)-(?P<token>[0-9a-f]+)")
CLUSTER_LABEL, ATTEMPT_LABEL = "broker-cluster", "broker-attempt"
LAUNCHES = ("launch", "start")
LIVE, FAILED = ("PENDING", "RUNNING"), ("FAILED", "CANCELLED")  # states of a request; the third one is SUCCEEDED
# SkyPilot's cluster states. INIT may be live or down; only the agents on its nodes know.
STATES = {
    "INIT": NodeState.PENDING,
    "PENDING": NodeState.PENDING,
    "UP": NodeState.RUNNING,
    "AUTOSTOPPING": NodeState.RUNNING,
    "STOPPED": NodeState.STOPPED,
}


@frozen
class SkyGang:
    """Our record of one launch. `task` is the task given to SkyPilot; `ended_s` is None while the gang lives."""

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
    reached_at: float = 0.0  # the `SkyClusterRow.launched_at` for which its nodes' addresses are known
    was_seen: bool = False
    was_up: bool = False
    addresses: tuple[str, ...] = ()
    is_down_asked: bool = False
    ended_s: float | None = None
    reason: str = ""
    account: str = ""  # through which it was launched; empty in older records


@frozen
class SkyClusterRow:
    """A row of SkyPilot's table of clusters."""

    name: str
    status: str
    cloud: str = ""
    region: str = ""
    nodes: int = 1
    labels: Mapping[str, str] = field(default_factory=dict)
    launched_at: float = 0.0
    addresses: Sequence[str] = ()  # by rank, as the nodes know each other
    why: str = ""


@frozen
class Request:
    """One request to the API server; `cluster` is the cluster that it concerns."""

    id: str
    verb: str
    cluster: str
    status: str


@frozen
class ServerState:
    """SkyPilot's clusters and requests at one moment. `account`: the API server and the user that they belong to."""

    clusters: Sequence[SkyClusterRow] = ()
    requests: Sequence[Request] = ()
    account: str = ""

    def find(self, name: str) -> SkyClusterRow | None:
        """Return the cluster of this name; None if SkyPilot has none."""
        return next((cluster for cluster in self.clusters if cluster.name == name), None)

    def is_launching(self, name: str) -> bool:
        """Return whether a launch of this cluster is still in progress."""
        return any(
            request.cluster == name and request.verb in LAUNCHES and request.status in LIVE for request in self.requests
        )

    def read_status(self, request_id: str) -> str:
        """Return the request's status; empty if the server does not know it."""
        return next((request.status for request in self.requests if request.id == request_id), "")


def is_elsewhere(gang: SkyGang, observed: ServerState) -> bool:
    """Return whether a gang that has not ended belongs to an API server or user other than the observed one.

    It is missing from what was observed, which proves nothing.
    """
    return bool(gang.account and observed.account) and gang.account != observed.account and gang.ended_s is None


def make_prefix(owner: str) -> str:
    """Return the prefix of the names of this installation's clusters in SkyPilot."""
    return f"b-{owner}-"


def make_name(request: NodeRequest) -> str:
    """Return the name of the request's cluster in SkyPilot. It follows from the token, so a repeat finds it."""
    return f"{make_prefix(request.owner)}{request.placement.offer.cloud}-{request.token}"


def make_gang(request: NodeRequest, *, task: dict[str, Any], now_s: float) -> SkyGang:
    """Make the record of a gang before SkyPilot is called."""
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


def adopt(name: str, owner: str, seen: SkyClusterRow | None) -> SkyGang | None:
    """Make a record, from name and labels, for a gang of ours that has none."""
    match = NAME.fullmatch(name)
    if match is None:
        return None
    labels = seen.labels if seen else {}
    attempt = labels.get(ATTEMPT_LABEL, "")
    return SkyGang(
        name=name,
        cloud=match["cloud"],
        owner=owner,
        cluster=labels.get(CLUSTER_LABEL, ""),
        attempt=int(attempt) if attempt.isdigit() else 0,
        token=match["token"],
        node_count=seen.nodes if seen else 1,
        region=seen.region if seen else "",
        created_s=seen.launched_at if seen else 0.0,
    )


def judge(gang: SkyGang, observed: ServerState, *, now_s: float) -> tuple[SkyGang, NodeState | None]:
    """Return the gang's state; None if nothing proves that SkyPilot received its request.

    A gang has ended when its cluster has left SkyPilot's table, where it stays until confirmed gone, and no request for
    it is live.
    """
    if gang.ended_s is not None:
        return gang, NodeState.TERMINATED
    seen = observed.find(gang.name)
    if seen is not None:
        is_up = seen.status == "UP" or gang.was_up
        addresses = tuple(seen.addresses) or gang.addresses
        updated = replace(gang, was_seen=True, was_up=is_up, addresses=addresses)
        return updated, STATES.get(seen.status, NodeState.PENDING)
    if observed.is_launching(gang.name):
        return gang, NodeState.PENDING
    status = observed.read_status(gang.request_id)
    if not gang.was_seen and not status:
        return gang, None
    return replace(gang, ended_s=now_s, reason=_classify_end(gang, status)), NodeState.TERMINATED


def _classify_end(gang: SkyGang, status: str) -> str:
    if gang.is_down_asked:
        return NodeEnd.TERMINATED
    if gang.was_up or status == "SUCCEEDED":
        return NodeEnd.PREEMPTED if gang.is_spot else NodeEnd.LEASE  # nothing else terminates a cluster that is up
    return "refused"


def is_broken(gang: SkyGang, observed: ServerState) -> bool:
    """Return whether a launch failed half-way and left something behind."""
    return (
        observed.find(gang.name) is not None
        and not observed.is_launching(gang.name)
        and not gang.was_up
        and observed.read_status(gang.request_id) in FAILED
    )


def list_nodes_of(gang: SkyGang, state: NodeState) -> Sequence[Node]:
    """List the nodes of a gang by rank, all in the same state."""
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
    """Return the cluster of a node."""
    name = node_id.partition("/")[0]
    if not NAME.fullmatch(name):
        raise InvalidRequestError(f"invalid SkyPilot node `{node_id}`")
    return name
