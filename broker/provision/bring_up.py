"""Bring nodes up: a whole cluster under its name's lock, or one replacement for a lost node of a running cluster."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from urllib.parse import quote

from broker.clock import Clock
from broker.clouds.base import Cloud, ProvidesSshHosts
from broker.errors import CapacityError, UsageError
from broker.locks import try_lock
from broker.provision.failover import Failover
from broker.provision.launch import LaunchSpec, make_down_error
from broker.provision.launcher import SurplusReleaser
from broker.provision.refusals import draw_backoff_s
from broker.provision.zones import join_zones, split_zones
from broker.state.faults import explain_os_error
from broker.state.store import Store
from broker.types import Cluster, ClusterStatus, Placement, Plan, Task
from broker.types.machines import MachineSpec, Node, NodeState
from broker.types.outcomes import EventKind, IntentEnd, make_event
from broker.wording import make_place

RETRY_BASE_S = 15.0
RETRY_S_MAX = 60.0


def find_lock(folder: Path, name: str) -> Path:
    """Return the lock file of a cluster name."""
    return folder / f"{quote(name, safe='')}.lock"


@contextmanager
def lock_name(folder: Path, name: str) -> Iterator[None]:
    """Lock a cluster name for one command; the kernel releases the lock when the process ends for any reason.

    Raises UsageError while another command holds the lock.
    """
    path = find_lock(folder, name)
    with ExitStack() as stack:
        try:
            is_held = stack.enter_context(try_lock(path))
        except OSError as error:
            raise explain_os_error(error, default=path) from error
        if not is_held:
            hints = (
                "check progress with `broker status`; once it is up, run tasks with `broker exec`",
                "or choose another name with `-c NAME`",
            )
            raise UsageError(f"another command is bringing `{name}` up", hints=hints)
        yield


class ClusterBuilder:
    """Search for a gang, record it as a cluster, and replace single nodes of it."""

    def __init__(
        self,
        clouds: Mapping[str, Cloud],
        store: Store,
        *,
        clock: Clock,
        failover: Failover,
        surplus: SurplusReleaser,
        down: Callable[[str], Awaitable[None]],
    ) -> None:
        self._clouds = clouds
        self._store = store
        self._clock = clock
        self._failover = failover
        self._surplus = surplus
        self._down = down

    def make_spec(self, task: Task, placement: Placement, *, job_id: int | None) -> MachineSpec:
        """Return what the task requires of each node in addition to its instance type.

        If nodes are hosts that the agent runs on, the agent starts containers: the machine boots its default image.
        """
        resources = placement.get_resources(task)
        is_host = isinstance(self._clouds[placement.offer.cloud], ProvidesSshHosts)
        return MachineSpec(
            disk_size_gib=resources.disk_size_gib,
            disk_tier=resources.disk_tier,
            network_tier=resources.network_tier,
            image_id=None if resources.container is not None and is_host else resources.image_id,
            ports=resources.ports,
            labels=resources.labels,
            pod_config=task.pod_config,
            group=self._find_group(task, job_id),
            is_replaceable=job_id is not None,
        )

    def _find_group(self, task: Task, job_id: int | None) -> str:
        """Return the name of the job group whose tasks exchange data with this task; otherwise ""."""
        if job_id is None or task.group is None or not task.group.is_connected:
            return ""
        job = self._store.jobs.get(job_id)
        return "" if job is None else job.pipeline

    async def make_room(self, name: str, attempt: int) -> float:
        """Tear down a stale cluster with this name; return the start time of the new one.

        Raises UsageError if the name belongs to a stopped or running cluster.
        """
        existing = self._store.clusters.get(name)
        if existing and (existing.status is ClusterStatus.TERMINATING or existing.attempt != attempt):
            await self._down(name)
            existing = None
        if existing and existing.status is ClusterStatus.STOPPED:
            raise UsageError(f"cluster {name} is stopped", hints=(f"start it with `broker start {name}`",))
        if existing and existing.status is ClusterStatus.UP:  # another command acquired the lock first
            raise UsageError(f"cluster {name} is already up", hints=(f"run a task on it with `broker exec {name}`",))
        return existing.created_s if existing else self._clock.now_s()

    async def bring_up(self, spec: LaunchSpec, plan: Plan, *, retry_until_up: bool) -> Cluster:
        """Bring the cluster up and return it. `retry_until_up`: retry after a CapacityError, with a growing backoff."""
        for tries in count():
            try:
                return await self._search(spec, plan)
            except CapacityError as error:
                if not retry_until_up:
                    raise
                wait_s = draw_backoff_s(tries, base_s=RETRY_BASE_S, cap_s=RETRY_S_MAX)
                spec.on_event(make_event(EventKind.WAITING, error=error.message, wait_s=wait_s))
                await self._clock.sleep(wait_s)
        raise AssertionError("unreachable: the loop has no end")

    async def replace_node(self, spec: LaunchSpec, *, rank: int) -> Cluster:
        """Replace a node that is confirmed gone by a new node of the same rank; return the changed cluster.

        The new node is launched at the cluster's placement, because the nodes communicate with each other. Its intent
        is committed first; one commit then adds the node to the record and closes the intent.

        Raises CloudError if that placement has no capacity, after cleaning up the launch, and UsageError if the cluster
        was taken down in the meantime. If cancelled, the intent remains open: a later call resumes it, or `down` or the
        collector terminates its node.
        """
        launcher = self._failover.launcher
        launch = launcher.begin(spec, replace(spec.cluster.placement, node_count=1), rank=0, is_addition=True)
        try:
            created = (await launch.task)[0]
        except BaseException:
            launch.cancel()
            raise
        return self._swap(spec.cluster.name, replace(created, rank=rank))

    def _swap(self, name: str, new: Node) -> Cluster:
        with self._store.transaction():
            cluster = self._store.clusters.get(name)
            if cluster is None or cluster.status is not ClusterStatus.UP or not self._store.intents.is_open(new.token):
                raise UsageError(f"{name} was terminated while one of its nodes was being replaced")
            old = next(node for node in cluster.nodes if node.rank == new.rank)
            assert old.state is NodeState.TERMINATED, "a node is replaced once it is confirmed gone"
            changed = replace(cluster, nodes=tuple(new if node is old else node for node in cluster.nodes))
            self._store.clusters.put(changed)
            self._failover.launcher.record([new])
            self._store.intents.close(new.token, IntentEnd.UP)
            event = make_event(EventKind.REPLACED, cluster=name, rank=new.rank)
            self._store.events.add(event, cluster=name, job_id=cluster.job_id)
        return changed

    async def _search(self, spec: LaunchSpec, plan: Plan) -> Cluster:
        name = spec.cluster.name
        resumed = [intent.request.placement for intent in self._store.intents.list_open(name)]
        zones = [replace(zone, alternative=0) for placement in resumed for zone in split_zones(placement)]
        # A zone is requested once, even if it belongs to a different alternative since the task file was changed.
        others = (estimate for estimate in plan.estimates if replace(estimate.placement, alternative=0) not in zones)
        ordered = join_zones(others, self._clouds, spec.make_spec)
        try:
            result = await self._failover.acquire(spec, ordered, resumed=resumed)
        except Exception:
            if not self._store.intents.list_open(name):
                self._store.clusters.delete(name)
            raise
        try:
            return self._enter(spec, result.placement, result.nodes)
        finally:
            self._surplus.begin(result.surplus, spec.on_event)

    def _enter(self, spec: LaunchSpec, placement: Placement, nodes: Sequence[Node]) -> Cluster:
        """Record the cluster and close the intent in one commit, so that the nodes are recorded at all times."""
        name = spec.cluster.name
        cluster = replace(spec.cluster, status=ClusterStatus.UP, placement=placement, nodes=tuple(nodes))
        with self._store.transaction():
            current = self._store.clusters.get(name)
            is_going = current is not None and current.status is ClusterStatus.TERMINATING  # the intent closes later
            if is_going or not self._store.intents.is_open(nodes[0].token):
                raise make_down_error(name)
            self._store.clusters.put(cluster)
            self._failover.launcher.record(nodes)
            self._store.intents.close(nodes[0].token, IntentEnd.UP)
            event = make_event(EventKind.UP, cluster=name, place=make_place(placement))
            self._store.events.add(event, cluster=name, job_id=cluster.job_id)
        return cluster
