"""Let an elastic gang survive the loss of the node that coordinates it, its head.

The choice is committed with a higher epoch before any node is informed, so that a restarted or suspended controller
cannot name another node for the same epoch. Informing nodes may be repeated at any time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from broker.errors import CloudError
from broker.jobs.gang import Gang, GangReport, get_run_id
from broker.jobs.health import HealthSignals, find_next_head, list_lost_ranks
from broker.state.store import Store
from broker.types import Attempt, Cluster, EventKind, GangHead, make_event


class HeadMover:
    """Move the head of one job's gang. Only the state sent to the nodes is kept in memory."""

    def __init__(self, store: Store, gang: Gang) -> None:
        self._store = store
        self._gang = gang
        self._notified: object = None

    async def step(
        self, attempt: Attempt, cluster: Cluster, report: GangReport, signals: HealthSignals
    ) -> tuple[Attempt, bool]:
        """Name a new head if the current one is lost, and inform the nodes.

        Return the attempt, and whether new nodes can join.

        Also inform nodes when one of them was replaced: programs need its address if the head is lost later.
        """
        if attempt.head.rank in list_lost_ranks(cluster.nodes):
            attempt = self._name_next(attempt, signals)
        if not report.followers:
            return attempt, attempt.head.epoch == 0
        members = list_members(report, cluster)
        addresses = tuple(node.address for node in cluster.nodes)
        message = (attempt.number, attempt.head, addresses, members)
        if message != self._notified and attempt.head.rank in members:
            is_notified = await self._notify_agents(attempt, cluster, members)
            self._notified = message if is_notified else self._notified
        return attempt, attempt.head.epoch == 0 or self._notified == message

    def _name_next(self, attempt: Attempt, signals: HealthSignals) -> Attempt:
        rank = find_next_head(signals)
        if rank is None:
            return attempt  # the list is newer than the signals: judged at the next poll
        attempt = replace(attempt, head=GangHead(epoch=attempt.head.epoch + 1, rank=rank))
        with self._store.transaction():
            self._store.jobs.put_attempt(attempt)
            self._store.events.add(make_event(EventKind.HEAD_MOVED, rank=rank), job_id=attempt.job_id)
        return attempt

    async def _notify_agents(self, attempt: Attempt, cluster: Cluster, members: Sequence[int]) -> bool:
        copied = self._store.jobs.get_log_offset(attempt.job_id)
        log_bytes = copied.source_bytes if copied.attempt == attempt.number else 0
        run_id = get_run_id(attempt, cluster)
        try:
            return await self._gang.move_head(cluster, run_id, attempt.head, members=members, log_bytes=log_bytes)
        except CloudError:
            return False  # retried at the next step; the agents limit how long that is useful


def list_members(report: GangReport, cluster: Cluster) -> tuple[int, ...]:
    """Return the responding ranks on which the run has begun and not ended."""
    lost = list_lost_ranks(cluster.nodes)
    return tuple(
        rank
        for rank, status in enumerate(report.statuses)
        if status is not None and not status.is_terminal and rank not in lost
    )
