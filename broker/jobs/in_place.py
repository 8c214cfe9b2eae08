"""Start the next attempt on the nodes of the last one: end its program everywhere, replace lost nodes, commit once.

A node with a preemption notice is terminated once the program has ended everywhere, and replaced like a lost one.

An attempt that ended may keep its nodes until `kept_until_s`. Each step polls them once; when all are running, respond
and have ended the old program, one commit closes the old attempt and opens the next one on the same cluster. The new
number fences late writes of the old attempt, and the new run ID its agents' late reports. If this takes too long or
would cost more than new nodes, the cluster is released, as after any other end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum

from broker.clock import Clock
from broker.errors import BrokerError, CloudError, InvalidRequestError
from broker.jobs.gang import Gang, GangReport, get_run_id
from broker.jobs.group_member import GroupMember
from broker.jobs.health import list_lost_ranks
from broker.jobs.job_limits import JobLimits, LimitReached
from broker.jobs.monitor import is_due, list_answering
from broker.jobs.teardown import AttemptTeardown
from broker.provision.lifecycle import Provisioner
from broker.state.store import Store
from broker.storage.mounts import add_mounts
from broker.types import Attempt, Cluster, ClusterStatus, EventKind, Job, Node, NodeState, make_event

KEPT_S_MAX = 1800.0  # longer only if the wall clock was set back
END_AGAIN_S = 30.0  # before the request to terminate a node that is still running is repeated


class ReuseState(StrEnum):
    """State of the retained nodes."""

    WAITING = "waiting"
    READY = "ready"
    GIVEN_UP = "given up"


class InPlace:
    """Reuse the nodes of one job."""

    def __init__(
        self,
        store: Store,
        provisioner: Provisioner,
        gang: Gang,
        clock: Clock,
        teardown: AttemptTeardown,
        group: GroupMember,
    ) -> None:
        self._store = store
        self._provisioner = provisioner
        self._gang = gang
        self._clock = clock
        self._teardown = teardown
        self._group = group
        self._limits = JobLimits(store, clock)
        self._replacing: asyncio.Task[Cluster] | None = None
        self._asked_s: dict[str, float] = {}  # node ID -> when its termination was last requested

    def stop(self) -> None:
        """Stop waiting for a replacement; a node that is being created is later found by its intent."""
        if self._replacing is not None:
            self._replacing.cancel()
            self._replacing.add_done_callback(lambda task: task.cancelled() or task.exception())
            self._replacing = None

    async def step(self, job: Job, attempt: Attempt) -> ReuseState:
        """Take one step towards a complete gang without a running program."""
        cluster = self._store.clusters.get(attempt.cluster)
        if cluster is None or cluster.status is not ClusterStatus.UP:
            return ReuseState.GIVEN_UP
        left_s = (attempt.kept_until_s or 0.0) - self._clock.now_s()
        if not 0.0 < left_s <= KEPT_S_MAX or self._limits.find_breach(job):
            return ReuseState.GIVEN_UP
        report = await self._gang.poll(cluster, get_run_id(attempt, cluster))
        try:
            answering = list_answering(report, cluster)
            # Without a cached list: in an older list, a node that was just created would appear to be gone.
            cluster = await self._provisioner.refresh(cluster, answering=answering)
        except CloudError:
            return ReuseState.WAITING
        if not has_ended(report):
            await self._end_program(attempt, cluster)
        else:
            await self._end_noticed(attempt, cluster, report)
        leaving = [node.rank for node in cluster.nodes if node.rank in report.noticed or node.id in self._asked_s]
        silent = [rank for rank in report.unreachable if rank not in leaving]
        if list_lost_ranks(cluster.nodes) or self._replacing is not None:
            return self._replace(job, cluster)
        if silent and not await self._prepare(job, cluster, silent):
            return ReuseState.GIVEN_UP
        if leaving or report.unreachable or not has_ended(report) or not are_running(cluster.nodes):
            return ReuseState.WAITING
        await self._teardown.copy_log(attempt, cluster)
        return ReuseState.READY

    def begin_attempt(self, job: Job, old: Attempt) -> Attempt:
        """Close the old attempt and open the next in one commit, so that the nodes always belong to a live attempt."""
        new = Attempt(
            job_id=job.id,
            number=job.next_attempt,
            cluster=old.cluster,
            placement=old.placement,
            started_s=self._clock.now_s(),
            generation=self._group.find_generation(job),
        )
        with self._store.transaction():
            self._teardown.close(replace(old, kept_until_s=None))
            self._store.jobs.put_attempt(new)
            event = make_event(EventKind.ATTEMPT_IN_PLACE, number=new.number, earlier=old.number)
            self._store.events.add(event, job_id=job.id)
        return new

    def _replace(self, job: Job, cluster: Cluster) -> ReuseState:
        """Replace lost nodes one at a time; the first refusal gives up because the place has no capacity."""
        if self._replacing is not None:
            if not self._replacing.done():
                return ReuseState.WAITING
            task, self._replacing = self._replacing, None
            if (error := task.exception()) is None:
                return ReuseState.WAITING  # the next step polls it
            if not isinstance(error, BrokerError | LimitReached):
                raise error
            self._store.events.add(make_event(EventKind.REPLACEMENT_FAILED, error=str(error)), job_id=job.id)
            return ReuseState.GIVEN_UP
        lost = [node for node in cluster.nodes if node.state is NodeState.TERMINATED]
        if len(lost) < len(list_lost_ranks(cluster.nodes)) or len(lost) == len(cluster.nodes):
            return ReuseState.GIVEN_UP  # a stopped node occupies its slot, or all are gone
        if not self._provisioner.can_replace_node(cluster):
            return ReuseState.GIVEN_UP
        self._replacing = asyncio.ensure_future(
            self._provisioner.replace_node(
                cluster,
                job.task,
                rank=lost[0].rank,
                check_budget=lambda: self._limits.check(job),
            )
        )
        return ReuseState.WAITING

    async def _prepare(self, job: Job, cluster: Cluster, ranks: Sequence[int]) -> bool:
        """Install the agent on nodes that do not respond: new nodes lack it.

        Return False if the task's files are gone.
        """
        silent = replace(cluster, nodes=tuple(node for node in cluster.nodes if node.rank in ranks))
        try:
            await self._gang.prepare(silent, add_mounts(job.task))
        except InvalidRequestError:
            return False
        except CloudError:
            pass  # still booting; retried at the next step
        return True

    async def _end_noticed(self, attempt: Attempt, cluster: Cluster, report: GangReport) -> None:
        """Terminate nodes with a preemption notice, which the cloud would take anyway, after copying their log.

        Their replacement may start only when they are confirmed gone.
        """
        now_s = self._clock.now_s()
        for node in cluster.nodes:
            if node.rank not in report.noticed or node.state is NodeState.TERMINATED:
                continue
            if not is_due(self._asked_s.get(node.id, float("-inf")), END_AGAIN_S, now_s):
                continue
            await self._teardown.copy_log(attempt, cluster)
            try:
                await self._provisioner.end_node(cluster, node)
            except CloudError:
                continue  # retried at the next step
            self._asked_s[node.id] = now_s

    async def _end_program(self, attempt: Attempt, cluster: Cluster) -> None:
        try:
            await self._gang.cancel(cluster, get_run_id(attempt, cluster))
        except CloudError:
            pass  # retried at the next step


def has_ended(report: GangReport) -> bool:
    """Return whether the program has ended on every responding node; a replacement node does not know the run."""
    return report.status.is_terminal and all(status is None or status.is_terminal for status in report.statuses)


def are_running(nodes: Sequence[Node]) -> bool:
    """Return whether the cloud lists every node as running."""
    return all(node.state is NodeState.RUNNING for node in nodes)
