"""Programs on the simulated nodes: a step a second, a save each tenth step, and every way to fail.

Stands in for `runtime.gang.Gang`. A program's state follows from times alone, so nothing has to tick.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

from broker.errors import TransientError
from broker.runtime.gang import list_live
from broker.types import (
    Cluster,
    GangHead,
    Node,
    NodeFault,
    NodeSample,
    NodeState,
    ObservedCheckpoints,
    OwnTime,
    Progress,
    RunStatus,
    SetupResult,
    SlowNetwork,
    Task,
)
from tests.clouds.simulated import SimulatedCloud
from tests.simulation.processes import Process, ProcessClock, get_process
from tests.simulation.shuffled import ShuffledLoop

SAVE_EVERY = 10
STEPS_MAX = 1_000_000
QUIET_S = 300.0  # as `agent_files.QUIET_S`
POLL_S = 60.0  # how often a machine without a broker checks whether it is done


@dataclass(frozen=True, kw_only=True)
class Program:
    """The behaviour of a job's program, independent of its broker.

    `hang_at`: the first `hangs` starts stop there. `break_at`: the first `breaks` starts of a gang lose a rank there.
    `deaths`: for each start in turn, the step at which its last rank dies, and the resulting exit code.
    """

    steps: int = 30
    setup_s: float = 2.0
    exit_codes: tuple[int, ...] = ()  # of each start in turn; afterwards 0
    hang_at: int = 15
    hangs: int = 0
    break_at: int = 7
    breaks: int = 0
    deaths: tuple[tuple[int, int], ...] = ()
    sick: int = 0  # number of nodes with a broken GPU that its starts get, as their last ranks
    unfit: int = 0  # number of nodes joining a working elastic gang that fail in `setup`, the first ones


@dataclass(frozen=True, kw_only=True)
class Member:
    """A participating node, and since when."""

    rank: int
    id: str
    joined_s: float
    is_unfit: bool = False  # its `setup` failed: it has no part in the work


@dataclass(kw_only=True)
class MachineRun:
    """One start of a program on a gang. With `nodes_min` it continues while that many are left, the head among them."""

    job: int
    attempt: int
    cluster: str
    members: list[Member]
    nodes_min: int | None
    started_s: float
    first_step: int
    program: Program
    serial: int
    cancelled_s: float = math.inf
    is_held: bool = False  # in a job group: `run` starts when the addresses of the others arrive
    released_s: float = math.inf
    peers: Mapping[str, object] = field(default_factory=dict)
    saved_step: int = 0
    lease_s: dict[str, float] = field(default_factory=dict)  # node id -> until
    renewed_s: dict[str, float] = field(default_factory=dict)  # node id -> when its lease was last renewed
    heard_s: dict[str, float] = field(default_factory=dict)  # node id -> when the broker last asked for anything
    has_bucket: bool = False

    @property
    def ids(self) -> tuple[str, ...]:
        """Return the ids of all nodes that ever took part."""
        return tuple(each.id for each in self.members)


@dataclass(frozen=True, kw_only=True)
class Report:
    status: RunStatus
    returncode: int | None
    unreachable: tuple[int, ...]
    progress: Progress | None
    reason: str = ""
    advised: tuple[int, ...] = ()
    noticed: tuple[int, ...] = ()
    failed_rank: int | None = None
    unflushed: str = ""
    unfit: tuple[tuple[int, str], ...] = ()
    faults: tuple[NodeFault, ...] = ()
    network: SlowNetwork | None = None
    own_times: tuple[OwnTime, ...] = ()
    setups: tuple[SetupResult, ...] = ()
    statuses: tuple[RunStatus | None, ...] = ()
    samples: tuple[tuple[int, NodeSample], ...] = ()
    followers: tuple[int, ...] = ()
    flush: str = ""
    is_ready: bool = False
    port: int | None = None
    checkpoints: ObservedCheckpoints | None = None


class MachineGang:
    """A stand-in Gang. `on_effect` is called around each effect; `on_start` and `on_save` report to the checkers."""

    def __init__(
        self,
        cloud: SimulatedCloud,
        loop: ShuffledLoop,
        clock: ProcessClock,
        random: Random,
        *,
        on_effect: Callable[[str], None],
        on_start: Callable[[MachineRun], None],
        on_save: Callable[[MachineRun, int], None],
        on_lease: Callable[[MachineRun, str, float], None],
        on_self_end: Callable[[MachineRun, str, str], None],
        on_release: Callable[[MachineRun], None],
    ) -> None:
        self._cloud = cloud
        self._loop = loop
        self._clock = clock
        self._random = random
        self._on_effect = on_effect
        self._on_start = on_start
        self._on_save = on_save
        self._on_lease = on_lease
        self._on_self_end = on_self_end
        self._on_release = on_release
        self._prepared: set[str] = set()  # nodes that have the agent
        self.runs: dict[tuple[str, int], MachineRun] = {}  # by cluster and run id
        self.runs_by_job: dict[int, list[MachineRun]] = {}
        self.success_seen_by: dict[tuple[str, int], Process | None] = {}  # run -> process that saw its success
        self.programs: dict[int, Program] = {}
        self.roots: dict[int, int] = {}  # a retried job's id -> the one whose checkpoints it continues from
        self.saved: dict[int, int] = {}  # job -> newest checkpoint, outside all nodes
        self.sick: dict[str, int] = {}  # node with a broken GPU -> its job
        self.reported_sick: set[str] = set()  # those reported to a broker; a gang may be lost before
        self.unreachable: dict[str, list[tuple[float, float]]] = {}  # node id -> partitions from, until
        self.skews: dict[str, float] = {}
        self.silence_s = 0.0  # how long a call to an unreachable node takes to give up

    async def prepare(self, cluster: Cluster, task: Task) -> None:
        await self._reach(cluster)
        self._prepared.update(node.id for node in list_live(cluster.nodes))

    async def start(
        self,
        cluster: Cluster,
        task: Task,
        *,
        run_id: int,
        envs: Mapping[str, str],
        lease_s: float | None = None,
        head: object = None,
    ) -> None:
        self._on_effect("start:asked")
        await self._reach(cluster)
        self._on_effect("start:before")
        key = (cluster.name, run_id)
        if key not in self.runs:
            nodes_min = task.recovery.nodes_min
            self._begin(cluster, run_id, int(envs["BROKER_JOB_ID"]), int(envs["BROKER_ATTEMPT"]), nodes_min)
            self.runs[key].is_held = "BROKER_GROUP_NAME" in envs
            self.runs[key].has_bucket = "://" in envs.get("BROKER_CHECKPOINT_DIR", "")
        self._join(cluster, self.runs[key])
        self._renew(cluster, lease_s, is_start=True)
        self._on_effect("start:after")

    async def move_head(
        self, cluster: Cluster, run_id: int, head: GangHead, *, members: Sequence[int], log_bytes: int
    ) -> bool:
        raise AssertionError("no program here follows a head")

    async def poll(self, cluster: Cluster, run_id: int) -> Report:
        await self._clock.sleep(0.02)
        silent = self._find_silent(cluster)
        if silent and self.silence_s:
            await self._clock.sleep(self.silence_s)
            silent = self._find_silent(cluster)
        run = self.runs.get((cluster.name, run_id))
        bare = (node.rank for node in list_live(cluster.nodes) if node.id not in self._prepared)
        silent = tuple(sorted({*silent, *bare}))
        self._hear(cluster, silent)
        if run is None or len(silent) == len(list_live(cluster.nodes)):
            status = RunStatus.SETTING_UP
            return Report(status=status, returncode=None, unreachable=silent, progress=None)
        self.save(run)
        step, status, code = self.measure(run)
        if status is RunStatus.SUCCEEDED:
            self.success_seen_by[cluster.name, run_id] = get_process()
        progress = None
        if 0 not in silent and step > run.first_step:
            skew_s = self.skews.get(run.ids[0], 0.0)
            progress = Progress(
                step=step,
                total=run.program.steps,
                checkpoint_step=run.saved_step,
                time_s=self._loop.time() + skew_s,
            )
        reason = "rank 1 is lost" if status is RunStatus.FAILED and code is None else ""
        return Report(
            status=status,
            returncode=code,
            unreachable=silent,
            progress=progress,
            reason=reason,
            failed_rank=len(run.members) - 1 if code else None,
            is_ready=self._is_ready(run, status),
            port=20000 if run.is_held else None,
            unfit=self._list_unfit(cluster, run, silent) if status is RunStatus.RUNNING else (),
            faults=self._list_faults(cluster, silent) if status is RunStatus.FAILED_SETUP else (),
        )

    def _list_faults(self, cluster: Cluster, silent: tuple[int, ...]) -> tuple[NodeFault, ...]:
        nodes = [node for node in list_live(cluster.nodes) if node.id in self.sick and node.rank not in silent]
        self.reported_sick.update(node.id for node in nodes)
        return tuple(NodeFault(rank=node.rank, reason="an ECC error", serials=(f"GPU-{node.id}",)) for node in nodes)

    def _list_unfit(self, cluster: Cluster, run: MachineRun, silent: tuple[int, ...]) -> tuple[tuple[int, str], ...]:
        """List the unfit nodes among those that the broker asked and that answered."""
        unfit = {each.id for each in run.members if each.is_unfit}
        ranks = (node.rank for node in list_live(cluster.nodes) if node.id in unfit and node.rank not in silent)
        return tuple((rank, f"setup exited with 3 on rank {rank}") for rank in ranks)

    async def cancel(self, cluster: Cluster, run_id: int) -> None:
        await self._clock.sleep(0.05)
        silent = self._find_silent(cluster)
        self._on_effect("cancel:before")
        run = self.runs.get((cluster.name, run_id))
        if run is not None and len(silent) < len(list_live(cluster.nodes)):
            self.save(run)
            run.cancelled_s = min(run.cancelled_s, self._loop.time())
        self._on_effect("cancel:after")
        if silent:
            raise TransientError("a node does not answer")

    async def read_log(self, cluster: Cluster, run_id: int, *, offset: int) -> tuple[bytes, int]:
        run = self.runs.get((cluster.name, run_id))
        if 0 in self._find_silent(cluster):
            raise TransientError("the head does not answer")
        if run is None:
            return b"", offset
        length = 8 * (self.measure(run)[0] - run.first_step)
        return b"x" * max(0, length - offset), max(offset, length)

    async def renew_lease(self, cluster: Cluster, *, lease_s: float) -> None:
        await self._clock.sleep(0.02)
        self._renew(cluster, lease_s)
        if self._find_silent(cluster):
            raise TransientError("a node does not answer")

    def measure(self, run: MachineRun) -> tuple[int, RunStatus, int | None]:
        """Return step, status and exit code now. The program ends with the first node that it cannot do without."""
        now_s = self._loop.time()
        begun_s = self.find_begun_s(run)
        lost_s = self._find_loss_s(run, begun_s)
        if math.isinf(begun_s):
            return self._measure_held(run, lost_s)
        end_s = min(now_s, lost_s, run.cancelled_s)
        step_max = run.program.steps
        if run.serial < run.program.hangs:
            step_max = min(step_max, run.program.hang_at)
        broken_s = begun_s + self._measure_break_s(run)
        end_s = min(end_s, broken_s)
        death_s, death_code = self._find_death(run, begun_s)
        end_s = min(end_s, death_s)
        if self.is_sick(run) and begun_s <= min(now_s, lost_s, run.cancelled_s):
            return run.first_step, RunStatus.FAILED_SETUP, None
        step = min(step_max, run.first_step + max(0, int(end_s - begun_s)))
        code = run.program.exit_codes[run.serial] if run.serial < len(run.program.exit_codes) else 0
        if step >= run.program.steps:
            return step, RunStatus.SUCCEEDED if code == 0 else RunStatus.FAILED, code
        if run.cancelled_s <= min(now_s, lost_s, death_s, broken_s):
            return step, RunStatus.CANCELLED, None
        if broken_s <= min(now_s, lost_s, death_s):  # whatever happens to its nodes afterwards
            return step, RunStatus.FAILED, None
        if death_s <= min(now_s, lost_s):
            return step, RunStatus.FAILED, death_code
        if lost_s <= now_s:
            return step, RunStatus.FAILED, 1
        return step, RunStatus.SETTING_UP if now_s < begun_s else RunStatus.RUNNING, None

    def is_sick(self, run: MachineRun) -> bool:
        """Return whether the program cannot start for a broken GPU. Nodes that join later are not checked here."""
        return any(each.id in self.sick and each.joined_s == run.started_s for each in run.members)

    def _is_ready(self, run: MachineRun, status: RunStatus) -> bool:
        return run.is_held and not status.is_terminal and self._loop.time() >= run.started_s + run.program.setup_s

    def _measure_held(self, run: MachineRun, lost_s: float) -> tuple[int, RunStatus, int | None]:
        """Return step, status and exit code of a run whose job group is not up yet."""
        now_s = self._loop.time()
        if run.cancelled_s <= min(now_s, lost_s):
            return run.first_step, RunStatus.CANCELLED, None
        return (
            (run.first_step, RunStatus.FAILED, 1) if lost_s <= now_s else (run.first_step, RunStatus.SETTING_UP, None)
        )

    def find_begun_s(self, run: MachineRun) -> float:
        """Return when `run` began, or will; infinite while its job group is awaited."""
        ready_s = run.started_s + run.program.setup_s
        return max(ready_s, run.released_s) if run.is_held else ready_s

    async def send_peers(self, cluster: Cluster, run_id: int, peers: Mapping[str, object]) -> None:
        await self._reach(cluster)
        self._on_effect("peers:before")
        run = self.runs.get((cluster.name, run_id))
        if run is not None and self.is_working(run):
            run.peers = peers
            if math.isinf(run.released_s):
                run.released_s = self._loop.time()
                self._on_release(run)
        self._on_effect("peers:after")

    def measure_end_s(self, run: MachineRun) -> float:
        """Return when a program that has ended did so."""
        begun_s = self.find_begun_s(run)
        step = self.measure(run)[0]
        ends_s = [self._find_loss_s(run, begun_s), run.cancelled_s, begun_s + self._measure_break_s(run)]
        ends_s += [self._find_death(run, begun_s)[0], *([begun_s] if self.is_sick(run) else [])]
        return begun_s + step - run.first_step if step >= run.program.steps else min(ends_s)

    def has_died(self, run: MachineRun) -> bool:
        """Return whether the program ended with an exit code of its own, and not with a node."""
        step, status, code = self.measure(run)
        death_s = self._find_death(run, self.find_begun_s(run))[0]
        is_done = step >= run.program.steps
        return status is RunStatus.FAILED and bool(code) and (is_done or death_s <= self.measure_end_s(run))

    def _find_death(self, run: MachineRun, begun_s: float) -> tuple[float, int]:
        if run.serial >= len(run.program.deaths) or math.isinf(begun_s):
            return math.inf, 0
        step, code = run.program.deaths[run.serial]
        return begun_s + max(0, step - run.first_step), code

    def _find_loss_s(self, run: MachineRun, begun_s: float) -> float:
        ends = {node.id: node.ended_s for node in self._cloud.find(run.ids) if node.ended_s is not None}
        for end_s in sorted(ends.values()):
            left = {
                each.rank
                for each in run.members
                if each.joined_s <= end_s and not ends.get(each.id, math.inf) <= end_s and not each.is_unfit
            }
            is_elastic = run.nodes_min is not None and end_s >= begun_s
            if not is_elastic or 0 not in left or len(left) < (run.nodes_min or 0):
                return end_s
        return math.inf

    def _measure_break_s(self, run: MachineRun) -> float:
        """Return the seconds of work until ranks lose each other while every node lives (a broken network, say)."""
        if run.serial >= run.program.breaks or len(run.ids) == 1:
            return math.inf
        return float(max(0, run.program.break_at - run.first_step))

    def is_working(self, run: MachineRun) -> bool:
        return not self.measure(run)[1].is_terminal

    def is_hanging(self, run: MachineRun) -> bool:
        return run.serial < run.program.hangs and self.measure(run)[0] >= run.program.hang_at

    def save(self, run: MachineRun) -> None:
        """Commit the newest checkpoint up to now; storage refuses an attempt older than the newest to save."""
        step = max(run.first_step, self.measure(run)[0] // SAVE_EVERY * SAVE_EVERY)
        if step > run.saved_step:
            run.saved_step = step
            self._on_save(run, step)
            root = self.roots.get(run.job, run.job)
            self.saved[root] = max(self.saved.get(root, 0), step)

    def is_unreachable(self, node_id: str) -> bool:
        now_s = self._loop.time()
        return any(since_s <= now_s < until_s for since_s, until_s in self.unreachable.get(node_id, ()))

    def was_silent(self, ids: Sequence[str], *, one_s: float, all_s: float) -> bool:
        """Return whether one node was unreachable for `one_s` while another was not, or all were for `all_s`."""
        windows = [self._join_windows(node_id) for node_id in ids]
        common = windows[0]
        for each in windows[1:]:
            common = [
                (max(one[0], other[0]), min(one[1], other[1]))
                for one in common
                for other in each
                if max(one[0], other[0]) < min(one[1], other[1])
            ]
        if any(end_s - begin_s >= all_s for begin_s, end_s in common):
            return True
        alone = [each for windows_of in windows for each in windows_of if each not in common]
        return any(end_s - begin_s >= one_s for begin_s, end_s in alone)

    def _join_windows(self, node_id: str) -> list[tuple[float, float]]:
        """Return when the node was unreachable, up to now."""
        now_s = self._loop.time()
        joined: list[tuple[float, float]] = []
        for since_s, until_s in sorted(self.unreachable.get(node_id, ())):
            begin_s, end_s = since_s, min(now_s, until_s)
            if joined and begin_s <= joined[-1][1]:
                joined[-1] = (joined[-1][0], max(joined[-1][1], end_s))
            elif begin_s < end_s:
                joined.append((begin_s, end_s))
        return joined

    def find_run(self, cluster: str) -> MachineRun | None:
        """Find the newest run on these nodes."""
        of_cluster = [run for (name, _), run in self.runs.items() if name == cluster]
        return of_cluster[-1] if of_cluster else None

    def _begin(self, cluster: Cluster, run_id: int, job: int, attempt: int, nodes_min: int | None) -> None:
        root = self.roots.get(job, job)
        family = [root, *(each for each, of in self.roots.items() if of == root)]
        earlier = [run for each in family for run in self.runs_by_job.get(each, ())]
        for run in earlier:
            self.save(run)  # as it did by itself in its time, even if it was not polled since
        old = self.runs_by_job.setdefault(job, [])
        started = MachineRun(
            job=job,
            attempt=attempt,
            cluster=cluster.name,
            members=[Member(rank=node.rank, id=node.id, joined_s=self._loop.time()) for node in cluster.nodes],
            nodes_min=nodes_min,
            started_s=self._loop.time(),
            first_step=self.saved.get(root, 0),
            saved_step=self.saved.get(root, 0),
            program=self.programs[job],
            serial=len(earlier),  # a retry is another start of the same program
        )
        self.runs[cluster.name, run_id] = started
        self._on_start(started)
        if list(self.sick.values()).count(job) < started.program.sick and not self.is_sick(started):
            self.sick[cluster.nodes[-1].id] = job
        old.append(started)

    def _join(self, cluster: Cluster, run: MachineRun) -> None:
        """Add nodes that have replaced lost ones to the run; a program that has ended takes in none."""
        for node in list_live(cluster.nodes):
            if node.id not in run.ids and self.is_working(run):
                others = (each for old in self.runs_by_job[run.job] for each in old.members if each.is_unfit)
                is_unfit = sum(1 for _ in others) < run.program.unfit
                run.members.append(Member(rank=node.rank, id=node.id, joined_s=self._loop.time(), is_unfit=is_unfit))

    def _renew(self, cluster: Cluster, lease_s: float | None, *, is_start: bool = False) -> None:
        """Renew the lease of all nodes; a start sets it only on those that the run had not begun on."""
        run = self.find_run(cluster.name)
        if run is None or lease_s is None:
            return
        silent = self._find_silent(cluster)
        for node in list_live(cluster.nodes):
            if node.rank not in silent and node.id in run.ids and not (is_start and node.id in run.lease_s):
                run.lease_s[node.id] = self._loop.time() + lease_s
                run.renewed_s[node.id] = self._loop.time()
                if run.has_bucket and node.id not in run.heard_s:
                    self._loop.call_world(POLL_S, self._look_if_done, run, node.id)
                run.heard_s[node.id] = self._loop.time()
                self._on_lease(run, node.id, lease_s)
                self._loop.call_world(lease_s + 0.001, self._end_unleased, run, node.id)

    def _end_unleased(self, run: MachineRun, node_id: str) -> None:
        """Run the machine's own watchdog: shut down when the lease ends without a heartbeat."""
        lease_s = max(each.lease_s.get(node_id, 0.0) for each in self._list_runs(run, node_id))
        if lease_s <= self._loop.time() and self._is_live(node_id):
            self.save(run)
            self._on_self_end(run, node_id, "lease")
            self._cloud.end_by_itself(node_id, reason="lease")

    def _look_if_done(self, run: MachineRun, node_id: str) -> None:
        """Shut the machine down when its programs have ended, all is in the bucket, and no broker asks."""
        if not self._is_live(node_id):
            return
        runs = self._list_runs(run, node_id)
        is_quiet = self._loop.time() - max(each.heard_s.get(node_id, 0.0) for each in runs) >= QUIET_S
        if is_quiet and not any(self.is_working(each) for each in runs):
            self._on_self_end(run, node_id, "done")
            self._cloud.end_by_itself(node_id, reason="done")
        else:
            self._loop.call_world(POLL_S, self._look_if_done, run, node_id)

    def _list_runs(self, run: MachineRun, node_id: str) -> list[MachineRun]:
        """List all that the node was given: its lease and its quiet belong to the node, not to one run."""
        return [each for each in self.runs_by_job.get(run.job, ()) if node_id in each.ids]

    def _is_live(self, node_id: str) -> bool:
        return self._cloud.find([node_id])[0].state is not NodeState.TERMINATED

    def _hear(self, cluster: Cluster, silent: tuple[int, ...]) -> None:
        """Note that each polled node has heard the broker."""
        run = self.find_run(cluster.name)
        for node in list_live(cluster.nodes) if run is not None else ():
            if node.rank not in silent and node.id in run.heard_s:
                run.heard_s[node.id] = self._loop.time()

    def _find_silent(self, cluster: Cluster) -> tuple[int, ...]:
        ranks = {node.id: node.rank for node in list_live(cluster.nodes)}
        truth: list[Node] = list(self._cloud.find(list(ranks)))
        return tuple(
            ranks[node.id] for node in truth if node.state is not NodeState.RUNNING or self.is_unreachable(node.id)
        )

    async def _reach(self, cluster: Cluster) -> None:
        await self._clock.sleep(0.05)
        if self._find_silent(cluster):
            if self.silence_s:
                await self._clock.sleep(self.silence_s)
            raise TransientError("a node does not answer")
