"""Record the outcome of an attempt whose nodes are gone, from the head's result in the bucket and the nodes' ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from broker.config import Config
from broker.jobs.allowance import get_unattended_s, show_hours
from broker.jobs.checkpoints import BUCKET_SCHEMES, find_checkpoint_dir, name_job_folder
from broker.jobs.gang import GangReport
from broker.jobs.health import Verdict, list_leaving_ranks, list_lost_ranks
from broker.jobs.log_files import copy_left_log
from broker.jobs.node_health import UnhealthyNodes
from broker.jobs.outcome_recorder import OutcomeRecorder
from broker.jobs.outcomes import Outcomes, RunResult
from broker.jobs.progress import complete_progress
from broker.jobs.run_end import RunEnd, read_run_end
from broker.state.store import Store
from broker.types import Attempt, Cluster, Job, Node, NodeEnd, NodeState, RunStatus
from broker.wording import describe_lost_nodes, describe_notice

GONE = (NodeState.TERMINATED, NodeState.STOPPED)  # GCP keeps a node that shut itself down until it is deleted
# The leases of a gang may end this far apart, because a node that is unreachable for longer counts as lost.
LEASES_APART_S = 600.0
OUT_OF_MEMORY_CODE = 137  # as if SIGKILL had ended the program alone, as it does where the node is a whole machine


class LostGang:
    """Record the loss of a gang, after checking whether its outcome is in the bucket."""

    def __init__(
        self,
        store: Store,
        config: Config,
        recorder: OutcomeRecorder,
        outcomes: Outcomes,
        unhealthy: UnhealthyNodes,
    ) -> None:
        self._store = store
        self._unhealthy = unhealthy
        self._config = config
        self._recorder = recorder
        self._outcomes = outcomes

    async def record_loss(
        self,
        job: Job,
        attempt: Attempt,
        cluster: Cluster,
        report: GangReport,
        *,
        is_noticed: bool,
        was_attended: bool,
        find_kept_until_s: Callable[[], float | None] = lambda: None,
    ) -> float:
        """Record the outcome of a lost gang.

        `was_attended`: this broker has just renewed the lease, so it has not expired. `find_kept_until_s` returns the
        time until which the remaining nodes are kept.
        """
        left = await self._read_result(job, attempt, cluster)
        progress = (left.progress if left else None) or report.progress or job.progress
        if left and left.status is RunStatus.SUCCEEDED:
            return self._recorder.record_success(job, attempt)
        if left and (left.unflushed or is_programs_failure(left, cluster.nodes, report.unreachable)):
            run = read_run_end(self._store, self._config.logs, attempt=attempt, report=left, progress=progress)
            verdict = Verdict.FAILED_SETUP if left.status is RunStatus.FAILED_SETUP else Verdict.FAILED
            return self._recorder.record_exit(job, attempt, verdict, run)
        full = next(
            (each for each in cluster.nodes if each.state in GONE and each.reason == NodeEnd.OUT_OF_MEMORY), None
        )
        if full is not None:  # by the program, which would do it again: its failures are counted
            run = RunEnd(returncode=OUT_OF_MEMORY_CODE, progress=progress, failed_rank=full.rank)
            return self._recorder.record_exit(job, attempt, Verdict.FAILED, run)
        ranks = list_lost_ranks(cluster.nodes) or report.unreachable
        step = progress.step if progress else None
        ended_s = [node.ended_s for node in cluster.nodes if node.ended_s is not None]
        lost_s = min(ended_s, default=None)
        if not left and not was_attended and have_leases_ended(cluster.nodes):
            allowance = show_hours(get_unattended_s(job.task))
            up_to = "up to " if job.task.goal and (job.task.goal.budget_usd or job.task.goal.deadline_hours) else ""
            return self._recorder.record_lease_expiry(attempt, f"{up_to}{allowance}", step=step, lost_s=lost_s)
        kept_until_s = find_kept_until_s()
        leaving = list_leaving_ranks(cluster.nodes, report.noticed) or ranks
        kept_count = None if kept_until_s is None else len(cluster.nodes) - len(leaving)
        if is_noticed and not ranks:
            return self._recorder.record_loss(
                attempt, describe_notice(), step=step, kept_until_s=kept_until_s, kept_count=kept_count
            )
        if fault := self._unhealthy.explain(cluster, ranks):
            return self._recorder.record_unhealthy(
                job, attempt, fault, step=step, kept_until_s=kept_until_s, kept_count=kept_count
            )
        return self._recorder.record_loss(
            attempt,
            describe_lost_nodes(ranks),
            step=step,
            lost_s=lost_s,
            kept_until_s=kept_until_s,
            kept_count=kept_count,
        )

    async def record_success(self, job: Job, attempt: Attempt, cluster: Cluster) -> float | None:
        """End the job if the bucket shows that an unrecorded start ran to completion; otherwise return None."""
        left = await self._read_result(job, attempt, cluster)
        if left is not None and left.status is RunStatus.SUCCEEDED:
            return self._recorder.record_success(job, attempt)
        if left is not None and left.unflushed:
            return self._recorder.record_exit(job, attempt, Verdict.FAILED, RunEnd(unflushed=left.unflushed))
        return None

    async def _read_result(self, job: Job, attempt: Attempt, cluster: Cluster) -> RunResult | None:
        """Read the result that nodes write next to the checkpoints in case the broker is unavailable."""
        place = find_checkpoint_dir(self._config, job.task, cluster, name=name_job_folder(job))
        if place is None or not place.startswith(BUCKET_SCHEMES):
            return None
        left = await self._outcomes.read_outcome(place, attempt.number)
        if left is not None and left.progress is not None:
            progress = complete_progress(left.progress, job.progress)
            if progress != job.progress:
                self._store.jobs.set_progress(job.id, progress)
        if (content := await self._outcomes.read_log(place, attempt.number)) is not None:
            copy_left_log(self._store, self._config.logs, attempt=attempt, content=content)
        return left


def is_programs_failure(left: RunResult, nodes: Sequence[Node], unreachable: Sequence[int]) -> bool:
    """Return whether a failure in the bucket was caused by the program, not by the loss of a peer.

    Each node must have shut itself down, or be up and respond. No lease may have been about to expire when the program
    failed: if one node's lease expires first, the programs on the other nodes fail with their own exit codes.
    """
    return (
        left.status in (RunStatus.FAILED, RunStatus.FAILED_SETUP)
        and left.returncode is not None
        and left.lease_left_s is not None
        and left.lease_left_s >= LEASES_APART_S
        and all(has_ended_itself(node) if node.state in GONE else node.rank not in unreachable for node in nodes)
    )


def has_ended_itself(node: Node) -> bool:
    """Return whether the node shut itself down; AWS and GCP report LEASE as the only reason."""
    return node.reason in (NodeEnd.LEASE, NodeEnd.DONE)


def have_leases_ended(nodes: Sequence[Node]) -> bool:
    """Return whether any nodes are gone, and all of those because their lease expired."""
    gone = [node for node in nodes if node.state in GONE]
    return bool(gone) and all(node.reason == NodeEnd.LEASE for node in gone)
