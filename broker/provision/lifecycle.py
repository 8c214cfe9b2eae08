"""The life cycle of a cluster: up, refresh, stop, start, down. Each may be repeated after a crash at any point."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace

from broker.clock import Clock
from broker.clouds.base import CanAvoid, CanExtend, CanStop, Cloud, SupportsConsole
from broker.errors import (
    AuthError,
    CapacityError,
    CloudError,
    InvalidRequestError,
    QuotaError,
    TransientError,
    UnknownOutcomeError,
    UsageError,
)
from broker.provision.adoption import Adopter
from broker.provision.bring_up import ClusterBuilder, lock_name
from broker.provision.collection import Collector, LostResources, OnFailure, ResourceSweeper
from broker.provision.failover import Failover
from broker.provision.hedge_timer import Answer
from broker.provision.launch import HEDGE, LaunchSpec
from broker.provision.launcher import SurplusReleaser
from broker.provision.listing import RETRYABLE, Lister, was_restarted
from broker.provision.nodes import POLL_S, POLL_S_MAX, Absence, confirm_gone, find_doubt
from broker.state.store import Store
from broker.types import Autostop, Cluster, ClusterStatus, Placement, Plan, Task
from broker.types.machines import Node, NodeEnd, NodeRequest, NodeState
from broker.types.outcomes import Event, EventKind, make_event

STOP_S_MAX = 600.0


class Provisioner:
    """Create, observe and terminate clusters, and collect lost nodes."""

    def __init__(
        self,
        clouds: Mapping[str, Cloud],
        store: Store,
        *,
        clock: Clock,
        owner: str,
        write_boot: Callable[[NodeRequest], str] = lambda request: "",
    ) -> None:
        """Create the provisioner. `write_boot` returns a boot script, which is always the same for one token."""
        self._clouds = clouds
        self._store = store
        self._clock = clock
        self._owner = owner
        self._lister = Lister(owner, clock=clock)
        self._failover = Failover(clouds, store, clock=clock, owner=owner, lister=self._lister, write_boot=write_boot)
        self._surplus = SurplusReleaser(self._failover.launcher, clock=clock)
        self._builder = ClusterBuilder(
            clouds, store, clock=clock, failover=self._failover, surplus=self._surplus, down=self.down
        )
        self._adopter = Adopter(clouds, store, clock=clock, owner=owner)
        self._collector = Collector(
            clouds,
            store,
            clock=clock,
            owner=owner,
            down=self.down,
            terminate=self._terminate,
            surplus=self._surplus,
            adopter=self._adopter,
        )
        self._sweeper = ResourceSweeper(clouds, store, clock=clock, owner=owner)
        self._absences: dict[str, Absence] = {}  # by cloud

    async def up(
        self,
        name: str,
        plan: Plan,
        *,
        attempt: int = 1,
        job_id: int | None = None,
        autostop: Autostop | None = None,
        timeout_s: float = 600,
        on_event: Callable[[Event], None] | None = None,
        hedge: int = HEDGE,
        check_budget: Callable[[], None] | None = None,
        retry_until_up: bool = False,
        on_claimed: Callable[[], None] = lambda: None,
    ) -> Cluster:
        """Bring up the whole gang at the first placement with capacity, and return the cluster.

        A repeated call resumes.

        While launches are late, up to `hedge` placements are requested at once. Unneeded launches are released in the
        background; `finish` waits for that. `check_budget` is called before each call that may cost money;
        its error ends the search. `retry_until_up`: repeat the search with a growing backoff until it succeeds.
        `on_claimed` is called while no other command can bring up the name, before anything starts.
        """
        existing = self._store.clusters.get(name)
        if existing and existing.status is ClusterStatus.UP and existing.attempt == attempt:
            return await self.refresh(existing)
        # A job's cluster needs no lock: the epoch fences leaders, and a suspended leader must not block the next one.
        lock = lock_name(self._store.path.parent / "locks", name) if job_id is None else nullcontext()
        with lock, self._collector.spare(name):
            on_claimed()
            cluster = Cluster(
                name=name,
                status=ClusterStatus.INIT,
                placement=plan.choice.placement,
                attempt=attempt,
                created_s=await self._builder.make_room(name, attempt),
                job_id=job_id,
                autostop=autostop,
            )
            spec = LaunchSpec(
                cluster=cluster,
                make_spec=lambda placement: self._builder.make_spec(plan.task, placement, job_id=job_id),
                timeout_s=timeout_s,
                on_event=on_event or (lambda event: None),
                hedge=hedge,
                check_budget=check_budget or (lambda: None),
            )
            return await self._builder.bring_up(spec, plan, retry_until_up=retry_until_up)

    def hint_console(self, cluster: Cluster, node_id: str) -> str | None:
        """Return a hint about the console output of a node that does not finish booting; None if there is none."""
        cloud = self._clouds.get(cluster.placement.offer.cloud)
        node = next((node for node in cluster.nodes if node.id == node_id), None)
        if node is None or not isinstance(cloud, SupportsConsole):
            return None
        return f"`{cloud.name_console(node)}` shows the console output of the node"

    async def finish(self) -> None:
        """Wait until surplus launches are confirmed gone; `collect` handles those that the cloud does not confirm."""
        await self._surplus.finish()

    async def refresh(
        self, cluster: Cluster, *, age_s_max: float = 0.0, answering: Collection[str] = frozenset()
    ) -> Cluster:
        """Return the cluster with its nodes as the cloud lists them; lost nodes of a gang are TERMINATED.

        The list is at most `age_s_max` old; with 0, it is requested after the call. `answering`: IDs of nodes whose
        agent has just responded, which are alive even if a list omits them. Raises CloudError if the list fails, or if
        it does not cover the account and region of a node that neither responds nor is listed.
        """
        cloud = self._get_cloud(cluster.placement)
        listing = await self._lister.list(cloud, age_s_max=age_s_max)
        hidden = [node for node in cluster.nodes if _is_open(node) and node.id not in listing.by_id]
        silent = {(node.account, node.region) for node in hidden if node.id not in answering}
        if doubt := find_doubt(cloud, listing, silent, [node for node in hidden if node.id not in answering]):
            raise doubt
        nodes = tuple(
            self._observe(node, listing.by_id.get(node.id), is_answering=node.id in answering) for node in cluster.nodes
        )
        if nodes != cluster.nodes:
            with self._store.transaction():
                self._failover.launcher.record(nodes)
                for before, node in zip(cluster.nodes, nodes, strict=True):
                    if was_restarted(before, node):  # by its user, in the cloud's console
                        self._store.bills.reopen(node, since_s=node.created_s)
                current = self._store.clusters.get(cluster.name)
                # Since the caller read the record, a node may have been replaced or the cluster taken down.
                if current is not None and [node.id for node in current.nodes] == [node.id for node in nodes]:
                    self._store.clusters.put(replace(current, nodes=nodes))
        return replace(cluster, nodes=nodes)

    def can_replace_node(self, cluster: Cluster) -> bool:
        """Return whether the cluster's cloud can add single nodes to a gang."""
        return isinstance(self._clouds.get(cluster.placement.offer.cloud), CanExtend)

    def measure_start_s(self, cloud: str) -> float:
        """Return the learned time in seconds after which new nodes of this cloud are usually running."""
        return sum(self._failover.hedge_timer.measure_s(cloud, answer) for answer in Answer)

    async def replace_node(
        self, cluster: Cluster, task: Task, *, rank: int, check_budget: Callable[[], None], timeout_s: float = 600
    ) -> Cluster:
        """Replace a node that is confirmed gone while the others continue; see `ClusterBuilder.replace_node`."""
        spec = LaunchSpec(
            cluster=cluster,
            make_spec=lambda placement: self._builder.make_spec(task, placement, job_id=cluster.job_id),
            timeout_s=timeout_s,
            on_event=lambda event: None,
            check_budget=check_budget,
        )
        with self._collector.spare_gang(cluster.name):
            return await self._builder.replace_node(spec, rank=rank)

    async def end_node(self, cluster: Cluster, node: Node) -> None:
        """Terminate one node of a cluster that continues without it.

        The record changes once a list shows the node as gone (`refresh`). A repeated call has no effect. Raises
        CloudError.
        """
        await self._get_cloud(cluster.placement).terminate_nodes([node])

    def avoid_machine(self, cluster: Cluster, node: Node, *, until_s: float) -> None:
        """Do not create a node on this node's machine before `until_s`, if the cloud could assign the machine again."""
        cloud = self._get_cloud(cluster.placement)
        if isinstance(cloud, CanAvoid):
            cloud.avoid_machine(node, until_s=until_s)

    async def down(self, name: str) -> None:
        """Terminate the cluster; its record is deleted only after the cloud confirms that every node is gone."""
        with self._store.transaction():
            cluster = self._store.clusters.get(name)
            intents = self._store.intents.list_open(name)
            if cluster is None and not intents:
                return
            if cluster and cluster.status is not ClusterStatus.TERMINATING:
                self._store.clusters.put(replace(cluster, status=ClusterStatus.TERMINATING))
        # Concurrently: a region that does not respond must not delay the termination of nodes elsewhere.
        works = [self._terminate(intent.request) for intent in intents]
        if cluster and cluster.nodes:
            works.append(self._end_nodes(cluster))
        for result in await asyncio.gather(*works, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result
        if cluster is None:
            return
        with self._store.transaction():
            current = self._store.clusters.get(name)
            if current is None or current.created_s != cluster.created_s:
                return  # another process finished this, and the name may already belong to a new cluster
            self._store.clusters.delete(name)
            self._store.events.add(make_event(EventKind.DOWN, cluster=name), cluster=name, job_id=cluster.job_id)

    async def _end_nodes(self, cluster: Cluster) -> None:
        """Terminate the recorded nodes, and all others that carry the cluster's name and one of our tokens."""
        tokens = self._store.intents.list_tokens(cluster.name)
        gone = await confirm_gone(
            self._get_cloud(cluster.placement),
            self._lister,
            known=cluster.nodes,
            is_ours=lambda node: node.cluster == cluster.name and node.token in tokens,
            expected_count=len(cluster.nodes),
            places={(node.account, node.region) for node in cluster.nodes},
            clock=self._clock,
        )
        self._failover.launcher.record(gone)

    async def stop(self, name: str) -> None:
        """Stop a cluster and wait until every node is stopped. Raises UsageError if its cloud cannot stop nodes."""
        cluster, cloud = self._find_stoppable(name)
        await cloud.stop_nodes([node.id for node in cluster.nodes])
        await self._wait_all(cluster, NodeState.STOPPED)
        with self._store.transaction():
            for node in cluster.nodes:
                self._store.bills.close(node)
            self._change_status(name, ClusterStatus.STOPPED)

    async def start(self, name: str) -> Cluster:
        """Start a stopped cluster and wait until every node is running.

        Raises CloudError; without capacity for the whole gang, after stopping the nodes that have started. Raises
        UsageError if a node no longer exists.
        """
        cluster, cloud = self._find_stoppable(name)
        ids = [node.id for node in cluster.nodes]
        # Before the call: if this process is killed, a machine that costs money must not be recorded as stopped.
        self._change_status(name, ClusterStatus.UP)
        try:
            await cloud.start_nodes(ids)
        except CloudError as error:
            if cluster.status is ClusterStatus.STOPPED and await _is_stopped_after(cloud, ids, error, name=name):
                self._change_status(name, ClusterStatus.STOPPED)
            if isinstance(error, InvalidRequestError | TransientError) and (gone := await self._find_gone(cluster)):
                raise _refuse_gone(cluster, gone) from error
            raise
        with self._store.transaction():
            for node in cluster.nodes:
                self._store.bills.reopen(node)
        await self._wait_all(cluster, NodeState.RUNNING)
        return self._change_status(name, ClusterStatus.UP)

    async def find_lost(self) -> LostResources:
        """Find what `collect` would terminate."""
        return await self._collector.find()

    def is_adopted(self) -> bool:
        """Return whether every cloud was searched for unrecorded nodes since the records were created or restored."""
        return self._adopter.is_done()

    async def adopt(self) -> Sequence[str]:
        """Record our running nodes that have no record; return the names of their clusters. See `adoption.py`."""
        return await self._adopter.adopt_all()

    async def collect(self, on_failure: OnFailure | None = None) -> int:
        """Terminate resources of this installation without a record; return their number.

        `on_failure` is called with the name of each cloud and cluster that could not be collected.
        """
        return await self._collector.collect(on_failure) + await self.sweep()

    async def sweep(self) -> int:
        """Delete remaining resources of ended clusters, other than nodes; return their number."""
        return await self._sweeper.sweep()

    async def _terminate(self, request: NodeRequest) -> None:
        await self._failover.launcher.terminate(self._get_cloud(request.placement), request)

    def _get_cloud(self, placement: Placement) -> Cloud:
        """Return the cloud. Raises AuthError if its login or package is no longer available."""
        name = placement.offer.cloud
        if name not in self._clouds:
            raise AuthError(
                f"{name} is no longer set up here", hints=(f"run `broker check {name}` to see what is missing",)
            )
        return self._clouds[name]

    def _observe(self, node: Node, seen: Node | None, *, is_answering: bool) -> Node:
        if node.state is NodeState.TERMINATED:
            return node
        now_s = self._clock.now_s()
        absence = self._absences.setdefault(node.cloud, Absence(self._clouds[node.cloud].settle_s))
        if absence.note(node.id, is_listed=seen is not None or is_answering, now_s=now_s):
            return replace(node, state=NodeState.TERMINATED, ended_s=now_s, reason=NodeEnd.MISSING)
        if seen is None:
            return node
        # A replacement node has the rank of its record, not its tags; adapters may not name the account.
        return replace(seen, rank=node.rank, account=seen.account or node.account)

    def _find_stoppable(self, name: str) -> tuple[Cluster, CanStop]:
        cluster = self._store.clusters.get(name)
        if cluster is None:
            raise UsageError(f"cluster {name} does not exist", hints=("list clusters with `broker status`",))
        cloud = self._get_cloud(cluster.placement)
        if not isinstance(cloud, CanStop):
            raise UsageError(
                f"{cluster.placement.offer.cloud} cannot stop nodes",
                hints=(f"terminate it with `broker down {name}`",),
            )
        return cluster, cloud

    async def _find_gone(self, cluster: Cluster) -> Sequence[Node]:
        """Return the nodes that the cloud no longer lists, or as ended; none if the list fails or is partial."""
        cloud = self._get_cloud(cluster.placement)
        try:
            listing = await self._lister.list(cloud)
        except CloudError:
            return ()
        if find_doubt(cloud, listing, {(node.account, node.region) for node in cluster.nodes}, cluster.nodes):
            return ()
        listed = ((node, listing.by_id.get(node.id)) for node in cluster.nodes)
        return [node for node, seen in listed if seen is None or not _is_open(seen)]

    async def _wait_all(self, cluster: Cluster, state: NodeState) -> None:
        start_s = self._clock.now_s()
        look_s = POLL_S
        while self._clock.now_s() - start_s < STOP_S_MAX:
            try:
                refreshed = await self.refresh(cluster)
            except RETRYABLE:
                refreshed = cluster
            if all(node.state is state for node in refreshed.nodes):
                return
            if gone := [node for node in refreshed.nodes if not _is_open(node)]:
                raise _refuse_gone(cluster, gone)
            await self._clock.sleep(look_s)
            look_s = min(POLL_S_MAX, look_s * 1.2)
        raise TransientError(f"{cluster.name} is not {state.value} after {STOP_S_MAX:g} s")

    def _change_status(self, name: str, status: ClusterStatus) -> Cluster:
        with self._store.transaction():
            cluster = self._store.clusters.get(name)
            if cluster is None or cluster.status is ClusterStatus.TERMINATING:
                raise UsageError(f"{name} was terminated while it was being stopped or started")
            changed = replace(cluster, status=status)
            self._store.clusters.put(changed)
        return changed


async def _is_stopped_after(cloud: CanStop, ids: Sequence[str], error: CloudError, *, name: str) -> bool:
    """Return whether no machine runs after a failed start; stop the part of a gang that has started.

    It costs money and cannot work. After an error with an unknown outcome, machines may be starting.
    """
    if not isinstance(error, CapacityError | QuotaError):
        return not isinstance(error, TransientError | UnknownOutcomeError)
    try:
        await cloud.stop_nodes(ids)
    except CloudError:
        hint = f"a part of {name} may run and cost money: `broker stop {name}`, or `broker down {name}`"
        error.hints = (hint, *error.hints)
        return False
    return True


def _refuse_gone(cluster: Cluster, gone: Sequence[Node]) -> UsageError:
    offer = cluster.placement.offer
    return UsageError(
        f"{len(gone)} of {len(cluster.nodes)} machines of {cluster.name} no longer exist at {offer.cloud}",
        hints=(f"their disks are lost: run `broker down {cluster.name}`, then launch the cluster again",),
    )


def _is_open(node: Node) -> bool:
    return node.state is not NodeState.TERMINATED
