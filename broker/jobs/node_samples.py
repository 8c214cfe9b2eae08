"""Keep the samples that the nodes of jobs report: one file of bounded size for each rank of a job.

They are files, like the log of a job, not rows of the store: ten thousand nodes write a thousand samples per second,
which must not wait for the store's lock, and may be lost in a power cut. A file holds at most 128 KiB (`agent_ring`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from broker.agent import agent_ring
from broker.runtime.samples import encode_sample, parse_sample
from broker.state.faults import explain_os_error
from broker.state.jobs import JobLine
from broker.state.store import Store
from broker.types import JobUsage, NodeHistory, NodeSample

log = logging.getLogger(__name__)

CURRENT_S = 60.0  # a node's newest sample counts as current for this time
RANKS_MAX = 4096
SHOWN_MAX = 64  # ranks that are read for the usage of a job
HISTORIES_MAX = 16  # ranks whose samples are shown over time
POINTS_MAX = 120  # per history


def get_folder(logs: Path, job_id: int) -> Path:
    """Return the folder with one file of samples for each rank of this job."""
    return logs / "nodes" / str(job_id)


class SampleRecorder:
    """Appends the samples of one job's nodes to their files, each sample once."""

    def __init__(self, logs: Path, job_id: int) -> None:
        self._folder = get_folder(logs, job_id)
        self._newest_s: dict[int, float] = {}  # by rank, on the node's clock
        self._is_failing = False

    def record(self, samples: Sequence[tuple[int, NodeSample]]) -> None:
        """Append new samples, given as (rank, sample). If the disk is full, they are lost, which is reported once."""
        for rank in sorted({rank for rank, _ in samples if rank < RANKS_MAX}):
            path = self._folder / f"{rank}.jsonl"
            if rank not in self._newest_s:
                self._newest_s[rank] = float((agent_ring.read_newest(path) or {}).get("time_s", 0.0))
            newest_s = self._newest_s[rank]
            if is_set_back(own := [sample for each, sample in samples if each == rank], newest_s):
                newest_s = 0.0
            new = [sample for sample in own if sample.time_s > newest_s]
            if new:
                self._append(path, new)
                self._newest_s[rank] = new[-1].time_s

    def _append(self, path: Path, samples: Sequence[NodeSample]) -> None:
        try:
            for folder in (path.parent.parent, path.parent):  # with `parents`, the outer one would get the umask's mode
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            agent_ring.append(path, [encode_sample(sample) for sample in samples])
            self._is_failing = False
        except OSError as error:
            if not self._is_failing:
                log.warning("%s", explain_os_error(error, default=path).message)
            self._is_failing = True


def is_set_back(samples: Sequence[NodeSample], newest_s: float) -> bool:
    """Return whether the clock of these samples is behind: another node has the rank, or its clock was changed."""
    return bool(samples) and samples[-1].time_s < newest_s - CURRENT_S


def list_jobs(logs: Path) -> frozenset[int]:
    """List the jobs whose nodes have reported samples."""
    try:
        return frozenset(int(entry.name) for entry in (logs / "nodes").iterdir() if entry.name.isdigit())
    except OSError:
        return frozenset()


def list_ranks(logs: Path, job_id: int) -> Sequence[int]:
    """List the ranks of a job that have reported samples, in order."""
    try:
        return sorted(int(path.stem) for path in get_folder(logs, job_id).glob("*.jsonl") if path.stem.isdigit())
    except OSError:
        return []


def read_newest(
    logs: Path, job_id: int, *, now_s: float, ranks_max: int = SHOWN_MAX
) -> Sequence[tuple[int, NodeSample]]:
    """Return the newest sample of each rank that has reported within a minute."""
    found = []
    for rank in list_ranks(logs, job_id)[:ranks_max]:
        path = get_folder(logs, job_id) / f"{rank}.jsonl"
        if _is_current(path, now_s) and (sample := parse_sample(agent_ring.read_newest(path))) is not None:
            found.append((rank, sample))
    return found


def read_history(logs: Path, job_id: int, *, now_s: float, ranks_max: int = HISTORIES_MAX) -> tuple[NodeHistory, ...]:
    """Return the kept samples of a job's first nodes, thinned to `POINTS_MAX`."""
    found = []
    for rank in list_ranks(logs, job_id)[:ranks_max]:
        path = get_folder(logs, job_id) / f"{rank}.jsonl"
        samples = tuple(sample for data in agent_ring.read(path) if (sample := parse_sample(data)) is not None)
        if samples:
            found.append(NodeHistory(rank=rank, is_current=_is_current(path, now_s), samples=_thin(samples)))
    return tuple(found)


def _thin(samples: tuple[NodeSample, ...]) -> tuple[NodeSample, ...]:
    """Keep every n-th sample, counted from the newest."""
    return samples[:: -(1 + (len(samples) - 1) // POINTS_MAX)][::-1]


def _is_current(path: Path, now_s: float) -> bool:
    """Return whether the file was written within a minute; by our own clock, because a node's may be wrong."""
    try:
        return now_s - path.stat().st_mtime < CURRENT_S
    except OSError:
        return False


def sum_usage(samples: Sequence[NodeSample]) -> JobUsage | None:
    """Sum up the current usage of nodes; None without a sample.

    >>> sum_usage([NodeSample(time_s=1.0, cpu_ratio=0.5), NodeSample(time_s=1.0, cpu_ratio=1.0)]).cpu_ratio
    0.75
    """
    if not samples:
        return None
    gpus = [gpu for sample in samples for gpu in sample.gpus]
    return JobUsage(
        nodes=len(samples),
        cpu_ratio=mean_of_known([sample.cpu_ratio for sample in samples]),
        memory_ratio=mean_of_known([divide(sample.memory_used_bytes, sample.memory_bytes) for sample in samples]),
        gpu_ratio=mean_of_known([gpu.ratio for gpu in gpus]),
        gpu_memory_ratio=mean_of_known([divide(gpu.memory_used_bytes, gpu.memory_bytes) for gpu in gpus]),
        xids=sum(sum(sample.xids.values()) for sample in samples),
    )


def divide(used: float | None, total: float | None) -> float | None:
    """Return the share in use; None if either is unknown."""
    return used / total if used is not None and total else None


def mean_of_known(values: Sequence[float | None]) -> float | None:
    """Return the mean of the values that are not None; None if there are none."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def read_usage(logs: Path, job_id: int, *, now_s: float) -> JobUsage | None:
    """Return the current usage of a job's nodes; None if none has reported within a minute."""
    return sum_usage([sample for _, sample in read_newest(logs, job_id, now_s=now_s)])


def read_usages(logs: Path, lines: Sequence[JobLine], *, now_s: float) -> Mapping[int, JobUsage]:
    """Return the current usage, by ID, of the live jobs among these whose nodes have reported within a minute."""
    known = list_jobs(logs)
    found = {
        line.id: read_usage(logs, line.id, now_s=now_s)
        for line in lines
        if not line.status.is_terminal and line.id in known
    }
    return {job_id: usage for job_id, usage in found.items() if usage is not None}


def forget_samples(store: Store, logs: Path, *, older_than_s: float) -> None:
    """Delete the samples of jobs that ended before `older_than_s`, as for their logs."""
    live = set(store.jobs.list_unfinished_ids())
    for job_id in list_jobs(logs) - live:
        folder = get_folder(logs, job_id)
        with suppress(OSError):  # a user may delete one concurrently
            if all(path.stat().st_mtime < older_than_s for path in folder.iterdir()):
                for path in folder.iterdir():
                    path.unlink()
                folder.rmdir()
