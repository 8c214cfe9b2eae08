"""Ten thousand managed jobs in the dashboard: time and size of its pages, memory, and what open pages cost others.

    python -m tests.bench.bench_dashboard [--jobs 10000] [--live 1000] [--pages 20]

Times of the server are processor time, as other work on the machine does not count then; the way of an event to the
screen is wall time. SQLite lies on the disk of the temporary folder.
"""

from __future__ import annotations

import argparse
import http.client
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from broker.clock import SystemClock
from broker.dashboard.views import AFTER
from broker.locks import try_lock
from broker.state.store import Store
from broker.types import (
    Attempt,
    Cluster,
    ClusterStatus,
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
from tests.bench.bench_jobs import report
from tests.simulation.world import make_offer

OFFER = replace(make_offer("east1a"), ondemand_usd_hour=3.0, spot_usd_hour=1.0)
PLACEMENT = Placement(offer=OFFER, is_spot=True, node_count=2)
TASK = Task(run="true", resources=(Resources(cloud="local"),))
REQUESTS, EVENTS, WRITES, ROUNDS = 10, 10, 200, 7
CPU_CLOCK = 2  # of another process, by nanoseconds: `clock_getcpuclockid` makes the clock's id from it and the PID


def fill(store: Store, count: int, live: int) -> None:
    """Add jobs with two nodes and three events each; the newest `live` ones run."""
    now_s = store.clock.now_s()
    for begin in range(0, count, 500):
        with store.transaction():
            for number in range(begin, min(begin + 500, count)):
                add_job(store, f"job {number}", now_s - 3600, is_live=number >= count - live)


def pretend_daemon(store: Store) -> None:
    """Let the state say that a daemon is alive for an hour: otherwise each page that shows jobs would start one."""
    store.write("UPDATE leader SET beat_s = ?", (time.time() + 3600,))


def add_job(store: Store, name: str, begin_s: float, *, is_live: bool) -> None:
    job_id = store.jobs.add(name, TASK).id
    cluster, end_s = f"job-{job_id}-1", None if is_live else begin_s + 1800
    state = NodeState.RUNNING if is_live else NodeState.TERMINATED
    store.jobs.put_attempt(
        Attempt(
            job_id=job_id, number=1, cluster=cluster, placement=PLACEMENT, started_s=begin_s, running_s=begin_s + 60,
            lost_s=end_s, ended_s=end_s, outcome=None if is_live else Outcome(kind=OutcomeKind.SUCCEEDED),
        )
    )  # fmt: skip
    nodes = tuple(
        Node(
            id=f"{cluster}-{rank}", cloud="local", owner="o", cluster=cluster, attempt=1, rank=rank, token=cluster,
            state=state, region=OFFER.region, usd_hour=1.0, created_s=begin_s, ended_s=end_s, is_spot=True,
        )
        for rank in range(2)
    )  # fmt: skip
    store.clusters.put(
        Cluster(
            name=cluster, status=ClusterStatus.UP, placement=PLACEMENT, attempt=1, nodes=nodes, created_s=begin_s,
            job_id=job_id,
        )
    )  # fmt: skip
    for node in nodes:
        store.bills.record(node)
    store.jobs.set_progress(job_id, Progress(step=40, total=100, loss=2.5, checkpoint_step=30))
    for attempt in range(1, 4):
        store.events.add(make_event(EventKind.STARTED, attempt=attempt), job_id=job_id)
    store.jobs.set_status(job_id, JobStatus.RUNNING if is_live else JobStatus.SUCCEEDED)
    if not is_live:
        store.clusters.delete(cluster)


class Dashboard:
    """`broker dashboard` as a process of its own, and a browser that is logged in."""

    def __init__(self, home: Path) -> None:
        environment = {**os.environ, "BROKER_HOME": str(home), "HOME": str(home), "PYTHONUNBUFFERED": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "broker", "dashboard", "--no-open", "--port", "0"],
            env=environment, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._process.stdout is not None
        link = urlsplit(self._process.stdout.readline().removeprefix("Dashboard: ").strip())
        self.host = link.netloc
        connection = http.client.HTTPConnection(self.host)
        connection.request("GET", f"{link.path}?{link.query}")
        self.cookie = str(connection.getresponse().headers["Set-Cookie"]).partition(";")[0]
        connection.close()

    def get(self, path: str, **headers: str) -> bytes:
        answer = self.open(path, **headers)
        assert answer.status == 200, (path, answer.status)
        return answer.read()

    def open(self, path: str, **headers: str) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection(self.host, timeout=600)
        connection.request("GET", path, headers={"Cookie": self.cookie, **headers})
        return connection.getresponse()

    def measure_cpu_s(self) -> float:
        """Return the processor seconds of the process so far; the files in `/proc` count in hundredths."""
        return time.clock_gettime(~self._process.pid << 3 | CPU_CLOCK)

    def measure_rss_mib(self) -> float:
        lines = Path(f"/proc/{self._process.pid}/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) / 1024

    def measure_page(self, path: str, change: Callable[[], None]) -> tuple[float, int]:
        """Return processor seconds of a request after a `change`, the greatest of several, and the size in bytes."""
        size, found = len(self.get(path)), list[float]()
        for _ in range(REQUESTS):
            change()  # so that no earlier read is served
            start_s = self.measure_cpu_s()
            self.get(path)
            found.append(self.measure_cpu_s() - start_s)
        return max(found), size

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()


class OpenPage(threading.Thread):
    """A page that loads itself again at every change, as `live.js` does, until it is closed."""

    def __init__(self, dashboard: Dashboard, path: str, on_shown: Callable[[bytes], None]) -> None:
        super().__init__(daemon=True)
        self._dashboard, self._path, self._on_shown = dashboard, path, on_shown
        self._is_closed = False

    def run(self) -> None:
        page = self._dashboard.get(self._path)
        self._on_shown(page)  # it may have the first change: then none is reported
        newest, job = (re.search(rb'data-%s="(\d+)"' % name, page) for name in (b"newest", b"job"))
        assert newest
        query = f"after={newest[1].decode()}" + (f"&job={job[1].decode()}" if job else "")
        changes = self._dashboard.open(f"/changes?{query}")
        while not self._is_closed and (line := changes.readline()):
            if line.startswith(b"data:") and not self._is_closed:
                told = line.removeprefix(b"data:").strip().decode()
                self._on_shown(self._dashboard.get(self._path, **{AFTER: told}))
        changes.close()

    def close(self) -> None:
        """End with the next change."""
        self._is_closed = True


def measure_events(store: Store, dashboard: Dashboard, job_id: int) -> list[float]:
    """Return the seconds from the commit of each event until the page of the job has it."""
    shown, seen = [b""], threading.Condition()

    def show(page: bytes) -> None:
        with seen:
            shown[0] = page
            seen.notify_all()

    page = OpenPage(dashboard, f"/jobs/{job_id}", show)
    page.start()
    found = []
    for number in range(EVENTS):
        text = f"event {number} of the bench"
        store.events.add(make_event(EventKind.NOTE, text=text), job_id=job_id)
        start_s = time.perf_counter()
        with seen:
            assert seen.wait_for(lambda wanted=text.encode(): wanted in shown[0], 120)  # type: ignore[misc]
        found.append(time.perf_counter() - start_s)
    page.close()
    page.join()
    return found


def measure_writes(store: Store, job_ids: Sequence[int]) -> float:
    """Return the processor seconds of a controller's write: progress and an event, in one transaction each."""
    start_s = time.thread_time()
    for number in range(WRITES):
        job_id = job_ids[number % len(job_ids)]
        store.jobs.set_progress(job_id, Progress(step=number, total=WRITES, loss=2.0))
        store.events.add(make_event(EventKind.STARTED, attempt=number), job_id=job_id)
    return (time.thread_time() - start_s) / WRITES


def compare_writes(store: Store, dashboard: Dashboard, count: int, pages: int) -> tuple[float, float]:
    """Return how much more processor time a write takes with open pages, and the share of a core of the dashboard.

    Rounds with and without pages alternate; each is the median of its rounds.
    """
    alone, watched, loads = list[float](), list[float](), list[float]()
    shown = [count - index for index in range(0, pages, 2)]  # half of the pages; the others are the overview
    paths = [f"/jobs/{job_id}" for job_id in shown] + ["/"] * (pages - len(shown))
    for _ in range(ROUNDS):
        alone.append(measure_writes(store, shown))
        opened = [OpenPage(dashboard, path, lambda page: None) for path in paths]
        for each in opened:
            each.start()
        start_s, cpu_s = time.perf_counter(), dashboard.measure_cpu_s()
        watched.append(measure_writes(store, shown))
        loads.append((dashboard.measure_cpu_s() - cpu_s) / (time.perf_counter() - start_s))
        for each in opened:
            each.close()
        for each in opened:
            each.join()
    return statistics.median(watched) / statistics.median(alone) - 1, statistics.median(loads)


def measure(home: Path, count: int, live: int, pages: int) -> None:
    store = Store(home / "state.db", clock=SystemClock())
    fill(store, count, live)
    pretend_daemon(store)
    dashboard = Dashboard(home)
    try:

        def change() -> None:
            store.events.add(make_event(EventKind.NOTE, text="a change"), job_id=count)

        overview_s, overview_bytes = dashboard.measure_page("/", change)
        metrics_s, metrics_bytes = dashboard.measure_page("/metrics", change)
        job_s, _ = dashboard.measure_page(f"/jobs/{count}", change)
        events = measure_events(store, dashboard, count)
        slower, load = compare_writes(store, dashboard, count, pages)
        report(f"overview of {count:,} jobs, cpu", overview_s, "s", bar=0.2)
        report("... its size", overview_bytes / 1000, "kB", bar=100)
        report("/metrics, cpu", metrics_s, "s", bar=0.1)
        report("... its size", metrics_bytes / 1000, "kB")
        report("page of a job, cpu", job_s, "s")
        report("event to screen, slowest of " + str(EVENTS), max(events), "s", bar=1.0)
        report("... median", statistics.median(events), "s")
        report("memory of the dashboard", dashboard.measure_rss_mib(), "MiB", bar=60)
        # Threads of this process load the pages, which slows its writes; `bench_controllers` has a process for them.
        report(f"cpu of writes in a row, {pages} pages open", 100 * slower, "% more")
        report("... cpu of the dashboard meanwhile", 100 * load, "% of a core")
    finally:
        dashboard.close()
        store.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--live", type=int, default=1000)
    parser.add_argument("--pages", type=int, default=20)
    options = parser.parse_args()
    # Holding its lock keeps a daemon from starting: it would act on the made-up jobs.
    with tempfile.TemporaryDirectory() as folder, try_lock(Path(folder) / "daemon.lock"):
        measure(Path(folder), options.jobs, options.live, options.pages)


if __name__ == "__main__":
    main()
