"""A cluster's life: up, refreshed, stopped, started, down. Each verb may be called again after a crash at any point."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import count

from broker.clock import Clock
from broker.clouds.base import CanExtend, CanStop, Cloud, ProvidesSshHosts, SupportsConsole
from broker.errors import AuthError, CapacityError, TransientError, UsageError
from broker.provision.adoption import Adopter
from broker.provision.backoff import draw_backoff_s
from broker.provision.cluster_lock import claim_name
from broker.provision.collection import Collector
from broker.provision.failover import HEDGE, Failover, LaunchSpec
from broker.provision.hedge_timer import Answer
from broker.provision.listing import RETRYABLE, Lister
from broker.provision.nodes import LOOK_S, LOOK_S_MAX, Absence, confirm_gone, find_doubt
from broker.provision.replacement import replace_node
from broker.provision.resource_sweeper import ResourceSweeper
from broker.provision.surplus import SurplusReleaser
from broker.provision.zones import join_zones, split_zones
from broker.state.store import Store
from broker.types import Autostop, Cluster, ClusterStatus, Placement, Plan, Task
from broker.types.machines import MachineSpec, Node, NodeEnd, NodeRequest, NodeState
from broker.types.outcomes import Event, EventKind, IntentEnd, make_event
from broker.wording import make_place

STOP_S_MAX = 600.0
RETRY_BASE_S = 15.0
RETRY_S_MAX = 60.0


class Provisioner:
    def __init__(
        self,
        clouds: Mapping[str, Cloud],
        store: Store,
        *,
        clock: Clock,
        owner: str,
        write_boot: Callable[[NodeRequest], str] = lambda request: "",
    ) -> None:
        """`write_boot` makes a node's first-start script: for one token the same text, before and after a crash."""
        self._clouds = clouds
        self._store = store
        self._clock = clock
        self._owner = owner
        self._lister = Lister(owner, clock=clock)
        self._failover = Failover(clouds, store, clock=clock, owner=owner, lister=self._lister, write_boot=write_boot)
        self._surplus = SurplusReleaser(self._failover.launcher, clock=clock)
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
    ) -> Cluster:
        """The whole gang running, at the first place that gives it. Called again, it takes up where it was left.

        While places are late, `hedge` of them may be asked at once; those that are not needed are given back beside
        what the caller does next: `finish` waits for that. `check_budget` is called before each try, and what it
        raises ends the search. `retry_until_up`: all places are asked again, later and later, until one gives.
        """
        known = self._store.clusters.get(name)
        if known and known.status is ClusterStatus.UP and known.attempt == attempt:
            return await self.refresh(known)
        # A job's cluster is brought up by the leader, which the epoch fences: a stopped one must not hold up the next.
        claim = claim_name(self._store.path.parent / "locks", name) if job_id is None else nullcontext()
        with claim, self._collector.spare(name):
            cluster = Cluster(
                name=name,
                status=ClusterStatus.INIT,
                placement=plan.choice.placement,
                attempt=attempt,
                created_s=await self._make_room(name, attempt),
                job_id=job_id,
                autostop=autostop,
            )
            spec = LaunchSpec(
                cluster=cluster,
                make_spec=lambda placement: self._make_spec(plan.task, placement),
                timeout_s=timeout_s,
                on_event=on_event or (lambda event: None),
                hedge=hedge,
                check_budget=check_budget or (lambda: None),
            )
            return await self._search(spec, plan, is_patient=retry_until_up)

    def _make_spec(self, task: Task, placement: Placement) -> MachineSpec:
        """What the task asks of each node besides its instance type. Where nodes are hosts of ours, a container is
        no matter of the machine: it is run on one that boots as usual."""
        asked = placement.get_resources(task)
        is_host = isinstance(self._clouds[placement.offer.cloud], ProvidesSshHosts)
        return MachineSpec(
            disk_size_gib=asked.disk_size_gib,
            disk_tier=asked.disk_tier,
            network_tier=asked.network_tier,
            image_id=None if asked.container is not None and is_host else asked.image_id,
            ports=asked.ports,
            labels=asked.labels,
        )

    def hint_console(self, cluster: Cluster, node_id: str) -> str | None:
        """How to see what a machine does that boots and boots; None where its cloud keeps no word of that."""
        cloud = self._clouds.get(cluster.placement.offer.cloud)
        node = next((each for each in cluster.nodes if each.id == node_id), None)
        if node is None or not isinstance(cloud, SupportsConsole):
            return None
        return f"`{cloud.name_console(node)}` shows what it prints while it boots"

    async def finish(self) -> None:
        """Wait until all that was not needed is confirmed gone; what the cloud does not confirm, `collect` ends."""
        await self._surplus.finish()

    async def refresh(
        self, cluster: Cluster, *, age_s_max: float = 0.0, answering: Collection[str] = frozenset()
    ) -> Cluster:
        """The cluster with its nodes as the cloud lists them; a lost part of a gang shows as TERMINATED nodes.

        A list of at most `age_s_max` ago will do; without it, only one that is asked for from now on. `answering`: ids
        of nodes whose agent has just answered: they live, whatever a list leaves out. Raises CloudError where the list
        fails, or does not cover the account and region of a node that neither answers nor is listed.
        """
        cloud = self._get_cloud(cluster.placement)
        listing = await self._lister.list(cloud, age_s_max=age_s_max)
        hidden = [node for node in cluster.nodes if _is_open(node) and node.id not in listing.by_id]
        silent = {(node.account, node.region) for node in hidden if node.id not in answering}
        if doubt := find_doubt(listing, silent):
            raise doubt
        nodes = tuple(
            self._judge(node, listing.by_id.get(node.id), is_answering=node.id in answering) for node in cluster.nodes
        )
        if nodes != cluster.nodes:
            with self._store.transaction():
                self._failover.launcher.record(nodes)
                current = self._store.clusters.get(cluster.name)
                # Since the caller read the record a node may have been replaced, or the cluster been taken down.
                if current is not None and [node.id for node in current.nodes] == [node.id for node in nodes]:
                    self._store.clusters.put(replace(current, nodes=nodes))
        return replace(cluster, nodes=nodes)

    def can_replace_node(self, cluster: Cluster) -> bool:
        return isinstance(self._clouds.get(cluster.placement.offer.cloud), CanExtend)

    def measure_start_s(self, cloud: str) -> float:
        """Seconds after which new nodes of this cloud usually run, by what was learned of it."""
        return sum(self._failover.hedge_timer.measure_s(cloud, answer) for answer in Answer)

    async def replace_node(
        self, cluster: Cluster, task: Task, *, rank: int, check_budget: Callable[[], None], timeout_s: float = 600
    ) -> Cluster:
        """A new node in the place of one that is confirmed gone, beside what the others do; see `replacement.py`."""
        spec = LaunchSpec(
            cluster=cluster,
            make_spec=lambda placement: self._make_spec(task, placement),
            timeout_s=timeout_s,
            on_event=lambda event: None,
            check_budget=check_budget,
        )
        with self._collector.spare_gang(cluster.name):
            return await replace_node(self._failover.launcher, self._store, spec, rank=rank)

    async def end_node(self, cluster: Cluster, node: Node) -> None:
        """Have the cloud terminate one node of a cluster that continues without it.

        The record changes when a list shows it gone (`refresh`). Asked again it changes nothing. Raises CloudError.
        """
        await self._get_cloud(cluster.placement).terminate_nodes([node])

    async def down(self, name: str) -> None:
        """Terminate, confirm, forget: the record goes only when the cloud says every node is gone."""
        with self._store.transaction():
            cluster = self._store.clusters.get(name)
            intents = self._store.intents.list_open(name)
            if cluster is None and not intents:
                return
            if cluster and cluster.status is not ClusterStatus.TERMINATING:
                self._store.clusters.put(replace(cluster, status=ClusterStatus.TERMINATING))
        # All at once: a place that cannot be asked must not hold up the end of nodes elsewhere.
        works = [self._terminate(each.request) for each in intents]
        if cluster and cluster.nodes:
            works.append(self._end_nodes(cluster))
        for done in await asyncio.gather(*works, return_exceptions=True):
            if isinstance(done, BaseException):
                raise done
        if cluster is None:
            return
        with self._store.transaction():
            current = self._store.clusters.get(name)
            if current is None or current.created_s != cluster.created_s:
                return  # somebody else finished this, and the name may already stand for a new cluster
            self._store.clusters.delete(name)
            self._store.events.add(make_event(EventKind.DOWN, cluster=name), cluster=name, job_id=cluster.job_id)

    async def _end_nodes(self, cluster: Cluster) -> None:
        """Terminate the recorded nodes, and any other that carries the name with a token of ours."""
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
        cluster, cloud = self._find_stoppable(name)
        await cloud.stop_nodes([node.id for node in cluster.nodes])
        await self._wait_all(cluster, NodeState.STOPPED)
        with self._store.transaction():
            for node in cluster.nodes:
                self._store.bills.close(node)
            self._change_status(name, ClusterStatus.STOPPED)

    async def start(self, name: str) -> Cluster:
        cluster, cloud = self._find_stoppable(name)
        await cloud.start_nodes([node.id for node in cluster.nodes])
        with self._store.transaction():
            for node in cluster.nodes:
                self._store.bills.reopen(node)
        await self._wait_all(cluster, NodeState.RUNNING)
        return self._change_status(name, ClusterStatus.UP)

    async def find_lost(self) -> tuple[Sequence[Node], Sequence[str]]:
        """What `collect` would end: nodes, and names of clusters."""
        return await self._collector.find()

    def is_adopted(self) -> bool:
        """Whether no node of ours can be running unrecorded since the records were created or restored."""
        return self._adopter.is_done()

    async def adopt(self) -> Sequence[str]:
        """Record running nodes of ours that no record names; returns names of clusters. See `adoption.py`."""
        return await self._adopter.adopt_all()

    async def collect(self) -> int:
        """End what this installation owns and nobody records; returns how many nodes and intents it dealt with."""
        return await self._collector.collect() + await self.sweep()

    async def sweep(self) -> int:
        """Delete what clusters that are gone left behind besides nodes; returns how many things."""
        return await self._sweeper.sweep()

    async def _make_room(self, name: str, attempt: int) -> float:
        """What has the name and is not to be gone on with is gone; when the cluster now to come up was begun."""
        known = self._store.clusters.get(name)
        if known and (known.status is ClusterStatus.TERMINATING or known.attempt != attempt):
            await self.down(name)
            known = None
        if known and known.status is ClusterStatus.STOPPED:
            raise UsageError(f"cluster {name} is stopped", hints=(f"Start it with `broker start {name}`.",))
        if known and known.status is ClusterStatus.UP:  # by another command, just before this one's claim
            raise UsageError(f"cluster {name} has just come up", hints=(f"`broker exec {name}` runs more on it.",))
        return known.created_s if known else self._clock.now_s()

    async def _search(self, spec: LaunchSpec, plan: Plan, *, is_patient: bool) -> Cluster:
        for tries in count():
            try:
                return await self._bring_up(spec, plan)
            except CapacityError as error:
                if not is_patient:
                    raise
                wait_s = draw_backoff_s(tries, base_s=RETRY_BASE_S, cap_s=RETRY_S_MAX)
                spec.on_event(make_event(EventKind.WAITING, error=error.message, wait_s=wait_s))
                await self._clock.sleep(wait_s)
        raise AssertionError("it counts for ever")

    async def _bring_up(self, spec: LaunchSpec, plan: Plan) -> Cluster:
        name = spec.cluster.name
        begun = [intent.request.placement for intent in self._store.intents.list_open(name)]
        asked = [replace(zone, alternative=0) for placement in begun for zone in split_zones(placement)]
        # One place is asked once, whichever alternative it stands for since the file was changed.
        others = (each for each in plan.estimates if replace(each.placement, alternative=0) not in asked)
        ordered = join_zones(others, self._clouds, spec.make_spec)
        try:
            won = await self._failover.acquire(spec, ordered, begun=begun)
        except Exception:
            if not self._store.intents.list_open(name):
                self._store.clusters.delete(name)
            raise
        try:
            cluster = self._enter(spec, won.placement, won.nodes)
        finally:
            self._surplus.begin(won.others, spec.on_event)
        return cluster

    async def _terminate(self, request: NodeRequest) -> None:
        await self._failover.launcher.terminate(self._get_cloud(request.placement), request)

    def _get_cloud(self, placement: Placement) -> Cloud:
        """Raises AuthError where its login or package is gone since."""
        name = placement.offer.cloud
        if name not in self._clouds:
            raise AuthError(
                f"{name} is not set up here any more", hints=(f"`broker check {name}` says what is missing.",)
            )
        return self._clouds[name]

    def _enter(self, spec: LaunchSpec, placement: Placement, nodes: Sequence[Node]) -> Cluster:
        """Record and close the intent in one commit: there is no moment when nobody knows these nodes."""
        name = spec.cluster.name
        cluster = replace(spec.cluster, status=ClusterStatus.UP, placement=placement, nodes=tuple(nodes))
        with self._store.transaction():
            current = self._store.clusters.get(name)
            is_going = current is not None and current.status is ClusterStatus.TERMINATING  # its intent closes later
            if is_going or not self._store.intents.is_open(nodes[0].token):
                raise UsageError(f"{name} was taken down while it came up")
            self._store.clusters.put(cluster)
            self._failover.launcher.record(nodes)
            self._store.intents.close(nodes[0].token, IntentEnd.UP)
            event = make_event(EventKind.UP, cluster=name, place=make_place(placement))
            self._store.events.add(event, cluster=name, job_id=cluster.job_id)
        return cluster

    def _judge(self, node: Node, seen: Node | None, *, is_answering: bool) -> Node:
        if node.state is NodeState.TERMINATED:
            return node
        now_s = self._clock.now_s()
        absence = self._absences.setdefault(node.cloud, Absence(self._clouds[node.cloud].settle_s))
        if absence.note(node.id, is_listed=seen is not None or is_answering, now_s=now_s):
            return replace(node, state=NodeState.TERMINATED, ended_s=now_s, reason=NodeEnd.MISSING)
        if seen is None:
            return node
        # One that replaces another took over its rank; an adapter that names no account takes none away.
        return replace(seen, rank=node.rank, account=seen.account or node.account)

    def _find_stoppable(self, name: str) -> tuple[Cluster, CanStop]:
        cluster = self._store.clusters.get(name)
        if cluster is None:
            raise UsageError(f"there is no cluster {name}", hints=("List clusters with `broker status`.",))
        cloud = self._get_cloud(cluster.placement)
        if not isinstance(cloud, CanStop):
            raise UsageError(
                f"{cluster.placement.offer.cloud} cannot stop nodes", hints=(f"End it with `broker down {name}`.",)
            )
        return cluster, cloud

    async def _wait_all(self, cluster: Cluster, state: NodeState) -> None:
        start_s = self._clock.now_s()
        look_s = LOOK_S
        while self._clock.now_s() - start_s < STOP_S_MAX:
            try:
                refreshed = await self.refresh(cluster)
            except RETRYABLE:
                refreshed = cluster
            if all(node.state is state for node in refreshed.nodes):
                return
            await self._clock.sleep(look_s)
            look_s = min(LOOK_S_MAX, look_s * 1.2)
        raise TransientError(f"{cluster.name} is not {state.value} after {STOP_S_MAX:g} s")

    def _change_status(self, name: str, status: ClusterStatus) -> Cluster:
        with self._store.transaction():
            cluster = self._store.clusters.get(name)
            if cluster is None or cluster.status is ClusterStatus.TERMINATING:
                raise UsageError(f"{name} was taken down while it was stopped or started")
            changed = replace(cluster, status=status)
            self._store.clusters.put(changed)
        return changed


def _is_open(node: Node) -> bool:
    return node.state is not NodeState.TERMINATED
