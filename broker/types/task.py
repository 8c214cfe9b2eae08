"""Tasks as the user wrote them: the program, the node shapes that it accepts, and the goal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from broker.frozen import frozen
from broker.types.groups import GroupRole
from broker.types.notify import NotifySpec
from broker.types.schedules import ScheduleSpec
from broker.types.service import ServiceSpec

CONTAINER = "docker:"  # SkyPilot's prefix for an image that runs as a container, instead of being booted


@frozen
class Origin:
    """A position in a task file; lines and columns count from 1."""

    file: str
    line: int
    column: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"


@frozen
class Quantity:
    """A requested amount: `4` is exactly 4, `4+` at least 4."""

    value: float
    is_minimum: bool = False

    def admits(self, amount: float) -> bool:
        """Return whether an amount satisfies the request: at least (`4+`) or exactly (`4`) the value."""
        return amount >= self.value if self.is_minimum else amount == self.value

    def __str__(self) -> str:
        return f"{self.value:g}{'+' if self.is_minimum else ''}"


@frozen
class Autostop:
    """Stop the cluster after `idle_minutes` without a run; terminate it if `is_down`."""

    idle_minutes: int
    is_down: bool = False


@frozen
class JobRecovery:
    """The recovery of a managed job.

    `strategy` None is the default: the same place first, then the plan's order. `max_restarts_on_errors` None: a
    failing program is restarted while the job makes progress (`jobs/deaths.py`).
    """

    strategy: str | None = None
    max_restarts_on_errors: int | None = None
    recover_on_exit_codes: tuple[int, ...] = ()
    stall_timeout_s: float | None = None  # restart a program that reports no new step for this time
    checks_health: bool | None = None  # None: on GPU machines of clouds
    nodes_min: int | None = None  # an elastic program continues with at least this many, including the first
    caches_setup: bool = False  # later starts restore the results of `setup` instead of running it


# Of a machine without accelerators, if the task states no amount: SkyPilot requests this much for each vCPU, and with
# less, an ordinary `pip install` is often killed. Own machines are as they are.
ORDINARY_GIB = 4.0


@frozen
class Resources:
    """An acceptable node shape. Alternatives (`any_of`, a set of accelerators) become several Resources."""

    accelerator: str | None = None
    accelerator_count: float = 0
    cpus: Quantity | None = None
    memory_gib: Quantity | None = None
    memory_gib_per_vcpu: float | None = None  # at least
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
    usd_hour_max: float | None = None  # per node, at its spot or on-demand price
    preference: int | None = None  # in an ordered task; equal ones compete, and None is its position in the list
    origin: Origin | None = None

    @property
    def container(self) -> str | None:
        """The image that the program runs in; None if it runs on the machine itself."""
        image = self.image_id or ""
        return image.removeprefix(CONTAINER) if image.startswith(CONTAINER) else None

    @property
    def has_ordinary_memory(self) -> bool:
        """Whether the request leaves the amount of memory open, so that `ORDINARY_GIB` is the least."""
        return not (self.memory_gib or self.memory_gib_per_vcpu or self.instance_type or self.accelerator)


@frozen
class Goal:
    """The goal of a task. `work_hours` is the time without faults on `work_on` ("A100:8"; None: on any placement)."""

    work_hours: float | None = None
    work_on: str | None = None
    throughput: Mapping[str, float] = field(default_factory=dict)  # "H100:8" -> tokens or samples per second
    deadline_hours: float | None = None
    budget_usd: float | None = None
    confidence: float = 0.9
    # Placements that meet the deadline with a lower chance are ranked, too. Not in a task file.
    keeps_late: bool = False
    # of finishing an hour earlier; None: derived from the on-demand price of the gang
    hour_value_usd: float | None = None


@frozen
class CheckpointSpec:
    """The cost and the destination of checkpoints. `every_s` None: the Young/Daly interval is used.

    `to` is a bucket, or a folder that every node can access; None: the user's default, else a folder on this machine.
    `is_for_same_ranks`: the program only resumes on the number of accelerators that wrote the checkpoint.
    """

    every_s: float | None = None
    stall_s: float = 5.0
    restart_s: float = 300.0
    size_gib: float = 0.0
    to: str | None = None
    is_for_same_ranks: bool = False


@frozen
class Secret:
    """A value that never appears in `repr`, `str` or logs."""

    value: str

    def __repr__(self) -> str:
        return "Secret(***)"

    __str__ = __repr__


@frozen
class DataSet:
    """Data that a task reads or writes: the URL of a folder or bucket, and its size."""

    url: str
    size_gib: float


@frozen
class StorageMount:
    """A bucket mounted as a folder. `source` is a URL, local paths, or empty for a new bucket."""

    target: str
    source: tuple[str, ...] = ()
    name: str | None = None
    store: str | None = None
    mode: str = "MOUNT"  # or COPY, MOUNT_CACHED
    is_read_only: bool = False  # a mount that refuses writes
    origin: Origin | None = None


@frozen
class Repository:
    """A git repository as the working directory, until its clone is made. `ref`: a branch, tag or commit."""

    url: str
    ref: str | None = None


@frozen
class Notice:
    """A request of a task file that broker does not support; `blocks_launch` if ignoring it would change the task."""

    origin: Origin
    field: str
    message: str
    hint: str | None = None
    blocks_launch: bool = False
    source_line: str | None = None
    cloud: str | None = None  # the cloud that this applies to; None: all


@frozen
class Task:
    """A task as the user wrote it. `resources` is never empty; it is in order of preference if `is_ordered`."""

    name: str | None = None
    resources: tuple[Resources, ...] = (Resources(),)
    is_ordered: bool = False
    num_nodes: int = 1
    workdir: str | None = None
    repository: Repository | None = None  # instead of `workdir`, until the launch has cloned it
    file_mounts: Mapping[str, str] = field(default_factory=dict)  # target on the node -> local source
    storage_mounts: tuple[StorageMount, ...] = ()
    envs: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, Secret] = field(default_factory=dict)
    setup: str | None = None
    run: str | None = None
    goal: Goal | None = None
    recovery: JobRecovery = JobRecovery()
    autostop: Autostop | None = None  # of the cluster that `launch` starts
    checkpoint: CheckpointSpec = CheckpointSpec()
    unattended_s: float | None = None  # how long a managed job continues without its broker; None: the default
    max_duration_s: float | None = None  # of a managed job, from its first machines to its end
    inputs: tuple[DataSet, ...] = ()
    outputs: tuple[DataSet, ...] = ()
    needs: Mapping[str, float] = field(default_factory=dict)  # name of an earlier task -> GiB moved from it
    service: ServiceSpec | None = None  # of `broker serve`
    pipeline: str | None = None  # name in the header of a file with several tasks
    group: GroupRole | None = None  # its role in a job group
    priority: int = 0  # of a managed job: higher ones start first when `max_live_jobs` is reached
    notify: NotifySpec | None = None  # of managed jobs; None: as set by `[notify]` in `config.toml`
    event_callback: str | None = None  # a command that the daemon runs at each change of a managed job's status
    schedule: ScheduleSpec | None = None  # stored by `broker jobs launch`; None: one job, now
    pod_config: str = ""  # JSON: the supported parts are merged into its pods on Kubernetes
    notices: tuple[Notice, ...] = ()
    origin: Origin | None = None

    def list_preferences(self) -> list[int]:
        """Return the preference of each alternative: the lowest is tried first, and equal ones compete."""
        if not self.is_ordered:
            return [0] * len(self.resources)
        return [
            position if each.preference is None else each.preference for position, each in enumerate(self.resources)
        ]
