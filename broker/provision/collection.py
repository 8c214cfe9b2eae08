"""The collector: cloud lists first, then records. What carries our tag and is in no record ends; nothing else does."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from broker.clock import Clock
from broker.clouds.base import Cloud
from broker.errors import CloudError
from broker.provision.adoption import Adopter
from broker.provision.surplus import SurplusReleaser
from broker.state.store import Store
from broker.types import Cluster, ClusterStatus, EventKind, Node, NodeRequest, NodeState, make_event

log = logging.getLogger(__name__)
T = TypeVar("T")

GRACE_S = 30.0  # a node younger than this, plus the cloud's lag, may belong to a call still under way
UP_S_MAX = 3600.0  # no `up` of a living process takes longer: an older open intent is nobody's


class Collector:
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
        self._mended: Counter[str] = Counter()

    @contextmanager
    def spare(self, name: str) -> Iterator[None]:
        """While this process brings `name` up, its intents are alive however old they are."""
        self._spared[name] += 1
        try:
            yield
        finally:
            self._spared[name] -= 1

    @contextmanager
    def spare_gang(self, name: str) -> Iterator[None]:
        """While this process replaces a node of `name`, the intents of that are alive though the cluster is up."""
        self._mended[name] += 1
        try:
            yield
        finally:
            self._mended[name] -= 1

    async def find(self) -> tuple[Sequence[Node], Sequence[str]]:
        """What `collect` would end now: nodes that nobody records, and names of dead clusters. Raises CloudError."""
        left = {request.token for request in self._find_orphans()}
        nodes = [node for cloud in self._clouds.values() for node in await self._find_lost_nodes(cloud, left)]
        return nodes, self._find_dead_names()

    async def collect(self) -> int:
        count = 0
        for cloud in self._clouds.values():
            try:
                await self._adopter.adopt(cloud)
                count += await self._collect_nodes(cloud)
            except CloudError as error:
                log.warning("%s cannot be swept now: %s", cloud.name, error.message)
        names = self._find_dead_names()
        left = [request for request in self._find_orphans() if request.cluster not in names]
        works = [
            *(self._try(self._terminate, each, f"a gang of {each.cluster} cannot be given back now") for each in left),
            *(self._try(self._down, name, f"{name} cannot be ended now") for name in names),
        ]
        return count + await _add_up(works)

    async def _try(self, end: Callable[[T], Awaitable[object]], what: T, what_failed: str) -> int:
        try:
            await end(what)
        except CloudError as error:
            log.warning("%s: %s", what_failed, error.message)
            return 0
        return 1

    async def _collect_nodes(self, cloud: Cloud) -> int:
        lost = await self._find_lost_nodes(cloud)
        for node in lost:
            self._store.bills.record(node)  # first: what it has cost is known whoever is killed during the call
        if lost:
            await cloud.terminate_nodes(lost)
            for node in lost:
                self._store.events.add(make_event(EventKind.COLLECTED, node=node.id), cluster=node.cluster)
        return len(lost)

    async def _find_lost_nodes(self, cloud: Cloud, left: Collection[str] = ()) -> Sequence[Node]:
        """The list is read before the records, so that a node recorded in between is never mistaken for lost.

        Of a cloud that is not adopted yet, only nodes that this store has asked for: others may be at work.
        `left`: tokens whose open intents save nobody.
        """
        listed = await cloud.list_nodes(self._owner)
        self._close_bills(listed)
        clusters = {cluster.name: cluster for cluster in self._store.clusters.list()}
        tokens = {intent.request.token for intent in self._store.intents.list_open()} - set(left)
        oldest_s = self._clock.now_s() - GRACE_S - cloud.settle_s
        known = None
        if not self._store.meta.is_adopted(cloud.name):
            known = self._store.intents.list_known_tokens({node.token for node in listed})
        return [
            node
            for node in listed
            if (known is None or node.token in known)
            and node.owner == self._owner
            and node.state is not NodeState.TERMINATED
            and node.created_s < oldest_s
            and node.token not in tokens
            and not _is_recorded(node, clusters.get(node.cluster))
        ]

    def _close_bills(self, listed: Iterable[Node]) -> None:
        """What was collected is in no record that would learn of its end; until then it would cost for ever."""
        for node in listed:
            if node.state is NodeState.TERMINATED and node.ended_s is not None and self._store.bills.is_open(node):
                self._store.bills.record(node)

    def _find_orphans(self) -> Sequence[NodeRequest]:
        """Asked for by a search that has found its gang elsewhere, in a process that died before they were ended."""
        clusters = {cluster.name: cluster for cluster in self._store.clusters.list()}
        oldest_s = self._clock.now_s() - UP_S_MAX
        return [
            intent.request
            for intent in self._store.intents.list_open()
            if (cluster := clusters.get(intent.request.cluster)) is not None
            and cluster.status in (ClusterStatus.UP, ClusterStatus.STOPPED)
            and not (_is_replacement(intent.request, cluster) and intent.created_s > oldest_s)
            and intent.request.token not in self._surplus.tokens
            and not self._mended[intent.request.cluster]
            and intent.request.placement.offer.cloud in self._clouds
        ]

    def _find_dead_names(self) -> Sequence[str]:
        """Clusters whose job has ended, or whose `up` or `down` was cut short long ago."""
        now_s = self._clock.now_s()
        live_jobs = set(self._store.jobs.list_live_ids())
        names = {
            cluster.name
            for cluster in self._store.clusters.list()
            if (cluster.job_id is not None and cluster.job_id not in live_jobs)
            or cluster.status is ClusterStatus.TERMINATING
            or (cluster.status is ClusterStatus.INIT and not cluster.job_id and now_s - cluster.created_s > UP_S_MAX)
        }
        clusters = {cluster.name: cluster for cluster in self._store.clusters.list()}
        for intent in self._store.intents.list_open():
            cluster = clusters.get(intent.request.cluster)
            is_coming_up = cluster is None or (cluster.job_id is None and cluster.status is ClusterStatus.INIT)
            if is_coming_up and now_s - intent.created_s > UP_S_MAX:
                names.add(intent.request.cluster)
        return sorted(name for name in names if not self._spared[name])


async def _add_up(works: Sequence[Coroutine[Any, Any, int]]) -> int:
    """All at once: the end of one gang may take a quarter of an hour to confirm, and the others cost money meanwhile.

    The first that raises ends the others: a collector that was replaced must end nothing more.
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
    """Whether a gang that runs without some of its nodes waits for this one, in whatever process that is driven."""
    is_short = any(node.state is NodeState.TERMINATED for node in cluster.nodes)
    return is_short and request.placement.node_count < len(cluster.nodes)


def _is_recorded(node: Node, cluster: Cluster | None) -> bool:
    """A cluster that still comes up records none: its nodes are known by their open intents, and others are lost."""
    return cluster is not None and any(known.id == node.id for known in cluster.nodes)
