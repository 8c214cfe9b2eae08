"""The controllers of ten thousand jobs with and without open pages: part of `python -m tests.bench.bench_dashboard`.

    python -m tests.bench.bench_controllers [--jobs 10000] [--pages 20] [--rounds 9]

The controllers are the real ones, over the simulated cloud in virtual time, in this process; the dashboard is a process
of its own, and so are the pages. Rounds without pages (A) and with them (B) alternate, A B B A, so that a drift of the
machine counts for both. A round steps every controller once and commits ten events, at which each page loads again.
SQLite lies in memory where there is a RAM disk, because the disk is not what is measured.
"""

from __future__ import annotations

import argparse
import http.client
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from broker.locks import try_lock
from broker.types import EventKind
from broker.types.outcomes import make_event
from tests.bench.bench_dashboard import Dashboard, OpenPage, pretend_daemon
from tests.bench.bench_jobs import MEMORY, bring_up, make_controller, report, step_all
from tests.simulation.world import World

CHUNKS = 10
READY_S = 60.0


class Measured:
    """Processor and wall seconds of rounds, with and without pages."""

    def __init__(self) -> None:
        self.cpu_s: dict[bool, list[float]] = {False: [], True: []}
        self.wall_s: dict[bool, list[float]] = {False: [], True: []}

    def compare(self, times: dict[bool, list[float]]) -> tuple[float, float, float]:
        """Return by how much a round is slower with pages, as the median of neighbouring pairs, and both quartiles."""
        found = [watched / alone - 1 for alone, watched in zip(times[False], times[True], strict=True)]
        quartiles = statistics.quantiles(found, n=4)
        return 100 * statistics.median(found), 100 * quartiles[0], 100 * quartiles[2]


def measure(folder: Path, count: int, pages: int, rounds: int) -> None:
    world = World(folder)
    world.gang.steps = 10_000_000
    with world.store.transaction():
        ids = [world.store.jobs.add(f"job-{n}", world.task).id for n in range(count)]
    provisioner = world.make_provisioner()
    controllers = {job_id: make_controller(world, job_id, provisioner) for job_id in ids}
    world.clock.run(lambda: bring_up(world, controllers))
    world.clock.run(lambda: step_all(controllers))
    pretend_daemon(world.store)  # type: ignore[arg-type]
    dashboard = Dashboard(folder)
    measured = Measured()
    loads = []
    try:
        take_round(world, controllers, Measured(), has_pages=False)
        for pair in range(rounds):
            for has_pages in (False, True) if pair % 2 == 0 else (True, False):
                with open_pages(dashboard, ids[-pages:]) if has_pages else nullcontext():
                    begin_s, cpu_s = time.perf_counter(), dashboard.measure_cpu_s()
                    take_round(world, controllers, measured, has_pages=has_pages)
                    if has_pages:
                        loads.append((dashboard.measure_cpu_s() - cpu_s) / (time.perf_counter() - begin_s))
        for name, times, bar in (("cpu", measured.cpu_s, 2.0), ("wall", measured.wall_s, None)):
            median, low, high = measured.compare(times)
            report(f"a round of {count:,} jobs, {name}", statistics.median(times[False]), "s")
            report(f"... slower with {pages} pages, {name}", median, "%", bar=bar)
            print(f"{f'    quartiles of {rounds} pairs':<42}{low:>10.2f} to {high:.2f} %")
        report("cpu of the dashboard meanwhile", 100 * statistics.median(loads), "% of a core")
    finally:
        dashboard.close()
        world.store.close()


def take_round(world: World, controllers: dict[int, Any], measured: Measured, *, has_pages: bool) -> None:
    """Step every controller once. The processor time is this thread's, which steps them and writes to the store."""
    ids = list(controllers)
    size = -(-len(ids) // CHUNKS)
    world.clock.run(lambda: world.clock.sleep(10.0))  # so that each job reports a new step
    cpu_s, wall_s = time.thread_time(), time.perf_counter()
    for begin in range(0, len(ids), size):
        chunk = {job_id: controllers[job_id] for job_id in ids[begin : begin + size]}
        world.clock.run(lambda chunk=chunk: step_all(chunk))  # type: ignore[misc]
        world.store.events.add(make_event(EventKind.NOTE, text="a change"), job_id=ids[-1])
    measured.cpu_s[has_pages].append(time.thread_time() - cpu_s)
    measured.wall_s[has_pages].append(time.perf_counter() - wall_s)


@contextmanager
def open_pages(dashboard: Dashboard, ids: Sequence[int]) -> Any:
    """Keep pages open in a process of their own, half of them the overview, until the block ends."""
    argv = [
        dashboard.host,
        dashboard.cookie,
        *("/" if index % 2 else f"/jobs/{each}" for index, each in enumerate(ids)),
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.bench.bench_controllers", "--open", *argv], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "open\n"
        yield
    finally:
        process.kill()
        process.wait()


class Browser(Dashboard):
    """A logged-in browser of a dashboard that another process has started; counts pages that wait for changes."""

    def __init__(self, host: str, cookie: str) -> None:
        self.host, self.cookie = host, cookie
        self.loaded = threading.Semaphore(0)

    def open(self, path: str) -> http.client.HTTPResponse:
        answer = super().open(path)
        if path.startswith("/changes"):
            self.loaded.release()
        return answer


def keep_open(host: str, cookie: str, paths: Sequence[str]) -> None:
    """Open the pages, say so, and load each one again at every change."""
    browser = Browser(host, cookie)
    for path in paths:
        OpenPage(browser, path, lambda page: None).start()
    for _ in paths:
        assert browser.loaded.acquire(timeout=READY_S)
    print("open", flush=True)
    threading.Event().wait()


def main() -> None:
    if sys.argv[1:2] == ["--open"]:
        keep_open(sys.argv[2], sys.argv[3], sys.argv[4:])
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--pages", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder,
        try_lock(Path(folder) / "daemon.lock"),
    ):
        measure(Path(folder), options.jobs, options.pages, options.rounds)


if __name__ == "__main__":
    main()
