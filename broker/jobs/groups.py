"""Decide the next step of one task of a job group. Pure: the jobs of the group in, the step of one of them out.

Every task is a job with its own controller, and each controller decides from the same records; nothing else is shared.
A generation is one start of the whole group. It opens, once, when all its tasks are set up; a task that recovers in an
open generation starts without waiting for the others. The loss of a task with `on_loss: restart-group` begins the next
generation: attempts of earlier generations are restarted, and the group waits for all of them again. Example:

    learner (restart-group)   attempt 1, generation 1, preempted    attempt 2, generation 2
    rollout (keep-going)      attempt 1, generation 1, restarted    attempt 2, generation 2
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from broker.frozen import frozen
from broker.types import Attempt, Cluster, GroupRole, Job, JobStatus, OutcomeKind

RESTARTS = (OutcomeKind.SUCCEEDED, OutcomeKind.GROUP_RESTARTED)  # ends that do not begin a new generation


class GroupStep(StrEnum):
    """The effect of the group on one of its jobs."""

    NONE = "none"
    RESTART = "restart"  # its attempt belongs to an earlier generation
    FINISH = "finish"  # the primary tasks have succeeded, and its termination delay is over
    FAIL = "fail"  # a task that the group requires has failed


@frozen
class Judgement:
    """A step; `culprit` is the job that failed."""

    step: GroupStep = GroupStep.NONE
    culprit: Job | None = None

    @property
    def ends_job(self) -> bool:
        """Return whether the job ends with this step, succeeded or failed, instead of continuing or restarting."""
        return self.step in (GroupStep.FINISH, GroupStep.FAIL)


def judge(job: Job, members: Sequence[Job], now_s: float) -> Judgement:
    """Return the step for `job`, which has not ended; `members` are all jobs of its group."""
    role = get_role(job)
    if culprit := find_culprit(job, members):
        return Judgement(step=GroupStep.FAIL, culprit=culprit)
    primaries = [each for each in members if get_role(each).is_primary]
    if not role.is_primary and all(each.status is JobStatus.SUCCEEDED for each in primaries):
        ended_s = max(each.ended_s or 0.0 for each in primaries)
        if not ended_s <= now_s < ended_s + role.termination_delay_s:  # or the clock was set back
            return Judgement(step=GroupStep.FINISH)
    live = find_live(job)
    if live is not None and live.released_s is not None and live.generation < find_generation(members):
        return Judgement(step=GroupStep.RESTART)
    return Judgement()


def find_culprit(job: Job, members: Sequence[Job]) -> Job | None:
    """Return the failed job that ends the group: the cause, not a job that failed as a consequence."""
    is_open = has_opened(members)
    failed = [
        each
        for each in members
        if each.id != job.id
        and each.status.is_terminal
        and each.status is not JobStatus.SUCCEEDED
        and (get_role(each).is_required or not is_open)
    ]
    return min(failed, key=lambda each: (each.outcome_kind is OutcomeKind.DEPENDENCY_FAILED, each.id), default=None)


def has_opened(members: Sequence[Job]) -> bool:
    """Return whether the programs of the group have ever started."""
    return any(each.released_s is not None for member in members for each in member.attempts)


def find_generation(members: Sequence[Job]) -> int:
    """Return the newest generation: each loss that restarts the group, after its programs were released, adds one."""
    newest = 1
    for member in members:
        restarts = get_role(member).may_restart_group
        for each in member.attempts:
            newest = max(newest, each.generation)
            kind = each.outcome.kind if each.outcome else None
            if kind is None or kind in RESTARTS or each.released_s is None:
                continue
            if restarts or kind is OutcomeKind.GROUP_MOVED:
                newest = max(newest, each.generation + 1)
    return newest


def may_start(members: Sequence[Job], generation: int) -> bool:
    """Return whether programs of this generation may start: it has opened, or all tasks are set up in one region."""
    attempts = [each for member in members for each in member.attempts if each.generation == generation]
    if any(each.released_s is not None for each in attempts):
        return True
    ended = {member.status for member in members if member.status.is_terminal}
    if not has_opened(members) and ended - {JobStatus.SUCCEEDED}:
        return False  # `judge` will end the group: a task has failed since its last call
    live = [find_live(member) for member in members if not member.status.is_terminal]
    if not all(each is not None and each.generation == generation and each.ready_s is not None for each in live):
        return False
    regions = {(each.placement.offer.cloud, each.placement.offer.region) for each in live if each is not None}
    return len(regions) <= 1 or not get_role(members[0]).is_connected  # otherwise one of them moves


def find_live(job: Job) -> Attempt | None:
    """Return the attempt whose program runs or is being started; None while the job has none."""
    return next((each for each in job.attempts if each.ended_s is None and each.outcome is None), None)


def list_addresses(cluster: Cluster | None) -> list[str]:
    """Return the addresses of the nodes in the order of their ranks; empty without a cluster."""
    return [] if cluster is None else [node.address for node in sorted(cluster.nodes, key=lambda node: node.rank)]


def get_role(job: Job) -> GroupRole:
    """Return the role of a job in its group. Only for jobs with a group."""
    assert job.task.group is not None, "only called for jobs of a group"
    return job.task.group
