"""Watch the replicas of a rehearsed service: which are ready, which lost their machines, and where they ran."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from broker.rehearsal.service_context import ServiceRehearsalContext
from broker.rehearsal.uptime import ReadyCount, ReplicaLoss
from broker.serve.observing import ObservedReplica, observe
from broker.serve.replicas import find_folder
from broker.types import Cluster, JobStatus, Placement, Service


@dataclass(frozen=True, kw_only=True)
class WatchedReplica:
    """A replica at one look. `is_ready`: to the balancer, on running machines. `is_taken`: preempted or warned."""

    seen: ObservedReplica
    cluster: Cluster | None
    is_ready: bool
    is_taken: bool

    @property
    def is_settled(self) -> bool:
        """Whether its controller knows that it is ready, and it is neither preempted nor drained."""
        replica = self.seen.replica
        return self.is_ready and not self.is_taken and replica.ready_s is not None and replica.drained_s is None

    @property
    def waits_for_machines(self) -> bool:
        """Whether its job has requested machines, for the first time or in place of lost ones."""
        return self.seen.job is not None and self.seen.job.status in (JobStatus.STARTING, JobStatus.RECOVERING)


@dataclass
class ReplicaWatch:
    """The observations of all looks so far; times are simulated, except `starts_s`."""

    context: ServiceRehearsalContext
    counts: list[ReadyCount] = field(default_factory=list)
    placements: list[Placement] = field(default_factory=list)  # of the clusters that were ready, in that order
    starts_s: list[float] = field(default_factory=list)  # real, from the start of each program to its readiness
    jobs: dict[int, int] = field(default_factory=dict)  # of all replicas so far, with their numbers
    _places: dict[str, tuple[int, str]] = field(default_factory=dict)  # replica and place of each node
    _losses: dict[tuple[str, int], ReplicaLoss] = field(default_factory=dict)  # by cloud and preemption
    _announced: dict[tuple[str, int], int] = field(default_factory=dict)  # observations before each preemption
    _lost: set[str] = field(default_factory=set)
    _ready: set[str] = field(default_factory=set)  # clusters that were ready

    @property
    def losses(self) -> Sequence[ReplicaLoss]:
        """The losses so far, oldest first."""
        return sorted(self._losses.values(), key=lambda each: each.time_s)

    def observe(self, service: Service) -> Sequence[WatchedReplica]:
        """Observe all replicas, and record the number of ready ones and new losses."""
        context, store = self.context, self.context.store
        load = context.loads.read(find_folder(context.config, service), context.clock.now_s())
        unfinished = frozenset(store.jobs.list_unfinished_ids())
        taken = {node.node_id: node for each in context.rehearsed.values() for node in each.list_preempted()}
        found = []
        for replica in store.services.list_replicas(service.name):
            self.jobs[replica.job_id] = replica.number
            seen = observe(store, replica, load, unfinished)
            attempt = seen.job.attempts[-1] if seen.job and seen.job.attempts else None
            cluster = store.clusters.get(attempt.cluster) if attempt else None
            nodes = [node.id for node in cluster.nodes] if cluster else []
            if cluster is not None:
                offer = cluster.placement.offer
                self._places.update(
                    {node: (replica.number, f"{offer.cloud} {offer.zone or offer.region}") for node in nodes}
                )
            is_taken = any(node in taken for node in nodes)
            is_gone = any(node in taken and taken[node].ended_s is not None for node in nodes)
            each = WatchedReplica(seen=seen, cluster=cluster, is_ready=seen.is_ready and not is_gone, is_taken=is_taken)
            if each.is_ready:
                self._note_ready(each)
            found.append(each)
        self._note_losses()
        self.note_count(service, found)
        return found

    def note_count(self, service: Service, replicas: Sequence[WatchedReplica]) -> None:
        """Record the number of ready replicas at this time."""
        ready = sum(each.is_ready for each in replicas)
        self.counts.append(ReadyCount(time_s=self.context.clock.now_s(), wanted=service.wanted, ready=ready))

    def _note_ready(self, each: WatchedReplica) -> None:
        if each.cluster is None or each.cluster.name in self._ready:
            return
        self._ready.add(each.cluster.name)
        self.placements.append(each.cluster.placement)
        job = each.seen.job
        running_s = job.attempts[-1].running_s if job and job.attempts else None
        if running_s is not None:
            self.starts_s.append(max(0.0, self.context.clock.now_s() - running_s))

    def _note_losses(self) -> None:
        """Record the nodes that ended since the last look: those of one preemption as one loss, from the first end."""
        for cloud in self.context.rehearsed.values():
            for node in cloud.list_preempted():
                key = cloud.name, node.preemption
                announced = self._announced.setdefault(key, len(self.counts))
                if node.ended_s is None or node.node_id in self._lost or node.node_id not in self._places:
                    continue
                self._lost.add(node.node_id)
                number, place = self._places[node.node_id]
                first = ReplicaLoss(
                    time_s=node.ended_s, replicas=(), place=place, announced=announced, counted=len(self.counts)
                )
                known = self._losses.get(key, first)
                self._losses[key] = replace(
                    known,
                    time_s=min(known.time_s, node.ended_s),
                    replicas=tuple(sorted({*known.replicas, number})),
                )
