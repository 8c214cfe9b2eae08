"""Collect the metrics of nodes: the newest sample of each node of a live job, up to a number of nodes and GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from broker.dashboard.families import Family, Samples
from broker.frozen import frozen
from broker.jobs.node_samples import list_jobs, read_newest
from broker.types import GpuSample, NodeSample

NODES_MAX = 128
GPUS_MAX = 256
# field of a sample -> (name of the metric, help)
NODE_FIELDS = {
    "cpu_ratio": ("broker_node_cpu_ratio", "Share of a node's processors in use."),
    "memory_used_bytes": ("broker_node_memory_used_bytes", "Memory in use on a node, without caches."),
    "memory_bytes": ("broker_node_memory_bytes", "Memory of a node, or the limit of its container."),
    "disk_used_bytes": ("broker_node_disk_used_bytes", "Disk space in use on a node."),
    "disk_bytes": ("broker_node_disk_bytes", "Disk space of a node."),
    "disk_read_bytes_s": ("broker_node_disk_read_bytes_per_second", "Rate at which a node reads from its disks."),
    "disk_written_bytes_s": ("broker_node_disk_written_bytes_per_second", "Rate at which a node writes to its disks."),
    "network_received_bytes_s": ("broker_node_network_received_bytes_per_second", "Rate at which a node receives."),
    "network_sent_bytes_s": ("broker_node_network_sent_bytes_per_second", "Rate at which a node sends."),
}
GPU_FIELDS = {
    "ratio": ("broker_node_gpu_ratio", "Share of the time in which a GPU computed."),
    "memory_used_bytes": ("broker_node_gpu_memory_used_bytes", "GPU memory in use."),
    "memory_bytes": ("broker_node_gpu_memory_bytes", "GPU memory."),
    "temperature_celsius": ("broker_node_gpu_temperature_celsius", "Temperature of a GPU."),
    "power_watts": ("broker_node_gpu_power_watts", "Power that a GPU draws."),
}


@frozen
class NodeRow:
    """The newest sample of a node."""

    job_id: int
    rank: int
    sample: NodeSample


def list_nodes(logs: Path, live: Sequence[int], *, now_s: float) -> Sequence[NodeRow]:
    """List the nodes of live jobs that currently report, newest jobs first, within both bounds."""
    rows: list[NodeRow] = []
    gpus, known = 0, list_jobs(logs)
    for job_id in sorted(known.intersection(live), reverse=True):
        for rank, sample in read_newest(logs, job_id, now_s=now_s, ranks_max=NODES_MAX - len(rows)):
            gpus += len(sample.gpus)
            if gpus > GPUS_MAX:
                return rows
            rows.append(NodeRow(job_id=job_id, rank=rank, sample=sample))
        if len(rows) >= NODES_MAX:
            break
    return rows


def list_node_families(rows: Sequence[NodeRow]) -> Iterator[Family]:
    """List the families about nodes and GPUs."""
    nodes = [({"job": str(row.job_id), "node": str(row.rank)}, row.sample) for row in rows]
    for name, (metric, text) in NODE_FIELDS.items():
        samples = [(labels, value) for labels, sample in nodes if (value := getattr(sample, name)) is not None]
        yield Family(metric, "gauge", text, samples)
    gpus: list[tuple[dict[str, str], GpuSample]] = [
        ({**labels, "gpu": str(index)}, gpu) for labels, sample in nodes for index, gpu in enumerate(sample.gpus)
    ]
    for name, (metric, text) in GPU_FIELDS.items():
        samples = [(labels, value) for labels, gpu in gpus if (value := getattr(gpu, name)) is not None]
        yield Family(metric, "gauge", text, samples)
    errors: Samples = [
        ({**labels, "xid": number}, float(count)) for labels, sample in nodes for number, count in sample.xids.items()
    ]
    yield Family(
        "broker_node_gpu_errors_total", "counter", "Xid errors of NVIDIA's driver since the node's boot.", errors
    )
