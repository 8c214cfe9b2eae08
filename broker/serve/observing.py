"""Observe a service: its replicas' jobs in the store, their addresses, and the load that the balancer reports."""

from __future__ import annotations

import math

from broker.errors import StateError
from broker.frozen import frozen
from broker.locks import is_locked
from broker.runtime.transports.ssh_options import parse_handle
from broker.serve.credentials import KEY_SECRET
from broker.serve.files import Backend, Load, ServiceFolder, read_file
from broker.serve.reconciling import ON_DEMAND, ReplicaView, Slot
from broker.serve.replicas import digest_program
from broker.serve.scaling import Demand, find_target_qps
from broker.state.store import Store
from broker.types import EventKind, Job, JobStatus, Node, Offer, Replica, ServiceSpec

LOAD_AGE_S_MAX = 5.0  # the balancer writes twice a second
# After a preemption notice, a replica is about to be lost. One that still runs then was spared: AWS announces a loss
# two minutes before it, others half a minute.
NOTICED_S_MAX = 300.0
WINDOW_S = 60.0  # over which requests per second are counted, as SkyServe does
INSTANCE_AWARE = "instance_aware_least_load"
LOCAL_HOST = "127.0.0.1"  # replicas on the local cloud listen on ports of their own


@frozen
class ObservedReplica:
    """A replica with its job. `job` None: it is gone, for example after a restore of an older state file."""

    replica: Replica
    job: Job | None
    is_over: bool  # its job has ended and its machines are gone
    backend: Backend | None  # where its program runs
    is_ready: bool = False
    not_ready_since_s: float | None = None  # None unless its program runs and is not ready
    in_flight: int | None = None  # None: the balancer does not know the replica
    error: str = ""
    noticed_s: float | None = None  # when the preemption of one of its present nodes was announced

    def is_leaving(self, now_s: float) -> bool:
        """Return whether the replica still runs although its preemption was announced."""
        return self.is_running and self.noticed_s is not None and now_s - self.noticed_s < NOTICED_S_MAX

    @property
    def is_running(self) -> bool:
        """Return whether the replica's job runs, ready or not."""
        return self.job is not None and self.job.status is JobStatus.RUNNING

    @property
    def was_ready(self) -> bool:
        """Return whether its present program has been ready: after a preemption, a new one loads the model."""
        ready_s, started_s = self.replica.ready_s, _find_program_start(self.job)
        return ready_s is not None and (started_s is None or ready_s >= started_s)

    def describe(self, now_s: float) -> ReplicaView:
        """Return the input of the decisions."""
        replica = self.replica
        started_s = _find_program_start(self.job)
        return ReplicaView(
            number=replica.number,
            version=replica.version,
            slot=self._find_slot(),
            open_hours=max(0.0, now_s - started_s) / 3600 if self.is_running and started_s is not None else 0.0,
            is_ready=self.is_ready,
            is_lost=self.is_leaving(now_s) or (self.job is not None and self.job.status is JobStatus.RECOVERING),
            is_draining=replica.drained_s is not None or self.is_over or self.job is None,
            in_flight=self.in_flight or 0,
            start_s=self._measure_start_s(),
        )

    def _measure_start_s(self) -> float | None:
        """Return the seconds from the request for its machines to readiness there; None if it was never ready."""
        replica, attempts = self.replica, self.job.attempts if self.job else ()
        begin_s = attempts[-1].started_s if len(attempts) > 1 else replica.created_s
        return replica.ready_s - begin_s if replica.ready_s is not None and replica.ready_s >= begin_s else None

    def _find_slot(self) -> Slot:
        """Return the slot that the replica fills. One with a place may run elsewhere, where its job found capacity."""
        replica = self.replica
        slot = Slot(is_spot=replica.is_spot, region=replica.region, zone=replica.zone)
        has_run = self.job is not None and self.job.status in (JobStatus.RUNNING, JobStatus.RECOVERING)
        if slot.region is None or self.job is None or not has_run or not self.job.attempts:
            return slot
        placement = self.job.attempts[-1].placement
        if not placement.is_spot:
            return ON_DEMAND
        return Slot(is_spot=True, region=placement.offer.region, zone=placement.offer.zone)


def read_load(folder: ServiceFolder, now_s: float = 0.0, *, age_s_max: float = LOAD_AGE_S_MAX) -> Load | None:
    """Return the balancer's report; None if it does not run, its file cannot be read, or the report is old."""
    if not is_locked(folder.lock):
        return None
    try:
        load = read_file(folder.load, Load)
    except StateError:
        return None
    return load if load and now_s - load.time_s <= age_s_max else None


def observe(store: Store, replica: Replica, load: Load | None, unfinished: frozenset[int]) -> ObservedReplica:
    """Join a replica with its job and its load. `load` None: the balancer is not running."""
    job = store.jobs.get(replica.job_id)
    is_over = job is None or (job.status.is_terminal and job.id not in unfinished)
    backend = _find_backend(store, replica, job)
    seen = load.replicas.get(replica.number) if load else None
    since_s = started_s = _find_program_start(job)
    if seen is not None and not seen.is_ready:
        since_s = seen.since_s if started_s is None else max(seen.since_s, started_s)
    return ObservedReplica(
        replica=replica,
        job=job,
        is_over=is_over,
        backend=backend,
        is_ready=bool(backend and seen and seen.is_ready),
        not_ready_since_s=None if seen is None or seen.is_ready else since_s,
        in_flight=None if seen is None else seen.in_flight,
        error=seen.error if seen else "",
        noticed_s=find_notice(store, job),
    )


def _find_program_start(job: Job | None) -> float | None:
    return job.attempts[-1].running_s if job and job.attempts else None


def find_notice(store: Store, job: Job | None) -> float | None:
    """Return when the preemption of a node of a running spot job was last announced; None if none was."""
    if job is None or job.status is not JobStatus.RUNNING or not job.attempts or not job.attempts[-1].placement.is_spot:
        return None
    events = store.events.list_kinds([EventKind.NOTICED], job_id=job.id)
    cluster = store.clusters.get(job.attempts[-1].cluster) if events else None
    nodes = {node.id for node in cluster.nodes} if cluster is not None else set()
    return max((each.time_s for each in events if each.data.get("node") in nodes), default=None)


def _find_backend(store: Store, replica: Replica, job: Job | None) -> Backend | None:
    """Return where the replica is reached: on the first node of its gang."""
    if job is None or job.status is not JobStatus.RUNNING or not job.attempts:
        return None
    cluster = store.clusters.get(job.attempts[-1].cluster)
    if cluster is None or not cluster.nodes:
        return None
    node = min(cluster.nodes, key=lambda each: each.rank)
    host = find_host(node)
    if not host:
        return None
    return Backend(
        number=replica.number, version=replica.version, host=host, port=replica.port,
        is_draining=replica.drained_s is not None, is_encrypted=KEY_SECRET in job.task.secrets,
        region=name_region(job.attempts[-1].placement.offer), program=digest_program(job.task),
    )  # fmt: skip


def name_region(offer: Offer) -> str:
    """Return the region of an offer as balancers compare it."""
    return f"{offer.cloud}/{offer.region}"


def find_capacity(spec: ServiceSpec, job: Job | None) -> float:
    """Return the load that a replica can take, relative to other replicas.

    With `instance_aware_least_load`, it is `target_qps_per_replica` of the accelerators that it runs on; otherwise 1.
    """
    if spec.balancing != INSTANCE_AWARE or job is None or not job.attempts:
        return 1.0
    offer = job.attempts[-1].placement.offer
    return find_target_qps(spec.policy, offer.accelerator or "", offer.accelerator_count) or 1.0


def find_host(node: Node) -> str:
    """Return the address at which other machines reach a node: where ssh reaches it, if it does.

    The `address` of a node may be one that is private to its gang's network. Empty without an address.
    """
    if node.handle.startswith("ssh://"):
        return parse_handle(node.handle).host
    is_here = node.cloud == "local" or node.address.startswith("127.")  # the latter: a simulated cloud of this machine
    return LOCAL_HOST if is_here else node.address


class DemandMeter:
    """Measures the load at a balancer: requests per second over a minute are counted from its arrivals."""

    def __init__(self) -> None:
        self._points: list[tuple[float, int]] = []
        self._pid: int | None = None

    def measure(self, load: Load | None) -> Demand:
        """Return the demand, which is unknown while the balancer is not running."""
        if load is None:
            return Demand(is_known=False)
        if load.pid != self._pid:
            self._points, self._pid = [], load.pid
        self._points.append((load.time_s, load.arrivals))
        # Those of a clock that was set back since then are not of this minute either.
        self._points = [point for point in self._points if load.time_s - WINDOW_S < point[0] <= load.time_s]
        (first_s, first), (last_s, last) = self._points[0], self._points[-1]
        qps = (last - first) / (last_s - first_s) if last_s > first_s else 0.0
        ready = [each for each in load.replicas.values() if each.is_ready]
        return Demand(
            qps=qps if math.isfinite(qps) else 0.0,
            in_flight=float(load.in_flight),
            ttft_p95_s=load.window.ttft_p95_s,
            tpot_p95_s=load.window.tpot_p95_s,
            settled_count=sum(each.since_s <= load.time_s - WINDOW_S for each in ready),
            ready_count=len(ready),
        )
