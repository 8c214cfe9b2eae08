"""Declare the part of the runtime's Gang that the controller uses, so that a simulation can replace it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from broker.types import (
    Attempt,
    Cluster,
    GangHead,
    NodeFault,
    NodeSample,
    ObservedCheckpoints,
    OwnTime,
    Progress,
    RunStatus,
    SetupResult,
    SlowNetwork,
    Task,
)


class GangReport(Protocol):
    """The state of a run at one poll."""

    @property
    def status(self) -> RunStatus:
        """The state of the run, as the head reports it."""

    @property
    def returncode(self) -> int | None:
        """Exit code of the first failed program; None before the run's end, or if no program exited."""
        ...

    @property
    def unreachable(self) -> tuple[int, ...]:
        """Ranks that did not respond, which is not yet evidence that they are gone."""
        ...

    @property
    def progress(self) -> Progress | None:
        """The newest progress line of the program; None before the first."""

    @property
    def reason(self) -> str:
        """The reason for the run's end, if the node knows more than its status shows."""
        ...

    @property
    def advised(self) -> tuple[int, ...]:
        """Ranks with an elevated preemption risk according to the cloud: a recommendation, not a notice."""
        ...

    @property
    def noticed(self) -> tuple[int, ...]:
        """Ranks whose preemption the cloud has announced."""
        ...

    @property
    def statuses(self) -> Sequence[RunStatus | None]:
        """Status of each node, by rank; None if it did not respond or does not know the run."""
        ...

    @property
    def failed_rank(self) -> int | None:
        """Rank of the program that failed first; None if no program failed or it is unknown."""
        ...

    @property
    def flush(self) -> str:
        """Report of a node that is still uploading written files to their bucket; empty once all have arrived."""
        ...

    @property
    def unfit(self) -> Sequence[tuple[int, str]]:
        """Ranks that could not join a running elastic gang because `setup` failed, with the reason."""
        ...

    @property
    def faults(self) -> Sequence[NodeFault]:
        """Faults of nodes that were detected before the program started."""
        ...

    @property
    def network(self) -> SlowNetwork | None:
        """The speed of the nodes' network before the program started, if it is slow; None if it is not or unknown."""
        ...

    @property
    def own_times(self) -> Sequence[OwnTime]:
        """Time that each rank needed for its own part of its newest step; empty if the program does not report it."""
        ...

    @property
    def setups(self) -> Sequence[SetupResult]:
        """Result of the setup archive on each node that used or tried to keep one."""
        ...

    @property
    def followers(self) -> Sequence[int]:
        """Ranks whose program continues when another node becomes the head of an elastic gang."""
        ...

    @property
    def samples(self) -> Sequence[tuple[int, NodeSample]]:
        """Samples that nodes reported, with their ranks, oldest first; a sample may be repeated."""
        ...

    @property
    def is_ready(self) -> bool:
        """Return whether the gang of a job group is set up, so that `run` waits only for the group."""
        ...

    @property
    def port(self) -> int | None:
        """The port of the first node for its service in the job group; None before the start is known."""
        ...

    @property
    def unflushed(self) -> str:
        """Files that were not uploaded in a run that FAILED although its program succeeded; otherwise empty."""
        ...

    @property
    def checkpoints(self) -> ObservedCheckpoints | None:
        """The checkpoint folder after the program has failed; None if it is not a folder."""
        ...


class Gang(Protocol):
    """The nodes of one cluster.

    All methods except `poll` raise TransientError if a node does not respond, and InvalidRequestError for a task that
    fails permanently. Each call may be repeated, regardless of how the last one ended.
    """

    async def prepare(self, cluster: Cluster, task: Task) -> None:
        """Put the task's files on every node; existing files are kept."""
        ...

    async def start(
        self,
        cluster: Cluster,
        task: Task,
        *,
        run_id: int,
        envs: Mapping[str, str],
        lease_s: float | None = None,
        head: GangHead | None = None,
    ) -> None:
        """Start the run on all nodes; do nothing on nodes where it has started.

        `head`: the gang already runs with this head, and new nodes join it. Nodes shut down once `lease_s` seconds pass
        without a renewal. With BROKER_GROUP_NAME in `envs`, nodes are set up, and the program waits for `send_peers`.
        """
        ...

    async def send_peers(self, cluster: Cluster, run_id: int, peers: Mapping[str, object]) -> None:
        """Send the addresses of the job group to the nodes; the first call lets the program start."""
        ...

    async def move_head(
        self, cluster: Cluster, run_id: int, head: GangHead, *, members: Sequence[int], log_bytes: int
    ) -> bool:
        """Make a node the head of an elastic gang, and inform its members; return whether all of them acknowledged it.

        False means that the new head is not ready yet, so repeat the call. Nodes that know a head of a higher epoch
        ignore the call. With the current head, the call only renews the addresses of nodes. `members`: the ranks of
        the run. `log_bytes`: the new head's log begins at this offset, up to which the last head's log was copied.
        """
        ...

    async def poll(self, cluster: Cluster, run_id: int) -> GangReport:
        """Query every node; a node that does not respond is reported, not raised."""
        ...

    async def cancel(self, cluster: Cluster, run_id: int) -> None:
        """End the run on every reachable node; do nothing if it has ended."""
        ...

    async def read_log(self, cluster: Cluster, run_id: int, *, offset: int) -> tuple[bytes, int]:
        """Return a chunk of the head's log from `offset`, and the offset after it."""
        ...

    async def renew_lease(self, cluster: Cluster, *, lease_s: float) -> None:
        """Let the nodes run for another `lease_s` seconds without a renewal."""
        ...


def get_run_id(attempt: Attempt, cluster: Cluster) -> int:
    """Return the attempt's run ID on its cluster: 1 for the attempt that created the cluster, then counting up."""
    return attempt.number - cluster.attempt + 1


@runtime_checkable
class PushesNews(Protocol):
    """A gang whose nodes push changes. Other gangs are polled."""

    async def wait_news(self, cluster: Cluster, run_id: int, *, wake: asyncio.Event, timeout_s: float) -> None:
        """Wait until `poll` or `read_log` has new data, `wake` is set (which clears it), or the time is up.

        If a node cannot push at the moment, wait one poll interval.
        """
        ...
