"""Replace lost nodes of an elastic job (`job_recovery: {min_nodes: }`) while the others keep working."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from broker.clock import Clock
from broker.errors import BrokerError, CloudError
from broker.jobs.gang import Gang, GangReport, get_run_id
from broker.jobs.head_moves import HeadMover
from broker.jobs.health import HealthSignals, list_lost_ranks
from broker.jobs.job_limits import JobLimits, LimitReached
from broker.jobs.monitor import is_due
from broker.provision.lifecycle import Provisioner
from broker.provision.refusals import draw_backoff_s
from broker.state.store import Store
from broker.storage.mounts import add_mounts
from broker.types import Attempt, Cluster, EventKind, Job, Node, make_event

RETRY_BASE_S = 15.0
RETRY_S_MAX = 300.0
END_AGAIN_S = 30.0  # before the request to terminate a node that is still running is repeated
MakeEnvs = Callable[[], dict[str, str]]


class NodeReplacer:
    """Replace nodes and track the participating ones. After a crash, it harmlessly submits to all again."""

    def __init__(self, store: Store, provisioner: Provisioner, gang: Gang, clock: Clock) -> None:
        self._store = store
        self._provisioner = provisioner
        self._gang = gang
        self._clock = clock
        self._limits = JobLimits(store, clock)
        self._heads = HeadMover(store, gang)
        self._replacing: asyncio.Task[Cluster] | None = None
        self._participants: frozenset[str] = frozenset()
        self._reported: set[str] = set()
        self._ending_s: dict[str, float] = {}  # node ID -> last request to terminate it, because it cannot join
        self._refusals = 0  # consecutive
        self._refused_s, self._wait_s = float("-inf"), 0.0  # the newest refusal, and how long to wait after it

    async def step(
        self,
        job: Job,
        attempt: Attempt,
        cluster: Cluster,
        report: GangReport,
        signals: HealthSignals,
        *,
        make_envs: MakeEnvs,
        find_lease_s: Callable[[], float],
    ) -> Attempt:
        """Take one step: move the head, report a loss, request a node, add one, or terminate one that cannot join.

        Return the attempt as currently recorded. Never wait: a new node takes minutes.
        """
        if job.task.recovery.nodes_min is None:
            return attempt
        attempt, is_open = await self._heads.step(attempt, cluster, report, signals)
        if is_open:
            await self._replace(job, attempt, cluster, report, make_envs, find_lease_s)
        return attempt

    async def _replace(
        self,
        job: Job,
        attempt: Attempt,
        cluster: Cluster,
        report: GangReport,
        make_envs: MakeEnvs,
        find_lease_s: Callable[[], float],
    ) -> None:
        await self._add_nodes(job, attempt, cluster, make_envs, find_lease_s)
        await self._end_unfit(job, cluster, report)
        self._check_replacement(job)
        current = self._store.clusters.get(cluster.name)  # a node may just have been replaced
        lost = list_lost_ranks(current.nodes) if current else []
        if current is None or not lost:
            return
        for node in current.nodes:
            if node.rank in lost and node.id not in self._reported:
                self._reported.add(node.id)
                left = len(current.nodes) - len(lost)
                event = make_event(EventKind.SHRUNK, rank=node.rank, left=left, node_count=len(current.nodes))
                self._store.events.add(event, job_id=job.id)
        if self._replacing is None and is_due(self._refused_s, self._wait_s, self._clock.now_s()):
            self._replacing = asyncio.ensure_future(
                self._provisioner.replace_node(
                    current,
                    job.task,
                    rank=lost[0],
                    check_budget=lambda: self._limits.check(job),
                )
            )

    async def _end_unfit(self, job: Job, cluster: Cluster, report: GangReport) -> None:
        """Terminate a node whose `setup` failed; once it is gone, it is replaced like a lost one."""
        reasons = dict(report.unfit)
        for node in list_live(cluster):
            asked_s, now_s = self._ending_s.get(node.id), self._clock.now_s()
            if node.rank not in reasons or (asked_s is not None and not is_due(asked_s, END_AGAIN_S, now_s)):
                continue
            if asked_s is None:
                self._reported.add(node.id)
                wait_s = self._back_off(1 + len(self._ending_s))
                reason = reasons[node.rank]
                event = make_event(EventKind.UNFIT, rank=node.rank, reason=reason, wait_s=wait_s, job=job.id)
                self._store.events.add(event, job_id=job.id)
            self._ending_s[node.id] = now_s
            try:
                await self._provisioner.end_node(cluster, node)
            except CloudError:
                pass  # retried

    def _back_off(self, times: int) -> float:
        wait_s = draw_backoff_s(times, base_s=RETRY_BASE_S, cap_s=RETRY_S_MAX)
        self._refused_s, self._wait_s = self._clock.now_s(), wait_s
        return wait_s

    def stop(self) -> None:
        """Stop at the attempt's end: a node being created is released with the cluster, or used by its next attempt."""
        self._participants = frozenset()
        if self._replacing is not None:
            self._replacing.cancel()
            self._replacing.add_done_callback(lambda task: task.cancelled() or task.exception())
            self._replacing = None

    def _check_replacement(self, job: Job) -> None:
        """Check the result of the replacement that was requested."""
        if self._replacing is None or not self._replacing.done():
            return
        task, self._replacing = self._replacing, None
        error = task.exception()
        if error is None:
            self._refusals = 0
            return
        if not isinstance(error, BrokerError | LimitReached):
            raise error
        self._refusals += 1
        wait_s = self._back_off(self._refusals)
        event = make_event(EventKind.REPLACEMENT_FAILED, error=str(error), wait_s=wait_s)
        self._store.events.add(event, job_id=job.id)

    async def _add_nodes(
        self, job: Job, attempt: Attempt, cluster: Cluster, make_envs: MakeEnvs, find_lease_s: Callable[[], float]
    ) -> None:
        """Submit to all nodes; this has no effect on nodes that are already running."""
        live = frozenset(node.id for node in list_live(cluster))
        if live <= self._participants:
            return
        task, run_id, lease_s = add_mounts(job.task), get_run_id(attempt, cluster), find_lease_s()
        try:
            await self._gang.prepare(cluster, task)
            await self._gang.start(cluster, task, run_id=run_id, envs=make_envs(), lease_s=lease_s, head=attempt.head)
        except CloudError:
            return  # one does not respond yet, or another was just lost: retried at the next step
        self._participants = live


def list_live(cluster: Cluster) -> list[Node]:
    """List the nodes that the cloud has neither terminated nor stopped."""
    lost = list_lost_ranks(cluster.nodes)
    return [node for node in cluster.nodes if node.rank not in lost]
