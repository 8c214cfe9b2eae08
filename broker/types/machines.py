"""Rented machines, the cluster that they form, and one execution on it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field
from enum import StrEnum

from broker.errors import CloudError
from broker.frozen import frozen
from broker.types.market import Placement
from broker.types.task import Autostop


class NodeState(StrEnum):
    """The state of one machine, independent of its cloud."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    STOPPED = "STOPPED"
    TERMINATED = "TERMINATED"  # confirmed gone; `Node.reason` may give the reason


class NodeEnd(StrEnum):
    """The reasons for a node's end that code checks for. `Node.reason` may also be a cloud's own term."""

    PREEMPTED = "preempted"
    LEASE = "lease"  # no broker renewed its lease; some clouds only report that the node shut itself down
    DONE = "done"  # it shut itself down after its work had ended
    TERMINATED = "terminated"  # on request
    MISSING = "missing"  # omitted from the cloud's lists for too long
    OUT_OF_MEMORY = "out of memory"  # its processes exceeded the memory of the node, which is a container or allocation


@frozen
class MachineSpec:
    """The properties of a gang's nodes other than the instance type; None leaves the choice to the cloud's adapter."""

    disk_size_gib: int = 256
    disk_tier: str | None = None
    network_tier: str | None = None
    image_id: str | None = None
    ports: tuple[str, ...] = ()  # "8080" or "8000-8010", open to any address
    labels: Mapping[str, str] = field(default_factory=dict)
    pod_config: str = ""  # JSON, merged into pods; without effect on other clouds
    group: str = ""  # a connected job group: nodes of all its clusters can reach each other
    is_replaceable: bool = True  # a managed job's: broker replaces nodes that are lost, so a cloud may limit their life


@frozen
class NodeRequest:
    """A gang to create; repeated requests with the same `token` return the same nodes.

    `boot` is the script that a node runs as root at its first boot; it is the same for every request with one token.
    """

    owner: str
    cluster: str
    attempt: int
    token: str
    placement: Placement
    spec: MachineSpec = MachineSpec()
    account: str = ""  # recorded before the create call; empty until then, and for clouds without accounts
    boot: str = field(default="", repr=False)


@frozen
class Node:
    """A machine as its cloud lists it; `owner`, `cluster` and `attempt` come from its tags."""

    id: str
    cloud: str
    owner: str
    cluster: str
    attempt: int
    rank: int
    state: NodeState
    address: str = ""
    region: str = ""
    zone: str | None = None
    token: str = ""
    is_spot: bool = False
    usd_hour: float = 0.0
    created_s: float = 0.0
    ended_s: float | None = None  # when billing stopped
    reason: str = ""  # why it ended: a `NodeEnd`, or the cloud's own term
    handle: str = ""  # used by the transport to reach it (local: the node's folder; ssh: user@host)
    account: str = ""  # its AWS account ID or Google project; empty for clouds without accounts


@frozen
class NodeList:
    """The nodes that a cloud listed. A node in one of the `unseen` regions may exist although it is not listed."""

    nodes: tuple[Node, ...] = ()
    account: str = ""  # of the login that listed them
    unseen: Mapping[str, CloudError] = field(default_factory=dict)  # region -> the error that prevented its list

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes)

    def __len__(self) -> int:
        return len(self.nodes)


class ClusterStatus(StrEnum):
    """States of a cluster, named as in SkyPilot."""

    INIT = "INIT"
    UP = "UP"
    STOPPED = "STOPPED"
    TERMINATING = "TERMINATING"


@frozen
class Cluster:
    """The nodes of one gang under the name that the user gave them."""

    name: str
    status: ClusterStatus
    placement: Placement
    attempt: int
    nodes: tuple[Node, ...] = ()
    created_s: float = 0.0
    job_id: int | None = None  # the managed job that it belongs to
    autostop: Autostop | None = None


class RunStatus(StrEnum):
    """States of one execution of a task on a cluster; the gang's state is derived from those of the nodes."""

    PENDING = "PENDING"  # waiting for its turn, or for accelerators in use by other runs
    SETTING_UP = "SETTING_UP"
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    FAILED_SETUP = "FAILED_SETUP"
    CANCELLED = "CANCELLED"

    @property
    def is_terminal(self) -> bool:
        """Whether the run has ended, for any reason."""
        return self not in (RunStatus.PENDING, RunStatus.SETTING_UP, RunStatus.RUNNING)


@frozen
class Run:
    """One execution on a cluster. `id` counts from 1 within the cluster.

    `accelerators` is its reservation on each node, such as `T4:0.5`, and `cards` are its devices on the head node;
    both are empty if it has whole nodes.
    """

    id: int
    cluster: str
    name: str
    status: RunStatus
    started_s: float
    ended_s: float | None = None
    returncode: int | None = None
    accelerators: str = ""
    cards: tuple[int, ...] = ()
