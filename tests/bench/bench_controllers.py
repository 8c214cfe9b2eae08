"""The controllers of ten thousand jobs with and without open pages: part of `python -m tests.bench.bench_dashboard`.

    python -m tests.bench.bench_controllers [--jobs 10000] [--pages 20] [--rounds 9]

The controllers are the real ones, over the simulated cloud in virtual time, in this process; the dashboard is a process
of its own, and so are the pages: half of them show the overview, and half a job each. Rounds without pages (A) and with
them (B) alternate, A B B A, so that a drift of the machine counts for both. A round steps every controller, as often as
fills `ROUND_S`, so that pages are loaded in the rounds of few jobs too. It commits ten events, of the jobs whose pages
are open in turn: each makes the overviews load again, and the page of its job. The loads are counted.
SQLite lies in memory where there is a RAM disk, because the disk is not what is measured.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import math
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from broker.locks import try_lock
from broker.types import EventKind
from broker.types.outcomes import make_event
from tests.bench.bench_dashboard import Dashboard, OpenPage, pretend_daemon
from tests.bench.bench_jobs import MEMORY, bring_up, make_controller, report, step_all
from tests.simulation.world import World

CHUNKS = 10  # of a sweep over all controllers
EVENTS = 10  # in a round
ROUND_S = 2.5  # at least; several looks of the dashboard for new events
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
    measured, shown = Measured(), ids[-pages:]
    changed = itertools.cycle(shown[::2])  # the jobs whose pages are open
    loads, counts = list[float](), list[int]()
    try:
        take_round(world, controllers, Measured(), changed, has_pages=False, sweeps=1)
        alone = Measured()
        take_round(world, controllers, alone, changed, has_pages=False, sweeps=1)
        sweeps = math.ceil(ROUND_S / alone.wall_s[False][0])
        for pair in range(rounds):
            for has_pages in (False, True) if pair % 2 == 0 else (True, False):
                with open_pages(dashboard, shown) if has_pages else nullcontext() as opened:
                    begin_s, cpu_s = time.perf_counter(), dashboard.measure_cpu_s()
                    take_round(world, controllers, measured, changed, has_pages=has_pages, sweeps=sweeps)
                    if opened is not None:
                        loads.append((dashboard.measure_cpu_s() - cpu_s) / (time.perf_counter() - begin_s))
                        counts.append(opened.count())
        sweep = "a sweep" if sweeps == 1 else f"{sweeps} sweeps"
        for name, times, bar in (("cpu", measured.cpu_s, 2.0), ("wall", measured.wall_s, None)):
            median, low, high = measured.compare(times)
            report(f"{sweep} over {count:,} jobs, {name}", statistics.median(times[False]), "s")
            report(f"... slower with {pages} pages, {name}", median, "%", bar=bar)
            print(f"{f'    quartiles of {rounds} pairs':<42}{low:>10.2f} to {high:.2f} %")
        report("cpu of the dashboard meanwhile", 100 * statistics.median(loads), "% of a core")
        report("pages loaded meanwhile, in each round", statistics.median(counts), "")
    finally:
        dashboard.close()
        world.store.close()


def take_round(
    world: World,
    controllers: dict[int, Any],
    measured: Measured,
    changed: Iterator[int],
    *,
    has_pages: bool,
    sweeps: int,
) -> None:
    """Step every controller once a sweep. The processor time is this thread's, which steps them and writes."""
    ids = list(controllers)
    size = -(-len(ids) // CHUNKS)
    done = told = 0
    cpu_s = wall_s = 0.0
    for _ in range(sweeps):
        world.clock.run(lambda: world.clock.sleep(10.0))  # so that each job reports a new step
        begin_cpu_s, begin_wall_s = time.thread_time(), time.perf_counter()
        for begin in range(0, len(ids), size):
            chunk = {job_id: controllers[job_id] for job_id in ids[begin : begin + size]}
            world.clock.run(lambda chunk=chunk: step_all(chunk))  # type: ignore[misc]
            done += 1
            if done * EVENTS >= (told + 1) * CHUNKS * sweeps:
                told += 1
                world.store.events.add(make_event(EventKind.NOTE, text="a change"), job_id=next(changed))
        cpu_s += time.thread_time() - begin_cpu_s
        wall_s += time.perf_counter() - begin_wall_s
    measured.cpu_s[has_pages].append(cpu_s)
    measured.wall_s[has_pages].append(wall_s)


class OpenedPages:
    """A process that keeps pages open, half of them the overview, until it is closed."""

    def __init__(self, dashboard: Dashboard, ids: Sequence[int]) -> None:
        paths = ["/" if index % 2 else f"/jobs/{each}" for index, each in enumerate(ids)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.bench.bench_controllers", "--open", dashboard.host, dashboard.cookie, *paths],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._process.stdout is not None and self._process.stdout.readline() == "open\n"

    def count(self) -> int:
        """Return how many times pages were loaded again."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write("count\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@contextmanager
def open_pages(dashboard: Dashboard, ids: Sequence[int]) -> Iterator[OpenedPages]:
    """Keep pages open in a process of their own until the block ends."""
    opened = OpenedPages(dashboard, ids)
    try:
        yield opened
    finally:
        opened.close()


class Browser(Dashboard):
    """A logged-in browser of a dashboard that another process has started; counts pages that wait for changes."""

    def __init__(self, host: str, cookie: str) -> None:
        self.host, self.cookie = host, cookie
        self.loaded = threading.Semaphore(0)

    def open(self, path: str, **headers: str) -> http.client.HTTPResponse:
        answer = super().open(path, **headers)
        if path.startswith("/changes"):
            self.loaded.release()
        return answer


def keep_open(host: str, cookie: str, paths: Sequence[str]) -> None:
    """Open the pages, say so, load each one again at every change, and answer each line with the count of loads."""
    browser = Browser(host, cookie)
    loads = itertools.count()
    for path in paths:
        OpenPage(browser, path, lambda page: next(loads) and None).start()
    for _ in paths:
        assert browser.loaded.acquire(timeout=READY_S)
    print("open", flush=True)
    for _ in sys.stdin:
        print(next(loads), flush=True)


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
