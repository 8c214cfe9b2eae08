"""Rented machines, the cluster they form, and one execution on it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field
from enum import StrEnum

from broker.errors import CloudError
from broker.nouns import noun
from broker.types.market import Placement
from broker.types.task import Autostop


class NodeState(StrEnum):
    PENDING = "PENDING"
    RUNNING = "RUNNING"
    STOPPED = "STOPPED"
    TERMINATED = "TERMINATED"  # confirmed gone; `Node.reason` may say why


@noun
class MachineSpec:
    """What every node of a gang gets besides its instance type; None leaves the choice to the cloud's adapter."""

    disk_size_gib: int = 256
    disk_tier: str | None = None
    network_tier: str | None = None
    image_id: str | None = None
    ports: tuple[str, ...] = ()  # "8080" or "8000-8010", open to everybody
    labels: Mapping[str, str] = field(default_factory=dict)


@noun
class NodeRequest:
    """A gang to create. The same `token` gives the same nodes, however often it is asked.

    `boot` is the script that a node runs as root at its first start; it is the same for one token.
    """

    owner: str
    cluster: str
    attempt: int
    token: str
    placement: Placement
    spec: MachineSpec = MachineSpec()
    account: str = ""  # where it is asked for, written down before the call; empty: not asked yet, or no accounts there
    boot: str = field(default="", repr=False)


@noun
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
    reason: str = ""  # why it ended: "preempted", "lease", "done", "terminated"
    handle: str = ""  # what the transport needs to reach it (local: the node's folder; ssh: user@host)
    account: str = ""  # whose it is: AWS account id, Google project; empty where a cloud knows no accounts


@noun
class NodeList:
    """What one look at a cloud showed. A node that is missing from it proves nothing about a region in `unseen`."""

    nodes: tuple[Node, ...] = ()
    account: str = ""  # of the login that asked
    unseen: Mapping[str, CloudError] = field(default_factory=dict)  # region -> why it could not be listed

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes)

    def __len__(self) -> int:
        return len(self.nodes)


class ClusterStatus(StrEnum):
    """SkyPilot's words."""

    INIT = "INIT"
    UP = "UP"
    STOPPED = "STOPPED"
    TERMINATING = "TERMINATING"


@noun
class Cluster:
    name: str
    status: ClusterStatus
    placement: Placement
    attempt: int
    nodes: tuple[Node, ...] = ()
    created_s: float = 0.0
    job_id: int | None = None  # the managed job it belongs to
    autostop: Autostop | None = None


class RunStatus(StrEnum):
    """States of one execution of a task on a cluster; each node's agent reports one, the gang's is derived."""

    PENDING = "PENDING"  # it waits for its turn, or for accelerators that others have
    SETTING_UP = "SETTING_UP"
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    FAILED_SETUP = "FAILED_SETUP"
    CANCELLED = "CANCELLED"

    @property
    def is_terminal(self) -> bool:
        return self not in (RunStatus.PENDING, RunStatus.SETTING_UP, RunStatus.RUNNING)


@noun
class Run:
    """One execution on a cluster. `id` counts from 1 within the cluster.

    `accelerators`: what it reserves of each node, such as `T4:0.5`, and `cards` which of the head's it has; empty where
    it has the whole of each node.
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
