"""The cloud of Slurm clusters: a gang is one allocation, and Slurm's queue is the only record of it.

create     `sbatch` of a job whose name comes from the token; a second one with that name waits and is cancelled
list       `squeue`: the job's comment has the tags; the nodes of a pending job are its ranks
terminate  `scancel`: the gang ends as a whole, as Slurm cannot take single nodes out of a job
preempt    Slurm sends SIGTERM, which is passed on as a notice, and kills the nodes after the partition's grace time
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence, Set
from typing import ClassVar

from broker.clock import Clock
from broker.clouds import local_machine, usual_python
from broker.clouds.sent_source import read_source
from broker.clouds.slurm import node_program
from broker.clouds.slurm.commands import (
    QueuedJob,
    RunCommand,
    find_addresses,
    find_federation_name,
    list_jobs,
    run_command,
    show_job,
)
from broker.clouds.slurm.script import find_partition, make_argv, make_script, name_job, read_comment
from broker.clouds.slurm.states import EXIT_REASONS, GONE, REVOKED, find_error, find_state, is_hopeless
from broker.config import Config
from broker.errors import (
    AuthError,
    BrokerError,
    CloudError,
    InvalidRequestError,
    TransientError,
    UnknownOutcomeError,
)
from broker.sites import find_file
from broker.sites.backends import find_other_backend
from broker.sites.facts import find_facts
from broker.sites.slurm import Partition, SlurmCluster, read_clusters, read_partitions
from broker.types import Node, NodeList, NodeRequest, NodeState
from broker.user_files import UserFile

log = logging.getLogger(__name__)

KILL_WAIT_S = 30.0  # Slurm's default between SIGTERM and SIGKILL where a partition has no grace time
Read = Callable[[], tuple[Mapping[str, SlurmCluster], Mapping[str, Sequence[Partition]]]]


def make_cloud(config: Config, *, clock: Clock) -> SlurmCloud | None:
    """Make the cloud; None without a file of clusters."""
    path = find_file("slurm", config.home)
    if path is None:
        return None
    facts = find_facts("slurm", config.home)
    file = UserFile(path, lambda: (read_clusters(path), read_partitions(facts)), beside=[facts])
    return SlurmCloud(file.read, clock=clock)


class SlurmCloud:
    """`Cloud`, `HasQueue` and `ReadsSites` for the clusters of `slurm.yaml`, which is read at every call."""

    name: ClassVar[str] = "slurm"
    settle_s: ClassVar[float] = 0.0
    queue_s: ClassVar[float] = 2700.0  # a job that leaves the queue earlier loses its position

    def __init__(self, read: Read, *, clock: Clock, run: RunCommand = run_command) -> None:
        self._read = read
        self._clock = clock
        self._run = run
        # By job and nodes: a job may be moved, and a node of a cloud has another address after each start.
        self._addresses: dict[tuple[str, int, str], Sequence[tuple[str, str]]] = {}
        self._ends: dict[tuple[str, int], tuple[str, float]] = {}  # job -> why and when it ended

    async def check(self) -> None:
        """Return if any cluster answers; otherwise raise the first one's error."""
        answers = await asyncio.gather(*map(self._try_list, self._list_clusters()))
        if answers and all(isinstance(answer, CloudError) for answer in answers):
            raise next(answer for answer in answers if isinstance(answer, CloudError))

    async def create_nodes(self, request: NodeRequest) -> Sequence[Node]:
        """Submit the gang as one job and return its nodes, pending or not; a job of the same token is returned instead.

        Raises InvalidRequestError, CapacityError or QuotaError if Slurm refuses the job (nothing was submitted), and
        UnknownOutcomeError if the answer is lost or the job is not listed yet (list the nodes before retrying).
        """
        clusters, partitions = self._read_files()
        region = request.placement.offer.region
        if region not in clusters or clusters[region].is_off:
            raise InvalidRequestError(
                f"`slurm.yaml` has no cluster `{region}`", hints=("restore its entry, or plan again",)
            )
        cluster = clusters[region]
        name = name_job(request.owner, request.token)
        jobs = await list_jobs(self._run, cluster, name=name)
        if not jobs:
            await self._submit(cluster, find_partition(partitions.get(region, ()), request), request)
            jobs = await self._list_again(cluster, name)
        first, *later = sorted(jobs, key=lambda job: job.id)
        try:
            for job in later:  # from a concurrent call with the same token; it has not started
                await self._cancel(cluster, job.id, name)
            return await self._make_nodes(cluster, first)
        except CloudError as error:  # even a refused login, which would mean that nothing was submitted
            raise UnknownOutcomeError(f"the job was submitted, but cannot be queried: {error.message}") from error

    async def list_nodes(self, owner: str) -> NodeList:
        """List the nodes of every cluster. A cluster that does not answer is reported as an unseen region.

        Jobs of the owner that Slurm keeps, but never starts, are cancelled.
        """
        clusters = self._list_clusters()
        answers = await asyncio.gather(*(self._try_list(cluster, owner) for cluster in clusters))
        unseen = {
            cluster.name: answer
            for cluster, answer in zip(clusters, answers, strict=True)
            if isinstance(answer, CloudError)
        }
        if unseen and len(unseen) == len(clusters):
            raise next(iter(unseen.values()))
        nodes = [node for answer in answers if not isinstance(answer, CloudError) for node in answer]
        return NodeList(nodes=tuple(node for node in nodes if node.owner == owner), unseen=unseen)

    async def terminate_nodes(self, nodes: Sequence[Node]) -> None:
        """Cancel the whole job of each node; a job that has ended, or whose cluster is off, counts as success.

        Every job is attempted, then the first failure is raised. Raises TransientError if Slurm does not answer, and
        AuthError for a cluster that was removed from the file.
        """
        clusters = {cluster.name: cluster for cluster in self._list_clusters()}
        jobs = {
            (clusters[node.region].name, job_id, name_job(node.owner, node.token))
            for node in nodes
            if node.region in clusters and (job_id := read_handle(node)[1]) is not None
        }
        results = await asyncio.gather(
            *(self._cancel(clusters[region], job_id, name) for region, job_id, name in sorted(jobs)),
            return_exceptions=True,
        )
        for result in results:
            if isinstance(result, BaseException):
                raise result
        for node in nodes:
            if removal := self.find_removal(node.region, node):
                raise removal

    def find_removal(self, region: str, node: Node | None = None) -> CloudError | None:
        """Return an AuthError for a cluster that `slurm.yaml` does not list."""
        if node is not None and (other := find_other_backend(node, is_native=True)):
            return other
        clusters, _ = self._read_files()
        if region in clusters:
            return None
        whose = f"node `{node.id}`" if node else "nodes there"
        return AuthError(
            f"cluster `{region}` is no longer in `slurm.yaml`, so {whose} can be neither checked nor terminated",
            hints=(
                f"add `{region}` to `slurm.yaml` again; remove it after its nodes have ended",
                f"if the cluster was shut down for good, add `{region}: {{is_off: true}}`",
            ),
        )

    async def _submit(self, cluster: SlurmCluster, partition: Partition, request: NodeRequest) -> None:
        """Submit the gang, after checking that it can ever start: the queue itself refuses little."""
        argv = make_argv(cluster, partition, request, now_s=self._clock.now_s())
        if name := await find_federation_name(self._run, cluster):
            argv.append(f"--clusters={name}")  # another cluster may start it, and this one then lists it as revoked
        script = make_script(
            request,
            partition,
            program="\n".join(read_source(str(each.__file__)) for each in (node_program, usual_python)),
            machine=read_source(local_machine.__file__),
            kill_wait_s=KILL_WAIT_S,
        )
        trial = await self._run(cluster, ["sbatch", "--test-only", *argv[2:]], script)
        if trial.returncode:
            error = find_error(trial.stderr.decode(errors="replace"))
            raise TransientError(error.message) if isinstance(error, UnknownOutcomeError) else error
        try:
            done = await self._run(cluster, argv, script)
        except TransientError as error:  # the answer is lost: the job may have been accepted
            raise UnknownOutcomeError(error.message) from error
        if done.returncode:
            raise find_error(done.stderr.decode(errors="replace"))

    async def _list_again(self, cluster: SlurmCluster, name: str) -> Sequence[QueuedJob]:
        try:
            jobs = await list_jobs(self._run, cluster, name=name)
        except CloudError as error:
            raise UnknownOutcomeError(f"the job was submitted, but cannot be listed: {error.message}") from error
        if not jobs:
            raise UnknownOutcomeError("the job was submitted, but Slurm does not list it yet")
        return jobs

    async def _cancel(self, cluster: SlurmCluster, job_id: int, name: str) -> None:
        """End a job. SIGUSR1 makes its nodes end at once; `scancel` alone gives their programs time for a last save.

        The name must fit, too: a controller that has lost its state counts from 1 again, and the number may now be that
        of another job of the user. SIGUSR1 is sent to running jobs only: for a pending one, scancel would retry the
        signal for a minute.
        """
        for options in (["--signal=USR1", "--state=RUNNING"], []):
            argv = ["scancel", *options, f"--name={name}", str(job_id)]
            done = await self._run(cluster, argv, b"")
            text = done.stderr.decode(errors="replace")
            if done.returncode and not any(each in text for each in GONE):
                error = find_error(text)
                raise TransientError(error.message) if isinstance(error, UnknownOutcomeError) else error

    async def _try_list(self, cluster: SlurmCluster, owner: str = "") -> Sequence[Node] | CloudError:
        try:
            jobs = await list_jobs(self._run, cluster)
            self._forget_others(cluster, {job.id for job in jobs})
            for job in jobs:
                await self._give_up(cluster, job, owner)
            return [node for job in jobs for node in await self._make_nodes(cluster, job)]
        except CloudError as error:
            return error

    def _forget_others(self, cluster: SlurmCluster, jobs: Set[int]) -> None:
        """Forget the jobs that are no longer listed: a controller that lost its state uses their numbers again."""
        self._addresses = {
            key: value for key, value in self._addresses.items() if key[0] != cluster.name or key[1] in jobs
        }
        self._ends = {key: value for key, value in self._ends.items() if key[0] != cluster.name or key[1] in jobs}

    async def _give_up(self, cluster: SlurmCluster, job: QueuedJob, owner: str) -> None:
        """Cancel a job of the owner that never starts on this cluster; the next list reports it with the reason."""
        tags = read_comment(job.comment)
        if tags is None or tags["o"] != owner or find_state(job.state)[0] is not NodeState.PENDING:
            return
        is_elsewhere = job.state == REVOKED  # cancelled here, it ends there too; its nodes there cannot be reached
        if not is_elsewhere and not is_hopeless(job.reason):
            return
        why = "another cluster of the federation took it" if is_elsewhere else f"Slurm never starts it: {job.reason}"
        try:
            await self._cancel(cluster, job.id, name_job(owner, tags["t"]))
        except CloudError as error:  # it must not hide the other jobs; the next list tries again
            log.warning("job %d of cluster `%s` never starts there, but stays: %s", job.id, cluster.name, error.message)
        else:
            self._ends[(cluster.name, job.id)] = (why, self._clock.now_s())

    async def _make_nodes(self, cluster: SlurmCluster, job: QueuedJob) -> Sequence[Node]:
        """Return a node for each rank of one of our jobs; nothing for others."""
        tags = read_comment(job.comment)
        if tags is None:
            return ()
        state, reason = find_state(job.state)
        ended_s = None
        if state is NodeState.TERMINATED:
            reason, ended_s = await self._find_end(cluster, job, reason)
        addresses = await self._find_addresses(cluster, job) if state is NodeState.RUNNING else ()
        nodes = []
        for rank in range(int(tags["n"])):
            name, address = addresses[rank] if rank < len(addresses) else ("", "")
            node_id = f"{tags['i']}-{rank}"
            nodes.append(
                Node(
                    id=node_id,
                    cloud=self.name,
                    owner=tags["o"],
                    cluster=tags["c"],
                    attempt=tags["a"],
                    rank=rank,
                    state=state,
                    address=address,
                    region=cluster.name,
                    zone=tags["z"],
                    token=tags["t"],
                    is_spot=tags["p"],
                    usd_hour=tags["u"],
                    created_s=tags["s"],
                    ended_s=ended_s,
                    reason=reason,
                    handle=f"slurm://{cluster.name}/{job.id}/{name}/{node_id}",
                )
            )
        return nodes

    async def _find_end(self, cluster: SlurmCluster, job: QueuedJob, reason: str) -> tuple[str, float]:
        """Return why and when a job ended; queried once. The nodes report it by the job's exit code."""
        key = (cluster.name, job.id)
        end = self._ends.get(key)
        if end is None:
            if not reason:
                code = (await show_job(self._run, cluster, job.id)).get("ExitCode", "").partition(":")[0]
                reason = EXIT_REASONS.get(int(code), "crashed") if code.isdigit() else "crashed"
            # A job that never ran may have no end time later than its creation.
            end = self._ends[key] = (reason, min(job.end_s or self._clock.now_s(), self._clock.now_s()))
        return end

    async def _find_addresses(self, cluster: SlurmCluster, job: QueuedJob) -> Sequence[tuple[str, str]]:
        key = (cluster.name, job.id, job.node_list)
        if key not in self._addresses and job.node_list:
            self._addresses[key] = await find_addresses(self._run, cluster, job.node_list)
        return self._addresses.get(key, ())

    def _list_clusters(self) -> Sequence[SlurmCluster]:
        return [cluster for cluster in self._read_files()[0].values() if not cluster.is_off]

    def _read_files(self) -> tuple[Mapping[str, SlurmCluster], Mapping[str, Sequence[Partition]]]:
        try:
            return self._read()
        except BrokerError as error:  # the file may be half-written
            raise TransientError(error.message, hints=error.hints) from error


def read_handle(node: Node) -> tuple[str, int | None]:
    """Return cluster and job of a node, from `slurm://CLUSTER/JOB/HOST/NODE`.

    Without a job it is not a node of this cloud.
    """
    cluster, _, rest = node.handle.removeprefix("slurm://").partition("/")
    job = rest.partition("/")[0]
    return cluster, int(job) if job.isdigit() else None
