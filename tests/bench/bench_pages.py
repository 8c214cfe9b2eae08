"""The cost of open dashboard pages for the controllers of jobs, on a state of ten thousand jobs.

    python -m tests.bench.bench_pages [--jobs 10000] [--live 100] [--pages 20] [--pairs 40]

This process runs real controllers on the simulated cloud, with the state in a SQLite file. The dashboard is a process
of its own, and so are the pages, which load themselves again at the events that concern them, like a browser. Blocks of
reconcile steps with and without open pages alternate, each pair in the other order than the last. What is compared is
processor time of the thread that steps, so other processes count only by what they do to caches; the figure is the
median of the pairs' ratios, with the 95 % interval of a median by order statistics. As the dashboard can only slow a
controller through locks of the state, these are counted too: a probe asks for the write lock without waiting before
each step.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from broker.jobs.controller import JobController
from broker.locks import try_lock
from broker.types import EventKind
from broker.types.outcomes import make_event
from tests.bench.bench_dashboard import Dashboard, OpenPage, fill, pretend_daemon
from tests.bench.bench_jobs import bring_up, make_controller, report
from tests.simulation.world import World

ROUNDS = 16  # of all controllers, in one block
EVENT_ROUNDS = 4  # between two events, which make every overview load itself again, and the page of one job
SECONDS_PER_ROUND = 1.0  # of virtual time: each job reports a new step


class Pages:
    """A process that holds pages open between `open` and `close`."""

    def __init__(self, dashboard: Dashboard, paths: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.bench.bench_pages", "--hold", dashboard.host, dashboard.cookie, *paths],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def send(self, word: str) -> str:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(f"{word}\n")
        self._process.stdin.flush()
        return self._process.stdout.readline()

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()


def hold(host: str, cookie: str, paths: Sequence[str]) -> None:
    """Serve `Pages` in the other process: open and close pages as stdin says."""
    dashboard = Dashboard.__new__(Dashboard)
    dashboard.host, dashboard.cookie = host, cookie
    pages: list[OpenPage] = []
    loads, lock = [0], threading.Lock()

    def count(page: bytes) -> None:
        with lock:
            loads[0] += 1

    for line in sys.stdin:
        if line.strip() == "open":
            pages = [OpenPage(dashboard, path, count) for path in paths]
            for page in pages:
                dashboard.get(page._path)
                page.start()
        else:
            for page in pages:
                page.close()
        print(loads[0], flush=True)


class Block:
    """Blocks of steps of all controllers, with the counts of the probe."""

    def __init__(self, world: World, controllers: dict[int, JobController], *, shown: Sequence[int]) -> None:
        self._world = world
        self._changed = itertools.cycle(shown)
        self._is_open = False
        self._controllers = controllers
        self._probe = sqlite3.connect(world.folder / "state.db", timeout=0.0, isolation_level=None)
        self.probes = {False: 0, True: 0}  # by whether pages are open
        self.refusals = {False: 0, True: 0}

    def run(self, *, is_open: bool = False) -> float:
        """Return the processor seconds of a step."""
        self._is_open = is_open
        spent_s = 0.0
        for number in range(ROUNDS):
            if number % EVENT_ROUNDS == 0:
                self._world.store.events.add(make_event(EventKind.NOTE, text="a round"), job_id=next(self._changed))
            self._world.clock.run(lambda: self._world.clock.sleep(SECONDS_PER_ROUND))
            spent_s += self._world.clock.run(self._step_all)
        return spent_s / (ROUNDS * len(self._controllers))

    async def _step_all(self) -> float:
        spent_s = 0.0
        for controller in self._controllers.values():
            self._ask_for_lock()
            start_s = time.thread_time()
            await controller.step()
            spent_s += time.thread_time() - start_s
        return spent_s

    def _ask_for_lock(self) -> None:
        self.probes[self._is_open] += 1
        try:
            self._probe.execute("BEGIN IMMEDIATE")
            self._probe.execute("ROLLBACK")
        except sqlite3.OperationalError:
            self.refusals[self._is_open] += 1


def find_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the median by order statistics (normal approximation of the binomial)."""
    ranked, half = sorted(values), 0.98 * math.sqrt(len(values))
    low = max(0, math.floor(len(values) / 2 - half) - 1)
    return ranked[low], ranked[min(len(ranked) - 1, len(values) - 1 - low)]


def measure(folder: Path, *, jobs: int, live: int, pages: int, pairs: int) -> None:
    world = World(folder)
    world.gang.steps = 10_000_000
    fill(world.store, jobs - live, 0)
    with world.store.transaction():
        ids = [world.store.jobs.add(f"live-{number}", world.task).id for number in range(live)]
    provisioner = world.make_provisioner()
    controllers = {job_id: make_controller(world, job_id, provisioner) for job_id in ids}
    world.clock.run(lambda: bring_up(world, controllers))
    pretend_daemon(world.store)
    dashboard = Dashboard(folder)
    shown = [ids[number % live] for number in range(0, pages, 2)]
    holder = Pages(dashboard, [f"/jobs/{job_id}" for job_id in shown] + ["/"] * (pages - len(shown)))
    block = Block(world, controllers, shown=shown)
    try:
        block.run()  # fills caches
        found: dict[bool, list[float]] = {False: [], True: []}
        load_s = wall_s = 0.0
        for number in range(pairs):
            for is_open in (number % 2 == 0, number % 2 == 1):
                if is_open:
                    holder.send("open")
                start_s, start_cpu_s = time.perf_counter(), dashboard.measure_cpu_s()
                found[is_open].append(block.run(is_open=is_open))
                if is_open:
                    wall_s += time.perf_counter() - start_s
                    load_s += dashboard.measure_cpu_s() - start_cpu_s
                    holder.send("close")
        loads = int(holder.send("count"))
        ratios = [100 * (open_s / alone_s - 1) for open_s, alone_s in zip(found[True], found[False], strict=True)]
        low, high = find_interval(ratios)
        report("cpu of a reconcile step, no page open", 1000 * statistics.median(found[False]), "ms")
        report(f"... {pages} pages open", 1000 * statistics.median(found[True]), "ms")
        report(f"slower, median of {pairs} pairs", statistics.median(ratios), "%", bar=2.0)
        report("... 95 % interval: from", low, "%")
        report("... to", high, "%")
        for is_open, text in ((False, "no page open"), (True, f"{pages} pages open")):
            report(f"write lock taken, {text}", block.refusals[is_open], f"of {block.probes[is_open]:,} probes")
        report("pages loaded meanwhile", loads, "")
        report("cpu of the dashboard while pages are open", 100 * load_s / wall_s, "% of a core")
    finally:
        holder.close()
        dashboard.close()
        world.store.close()


def main() -> None:
    if "--hold" in sys.argv:
        hold(sys.argv[2], sys.argv[3], sys.argv[4:])
        return
    parser = argparse.ArgumentParser()
    for name, default in (("--jobs", 10_000), ("--live", 100), ("--pages", 20), ("--pairs", 40)):
        parser.add_argument(name, type=int, default=default)
    options = parser.parse_args()
    # Holding its lock keeps a daemon from starting: it would act on the made-up jobs.
    with tempfile.TemporaryDirectory() as folder, try_lock(Path(folder) / "daemon.lock"):
        measure(Path(folder), jobs=options.jobs, live=options.live, pages=options.pages, pairs=options.pairs)


if __name__ == "__main__":
    main()
