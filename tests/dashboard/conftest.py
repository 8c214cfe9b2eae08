"""A state folder with one running, one failed and one ended job, and a cluster; hostile names and texts included."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from broker.app.container import Context
from broker.dashboard.server import serve
from broker.types import (
    Attempt,
    Cluster,
    ClusterStatus,
    Event,
    EventKind,
    JobStatus,
    Node,
    NodeState,
    Outcome,
    OutcomeKind,
    Placement,
    Progress,
    Resources,
    Task,
)
from broker.types.outcomes import make_event
from tests.simulation.world import make_offer

HOSTILE = "<script>document.title='owned'</script>\x1b[31m"
OFFER = replace(make_offer("east1a"), ondemand_usd_hour=3.0, spot_usd_hour=1.0)
PLACEMENT = Placement(offer=OFFER, is_spot=True, node_count=2)
TASK = Task(run="true", resources=(Resources(cloud="local"),))


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
                running_s=begin_s + 60, lost_s=end_s, ended_s=end_s,
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

    def tell(self, job_id: int, event: Event) -> None:
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
    made.tell(running, make_event(EventKind.NOTE, text="the newest event"))
    made.store.jobs.set_status(failed, JobStatus.FAILED, f"exit code 3: {HOSTILE}")
    made.store.jobs.set_status(ended, JobStatus.SUCCEEDED)
    made.add_cluster("dev", begin_s=hour_ago_s)
    log = made.context.config.logs / "jobs" / f"{running}.log"
    log.parent.mkdir(parents=True)
    log.write_text(f"step 1\n{HOSTILE}\n")
    yield made
    made.context.close()


class Served:
    """A dashboard that serves a state folder in a thread of its own."""

    def __init__(self, home: Path) -> None:
        self._ready = threading.Event()
        self._home = home
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._thread.start()
        assert self._ready.wait(60)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        context = Context(self._home)
        await serve(context, host="127.0.0.1", port=0, on_ready=self._tell, until=self._stop.wait)
        context.close()

    def _tell(self, link: str) -> None:
        self.link = link
        self.base = link.partition("/login")[0]
        self._ready.set()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()


@pytest.fixture
def served(story: Story, tmp_path: Path) -> Iterator[Served]:
    """The dashboard of the story."""
    dashboard = Served(tmp_path / "home")
    yield dashboard
    dashboard.close()
