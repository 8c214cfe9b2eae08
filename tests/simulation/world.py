"""A simulated environment for controllers: a cloud, a fake gang that checks the rules, a store that may crash."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from broker.config import Config
from broker.errors import CloudError, TransientError
from broker.jobs.acquisition import Planner
from broker.jobs.controller import JobController
from broker.provision.lifecycle import Provisioner
from broker.state.store import Store
from broker.types import (
    Cluster,
    Estimate,
    GangHead,
    Job,
    Node,
    NodeFault,
    NodeSample,
    NodeState,
    ObservedCheckpoints,
    Offer,
    OwnTime,
    Placement,
    Plan,
    Progress,
    RunStatus,
    SetupResult,
    SlowNetwork,
    Task,
)
from tests.clouds.simulated import FaultRates, SimulatedCloud
from tests.simulation.virtual import VirtualClock

OWNER = "me"
FOREIGN = Node(
    id="foreign-1",
    cloud="simulated",
    owner="somebody-else",
    cluster="job-1-1",
    attempt=1,
    rank=0,
    state=NodeState.RUNNING,
    created_s=1.0,
)


class Crash(BaseException):
    """A kill -9: no handler of ours may catch it."""


class CrashPoints:
    """A counter of effects and commits that raises at the chosen one."""

    def __init__(self, crash_at: int | None = None) -> None:
        self.crash_at = crash_at
        self.count = 0
        self.has_crashed = False

    def pass_by(self, what: str) -> None:
        if self.has_crashed:
            raise Crash(what)  # a dead process has no further effect, whatever task wakes up
        self.count += 1
        if self.count == self.crash_at:
            self.has_crashed = True
            raise Crash(what)


class CrashingStore(Store):
    points: CrashPoints

    def _commit(self) -> None:
        self.points.pass_by("commit:before")
        super()._commit()
        self.points.pass_by("commit:after")


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
    flush: str = ""
    unflushed: str = ""
    unfit: tuple[tuple[int, str], ...] = ()
    faults: tuple[NodeFault, ...] = ()
    network: SlowNetwork | None = None
    own_times: tuple[OwnTime, ...] = ()
    setups: tuple[SetupResult, ...] = ()
    statuses: tuple[RunStatus | None, ...] = ()
    samples: tuple[tuple[int, NodeSample], ...] = ()
    followers: tuple[int, ...] = ()
    run_id: int = 1
    checkpoints: ObservedCheckpoints | None = None


@dataclass(kw_only=True)
class _Run:
    number: int
    job: str
    ids: tuple[str, ...]
    started_s: float
    first_step: int
    cancelled_s: float | None = None


class SimulatedGang:
    """A fake gang: one step a second, a checkpoint each tenth. With a slow node, steps take twice as long.

    Two attempts of one job at work at once fail the test.
    """

    def __init__(
        self, cloud: SimulatedCloud, clock: VirtualClock, *, steps: int = 30, exit_codes: tuple[int, ...] = ()
    ) -> None:
        self._cloud = cloud
        self._clock = clock
        self.steps = steps
        self._exit_codes = exit_codes  # of each started attempt in turn; afterwards 0
        self._runs: dict[tuple[str, int], _Run] = {}
        self._keys_by_job: dict[str, list[tuple[str, int]]] = {}
        self._checkpoints: dict[str, int] = {}
        self.starts = 0
        self.start_error: CloudError | None = None
        self.slow_nodes: set[str] = set()  # ids
        self.slow_rank: int | None = None  # whichever node has it: its share of the data is too large
        self.hangs = 0  # number of attempts that stop at step 15 and keep running

    async def prepare(self, cluster: Cluster, task: Task) -> None:
        await self._clock.sleep(0.1)
        self._reach(cluster)

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
        await self._clock.sleep(0.1)
        self._reach(cluster)
        if self.start_error:
            raise self.start_error
        key = (cluster.name, run_id)
        if key in self._runs:
            return
        job = envs["BROKER_JOB_ID"]
        for old in self._keys_by_job.setdefault(job, []):
            run = self._runs[old]
            assert not self._is_working(run), f"{old} still works while {key} starts"
            self._save(run)
        self._keys_by_job[job].append(key)
        assert {node.cluster for node in cluster.nodes} == {cluster.name}
        self._runs[key] = _Run(
            number=len(self._runs),
            job=job,
            ids=tuple(node.id for node in cluster.nodes),
            started_s=self._clock.now_s(),
            first_step=self._checkpoints.get(job, 0),
        )
        self.starts += 1

    async def move_head(
        self, cluster: Cluster, run_id: int, head: GangHead, *, members: Sequence[int], log_bytes: int
    ) -> bool:
        raise AssertionError("no program here follows a head")

    async def poll(self, cluster: Cluster, run_id: int) -> Report:
        truth = self._find_nodes(cluster)
        dead = tuple(rank for rank, node in enumerate(truth) if node.state is not NodeState.RUNNING)
        run = self._runs[cluster.name, run_id]
        self._save(run)
        step, status, code = self._measure(run)
        progress = Progress(step=step, total=self.steps, checkpoint_step=self._checkpoints[run.job])
        if len(dead) == len(truth):
            return Report(status=RunStatus.RUNNING, returncode=None, unreachable=dead, progress=None)
        own_times = tuple(
            OwnTime(rank=rank, step=step, own_s=2.0 if self._is_slow(rank, node.id) else 1.0)
            for rank, node in enumerate(truth)
            if status is RunStatus.RUNNING and rank not in dead
        )
        return Report(status=status, returncode=code, unreachable=dead, progress=progress, own_times=own_times)

    def _is_slow(self, rank: int, node_id: str) -> bool:
        return node_id in self.slow_nodes or rank == self.slow_rank

    async def send_peers(self, cluster: Cluster, run_id: int, peers: Mapping[str, object]) -> None:
        self._reach(cluster)

    async def cancel(self, cluster: Cluster, run_id: int) -> None:
        self._reach(cluster)
        run = self._runs[cluster.name, run_id]
        run.cancelled_s = run.cancelled_s or self._clock.now_s()

    async def read_log(self, cluster: Cluster, run_id: int, *, offset: int) -> tuple[bytes, int]:
        self._reach(cluster)
        run = self._runs.get((cluster.name, run_id))
        if run is None:
            return b"", offset
        last = self._measure(run)[0]
        name = f"{cluster.name.rpartition('-')[0]}-{cluster.attempt + run_id - 1}"  # as the attempt's own would be
        text = "".join(f"{name} step {n}\n" for n in range(run.first_step + 1, last + 1)).encode()
        chunk = text[offset : offset + 4096]
        return chunk, offset + len(chunk)

    async def renew_lease(self, cluster: Cluster, *, lease_s: float) -> None:
        self._reach(cluster)

    def _measure(self, run: _Run) -> tuple[int, RunStatus, int | None]:
        """Return step, status and exit code now. The program ends with its first lost node."""
        ends = [node.ended_s for node in self._cloud.find(run.ids) if node.ended_s is not None]
        now_s = self._clock.now_s()
        end_s = min([now_s, *ends, *([run.cancelled_s] if run.cancelled_s else [])])
        rate = 0.5 if any(self._is_slow(rank, each) for rank, each in enumerate(run.ids)) else 1.0
        step = min(self.steps, run.first_step + max(0, int((end_s - run.started_s) * rate)))
        number = run.number
        if number < self.hangs and not ends:
            return min(step, 15), RunStatus.CANCELLED if run.cancelled_s else RunStatus.RUNNING, None
        code = self._exit_codes[number] if self._has_code(run) else 0
        if step >= self.steps:
            return step, RunStatus.SUCCEEDED if code == 0 else RunStatus.FAILED, code
        if run.cancelled_s:
            return step, RunStatus.CANCELLED, None
        return (step, RunStatus.FAILED, 1) if ends else (step, RunStatus.RUNNING, None)

    def _has_code(self, run: _Run) -> bool:
        return run.number < len(self._exit_codes)

    def _is_working(self, run: _Run) -> bool:
        return self._measure(run)[1] is RunStatus.RUNNING

    def _save(self, run: _Run) -> None:
        step = self._measure(run)[0] // 10 * 10
        self._checkpoints[run.job] = max(self._checkpoints.get(run.job, 0), step)

    def _find_nodes(self, cluster: Cluster) -> list[Node]:
        return list(self._cloud.find([node.id for node in cluster.nodes]))

    def _reach(self, cluster: Cluster) -> None:
        if any(node.state is not NodeState.RUNNING for node in self._find_nodes(cluster)):
            raise TransientError("a node does not answer")


def make_offer(zone: str, *, usd_hour: float = 1.0) -> Offer:
    return Offer(
        cloud="simulated",
        region=zone[:-1],
        zone=zone,
        instance_type="big",
        vcpus=8,
        memory_gib=32,
        ondemand_usd_hour=3 * usd_hour,
        spot_usd_hour=usd_hour,
    )


def make_plan(task: Task, *zones: str, node_count: int = 2) -> Plan:
    return Plan(
        task=task,
        estimates=tuple(
            Estimate(placement=Placement(offer=make_offer(zone), is_spot=True, node_count=node_count))
            for zone in zones or ("east1a", "east1b", "west1a")
        ),
        rejections=(),
        prices_as_of="2026-11-01",
        reason="cheapest",
    )


class World:
    def __init__(
        self,
        folder: Path,
        *,
        faults: FaultRates = FaultRates(),
        seed: int = 0,
        crash_at: int | None = None,
        exit_codes: tuple[int, ...] = (),
    ) -> None:
        self.folder = folder
        self.clock = VirtualClock()
        self.cloud = SimulatedCloud(clock=self.clock, faults=faults, seed=seed)
        self.cloud.add_foreign_node(FOREIGN)
        self.gang = SimulatedGang(self.cloud, self.clock, exit_codes=exit_codes)
        self.points = CrashPoints()
        self.store = self.open()
        self.task = Task(name="train", run="python train.py", num_nodes=2)
        self.job_id = self.store.jobs.add("train", self.task).id
        self.points = self.store.points = CrashPoints(crash_at)
        self.cloud.on_effect = self.points.pass_by

    def open(self) -> CrashingStore:
        CrashingStore.points = self.points
        return CrashingStore(self.folder / "state.db", clock=self.clock)

    def reborn(self, crash_at: int | None = None) -> None:
        """Return a new process on the same file."""
        self.store.close()
        self.points = CrashPoints(crash_at)
        self.store = self.open()
        self.cloud.on_effect = self.points.pass_by

    def make_provisioner(self) -> Provisioner:
        return Provisioner({"simulated": self.cloud}, self.store, clock=self.clock, owner=OWNER)

    def make_controller(self, provisioner: Provisioner | None = None, planner: Planner | None = None) -> JobController:
        return JobController(
            self.job_id,
            store=self.store,
            provisioner=provisioner or self.make_provisioner(),
            gang=self.gang,
            planner=planner or (lambda task, avoid: make_plan(task)),
            clock=self.clock,
            config=Config(home=self.folder, owner=OWNER),
        )

    def get_job(self) -> Job:
        job = self.store.jobs.get(self.job_id)
        assert job is not None
        return job

    def list_live_nodes(self) -> list[Node]:
        return [node for node in self.cloud.observe() if node.owner == OWNER and node.state is not NodeState.TERMINATED]

    def count_live(self, matches: Callable[[Node], bool]) -> int:
        return sum(1 for node in self.list_live_nodes() if matches(node))
