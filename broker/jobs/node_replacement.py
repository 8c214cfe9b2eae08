"""A job that goes on without some of its nodes (`job_recovery: {min_nodes: }`): it gets new ones beside the work."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from broker.clock import Clock
from broker.errors import BrokerError, CloudError
from broker.jobs.budget import Overspent, check_budget
from broker.jobs.gang import Gang, GangReport
from broker.jobs.health import list_lost_ranks
from broker.jobs.monitor import is_due
from broker.provision.backoff import draw_backoff_s
from broker.provision.lifecycle import Provisioner
from broker.state.store import Store
from broker.storage.mounts import add_mounts
from broker.types import Cluster, EventKind, Job, Node, make_event

RETRY_BASE_S = 15.0
RETRY_S_MAX = 300.0
END_AGAIN_S = 30.0  # until a node that still runs is asked to end once more
MakeEnvs = Callable[[], dict[str, str]]


class NodeReplacer:
    """Remembers which nodes take part; after a crash of the controller all are submitted to again, to no harm."""

    def __init__(self, store: Store, provisioner: Provisioner, gang: Gang, clock: Clock) -> None:
        self._store = store
        self._provisioner = provisioner
        self._gang = gang
        self._clock = clock
        self._doing: asyncio.Task[Cluster] | None = None
        self._taking_part: frozenset[str] = frozenset()
        self._told: set[str] = set()
        self._ending_s: dict[str, float] = {}  # by id of nodes that cannot take part: when their end was last asked for
        self._refusals = 0  # in a row, of places
        self._next_try_s = 0.0

    async def look(
        self,
        job: Job,
        cluster: Cluster,
        report: GangReport,
        *,
        run_id: int,
        make_envs: MakeEnvs,
        find_lease_s: Callable[[], float],
    ) -> None:
        """One step: tell of a loss, ask for a node, take one in, end one that cannot take part.

        Returns soon; a node takes minutes to come.
        """
        if job.task.recovery.nodes_min is None:
            return
        await self._take_in(job, cluster, run_id, make_envs, find_lease_s)
        await self._end_unfit(job, cluster, report)
        self._hear(job)
        current = self._store.clusters.get(cluster.name)  # a node may just have been replaced
        lost = list_lost_ranks(current.nodes) if current else []
        if current is None or not lost:
            return
        for node in current.nodes:
            if node.rank in lost and node.id not in self._told:
                self._told.add(node.id)
                left = len(current.nodes) - len(lost)
                event = make_event(EventKind.SHRUNK, rank=node.rank, left=left, node_count=len(current.nodes))
                self._store.events.add(event, job_id=job.id)
        if self._doing is None and self._clock.now_s() >= self._next_try_s:
            self._doing = asyncio.ensure_future(
                self._provisioner.replace_node(
                    current,
                    job.task,
                    rank=lost[0],
                    check_budget=lambda: check_budget(job, self._store, self._clock),
                )
            )

    async def _end_unfit(self, job: Job, cluster: Cluster, report: GangReport) -> None:
        """A node whose `setup` failed would idle beside the others: once it is gone it is replaced as a lost one."""
        reasons = dict(report.unfit)
        for node in list_live(cluster):
            asked_s, now_s = self._ending_s.get(node.id), self._clock.now_s()
            if node.rank not in reasons or (asked_s is not None and not is_due(asked_s, END_AGAIN_S, now_s)):
                continue
            if asked_s is None:
                self._told.add(node.id)
                wait_s = self._back_off(1 + len(self._ending_s))
                reason = reasons[node.rank]
                event = make_event(EventKind.UNFIT, rank=node.rank, reason=reason, wait_s=wait_s, job=job.id)
                self._store.events.add(event, job_id=job.id)
            self._ending_s[node.id] = now_s
            try:
                await self._provisioner.end_node(cluster, node)
            except CloudError:
                pass  # asked again

    def _back_off(self, times: int) -> float:
        wait_s = draw_backoff_s(times, base_s=RETRY_BASE_S, cap_s=RETRY_S_MAX)
        self._next_try_s = self._clock.now_s() + wait_s
        return wait_s

    def stop(self) -> None:
        """The attempt is over: what is on its way ends with the cluster, or is taken up for the next attempt on it."""
        self._taking_part = frozenset()
        if self._doing is not None:
            self._doing.cancel()
            self._doing.add_done_callback(lambda done: done.cancelled() or done.exception())
            self._doing = None

    def _hear(self, job: Job) -> None:
        """What became of the node that was asked for."""
        if self._doing is None or not self._doing.done():
            return
        done, self._doing = self._doing, None
        error = done.exception()
        if error is None:
            self._refusals = 0
            return
        if not isinstance(error, BrokerError | Overspent):
            raise error
        self._refusals += 1
        wait_s = self._back_off(self._refusals)
        event = make_event(EventKind.REPLACEMENT_FAILED, error=str(error), wait_s=wait_s)
        self._store.events.add(event, job_id=job.id)

    async def _take_in(
        self, job: Job, cluster: Cluster, run_id: int, make_envs: MakeEnvs, find_lease_s: Callable[[], float]
    ) -> None:
        """Submit to all nodes: those that run already only answer."""
        live = frozenset(node.id for node in list_live(cluster))
        if live <= self._taking_part:
            return
        task = add_mounts(job.task)
        try:
            await self._gang.prepare(cluster, task)
            await self._gang.start(cluster, task, run_id=run_id, envs=make_envs(), lease_s=find_lease_s())
        except CloudError:
            return  # one does not answer yet, or another is just being lost: at the next look
        self._taking_part = live


def list_live(cluster: Cluster) -> list[Node]:
    lost = list_lost_ranks(cluster.nodes)
    return [node for node in cluster.nodes if node.rank not in lost]
