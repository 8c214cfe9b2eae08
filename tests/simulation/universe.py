"""One history: brokers, users, a cloud and its machines on one virtual clock, all from one seed."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import random as global_random
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from broker.config import Config
from broker.errors import BrokerError, NoOfferError, StateError
from broker.jobs import controller, daemon
from broker.jobs.controller import JobController
from broker.jobs.daemon import run_daemon
from broker.jobs.deadline import follows_deadline
from broker.jobs.job_limits import find_save_s
from broker.provision.lifecycle import Provisioner
from broker.types import Breakdown, Estimate, Node, NodeState, Placement, Plan, Resources, Task
from tests.simulation.disk import TRIFLE, SimulatedFile, SimulatedStore
from tests.simulation.events import TERMINAL, Event, Violation
from tests.simulation.fickle import fickle_policy
from tests.simulation.invariants import check_all
from tests.simulation.left import SimulatedOutcomes
from tests.simulation.machines import MachineGang, MachineRun
from tests.simulation.mixes import JobSpec, Mix
from tests.simulation.processes import Crash, Process, ProcessClock, get_process
from tests.simulation.services import ServiceBed
from tests.simulation.shuffled import ShuffledLoop
from tests.simulation.turns import note_unclear
from tests.simulation.watched import TrueClock, WatchedCloud, WatchedProvisioner
from tests.simulation.world import FOREIGN, OWNER, make_offer

OWNERS = frozenset(("jobs", "clusters", "intents"))  # tables that say what is left to do, and whose a node is
ZONES = ("east1a", "east1b", "west1a", "north1a")
TICK_S = 2.0  # while faults are played
CALM_TICK_S = 5.0  # afterwards
L1_S = 300.0  # an unowned node is gone within this time after the last fault


class Universe:
    def __init__(
        self,
        folder: Path,
        seed: int,
        mix: Mix,
        *,
        kill_at: int | None = None,
        stop_at: int | None = None,
        trace: bool = False,
    ) -> None:
        self.folder = folder
        self.seed = seed
        self.mix = mix
        self.kill_at = kill_at  # the one effect or commit, of all, to be killed at
        self.stop_at = stop_at  # as `kill_at`, but with SIGSTOP, for `Mix.stopped_s`
        self.random = Random(f"{seed}/world")
        self.loop = ShuffledLoop(Random(f"{seed}/order"))
        self.start_s = self.loop.time()
        self.clock = ProcessClock(self.loop, offset_s=mix.offset_s, drift=mix.drift)
        self.cloud = WatchedCloud(
            clock=TrueClock(self.loop),
            timings=mix.market,
            faults=mix.cloud,
            seed=seed,
            on_effect=self._pass_by,
            on_fault=self.note_fault,
        )
        self.cloud.universe = self
        self.cloud.add_foreign_node(FOREIGN)
        self.gang = MachineGang(
            self.cloud,
            self.loop,
            self.clock,
            Random(f"{seed}/gang"),
            on_effect=self._pass_by,
            on_start=lambda run: self.emit("start", run=run),
            on_save=lambda run, step: self.emit("save", run=run, step=step),
            on_lease=lambda run, node_id, lease_s: self.emit("lease", run=run, name=node_id, lease_s=lease_s),
            on_release=lambda run: self.emit("release", run=run),
            on_self_end=lambda run, node_id, reason: self.emit("self-end", run=run, name=node_id, reason=reason),
        )
        self.gang.silence_s = mix.silence_s
        self.processes: list[Process] = []
        self.points = 0
        self.kills: Counter[str] = Counter()
        self.cells: Counter[tuple[str, str]] = Counter()
        self.unowned_s = 0.0
        self.budgets: dict[int, float] = {}
        self.tasks: dict[int, Task] = {}
        self.projects: dict[int, str] = {}
        self.searched_s: dict[int, float] = {}  # job -> its first search for machines: `max_duration` counts from there
        self.spread_s = 0.0  # by which the clocks of two brokers differ at most
        self.side_tasks: list[asyncio.Task[Any]] = []
        self.unowned_since_s: dict[str, float] = {}
        self.asked_down: set[str] = set()  # clusters that a user took down
        self.stuck: set[str] = set()  # clusters of which a create call got nowhere for a while
        self.requests: set[str] = set()
        self.retries = 0
        self.follows_deadline = any(follows_deadline(spec.task) for spec in mix.jobs)
        self.has_groups = any(spec.task.group is not None for spec in mix.jobs)
        self.displaces = False  # jobs of higher priority take slots
        self.jumps = 0  # of the wall clock
        self.jobs_in: dict[int, int] = {}  # index of the spec -> id of its job
        self.memory: dict[str, Any] = {}  # state of checkers, by their letter
        self.away_until_s = 0.0  # no broker is started before
        self.is_healed = False
        self.healed_s = math.inf
        self.services: ServiceBed | None = None
        self.is_acting = False  # a scene has not come to its end
        self.is_over = False
        self.failure: BaseException | None = None
        self.digest = hashlib.sha256()
        self.trace_lines: list[str] | None = [] if trace else None
        self._kill_random = Random(f"{seed}/kill")
        self._points_to_kill = self._draw_points()
        self.file = SimulatedFile(may_lose_power=mix.may_lose_power)
        self.outcomes = SimulatedOutcomes(self.gang, self.cloud, is_silent=self._is_bucket_silent)
        self.unread: set[str] = set()  # clusters whose bucket gave no answer when it was last asked
        self.is_suspended = False  # the machine that brokers and commands run on
        self.is_owner_lost = False
        self.account = self.cloud.account  # the account that new processes are logged in to, since
        self.login_s = self.start_s
        self._seen: dict[str, list[Any]] = {}

    # -- what the universe reports ------------------------------------------------------------------------------------

    def emit(self, kind: str, **data: Any) -> None:
        """Report an event to every checker that handles it at once. The first violation ends the history."""
        if self.failure is not None:
            return
        event = Event(kind=kind, time_s=self.loop.time(), process=get_process(), **data)
        if kind == "search" and (job_id := self.get_job_id(event.name)) is not None:
            self.searched_s.setdefault(job_id, event.time_s)
        self.say(str(event))
        try:
            check_all(self, event)
        except Violation as violation:
            self.fail(violation)

    def fail(self, failure: BaseException) -> None:
        if self.failure is None:
            self.failure = failure
            self.say(f"VIOLATION {failure}")

    def say(self, text: str) -> None:
        line = f"{self.loop.time() - self.start_s:10.3f} {text}"
        self.digest.update(line.encode())
        if self.trace_lines is not None:
            self.trace_lines.append(line)

    def check_list(self, late_s: float) -> None:
        """Check every list; only a late one is reported, since there are many."""
        if late_s > 1e-6:
            self.emit("list", late_s=late_s)

    def note_made(self, ids: Sequence[str]) -> None:
        """Draw when a spot node is preempted as soon as it is made."""
        for node_id in ids:
            node = self.cloud.find([node_id])[0]
            self.gang.skews[node_id] = self.mix.skew_s
            if node.is_spot and not self.is_healed and self.random.random() < self.mix.preempt_chance:
                self.loop.call_world(self.random.uniform(0.0, self.mix.preempt_s_max), self._preempt, node_id)

    def note_fault(self, fault: str, cluster: str = "") -> None:
        self.say(f"fault {fault} {cluster}")
        note_unclear(self, fault, cluster)
        if fault == "create:stuck":
            self.stuck.add(cluster)
        rows = self.read("SELECT 'job-' || id || '-%' AS pattern, status FROM jobs")
        for pattern, status in rows:
            if not cluster or cluster.startswith(pattern[:-1]):
                self.cells[fault, status] += 1

    def read(self, sql: str, parameters: Sequence[Any] = ()) -> list[Any]:
        """Read what is committed, as seen from outside."""
        return self.file.connection.execute(sql, parameters).fetchall()

    def _see(self, sql: str) -> list[Any]:
        """Read the tables in OWNERS, querying again only when one of them was written."""
        if sql not in self._seen:
            self._seen[sql] = self.read(sql)
        return self._seen[sql]

    def forget_what_was_seen(self) -> None:
        """Drop cached reads after the file has changed without a commit."""
        self._seen.clear()

    def list_live_nodes(self) -> list[Node]:
        return [node for node in self.cloud.observe() if node.owner == OWNER and node.state is not NodeState.TERMINATED]

    def list_unowned_nodes(self) -> list[Node]:
        """List nodes that are alive, not asked to end, and in no record and no open intent."""
        live = [node for node in self.list_live_nodes() if math.isinf(self.cloud.get_ending_s(node.id))]
        if not live:
            return []
        rows = self._see("SELECT token FROM intents WHERE outcome IS NULL UNION ALL SELECT body FROM clusters")
        tokens = {row[0] for row in rows if isinstance(row[0], str)}
        bodies = b"".join(row[0] for row in rows if isinstance(row[0], bytes)).decode()
        return [node for node in live if node.token not in tokens and f'"{node.id}"' not in bodies]

    def is_quiet(self) -> bool:
        """Return whether nothing is left to do and nothing was left behind."""
        rows = self._see(
            f"SELECT EXISTS (SELECT 1 FROM jobs WHERE status NOT IN {TERMINAL}) "
            "OR EXISTS (SELECT 1 FROM clusters) OR EXISTS (SELECT 1 FROM intents WHERE outcome IS NULL)"
        )
        return not rows[0][0] and not self.list_live_nodes()

    def are_jobs_in(self) -> bool:
        return len(self.jobs_in) == len(self.mix.jobs)

    def has_ended(self, job_ids: Collection[int]) -> bool:
        """Return whether each of these jobs has a terminal status."""
        rows = self._see(f"SELECT id FROM jobs WHERE status NOT IN {TERMINAL}")
        return not {row[0] for row in rows} & set(job_ids)

    @property
    def requests_made(self) -> int:
        return len(self.requests) + self.retries

    def expect_job(self, request_id: str, spec: JobSpec, *, place: int = 0) -> None:
        """Expect the next job id, or the one it already has: programs and budgets are looked up by it.

        `place`: number of jobs that are submitted before it in the same transaction.
        """
        rows = self.read("SELECT id FROM jobs WHERE request_id = ?", (request_id,))
        self._expect(rows[0][0] if rows else self._next_job_id() + place, spec)

    def expect_retry(self, job_id: int, spec: JobSpec, *, request_id: str = "", place: int = 0) -> None:
        """Expect the retry of a job as the next one, or as the one that this request made before."""
        known = self.read("SELECT id FROM jobs WHERE request_id = ?", (request_id,))
        new = known[0][0] if known else self._next_job_id() + place
        root = self.read("SELECT coalesce(resumes, id) FROM jobs WHERE id = ?", (job_id,))[0][0]
        self._expect(new, spec)
        self.gang.roots[new] = root

    def _expect(self, job_id: int, spec: JobSpec) -> None:
        self.gang.roots.pop(job_id, None)  # of a retry that was killed before it had its id
        self.gang.programs[job_id] = spec.program
        self.tasks[job_id] = spec.task
        self.projects[job_id] = spec.project
        budget_usd = spec.task.goal.budget_usd if spec.task.goal else None
        self.budgets.pop(job_id, None)  # of a submission that was killed before it had its id
        if budget_usd is not None:
            self.budgets[job_id] = budget_usd

    def _next_job_id(self) -> int:
        return int(self.read("SELECT coalesce(max(id), 0) + 1 FROM jobs")[0][0])

    def make_whole_plan(self, job_id: int) -> Plan:
        """Make the plan of a job without its goal, whatever is left of its budget."""
        return make_plan(replace(self.tasks[job_id], goal=None))

    def list_replacement_tokens(self, cluster: str, node_count: int) -> set[str]:
        """List tokens of requests for fewer nodes than the gang has: for those that an elastic one lost."""
        rows = self.read("SELECT token, body FROM intents WHERE cluster = ?", (cluster,))
        return {token for token, body in rows if json.loads(body)["placement"]["node_count"] < node_count}

    def get_job_id(self, cluster: str) -> int | None:
        kind, _, rest = cluster.partition("-")
        return int(rest.partition("-")[0]) if kind == "job" else None

    def measure_recorded_usd(self, job_id: int | None, *, ago_s: float = 0.0) -> float:
        """Measure the recorded cost of this job, or of everything ever; as far as it was known that long ago."""
        then_s = self.clock.now_s() - ago_s
        rows = self.read(
            "SELECT id, usd_hour * max(0.0, min(coalesce(ended_s, ?1), ?3) - created_s) / 3600 FROM nodes "
            "WHERE ?2 IS NULL OR job_id = ?2",
            (
                then_s,
                job_id,
                then_s if ago_s else math.inf,
            ),  # ended machines cost that, also where the clock was set back
        )
        known_s: dict[str, float] = self.memory.get("bills", {})
        known_by_s = self.loop.time() - ago_s
        return sum(usd for node_id, usd in rows if not ago_s or known_s.get(node_id, known_by_s) <= known_by_s)

    def is_over_budget(self, job_id: int) -> bool:
        budget_usd = self.budgets.get(job_id)
        return budget_usd is not None and self.measure_recorded_usd(job_id) >= budget_usd

    def is_over_duration(self, run: MachineRun) -> bool:
        """Return whether the job of this run may have reached its `max_duration`, by any clock of a broker."""
        limit_s = self.tasks[run.job].max_duration_s
        if limit_s is None:
            return False
        used_s = self.loop.time() - self.searched_s.get(run.job, math.inf)
        return used_s >= limit_s - find_save_s(limit_s) - self.spread_s

    def find_begin_s(self, job_id: int) -> float:
        """Return when the machines of the job's first recorded attempt were created, on the cloud's clock."""
        runs = self.gang.runs_by_job[job_id]
        rows = self.read(
            "SELECT json_extract(body, '$.cluster') FROM attempts WHERE job_id = ? ORDER BY number LIMIT 1", (job_id,)
        )
        first = next((run for run in runs if rows and run.cluster == rows[0][0]), runs[0])
        return min(node.created_s for node in self.cloud.find(first.ids))

    def begin(self, work: Any) -> None:
        self.side_tasks.append(self.loop.begin(work, None))

    # -- processes ------------------------------------------------------------------------------------------------

    def spawn(self, name: str, work: Callable[[Process], Any]) -> Process:
        process = Process(name, self.loop, on_point=self._on_point, on_fault=self.note_fault)
        process.account = self.account
        self.processes.append(process)
        if self.is_suspended:
            process.stop("suspended")
        process.begin(work(process))
        return process

    def _is_bucket_silent(self, run: MachineRun) -> bool:
        self.unread.discard(run.cluster)
        if self.is_healed or not self.mix.bucket_silence or self.random.random() >= self.mix.bucket_silence:
            return False
        self.note_fault("bucket:silent", run.cluster)
        self.unread.add(run.cluster)
        return True

    def fall_asleep(self) -> None:
        if self.is_healed:
            return
        self.note_fault("suspend")
        self.is_suspended = True
        for process in self.processes:
            process.stop("suspended")
        self.loop.freeze(set(self.processes))

    def wake_up(self) -> None:
        if self.is_suspended:
            self.is_suspended = False
            self.loop.thaw()
            for process in self.processes:
                process.resume("suspended")

    def open_store(self, process: Process) -> SimulatedStore:
        if self.is_owner_lost:
            raise StateError("the file `owner` is empty")
        return SimulatedStore(
            self.folder / "state.db", clock=self.clock, process=process, file=self.file, on_commit=self._on_commit
        )

    def make_provisioner(self, store: SimulatedStore) -> Provisioner:
        provisioner = WatchedProvisioner({"simulated": self.cloud}, store, clock=self.clock, owner=OWNER)
        provisioner.watch(self)
        return provisioner

    async def run_broker(self, process: Process) -> None:
        store = self.open_store(process)
        process.store = store
        provisioner = self.make_provisioner(store)
        config = Config(home=self.folder, owner=OWNER)

        def make_controller(job_id: Any) -> Any:
            if isinstance(job_id, str):
                assert self.services is not None
                return self.services.make_controller(job_id, store)
            return JobController(
                job_id,
                store=store,
                provisioner=provisioner,
                gang=self.gang,
                planner=make_plan,
                clock=self.clock,
                config=config,
                outcomes=self.outcomes,
            )

        await run_daemon(
            store=store, make_controller=make_controller, provisioner=provisioner, clock=self.clock, config=config
        )

    async def keep_broker(self, name: str) -> None:
        """Start the broker again whenever it is gone, sooner or later."""
        while not self.is_over:
            while self.loop.time() < self.away_until_s:
                await asyncio.sleep(self.away_until_s - self.loop.time())
            if self.mix.leaves_broker_dead and self.is_healed:
                return
            process = self.spawn(name, self.run_broker)
            await self.wait_for(process)
            if not process.was_killed:  # another one leads, or there was nothing to do
                await asyncio.sleep(self.random.uniform(1.0, 10.0))
            await asyncio.sleep(self.random.uniform(0.2, 2.0 if self.is_healed else self.mix.restart_s_max))

    async def wait_for(self, process: Process) -> BaseException | None:
        """Wait until it has ended or was killed, and its last task is gone. Return the error it ended with."""
        assert process.main is not None
        await asyncio.wait({process.main, process.dead}, return_when=asyncio.FIRST_COMPLETED)
        if process.is_alive:
            process.is_alive = False  # it exited
            process.kill_rest()
        while tasks := [task for task in process.tasks if not task.done()]:
            await asyncio.wait(tasks)
        self.processes.remove(process)
        if process.main.cancelled():
            return None
        error = process.main.exception()
        if error is not None and not isinstance(error, Crash | BrokerError):
            self.fail(error)  # a bug of the product, or ours
        return error

    def _pass_by(self, point: str) -> None:
        process = get_process()
        if process is not None:
            process.pass_by(point)

    def _on_point(self, process: Process, point: str) -> None:
        self.say(f"{process.name} {point}")
        self.points += not point.startswith(TRIFLE) and (self.services is None or self.services.is_own(process))
        if self.points == self.kill_at:
            self.kill_at = None
            self._kill(process, "kill:point")
            return
        if self.points == self.stop_at:
            self.stop_at = None
            self.stop(process, self.mix.stopped_s)
            return
        if self.is_healed:
            return
        self._points_to_kill -= 1
        if self._points_to_kill <= 0:
            self._points_to_kill = self._draw_points()
            self._kill(process, "kill:point")

    def _kill(self, process: Process, fault: str) -> None:
        self.kills[fault] += 1
        self.note_fault(fault)
        process.kill()

    def stop(self, process: Process, duration_s: float) -> None:
        """Send SIGSTOP; the process continues much later, sure that it still leads."""
        self.note_fault("stop")
        process.stop()
        self.loop.call_world(duration_s, process.resume)

    def _draw_points(self) -> float:
        mean = self.mix.points_between_kills
        return math.inf if math.isinf(mean) else self._kill_random.expovariate(1 / mean) + 1

    def _on_commit(self, process: Process, tables: Sequence[str]) -> None:
        if not OWNERS.isdisjoint(tables):
            self._seen.clear()
        self.emit("commit", written=tuple(tables))

    def _preempt(self, node_id: str) -> None:
        if self.is_healed:
            return
        node = self.cloud.find([node_id])[0]
        if node.state is NodeState.TERMINATED:
            return
        self.note_fault("preempt", node.cluster)
        self.cloud.preempt([node_id], notice_s=self.mix.notice_s)


def make_plan(task: Task, avoid: Any = None) -> Plan:
    if task.goal and task.goal.budget_usd is not None and task.goal.budget_usd <= 0:
        raise NoOfferError("the budget is used up")
    placements = [Placement(offer=make_offer(zone), is_spot=True, node_count=task.num_nodes) for zone in ZONES]
    placements.append(Placement(offer=make_offer(ZONES[0]), is_spot=False, node_count=task.num_nodes))
    if len(task.resources) > 1:
        placements = [
            _make_kind(each, asked, number) for each in placements for number, asked in enumerate(task.resources)
        ]
    return Plan(
        task=task,
        estimates=tuple(_estimate(placement, task) for placement in placements),
        rejections=(),
        prices_as_of="2026-11-01",
        reason="cheapest",
    )


def _make_kind(placement: Placement, asked: Resources, number: int) -> Placement:
    """Return the placement with machines of one of the task's kinds: each further one costs and does twice as much."""
    offer, factor = placement.offer, 2.0**number
    assert offer.spot_usd_hour is not None and offer.ondemand_usd_hour is not None
    machine = replace(
        offer, instance_type=f"{offer.instance_type}-{asked.accelerator}", accelerator=asked.accelerator,
        accelerator_count=asked.accelerator_count, spot_usd_hour=factor * offer.spot_usd_hour,
        ondemand_usd_hour=factor * offer.ondemand_usd_hour,
    )  # fmt: skip
    return replace(placement, offer=machine, alternative=number)


def _estimate(placement: Placement, task: Task) -> Estimate:
    if len(task.resources) < 2 or task.goal is None or task.goal.work_hours is None:
        return Estimate(placement=placement)
    work_hours = task.goal.work_hours / 2.0**placement.alternative
    return Estimate(placement=placement, breakdown=Breakdown(work_hours=work_hours))


def run_universe(universe: Universe, story: Callable[[Universe], Any]) -> None:
    """Play it to its end; `universe.failure` says whether all was well."""
    state = global_random.getstate()
    global_random.seed(universe.seed)  # the product's jitter
    try:
        with pace(universe.mix.poll_s), fickle_policy(universe):
            universe.loop.run_until_complete(universe.loop.begin(story(universe), None))
    except (Violation, RuntimeError, AssertionError) as error:
        universe.fail(error)
    finally:
        global_random.setstate(state)
        universe.file.close()
        universe.loop.close()


@contextmanager
def pace(poll_s: float) -> Iterator[None]:
    """Set how often the daemon and its controllers poll; nothing else of the product is touched."""
    scale = poll_s / controller.POLL_S
    names = ((controller, "POLL_S"), (daemon, "JOBS_POLL_S"))
    usual = [getattr(module, name) for module, name in names]
    for (module, name), value in zip(names, usual, strict=True):
        setattr(module, name, value * scale)
    try:
        yield
    finally:
        for (module, name), value in zip(names, usual, strict=True):
            setattr(module, name, value)
