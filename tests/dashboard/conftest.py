"""A state folder with jobs in several states, a cluster and a service; hostile names and texts included."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from broker.app.container import Context
from broker.dashboard.server import serve
from broker.jobs.node_samples import SampleRecorder
from broker.task.loader import load_tasks_text
from broker.types import (
    Attempt,
    Cluster,
    ClusterStatus,
    Event,
    EventKind,
    GpuSample,
    JobStatus,
    Node,
    NodeSample,
    NodeState,
    Outcome,
    OutcomeKind,
    Placement,
    Progress,
    Replica,
    Resources,
    ServiceEventKind,
    Task,
)
from broker.types.forecasts import QUANTILES, ForecastRecord
from broker.types.outcomes import make_event
from broker.wording import make_place
from tests.simulation.world import make_offer

HOSTILE = "<script>document.title='owned'</script>\x1b[31m"
OFFER = replace(make_offer("east1a"), ondemand_usd_hour=3.0, spot_usd_hour=1.0)
PLACEMENT = Placement(offer=OFFER, is_spot=True, node_count=2)
GIB = float(1 << 30)
LOG = "".join(f"step {step}/100  loss {4 - step / 40:.4f}  90 tokens/s\n" for step in (*range(0, 41, 5), 30, 31))
TASK = Task(run="true", resources=(Resources(cloud="local"),))
PLANNED = """
name: planned
resources: {infra: local}
goal: {work: 10h, deadline: 24h}
checkpoint: {stall: 10s, restart: 6m}
run: "true"
"""
SERVED = """
name: chat
service: {readiness_probe: /health, replicas: 2}
resources: {infra: local, ports: 8080}
run: "true"
"""


def make_decision(action: str, *, work_left_hours: float, expected_usd: dict[str, float]) -> Event:
    return make_event(
        EventKind.DECISION, action=action, reason="spot is worth its start", work_left_hours=work_left_hours,
        place=make_place(PLACEMENT), usd_work_hour=0.61, time_left_hours=22.5, spare_hours=7.25,
        ondemand_usd_work_hour=6.0, expected_usd=expected_usd,
    )  # fmt: skip


def make_sample(time_s: float, rank: int) -> NodeSample:
    wave = 0.5 + 0.4 * math.sin(time_s / 40 + rank)
    gpu = GpuSample(
        ratio=round(wave, 3), memory_used_bytes=60.5 * GIB, memory_bytes=79.6 * GIB, temperature_celsius=64.0,
        power_watts=512.4,
    )  # fmt: skip
    return NodeSample(
        time_s=time_s, cpu_ratio=round(wave / 2, 3), cpu_count=16.0, memory_used_bytes=(20 + rank) * GIB,
        memory_bytes=64.0 * GIB, disk_used_bytes=31.0 * GIB, disk_bytes=100.0 * GIB, disk_read_bytes_s=1e6,
        disk_written_bytes_s=wave * 4e7, network_received_bytes_s=wave * 3e8, network_sent_bytes_s=2.9e8,
        gpus=(gpu, gpu), xids={} if rank else {"79": 1},
    )  # fmt: skip


class Story:
    """A context on a state folder, and what is stored there."""

    def __init__(self, home: Path) -> None:
        self.context = Context(home)
        self.store = self.context.store
        self.now_s = self.context.clock.now_s()

    def add_job(self, name: str) -> int:
        return self.store.jobs.add(name, TASK).id

    def add_attempt(self, job_id: int, number: int, *, begin_s: float, end_s: float | None) -> None:
        """Add an attempt on two nodes of 1 USD an hour; it was lost if it ended."""
        cluster = f"job-{job_id}-{number}"
        self.store.jobs.put_attempt(
            Attempt(
                job_id=job_id, number=number, cluster=cluster, placement=PLACEMENT, started_s=begin_s,
                running_s=begin_s + 60, lost_s=end_s, ended_s=end_s, saved_s=begin_s + 600,
                outcome=None if end_s is None else Outcome(kind=OutcomeKind.PREEMPTED),
            )
        )  # fmt: skip
        self.add_cluster(cluster, begin_s=begin_s, end_s=end_s, job_id=job_id)

    def add_cluster(self, name: str, *, begin_s: float, end_s: float | None = None, job_id: int | None = None) -> None:
        nodes = tuple(
            Node(
                id=f"{name}-{rank}", cloud="local", owner="o", cluster=name, attempt=1, rank=rank, token=name,
                state=NodeState.TERMINATED if end_s else NodeState.RUNNING, region=OFFER.region, usd_hour=1.0,
                created_s=begin_s, ended_s=end_s, is_spot=True,
            )
            for rank in range(2)
        )  # fmt: skip
        cluster = Cluster(
            name=name, status=ClusterStatus.UP, placement=PLACEMENT, attempt=1, nodes=nodes, created_s=begin_s,
            job_id=job_id,
        )  # fmt: skip
        self.store.clusters.put(cluster)
        for node in nodes:
            self.store.bills.record(node)
        if end_s is not None:
            self.store.clusters.delete(name)

    def add_planned(self) -> int:
        """Add a job with work and a deadline, which follows decisions; it succeeded after two node-hours."""
        (task,) = load_tasks_text(PLANNED, "task.yaml")
        job_id = self.store.jobs.add("planned", task).id
        self.store.forecasts.add(
            job_id,
            ForecastRecord(usd=(1.6,) * len(QUANTILES), hours=(2.0,) * len(QUANTILES), usd_mean=1.6, hours_mean=2.0),
        )
        begin_s = self.now_s - 7200
        self.add_event(
            job_id, make_decision("move", work_left_hours=10.0, expected_usd={"spot": 1.6, "on-demand": 4.0})
        )
        self.add_event(job_id, make_decision("stay", work_left_hours=4.5, expected_usd={"spot": 0.5, "on-demand": 2.0}))
        self.add_attempt(job_id, 1, begin_s=begin_s, end_s=begin_s + 3600)
        self.store.jobs.set_status(job_id, JobStatus.SUCCEEDED)
        return job_id

    def add_service(self) -> None:
        """Add a service with a replica that failed; hostile text is its reason."""
        (task,) = load_tasks_text(SERVED, "service.yaml")
        self.store.services.add("chat", task, host="127.0.0.1", port=30001, wanted=2)
        job_id = self.add_job("chat-1")
        self.store.jobs.set_status(job_id, JobStatus.FAILED, f"exit code 1: {HOSTILE}")
        self.store.services.put_replica(
            Replica(service="chat", number=1, version=1, job_id=job_id, port=8080, created_s=self.now_s)
        )
        self.store.services.add_event("chat", ServiceEventKind.REPLICA_FAILED, replica=1, detail=HOSTILE)

    def add_samples(self, job_id: int, *, ranks: int = 2, count: int = 30) -> None:
        """Add samples of nodes with two GPUs each, the newest of now; there was an Xid error on the first node."""
        recorder = SampleRecorder(self.context.config.logs, job_id)
        for rank in range(ranks):
            recorder.record([(rank, make_sample(self.now_s - 10 * back, rank)) for back in reversed(range(count))])

    def add_event(self, job_id: int, event: Event) -> None:
        self.store.events.add(event, job_id=job_id)


@pytest.fixture
def story(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Story]:
    """Three jobs and a cluster, one hour old."""
    monkeypatch.setenv("BROKER_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("broker.app.container.Context.ensure_daemon", lambda context: None)
    made = Story(tmp_path / "home")
    hour_ago_s = made.now_s - 3600
    running, failed, ended = (made.add_job(name) for name in ("train", HOSTILE, "done"))
    made.add_attempt(running, 1, begin_s=hour_ago_s, end_s=hour_ago_s + 1800)
    made.store.jobs.set_progress(running, Progress(step=40, total=100, loss=2.5, checkpoint_step=30))
    made.add_attempt(running, 2, begin_s=hour_ago_s + 1900, end_s=None)
    made.store.jobs.set_progress(running, Progress(step=31, total=100, loss=2.25, checkpoint_step=30))
    made.store.jobs.set_status(running, JobStatus.RUNNING)
    made.add_event(running, make_event(EventKind.NOTE, text="the newest event"))
    made.store.jobs.set_status(failed, JobStatus.FAILED, f"exit code 3: {HOSTILE}")
    made.store.jobs.set_status(ended, JobStatus.SUCCEEDED)
    made.add_cluster("dev", begin_s=hour_ago_s)
    made.add_samples(running)
    log = made.context.config.logs / "jobs" / f"{running}.log"
    log.parent.mkdir(parents=True)
    log.write_text(f"{LOG}{HOSTILE}\n")
    yield made
    made.context.close()


class Served:
    """A dashboard that serves a state folder in a thread of its own."""

    def __init__(self, home: Path) -> None:
        self._ready = threading.Event()
        self._home = home
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._thread.start()
        assert self._ready.wait(300)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        context = Context(self._home)
        await serve(context, host="127.0.0.1", port=0, on_ready=self._note_link, until=self._stop.wait)
        context.close()

    def _note_link(self, link: str) -> None:
        self.link = link
        self.base = link.partition("/login")[0]
        self._ready.set()

    def close(self) -> None:
        """Stop the dashboard; a repeated call changes nothing."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()


@pytest.fixture
def served(story: Story, tmp_path: Path) -> Iterator[Served]:
    """The dashboard of the story, with a job that follows a deadline and a service."""
    story.add_planned()
    story.add_service()
    dashboard = Served(tmp_path / "home")
    yield dashboard
    dashboard.close()
