"""Resource usage of a node, sampled by its agent, and of all nodes of a job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from broker.frozen import frozen


@frozen
class GpuSample:
    """One GPU at one moment; None for values that it does not report."""

    ratio: float | None = None  # share of the time since the driver's last sample in which it was busy
    memory_used_bytes: float | None = None
    memory_bytes: float | None = None
    temperature_celsius: float | None = None
    power_watts: float | None = None


@frozen
class NodeSample:
    """One node at one moment, by its own clock. CPU and rates are means since the preceding sample.

    CPU and memory are those of the container if the agent runs in one. `xids`: errors of NVIDIA's driver since the
    node's boot, by number.
    """

    time_s: float
    cpu_ratio: float | None = None
    cpu_count: float | None = None
    memory_used_bytes: float | None = None
    memory_bytes: float | None = None
    disk_used_bytes: float | None = None
    disk_bytes: float | None = None
    disk_read_bytes_s: float | None = None
    disk_written_bytes_s: float | None = None
    network_received_bytes_s: float | None = None
    network_sent_bytes_s: float | None = None
    gpus: tuple[GpuSample, ...] = ()
    xids: Mapping[str, int] = field(default_factory=dict)


@frozen
class NodeFault:
    """A fault of a node that was detected before the program started, with the serials of the GPUs at fault."""

    rank: int
    reason: str
    serials: tuple[str, ...] = ()


@frozen
class SlowNetwork:
    """The network of a gang, slower before the program started than the planner assumes, in GB/s one way.

    `gang_gbs`: an all-reduce of all nodes; `pair`: the ranks of the slowest pair of neighbours, at `pair_gbs`.
    """

    backend: str
    expected_gbs: float
    gang_gbs: float | None
    pair: tuple[int, int] | None
    pair_gbs: float | None


@frozen
class OwnTime:
    """The seconds that a rank needed for its own part of a step, before it waited for the others."""

    rank: int
    step: int
    own_s: float


@frozen
class JobUsage:
    """The current usage of a job's nodes: means over its nodes and GPUs. None if no node reports it."""

    nodes: int  # number that has reported within a minute
    cpu_ratio: float | None = None
    memory_ratio: float | None = None
    gpu_ratio: float | None = None
    gpu_memory_ratio: float | None = None
    xids: int = 0  # on all nodes since their boot


@frozen
class NodeHistory:
    """The newest samples of one node of a job, oldest first, by its rank. `is_current`: it reported within a minute."""

    rank: int
    is_current: bool
    samples: tuple[NodeSample, ...]


@frozen
class SetupResult:
    """The result of the setup archive on one node.

    `result`: `used` (`took_s` instead of `setup_s`), `kept` for later starts, or `not_kept` for a `reason`.
    """

    rank: int
    result: str
    setup_s: float = 0.0
    took_s: float = 0.0
    size_bytes: int = 0
    reason: str = ""
