"""Adoption: after a restore or a reset, record running nodes that carry our tag but have no record, by their tags.

A pure function of the listed nodes and the records decides; then each gang is adopted in one commit. The job's
controller reads the rest of the lost state (the running program and its start time) from the nodes.

    tags                                                 becomes
    a live job's newest attempt, its gang complete       the job's live attempt; the controller polls it as usual
    a live job's newest attempt, nodes missing           the same with an outcome: torn down, then the next one starts
    an older attempt of a live job                       not adopted: the collector terminates it
    anything else                                        a cluster without a job, for a user to take down
"""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum

from broker.clock import Clock
from broker.clouds.base import Cloud
from broker.errors import AuthError, CloudError
from broker.frozen import frozen
from broker.state.store import Store
from broker.types import (
    Attempt,
    Cluster,
    ClusterStatus,
    EventKind,
    IntentEnd,
    Job,
    JobStatus,
    Node,
    NodeList,
    NodeRequest,
    NodeState,
    Offer,
    Outcome,
    OutcomeKind,
    Placement,
    make_event,
)

log = logging.getLogger(__name__)

# Minimum time between the first and the last list used to compare a cloud; at least four times its list lag.
SETTLED_S_MIN = 60.0
UNKNOWN_TYPE = "unknown"  # lists do not contain the instance type
JOB_CLUSTER = re.compile(r"job-(\d{1,18})(?:-[a-z0-9]+)?-\d+")


class AdoptionAction(StrEnum):
    """The action for a gang found by its tags."""

    CONTINUE = "CONTINUE"
    REPLACE = "REPLACE"
    KEEP = "KEEP"


@frozen
class Adoption:
    """The decision for one gang. `spare`: nodes with the same name that a search had requested elsewhere."""

    action: AdoptionAction
    cluster: str
    attempt: int
    nodes: tuple[Node, ...]
    spare: tuple[Node, ...] = ()
    job: Job | None = None


def decide(nodes: Iterable[Node], jobs: Mapping[int, Job]) -> Sequence[Adoption]:
    """Decide for each gang.

    `nodes`: our live nodes without a record or intent. `jobs`: the jobs that their tags may name, by ID.
    """
    gangs: dict[tuple[str, int], list[Node]] = defaultdict(list)
    for node in sorted(nodes, key=lambda node: (node.rank, node.id)):
        gangs[node.cluster, node.attempt].append(node)
    newest: dict[int, int] = {}
    for name, attempt in gangs:
        job = find_job(name, attempt, jobs)
        if job is not None:
            newest[job.id] = max(attempt, newest.get(job.id, 0))
    adoptions = []
    for (name, attempt), gang in sorted(gangs.items()):
        job = find_job(name, attempt, jobs)
        if job is None or job.status.is_terminal:
            adoptions.append(Adoption(action=AdoptionAction.KEEP, cluster=name, attempt=attempt, nodes=tuple(gang)))
        elif attempt == newest[job.id] and attempt > max((earlier.number for earlier in job.attempts), default=0):
            adoptions.append(_decide_job(name, attempt, gang, job))
    return adoptions


def find_job(name: str, attempt: int, jobs: Mapping[int, Job]) -> Job | None:
    """Return the job whose attempt has a cluster with this name, including the random part."""
    job_id = read_job_id(name)
    job = None if job_id is None else jobs.get(job_id)
    return job if job is not None and job.name_cluster(attempt) == name else None


def read_job_id(name: str) -> int | None:
    """Return the job's ID from the name of its cluster; None for any other cluster."""
    match = JOB_CLUSTER.fullmatch(name)
    return int(match[1]) if match else None


def _decide_job(name: str, attempt: int, gang: Sequence[Node], job: Job) -> Adoption:
    by_token: dict[str, list[Node]] = defaultdict(list)
    for node in gang:
        by_token[node.token].append(node)
    ranks = list(range(job.task.num_nodes))
    whole = [
        nodes
        for nodes in by_token.values()
        if [node.rank for node in nodes] == ranks and all(node.state is not NodeState.STOPPED for node in nodes)
    ]
    if not whole:
        return Adoption(action=AdoptionAction.REPLACE, cluster=name, attempt=attempt, nodes=tuple(gang), job=job)
    # A search may have had two launches in progress: the gang that ran first has the program.
    chosen = min(whole, key=lambda nodes: (any(n.state is NodeState.PENDING for n in nodes), nodes[0].created_s))
    spare = tuple(node for node in gang if node.token != chosen[0].token)
    return Adoption(
        action=AdoptionAction.CONTINUE, cluster=name, attempt=attempt, nodes=tuple(chosen), spare=spare, job=job
    )


class Adopter:
    """Compare each cloud with the records, and carry out the decisions."""

    def __init__(self, clouds: Mapping[str, Cloud], store: Store, *, clock: Clock, owner: str) -> None:
        self._clouds = clouds
        self._store = store
        self._clock = clock
        self._owner = owner

    def is_done(self) -> bool:
        """Return whether every cloud was compared with the records since the records were created or restored."""
        return all(self._store.meta.is_adopted(name) for name in self._clouds)

    async def adopt_all(self) -> Sequence[str]:
        """Adopt nodes on all clouds; return the cluster names. A cloud whose list fails is retried by the next call."""
        names: list[str] = []
        for cloud in self._clouds.values():
            try:
                names += await self.adopt(cloud)
            except CloudError as error:
                log.warning("cannot compare %s with the records now: %s", cloud.name, error.message)
        return names

    async def adopt(self, cloud: Cloud) -> Sequence[str]:
        """Adopt the nodes of one cloud. It counts as adopted after two complete lists some time apart.

        A single list may be outdated or empty. Raises CloudError.
        """
        if self._store.meta.is_adopted(cloud.name):
            return ()
        listed = await cloud.list_nodes(self._owner)
        names = []
        with self._store.transaction():  # no other process writes the records in between
            for adoption in decide(self._find_strangers(listed), self._find_jobs(listed)):
                names.append(self._carry_out(adoption))
            if _is_whole(listed) and self._is_same_account(cloud.name, listed.account):
                self._store.meta.note_listed(cloud.name, settled_after_s=max(SETTLED_S_MIN, 4 * cloud.settle_s))
        return names

    def _is_same_account(self, cloud: str, account: str) -> bool:
        """Return whether this login is for the account of the recorded nodes; another login cannot list them."""
        nodes = (node for cluster in self._store.clusters.list() for node in cluster.nodes if node.cloud == cloud)
        return all(account == node.account for node in nodes if account and node.account)

    def _find_strangers(self, listed: Iterable[Node]) -> Sequence[Node]:
        """Return live nodes without a record. Nodes whose token is in the store are either recorded or lost."""
        alive = [node for node in listed if node.owner == self._owner and node.state is not NodeState.TERMINATED]
        tokens = self._store.intents.list_known_tokens({node.token for node in alive})
        recorded = {node.id for cluster in self._store.clusters.list() for node in cluster.nodes}
        return [node for node in alive if node.token not in tokens and node.id not in recorded]

    def _find_jobs(self, listed: Iterable[Node]) -> Mapping[int, Job]:
        ids = {read_job_id(node.cluster) for node in listed} - {None}
        return {job.id: job for job in (self._store.jobs.get(job_id) for job_id in ids if job_id is not None) if job}

    def _carry_out(self, adoption: Adoption) -> str:
        now_s = self._clock.now_s()
        job = adoption.job
        cluster = Cluster(
            name=adoption.cluster if job else self._find_name(adoption.cluster),
            status=_read_status(adoption.nodes),
            placement=make_placement(adoption.nodes),
            attempt=adoption.attempt,
            nodes=adoption.nodes,
            created_s=min(node.created_s for node in adoption.nodes),
            job_id=job.id if job else None,
        )
        self._record_intents(cluster, adoption)
        if job is not None:
            self._end_earlier(job, but=cluster.name, now_s=now_s)
        self._store.clusters.put(cluster)
        for node in adoption.nodes:
            self._store.bills.record(replace(node, cluster=cluster.name))
        if job is None:
            event = make_event(
                EventKind.CLUSTER_ADOPTED,
                cluster=cluster.name,
                tag=adoption.cluster,
                node_count=len(adoption.nodes),
            )
            self._store.events.add(event, cluster=cluster.name)
            return cluster.name
        is_whole = adoption.action is AdoptionAction.CONTINUE
        self._store.jobs.put_attempt(
            Attempt(
                job_id=job.id,
                number=adoption.attempt,
                cluster=cluster.name,
                placement=cluster.placement,
                started_s=cluster.created_s,
                lost_s=None if is_whole else now_s,
                outcome=None if is_whole else Outcome(kind=OutcomeKind.GANG_INCOMPLETE),
            )
        )
        if job.status is JobStatus.PENDING:
            self._store.jobs.set_status(job.id, JobStatus.STARTING)
        found_count = None if is_whole else len(adoption.nodes)
        event = make_event(EventKind.ATTEMPT_ADOPTED, number=adoption.attempt, found_count=found_count)
        self._store.events.add(event, job_id=job.id)
        return cluster.name

    def _record_intents(self, cluster: Cluster, adoption: Adoption) -> None:
        """Record the tokens, so that `down` finds their nodes and their keys are kept.

        The intents of spare nodes remain open: the collector terminates those nodes.
        """
        for nodes, is_kept in ((adoption.nodes, True), (adoption.spare, False)):
            for token in sorted({node.token for node in nodes}):
                gang = [node for node in nodes if node.token == token]
                request = NodeRequest(
                    owner=self._owner,
                    cluster=cluster.name,
                    attempt=adoption.attempt,
                    token=token,
                    placement=make_placement(gang),
                    account=gang[0].account,
                )
                self._store.intents.put(request)
                if is_kept:
                    self._store.intents.close(token, IntentEnd.ADOPTED)

    def _end_earlier(self, job: Job, *, but: str, now_s: float) -> None:
        """End earlier attempts, whose records are outdated, and mark their clusters for termination."""
        for attempt in job.attempts:
            if attempt.ended_s is None:
                usd = self._store.bills.spend_usd(cluster=attempt.cluster, now_s=now_s)
                outcome = attempt.outcome or Outcome(kind=OutcomeKind.SUPERSEDED)
                self._store.jobs.put_attempt(replace(attempt, outcome=outcome, ended_s=now_s, usd=usd))
        for cluster in self._store.clusters.list():
            if cluster.job_id == job.id and cluster.name != but:
                self._store.clusters.put(replace(cluster, status=ClusterStatus.TERMINATING))

    def _find_name(self, tag: str) -> str:
        """Return the tag, with a suffix if a cluster with that name already exists."""
        names = (tag, *(f"{tag}-adopted-{n}" for n in range(1, 1000)))
        return next(name for name in names if self._store.clusters.get(name) is None)


def make_placement(nodes: Sequence[Node]) -> Placement:
    """Return a placement with the location and price of the nodes; the rest is unknown."""
    first = nodes[0]
    zones = {node.zone for node in nodes}
    usd_hour = sum(node.usd_hour for node in nodes) / len(nodes)
    offer = Offer(
        cloud=first.cloud,
        region=first.region,
        zone=first.zone if len(zones) == 1 else None,
        instance_type=UNKNOWN_TYPE,
        vcpus=0,
        memory_gib=0,
        ondemand_usd_hour=None if first.is_spot else usd_hour,
        spot_usd_hour=usd_hour if first.is_spot else None,
    )
    return Placement(offer=offer, is_spot=first.is_spot, node_count=len(nodes))


def _is_whole(listed: NodeList) -> bool:
    """Return whether no region can hide our nodes. Regions that this login may not list cannot contain its nodes."""
    return all(isinstance(error, AuthError) for error in listed.unseen.values())


def _read_status(nodes: Sequence[Node]) -> ClusterStatus:
    is_stopped = all(node.state is NodeState.STOPPED for node in nodes)
    return ClusterStatus.STOPPED if is_stopped else ClusterStatus.UP
