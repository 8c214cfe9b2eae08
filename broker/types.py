"""The nouns. Each room turns one of these into the next; all are frozen, and nothing mutates what it was handed.

task.yaml -> Task -> Offers -> Plan -> Cluster -> Run -> Job with its Attempts
Units stand last in a name: `_s`, `_hours`, `_usd`, `_gib`. Money is US dollars, memory is GiB, a point in time is
seconds since the epoch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where in a task file something was written; lines and columns count from 1."""

    file: str
    line: int
    column: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """An asked amount: `4` is exactly 4, `4+` at least 4."""

    value: float
    is_minimum: bool = False

    def admits(self, amount: float) -> bool:
        return amount >= self.value if self.is_minimum else amount == self.value

    def __str__(self) -> str:
        return f"{self.value:g}{'+' if self.is_minimum else ''}"


@dataclass(frozen=True, kw_only=True)
class Autostop:
    idle_minutes: int
    is_down: bool = False


@dataclass(frozen=True, kw_only=True)
class JobRecovery:
    """`strategy` None is the default: same place first, then the plan's order."""

    strategy: str | None = None
    max_restarts_on_errors: int = 0
    recover_on_exit_codes: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Resources:
    """One acceptable shape of a node. Alternatives (`any_of`, a set of accelerators) become several Resources."""

    accelerator: str | None = None
    accelerator_count: float = 0
    cpus: Quantity | None = None
    memory_gib: Quantity | None = None
    instance_type: str | None = None
    cloud: str | None = None
    region: str | None = None
    zone: str | None = None
    use_spot: bool | None = None  # None: on-demand, or both when the task has a goal
    disk_size_gib: int = 256
    disk_tier: str | None = None
    network_tier: str | None = None
    ports: tuple[str, ...] = ()
    image_id: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    autostop: Autostop | None = None
    job_recovery: JobRecovery = JobRecovery()
    origin: Origin | None = None


@dataclass(frozen=True, kw_only=True)
class Goal:
    """What finishing means. `work_hours` is the time without faults on `work_on` ("A100:8"; None: on any placement)."""

    work_hours: float | None = None
    work_on: str | None = None
    deadline_hours: float | None = None
    budget_usd: float | None = None
    confidence: float = 0.9


@dataclass(frozen=True, kw_only=True)
class CheckpointSpec:
    """What a checkpoint costs. `every_s` None: the Young/Daly interval is used."""

    every_s: float | None = None
    stall_s: float = 5.0
    restart_s: float = 300.0
    size_gib: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Secret:
    """A value that never shows itself: not in repr, logs, or `str`."""

    value: str

    def __repr__(self) -> str:
        return "Secret(***)"

    __str__ = __repr__


@dataclass(frozen=True, kw_only=True)
class Task:
    """What the user wrote. `resources` is never empty; its order is a preference when `is_ordered`."""

    name: str | None = None
    resources: tuple[Resources, ...] = (Resources(),)
    is_ordered: bool = False
    num_nodes: int = 1
    workdir: str | None = None
    file_mounts: Mapping[str, str] = field(default_factory=dict)  # target on the node -> local source
    envs: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, Secret] = field(default_factory=dict)
    setup: str | None = None
    run: str | None = None
    goal: Goal | None = None
    checkpoint: CheckpointSpec = CheckpointSpec()
    origin: Origin | None = None


@dataclass(frozen=True, kw_only=True)
class Offer:
    """One instance type for sale at one place, prices in USD per instance-hour. `as_of` is an ISO date."""

    cloud: str
    region: str
    zone: str | None
    instance_type: str
    vcpus: float
    memory_gib: float
    accelerator: str | None = None
    accelerator_count: float = 0
    accelerator_memory_gib: float = 0
    ondemand_usd_hour: float | None = None
    spot_usd_hour: float | None = None
    interruption_band: float | None = None  # upper bound in percent a month; 100 stands for "over 20"
    is_estimated: bool = False  # the on-demand price is worked out, not listed: shown with `~`
    as_of: str = ""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where a gang would run: so many nodes of one offer, spot or on-demand."""

    offer: Offer
    is_spot: bool
    node_count: int

    @property
    def usd_hour(self) -> float:
        """Price of the whole gang, USD per hour."""
        price = self.offer.spot_usd_hour if self.is_spot else self.offer.ondemand_usd_hour
        assert price is not None, "a placement is only made from an offer that has its price"
        return price * self.node_count


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A placement with what it is expected to cost to finish. Hours and dollars are None where no work was given."""

    placement: Placement
    preemptions_per_hour: float = 0.0  # of the whole gang
    checkpoint_every_s: float | None = None
    expected_hours: float | None = None
    expected_preemptions: float | None = None
    expected_usd: float | None = None
    deadline_chance: float | None = None


@dataclass(frozen=True, kw_only=True)
class Rejection:
    """How many offers a named filter took out, and the nearest miss in words."""

    filter: str
    count: int
    nearest: str | None = None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Estimates, best first, never empty; `estimates[0]` is the choice and `reason` says why in one sentence."""

    task: Task
    estimates: tuple[Estimate, ...]
    rejections: tuple[Rejection, ...]
    prices_as_of: str
    reason: str

    @property
    def choice(self) -> Estimate:
        return self.estimates[0]


class NodeState(StrEnum):
    PENDING = "PENDING"
    RUNNING = "RUNNING"
    STOPPED = "STOPPED"
    TERMINATED = "TERMINATED"  # confirmed gone; `Node.reason` may say why


@dataclass(frozen=True, kw_only=True)
class NodeRequest:
    """A gang to create. The same `token` gives the same nodes, however often it is asked."""

    owner: str
    cluster: str
    attempt: int
    token: str
    placement: Placement
    disk_size_gib: int = 256
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
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
    reason: str = ""  # why it ended: "preempted", "lease", "terminated"
    handle: str = ""  # what the transport needs to reach it (local: the node's folder; ssh: user@host)


class ClusterStatus(StrEnum):
    """SkyPilot's words."""

    INIT = "INIT"
    UP = "UP"
    STOPPED = "STOPPED"
    TERMINATING = "TERMINATING"


@dataclass(frozen=True, kw_only=True)
class Cluster:
    name: str
    status: ClusterStatus
    placement: Placement
    attempt: int
    nodes: tuple[Node, ...] = ()
    created_s: float = 0.0
    job_id: int | None = None  # the managed job it belongs to
    autostop: Autostop | None = None


class JobStatus(StrEnum):
    """States of a managed job, in SkyPilot's words. The last seven are terminal and never change."""

    PENDING = "PENDING"
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    RECOVERING = "RECOVERING"
    CANCELLING = "CANCELLING"
    SUCCEEDED = "SUCCEEDED"
    CANCELLED = "CANCELLED"
    FAILED = "FAILED"
    FAILED_SETUP = "FAILED_SETUP"
    FAILED_PRECHECKS = "FAILED_PRECHECKS"
    FAILED_NO_RESOURCE = "FAILED_NO_RESOURCE"
    FAILED_CONTROLLER = "FAILED_CONTROLLER"

    @property
    def is_terminal(self) -> bool:
        return self not in (
            JobStatus.PENDING,
            JobStatus.STARTING,
            JobStatus.RUNNING,
            JobStatus.RECOVERING,
            JobStatus.CANCELLING,
        )


class RunStatus(StrEnum):
    """States of one execution of a task on a cluster; each node's agent reports one, the gang's is derived."""

    SETTING_UP = "SETTING_UP"
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    FAILED_SETUP = "FAILED_SETUP"
    CANCELLED = "CANCELLED"

    @property
    def is_terminal(self) -> bool:
        return self not in (RunStatus.SETTING_UP, RunStatus.RUNNING)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One execution on a cluster. `id` counts from 1 within the cluster."""

    id: int
    cluster: str
    name: str
    status: RunStatus
    started_s: float
    ended_s: float | None = None
    returncode: int | None = None


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One try at a job on one cluster. `number` counts from 1 and only grows."""

    job_id: int
    number: int
    cluster: str
    placement: Placement
    started_s: float
    running_s: float | None = None  # first time the program was seen running
    ended_s: float | None = None
    outcome: str = ""
    usd: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The newest line of BROKER_PROGRESS_FILE."""

    step: int = 0
    total: int | None = None
    loss: float | None = None
    tokens_per_s: float | None = None
    checkpoint_step: int | None = None
    time_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Job:
    """A managed job: promised to finish or to say why not."""

    id: int
    name: str
    status: JobStatus
    task: Task
    submitted_s: float
    ended_s: float | None = None
    attempts: tuple[Attempt, ...] = ()
    progress: Progress | None = None
    failure: str = ""
    cancel_requested: bool = False
