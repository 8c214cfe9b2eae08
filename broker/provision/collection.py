"""Garbage collection: terminate nodes that carry our tag but have no record; delete resources without a cluster.

Cloud lists are read before the records, so that a node recorded in between is not mistaken for lost.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from broker.clock import Clock
from broker.clouds.base import CanSweep, Cloud
from broker.errors import AuthError, CloudError
from broker.frozen import frozen
from broker.locks import is_locked
from broker.provision.adoption import Adopter
from broker.provision.bring_up import find_lock
from broker.provision.launcher import SurplusReleaser
from broker.state.store import Store
from broker.types import Cluster, ClusterStatus, EventKind, Node, NodeRequest, NodeState, make_event

log = logging.getLogger(__name__)
T = TypeVar("T")
OnFailure = Callable[[str, CloudError], object]  # the name of a cloud or cluster, and why it could not be collected

GRACE_S = 30.0  # a node younger than this, plus the cloud's lag, may belong to a call in progress
UP_S_MAX = 3600.0  # no request of a live process takes longer: an older open intent is orphaned
SWEEP_EVERY_S = 3600.0  # even if no cluster has ended: the last sweep may have skipped resources in use


@frozen
class LostResources:
    """Nodes without a record, and names of dead clusters.

    `failures`: by cloud, or cloud and region, why it was not searched.
    """

    nodes: tuple[Node, ...]
    names: tuple[str, ...]
    failures: Mapping[str, CloudError]


class Collector:
    """Terminate lost nodes, orphaned launches and dead clusters of this installation."""

    def __init__(
        self,
        clouds: Mapping[str, Cloud],
        store: Store,
        *,
        clock: Clock,
        owner: str,
        down: Callable[[str], Awaitable[None]],
        terminate: Callable[[NodeRequest], Awaitable[None]],
        surplus: SurplusReleaser,
        adopter: Adopter,
    ) -> None:
        self._clouds = clouds
        self._store = store
        self._clock = clock
        self._owner = owner
        self._down = down
        self._terminate = terminate
        self._surplus = surplus
        self._adopter = adopter
        self._spared: Counter[str] = Counter()
        self._repaired: Counter[str] = Counter()

    @contextmanager
    def spare(self, name: str) -> Iterator[None]:
        """Protect the intents of `name`, regardless of age, while this process brings it up."""
        self._spared[name] += 1
        try:
            yield
        finally:
            self._spared[name] -= 1

    @contextmanager
    def spare_gang(self, name: str) -> Iterator[None]:
        """Protect the intents of the running cluster `name` while this process replaces one of its nodes."""
        self._repaired[name] += 1
        try:
            yield
        finally:
            self._repaired[name] -= 1

    async def find(self) -> LostResources:
        """Find what `collect` would terminate now. An error of one cloud does not affect others."""
        orphaned = {request.token for request in self._find_orphans()}
        nodes: list[Node] = []
        failures: dict[str, CloudError] = {}
        for cloud in self._clouds.values():
            try:
                listed = await cloud.list_nodes(self._owner)
            except CloudError as error:
                failures[cloud.name] = error
                continue
            nodes += self._select_lost(cloud, listed, orphaned)
            # Regions that this login may not list contain no nodes of it.
            unseen = {region: each for region, each in listed.unseen.items() if not isinstance(each, AuthError)}
            failures.update((f"{cloud.name} in {region}", error) for region, error in unseen.items())
        return LostResources(nodes=tuple(nodes), names=tuple(self._find_dead_names()), failures=failures)

    async def collect(self, on_failure: OnFailure | None = None) -> int:
        """Collect; return the number of ended nodes, launches and clusters.

        An error of one cloud does not affect others: it is passed to `on_failure`, with the cloud's or the cluster's
        name, or else logged.
        """
        note = on_failure or _log_failure
        count = 0
        for cloud in self._clouds.values():
            try:
                await self._adopter.adopt(cloud)
                count += await self._collect_nodes(cloud)
            except CloudError as error:
                note(cloud.name, error)
        names = self._find_dead_names()
        orphans = [request for request in self._find_orphans() if request.cluster not in names]
        works = [
            *(_try(self._terminate, orphan, partial(note, orphan.cluster)) for orphan in orphans),
            *(_try(self._down, name, partial(note, name)) for name in names),
        ]
        return count + await _sum_concurrently(works)

    async def _collect_nodes(self, cloud: Cloud) -> int:
        lost = await self._find_lost_nodes(cloud)
        for node in lost:
            self._store.bills.record(node)  # before the call: if this process is killed, the cost is recorded
        if lost:
            await cloud.terminate_nodes(lost)
            for node in lost:
                self._store.events.add(make_event(EventKind.COLLECTED, node=node.id), cluster=node.cluster)
        return len(lost)

    async def _find_lost_nodes(self, cloud: Cloud) -> Sequence[Node]:
        return self._select_lost(cloud, await cloud.list_nodes(self._owner))

    def _select_lost(self, cloud: Cloud, listed: Iterable[Node], orphaned: Collection[str] = ()) -> Sequence[Node]:
        """Return listed nodes without a record.

        In a cloud that is not adopted yet, only nodes that this store has requested: others may be in use.
        `orphaned`: tokens whose open intents do not protect their nodes.
        """
        listed = list(listed)
        self._close_bills(listed)
        clusters = {cluster.name: cluster for cluster in self._store.clusters.list()}
        tokens = {intent.request.token for intent in self._store.intents.list_open()} - set(orphaned)
        oldest_s = self._clock.now_s() - GRACE_S - cloud.settle_s
        own_tokens = None
        if not self._store.meta.is_adopted(cloud.name):
            own_tokens = self._store.intents.list_known_tokens({node.token for node in listed})
        return [
            node
            for node in listed
            if (own_tokens is None or node.token in own_tokens)
            and node.owner == self._owner
            and node.state is not NodeState.TERMINATED
            and node.created_s < oldest_s
            and node.token not in tokens
            and not _is_recorded(node, clusters.get(node.cluster))
        ]

    def _close_bills(self, listed: Iterable[Node]) -> None:
        """Close the bills of collected nodes, which have no record that would show their end."""
        for node in listed:
            if node.state is NodeState.TERMINATED and node.ended_s is not None and self._store.bills.is_open(node):
                self._store.bills.record(node)

    def _find_orphans(self) -> Sequence[NodeRequest]:
        """Return open intents of clusters that are up: a search did not need them, and its process died too early."""
        clusters = {cluster.name: cluster for cluster in self._store.clusters.list()}
        oldest_s = self._clock.now_s() - UP_S_MAX
        return [
            intent.request
            for intent in self._store.intents.list_open()
            if (cluster := clusters.get(intent.request.cluster)) is not None
            and cluster.status in (ClusterStatus.UP, ClusterStatus.STOPPED)
            and not (_is_replacement(intent.request, cluster) and intent.created_s > oldest_s)
            and intent.request.token not in self._surplus.tokens
            and not self._repaired[intent.request.cluster]
            and intent.request.placement.offer.cloud in self._clouds
        ]

    def _find_dead_names(self) -> Sequence[str]:
        """Return clusters whose job has ended, or whose `up` or `down` was interrupted long ago."""
        clusters = {cluster.name: cluster for cluster in self._store.clusters.list()}
        live_jobs = set(self._store.jobs.list_live_ids())
        names = {
            cluster.name
            for cluster in clusters.values()
            if (cluster.job_id is not None and cluster.job_id not in live_jobs)
            or cluster.status is ClusterStatus.TERMINATING
        }
        names |= {name for name in self._find_interrupted(clusters) if not self._is_coming_up(name)}
        return sorted(name for name in names if not self._spared[name])

    def _find_interrupted(self, clusters: Mapping[str, Cluster]) -> Collection[str]:
        """Return the names that were last requested long ago and are not up, except those of jobs.

        A search that waits for capacity takes days, and its record is as old: its newest request counts.
        """
        requested_s = {
            name: cluster.created_s
            for name, cluster in clusters.items()
            if cluster.status is ClusterStatus.INIT and not cluster.job_id
        }
        for intent in self._store.intents.list_open():
            name = intent.request.cluster
            if name not in clusters or name in requested_s:
                requested_s[name] = max(requested_s.get(name, intent.created_s), intent.created_s)
        oldest_s = self._clock.now_s() - UP_S_MAX
        return [name for name, newest_s in requested_s.items() if newest_s < oldest_s]

    def _is_coming_up(self, name: str) -> bool:
        """Return whether another process on this machine brings it up now, perhaps with a request of an earlier one."""
        return is_locked(find_lock(self._store.path.parent / "locks", name))


class ResourceSweeper:
    """Delete other resources of ended clusters, such as firewall groups, templates and disks."""

    def __init__(self, clouds: Mapping[str, Cloud], store: Store, *, clock: Clock, owner: str) -> None:
        self._clouds = clouds
        self._store = store
        self._clock = clock
        self._owner = owner
        self._swept: dict[
            str, tuple[float, frozenset[str]]
        ] = {}  # cloud -> time of the last sweep, and the clusters at that time

    async def sweep(self) -> int:
        """Delete our resources that do not belong to any of our clusters; return their number.

        A sweep takes dozens of calls, so it is skipped if no cluster has ended since the last one. A failed sweep is
        repeated by the next call.
        """
        keep = self._list_names()
        now_s = self._clock.now_s()
        count = 0
        for name, cloud in self._clouds.items():
            swept_s, before = self._swept.get(name, (-SWEEP_EVERY_S, frozenset()))
            if not isinstance(cloud, CanSweep) or (now_s - swept_s < SWEEP_EVERY_S and before <= keep):
                continue
            try:
                count += await cloud.sweep(self._owner, keep)
            except CloudError as error:
                log.warning("cannot delete unused resources of %s now: %s", name, error.message)
                continue
            self._swept[name] = (now_s, keep)
        return count

    def _list_names(self) -> frozenset[str]:
        """Return the names of all clusters that exist or may be coming up."""
        coming = (intent.request.cluster for intent in self._store.intents.list_open())
        return frozenset((*coming, *(cluster.name for cluster in self._store.clusters.list())))


def _log_failure(name: str, error: CloudError) -> None:
    log.warning("cannot collect resources of %s now: %s", name, error.message)


async def _try(end: Callable[[T], Awaitable[object]], target: T, note: Callable[[CloudError], object]) -> int:
    try:
        await end(target)
    except CloudError as error:
        note(error)
        return 0
    return 1


async def _sum_concurrently(works: Sequence[Coroutine[Any, Any, int]]) -> int:
    """Run all concurrently, because confirming the end of one gang may take 15 minutes; return the sum.

    The first error cancels the others: a replaced collector must not terminate anything else.
    """
    tasks = [asyncio.ensure_future(work) for work in works]
    if not tasks:
        return 0
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        pending = [task for task in tasks if not task.done()]
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
    failed = next((task for task in tasks if not task.cancelled() and task.exception()), None)
    return failed.result() if failed else sum(task.result() for task in tasks)


def _is_replacement(request: NodeRequest, cluster: Cluster) -> bool:
    """Return whether this request may be for the replacement of a lost node of the cluster, by any process."""
    is_short = any(node.state is NodeState.TERMINATED for node in cluster.nodes)
    return is_short and request.placement.node_count < len(cluster.nodes)


def _is_recorded(node: Node, cluster: Cluster | None) -> bool:
    """Return whether the cluster's record contains this node. Until a cluster is up, intents protect its nodes."""
    return cluster is not None and any(recorded.id == node.id for recorded in cluster.nodes)
