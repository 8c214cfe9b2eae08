"""What the controller needs of the runtime's Gang, as a Protocol, so that a simulation can stand in for it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from broker.types import Attempt, Cluster, Progress, RunStatus, Task


class GangReport(Protocol):
    """What was heard of a run at one look."""

    @property
    def status(self) -> RunStatus: ...
    @property
    def returncode(self) -> int | None:
        """The first failed program's; None before the run's end, and where no program gave one."""
        ...

    @property
    def unreachable(self) -> tuple[int, ...]:
        """Ranks that gave no answer: no evidence yet that they are gone."""
        ...

    @property
    def progress(self) -> Progress | None: ...
    @property
    def reason(self) -> str:
        """Why the run ended, where the node knows more than its status says."""
        ...

    @property
    def advised(self) -> tuple[int, ...]:
        """Ranks whose cloud thinks a preemption likelier than usual: news, and no notice."""
        ...

    @property
    def statuses(self) -> Sequence[RunStatus | None]:
        """Of each node, by rank; None where one did not answer or does not know the run."""
        ...

    @property
    def failed_rank(self) -> int | None:
        """Whose program ended first with an exit code of its own; None where no program did, or it is not known."""
        ...

    @property
    def flush(self) -> str:
        """What a node says while written files are not in their bucket yet; empty where all are."""
        ...

    @property
    def unfit(self) -> Sequence[tuple[int, str]]:
        """Ranks that were to join an elastic gang at work and whose `setup` failed, with the reason."""
        ...

    @property
    def unflushed(self) -> str:
        """Of a run that FAILED though its program succeeded: which written files did not arrive. Else empty."""
        ...


class Gang(Protocol):
    """All but `poll` raise TransientError for a node that does not answer, and InvalidRequestError for a task that
    no repetition mends. Each may be asked again after any end of the call."""

    async def prepare(self, cluster: Cluster, task: Task) -> None:
        """Put what the task needs on every node; what is there already stays."""
        ...

    async def start(
        self, cluster: Cluster, task: Task, *, run_id: int, envs: Mapping[str, str], lease_s: float | None = None
    ) -> None:
        """Begin the run on all nodes; one that has begun is left alone. Nodes end themselves after `lease_s` seconds
        in which nobody has renewed it."""
        ...

    async def poll(self, cluster: Cluster, run_id: int) -> GangReport:
        """Ask every node; silence is an answer."""
        ...

    async def cancel(self, cluster: Cluster, run_id: int) -> None:
        """End the run on every node that can be reached; one that has ended is left alone."""
        ...

    async def read_log(self, cluster: Cluster, run_id: int, *, offset: int) -> tuple[bytes, int]:
        """What the head's log holds from that byte on, as far as one answer goes, and the byte after it."""
        ...

    async def renew_lease(self, cluster: Cluster, *, lease_s: float) -> None:
        """From now on the nodes may live so many seconds without a word from us."""
        ...


def get_run_id(attempt: Attempt, cluster: Cluster) -> int:
    """Each attempt on a cluster is a run of its own there: the first is that of the attempt it was brought up for."""
    return attempt.number - cluster.attempt + 1


@runtime_checkable
class HearsNews(Protocol):
    """A gang whose nodes tell by themselves when something changes. One that cannot is polled."""

    async def wait_news(self, cluster: Cluster, run_id: int, *, wake: asyncio.Event, timeout_s: float) -> None:
        """Until `poll` or `read_log` would answer something new, `wake` is set (it is cleared), or the time is up.

        Where a node cannot tell of news now: for as long as a poll may wait.
        """
        ...
