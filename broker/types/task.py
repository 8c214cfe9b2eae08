"""What the user wrote: a task, the shapes of node that it accepts, and what finishing means."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from broker.nouns import noun

CONTAINER = "docker:"  # SkyPilot's word before an image that is run, not booted


@noun
class Origin:
    """Where in a task file something was written; lines and columns count from 1."""

    file: str
    line: int
    column: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"


@noun
class Quantity:
    """An asked amount: `4` is exactly 4, `4+` at least 4."""

    value: float
    is_minimum: bool = False

    def admits(self, amount: float) -> bool:
        return amount >= self.value if self.is_minimum else amount == self.value

    def __str__(self) -> str:
        return f"{self.value:g}{'+' if self.is_minimum else ''}"


@noun
class Autostop:
    idle_minutes: int
    is_down: bool = False


@noun
class JobRecovery:
    """`strategy` None is the default: same place first, then the plan's order. `max_restarts_on_errors` None: a program
    that fails is restarted while the job makes headway (`jobs/deaths.py`)."""

    strategy: str | None = None
    max_restarts_on_errors: int | None = None
    recover_on_exit_codes: tuple[int, ...] = ()
    stall_timeout_s: float | None = None  # restart a program that reports no new step for so long
    nodes_min: int | None = None  # of an elastic program: it goes on while the first node and so many in all are left


@noun
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
    usd_hour_max: float | None = None  # of one node, at the price of its pricing model
    origin: Origin | None = None

    @property
    def container(self) -> str | None:
        """The image that the program runs in; None where it runs on the machine itself."""
        image = self.image_id or ""
        return image.removeprefix(CONTAINER) if image.startswith(CONTAINER) else None


@noun
class Goal:
    """What finishing means. `work_hours` is the time without faults on `work_on` ("A100:8"; None: on any placement)."""

    work_hours: float | None = None
    work_on: str | None = None
    throughput: Mapping[str, float] = field(default_factory=dict)  # "H100:8" -> tokens or samples a second
    deadline_hours: float | None = None
    budget_usd: float | None = None
    confidence: float = 0.9


@noun
class CheckpointSpec:
    """What a checkpoint costs, and where it goes. `every_s` None: the Young/Daly interval is used.

    `to`: the bucket, or the folder that every node sees; None: the user's own default, else a folder of this machine.
    """

    every_s: float | None = None
    stall_s: float = 5.0
    restart_s: float = 300.0
    size_gib: float = 0.0
    to: str | None = None


@noun
class Secret:
    """A value that never shows itself: not in repr, logs, or `str`."""

    value: str

    def __repr__(self) -> str:
        return "Secret(***)"

    __str__ = __repr__


@noun
class DataSet:
    """Data that a task reads or writes: a folder or bucket URL, and its size."""

    url: str
    size_gib: float


@noun
class StorageMount:
    """A bucket that the task wants to see as a folder. `source` is a URL, local paths, or empty for a new bucket."""

    target: str
    source: tuple[str, ...] = ()
    name: str | None = None
    store: str | None = None
    mode: str = "MOUNT"  # or COPY, MOUNT_CACHED
    is_persistent: bool = True
    origin: Origin | None = None


@noun
class Notice:
    """What a task file asks for and broker does not do; `blocks_launch` when ignoring it would run another task."""

    origin: Origin
    field: str
    message: str
    hint: str | None = None
    blocks_launch: bool = False
    source_line: str | None = None
    cloud: str | None = None  # where this is so; None: everywhere


@noun
class Task:
    """What the user wrote. `resources` is never empty; its order is a preference when `is_ordered`."""

    name: str | None = None
    resources: tuple[Resources, ...] = (Resources(),)
    is_ordered: bool = False
    num_nodes: int = 1
    workdir: str | None = None
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
    unattended_s: float | None = None  # how long a managed job continues while its broker is away; None: the default
    inputs: tuple[DataSet, ...] = ()
    outputs: tuple[DataSet, ...] = ()
    needs: Mapping[str, float] = field(default_factory=dict)  # name of an earlier task -> GiB moved from it
    pipeline: str | None = None  # name in the header of the file's several tasks
    notices: tuple[Notice, ...] = ()
    origin: Origin | None = None
