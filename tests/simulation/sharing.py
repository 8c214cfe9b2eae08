"""Several controllers that share one store: each is a machine of its own, with its own clock and its own network.

`python -m tests.simulation.sharing --seeds 360` plays histories. Everything that holds for one broker holds here too;
in addition: C1, only the newest claim of a job writes and asks for nodes; C2, no epoch is given out twice or goes back;
C3, a job without a living controller is taken over within 15 s by one that is well. `slots.py` checks the limits on
live jobs, displacement, and `max_duration`.
"""

from __future__ import annotations

import argparse
import asyncio
import sqlite3
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

from broker.config import Config
from broker.errors import StateError
from broker.jobs.controller import JobController
from broker.jobs.daemon import run_daemon
from broker.jobs.daemon_parts import StartsSchedules
from broker.jobs.slots import JobQueue
from broker.provision.lifecycle import Provisioner
from broker.state.claims import HOUSEKEEPING
from broker.types import Task
from tests.simulation import stories
from tests.simulation.disk import SimulatedConnection, SimulatedStore
from tests.simulation.events import Violation
from tests.simulation.mixes import Mix, draw_mix
from tests.simulation.processes import Process, ProcessClock, get_process
from tests.simulation.runner import make_folder, watch_log
from tests.simulation.slots import COVERED, SlotWatch, draw_limits, draw_queued_jobs
from tests.simulation.universe import Universe, make_plan, run_universe
from tests.simulation.watched import WatchedProvisioner
from tests.simulation.world import OWNER

TAKEOVER_S = 15.0
POLL_S = 0.5
SKEWS_S = (0.0, 0.0, -20.0, 20.0, 90.0)
STATE_OF_JOBS = {"jobs", "attempts", "clusters", "intents"}
# The job whose controller, or the collector, the current task belongs to: set here, whatever the product believes.
DRIVING: ContextVar[int | None] = ContextVar("driving", default=None)


class SharedConnection(SimulatedConnection):
    """A connection over a network: an answer may be lost after the commit, and the server may be away."""

    def execute(self, sql: str, parameters: Sequence[Any] = ()) -> sqlite3.Cursor:
        if self._process.is_cut_off and sql != "ROLLBACK":  # type: ignore[attr-defined]
            raise sqlite3.OperationalError("the server does not answer")
        cursor = super().execute(sql, parameters)
        if sql == "COMMIT" and getattr(self._process, "loses_answer", False):
            self._process.loses_answer = False  # type: ignore[attr-defined]
            raise sqlite3.OperationalError("the connection was lost")
        return cursor


class SharedStore(SimulatedStore):
    """A store whose time is the server's, and whose jobs are claimed one by one."""

    is_shared = True

    def __init__(self, universe: SharedUniverse, process: Process, clock: ProcessClock) -> None:
        self._universe = universe
        super().__init__(
            universe.folder / "state.db",
            clock=clock,
            process=process,
            file=universe.file,
            on_commit=universe._on_commit,
        )

    def _open(self) -> Any:
        self._process.check()
        return SharedConnection(self._universe.file, self._process, self._universe._on_commit)

    def read_time_s(self) -> float:
        return self._universe.loop.time()


class WatchedController:
    """Note whose step it is."""

    def __init__(self, job_id: int, controller: JobController) -> None:
        self._job_id, self._controller = job_id, controller

    async def step(self) -> float:
        token = DRIVING.set(self._job_id)
        try:
            return await self._controller.step()
        finally:
            DRIVING.reset(token)

    async def rest(self, wait_s: float, wake: asyncio.Event) -> None:
        await self._controller.rest(wait_s, wake)


class HousekeepingProvisioner(WatchedProvisioner):
    async def collect(self) -> int:
        token = DRIVING.set(HOUSEKEEPING)
        try:
            return await super().collect()
        finally:
            DRIVING.reset(token)


class SharedUniverse(Universe):
    def __init__(self, folder: Path, seed: int, mix: Mix, *, is_skewed: bool = False, trace: bool = False) -> None:
        super().__init__(folder, seed, mix, trace=trace)
        self.owners: dict[tuple[int, int], Process] = {}  # of each epoch of each job
        self.newest: dict[int, tuple[int, str]] = {}  # epoch and holder of each job, as last committed
        self.takeovers = 0
        self.well_since_s: dict[Process, float] = {}
        self.orphaned_since_s: dict[int, float] = {}
        chance = Random(f"{seed}/skew")
        self.skews = {f"broker-{number}": chance.choice(SKEWS_S) for number in range(1, 6)} if is_skewed else {}
        self.is_store_away = False
        self.limits = draw_limits(Random(f"{seed}/slots"))
        self.spread_s = max(self.skews.values(), default=0.0) - min(self.skews.values(), default=0.0)
        self.displaces = self.limits.is_set
        self.covered: frozenset[str] = frozenset()
        self.slots = SlotWatch(universe=self, limits=self.limits)

    # -- controllers ----------------------------------------------------------------------------------------------

    def spawn(self, name: str, work: Callable[[Process], Any]) -> Process:
        process = super().spawn(name, work)
        process.is_cut_off = self.is_store_away  # type: ignore[attr-defined]
        return process

    def open_store(self, process: Process) -> SimulatedStore:
        if self.is_store_away or getattr(process, "is_cut_off", False):
            raise StateError("the server does not answer")
        return SharedStore(self, process, self._make_clock(process))

    def _make_clock(self, process: Process) -> ProcessClock:
        return ProcessClock(self.loop, offset_s=self.mix.offset_s + self.skews.get(process.name, 0.0))

    async def run_broker(self, process: Process) -> None:
        store = self.open_store(process)
        process.store = store
        clock = self._make_clock(process)
        provisioner = self._watch(store, clock)
        config = Config(home=self.folder, owner=OWNER)
        queue = JobQueue(store, clock, read_limits=lambda: self.limits)

        def make_controller(job_id: int) -> Any:
            controller = JobController(
                job_id, store=store, provisioner=provisioner, gang=self.gang, planner=make_plan, clock=clock,
                config=config, outcomes=self.outcomes, queue=queue,
            )  # fmt: skip
            return WatchedController(job_id, controller)

        await run_daemon(
            store=store, make_controller=make_controller, provisioner=provisioner, clock=clock, config=config,
            scheduler=self.make_scheduler(store),
        )  # fmt: skip

    def make_scheduler(self, store: SimulatedStore) -> StartsSchedules | None:
        return None

    def _watch(self, store: SimulatedStore, clock: ProcessClock) -> Provisioner:
        provisioner = HousekeepingProvisioner({"simulated": self.cloud}, store, clock=clock, owner=OWNER)
        provisioner.watch(self)
        return provisioner

    # -- faults of the store --------------------------------------------------------------------------------------

    def cut_off(self, process: Process, duration_s: float) -> None:
        """Part one process from the store."""
        self.note_fault("store:cut off")
        process.is_cut_off = True  # type: ignore[attr-defined]
        self.loop.call_world(duration_s, self._reach_again, process)

    def _reach_again(self, process: Process) -> None:
        process.is_cut_off = self.is_store_away  # type: ignore[attr-defined]

    def restart_store(self, duration_s: float, *, is_crash: bool) -> None:
        """Take the store away from all for a while; a crash also loses commits that were not synced."""
        self.note_fault("store:crash" if is_crash else "store:restart")
        self.is_store_away = True
        for process in self.processes:
            process.is_cut_off = True  # type: ignore[attr-defined]
        if is_crash:
            self.say(f"{self.file.cut_power(self.random)} commits are lost")
            self.forget_what_was_seen()
        self.loop.call_world(duration_s, self.bring_store_back)

    def bring_store_back(self) -> None:
        self.is_store_away = False
        for process in self.processes:
            process.is_cut_off = False  # type: ignore[attr-defined]

    # -- what must hold -------------------------------------------------------------------------------------------

    def emit(self, kind: str, **data: Any) -> None:
        super().emit(kind, **data)
        try:
            if kind == "commit":
                self._check_commit(set(data["written"]))
            elif kind == "ask":
                self._check_claim("asks for nodes")
            elif kind == "start":
                self.slots.check_start(data["run"])
            elif kind == "tick":
                self.slots.check_tick()
        except Violation as violation:
            self.fail(violation)

    def _check_commit(self, written: set[str]) -> None:
        if "claims" in written:
            process = get_process()
            for row in self.read("SELECT job_id, epoch, holder FROM claims"):
                self._note_claim(row["job_id"], row["epoch"], row["holder"], process)
        self.slots.check_commit(written)
        if written & STATE_OF_JOBS:
            self._check_claim(f"writes {' '.join(sorted(written))}")

    def _note_claim(self, job_id: int, epoch: int, holder: str, process: Process | None) -> None:
        before, was_held_by = self.newest.get(job_id, (0, ""))
        if epoch < before:
            raise Violation("C2", f"the epoch of job {job_id} goes back from {before} to {epoch}")
        if epoch == before and holder not in ("", was_held_by):
            raise Violation("C2", f"epoch {epoch} of job {job_id} is given to a second process")
        if epoch > before:
            if process is not None:
                last = self.owners.get((job_id, before))
                self.takeovers += last is not None and last is not process
                self.owners[job_id, epoch] = process
            self.orphaned_since_s.pop(job_id, None)
            self.say(f"job {job_id} is claimed in epoch {epoch}")
        # A crash may undo that a claim was given up: the epoch still belongs to its last holder.
        self.newest[job_id] = (epoch, holder or (was_held_by if epoch == before else ""))

    def _check_claim(self, action: str) -> None:
        job_id, process = DRIVING.get(), get_process()
        if job_id is None or process is None:
            return
        epoch = self.newest.get(job_id, (0, ""))[0]
        if self.owners.get((job_id, epoch)) is not process:
            raise Violation(
                "C1", f"{process.name} {action} for job {job_id}, which another process has in epoch {epoch}"
            )

    async def watch_takeovers(self) -> None:
        """Check C3 twice a second."""
        while not self.is_over:
            await asyncio.sleep(POLL_S)
            self._check_takeovers()

    def _check_takeovers(self) -> None:
        now_s = self.loop.time()
        well = {each for each in self.processes if each.name.startswith("broker") and self._is_well(each)}
        self.well_since_s = {each: self.well_since_s.get(each, now_s) for each in well}
        rows = self.read("SELECT id FROM jobs WHERE NOT is_terminal")
        orphans = {row["id"] for row in rows if self.owners.get((row["id"], self._get_epoch(row["id"]))) not in well}
        self.orphaned_since_s = {job_id: self.orphaned_since_s.get(job_id, now_s) for job_id in orphans}
        if not self.well_since_s:
            return
        well_s = now_s - min(self.well_since_s.values())
        for job_id, since_s in self.orphaned_since_s.items():
            waited_s = min(well_s, now_s - since_s)
            if waited_s > TAKEOVER_S:
                self.fail(Violation("C3", f"job {job_id} has no controller for {waited_s:.1f} s"))

    def _get_epoch(self, job_id: int) -> int:
        return self.newest.get(job_id, (0, ""))[0]

    def _is_well(self, process: Process) -> bool:
        # A sticky fault of its statements is a kind of partition.
        return (
            process.is_alive
            and not process.is_stopped
            and process.store is not None
            and process.statements_left is None
            and not process.is_cut_off  # type: ignore[attr-defined]
        )


@dataclass(frozen=True, kw_only=True)
class SharedResult:
    seed: int
    failure: str
    takeovers: int
    covered: frozenset[str]
    faults: Counter[str]
    controller_count: int
    trace: Sequence[str]


def play_shared(seed: int, *, trace: bool = False) -> SharedResult:
    random = Random(f"{seed}/shared")
    controller_count = random.randint(2, 5)
    mix = draw_shared_mix(random)
    if is_skewed := random.random() < 0.5:  # a clock that is late measures less cost: no budget is kept to the cent
        mix = replace(mix, jobs=tuple(replace(job, task=_drop_budget(job.task)) for job in mix.jobs))
    with make_folder() as folder, one_listener_each():
        universe = SharedUniverse(folder, seed, mix, is_skewed=is_skewed, trace=trace)
        with watch_log(universe):
            run_universe(universe, lambda each: _play(each, controller_count))
        return SharedResult(
            seed=seed,
            failure=f"{universe.failure!s}" if universe.failure else "",
            takeovers=universe.takeovers,
            covered=universe.covered,
            faults=Counter({fault: sum(n for (name, _), n in universe.cells.items() if name == fault)
                            for fault, _ in universe.cells}),
            controller_count=controller_count,
            trace=universe.trace_lines or (),
        )  # fmt: skip


def _drop_budget(task: Task) -> Task:
    return replace(task, goal=None) if task.goal is not None and task.goal.budget_usd is not None else task


async def _play(universe: Any, controller_count: int) -> None:
    for number in range(2, controller_count + 1):
        universe.begin(universe.keep_broker(f"broker-{number}"))
    universe.begin(universe.watch_takeovers())
    begin_store_faults(universe)
    await stories.play(universe)
    universe.covered = universe.slots.count_covered()


def begin_store_faults(universe: Any) -> None:
    """Let the store fail in some ways, which the seed draws."""
    random = Random(f"{universe.seed}/store")
    for mean_s, act in ((25.0, _cut_off), (60.0, _restart), (30.0, _lose_answer)):
        if random.random() < 0.7:
            universe.begin(stories.repeat(universe, mean_s, act))


def _list_brokers(universe: SharedUniverse) -> list[Process]:
    return [each for each in universe.processes if each.is_alive and each.name.startswith("broker")]


def _cut_off(universe: Any) -> None:
    if brokers := _list_brokers(universe):
        universe.cut_off(universe.random.choice(brokers), universe.random.choice((2.0, 8.0, 12.0, 40.0)))


def _restart(universe: Any) -> None:
    if not universe.is_store_away:
        is_crash = universe.mix.may_lose_power and universe.random.random() < 0.5
        universe.restart_store(universe.random.choice((0.5, 3.0, 20.0)), is_crash=is_crash)


def _lose_answer(universe: Any) -> None:
    if brokers := _list_brokers(universe):
        universe.note_fault("store:answer lost")
        universe.random.choice(brokers).loses_answer = True


def draw_shared_mix(random: Random) -> Mix:
    """Draw a mix without faults of a single host that all controllers share."""
    mix = draw_mix(random)
    return replace(
        mix,
        jobs=draw_queued_jobs(random),
        away_s=0.0,
        is_doubled=False,
        leaves_broker_dead=False,
        power_every_s=1e9 if random.random() < 0.5 else float("inf"),  # images are kept, for crashes of the store
        disk_every_s=float("inf"),
        suspend_every_s=float("inf"),
        owner_every_s=float("inf"),
        login_every_s=float("inf"),
        jump_every_s=float("inf"),
        heal_s=random.uniform(60.0, 200.0),
        kill_every_s=random.choice((20.0, 40.0, float("inf"))),
        stop_every_s=random.choice((20.0, 40.0, float("inf"))),
        restart_s_max=random.choice((1.0, 10.0, 40.0)),
        drift=1e-9,  # the clocks of the controllers differ: no checker may trust one of them
        offset_s=0.0,
        poll_s=random.choice((0.5, 1.0)),
    )


@contextmanager
def one_listener_each() -> Iterator[None]:
    """Let the simulated processes, which are one for the kernel, each have a name of its own."""
    with (
        patch("broker.jobs.workload.os.getpid", return_value=1),
        patch("broker.jobs.workload.socket.gethostname", return_value="host"),
    ):
        yield


def describe_coverage(covered: Mapping[str, int], count: int) -> str:
    """Describe in which share of the histories each of `COVERED` occurred."""
    return ", ".join(f"{name} in {covered.get(name, 0)} of {count} ({covered.get(name, 0) / count:.0%})"
                     for name in COVERED)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.sharing")
    parser.add_argument("--seeds", type=int, default=360, help="how many")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, help="this one only")
    parser.add_argument("--trace", action="store_true", help="print what happened")
    options = parser.parse_args()
    seeds = [options.seed] if options.seed is not None else range(options.first, options.first + options.seeds)
    failing = takeovers = 0
    faults: Counter[str] = Counter()
    covered: Counter[str] = Counter()
    for seed in seeds:
        result = play_shared(seed, trace=options.trace)
        for line in result.trace:
            print(line)
        takeovers += result.takeovers
        covered.update(result.covered)
        faults += result.faults
        if result.failure:
            failing += 1
            print(
                f"seed {seed}: {result.failure}\n  python -m tests.simulation.sharing --seed {seed} --trace", flush=True
            )
    store = {name: count for name, count in sorted(faults.items()) if name.startswith(("store", "kill", "stop"))}
    print(f"{len(seeds)} histories, {failing} failing; {takeovers} takeovers; faults {store}")
    print(f"coverage: {describe_coverage(covered, len(seeds))}")
    return int(failing > 0)


if __name__ == "__main__":
    sys.exit(main())
