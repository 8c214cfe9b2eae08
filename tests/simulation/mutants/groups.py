"""Bugs planted into job groups: their starts, addresses, moves, ends and retries."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from broker.jobs import group_member, group_placement, submission
from broker.jobs.group_member import GroupMember
from broker.jobs.group_placement import GroupPlacement, find_anchor
from broker.jobs.groups import GroupStep, Judgement, find_culprit, find_live, get_role, judge, may_start
from broker.jobs.job_limits import JobLimits
from broker.jobs.outcome_recorder import OutcomeRecorder
from broker.pipelines.groups import locate
from broker.state.jobs import JobRows
from broker.types import Attempt, Cluster, Job, JobStatus
from tests.simulation.mutants.provisioning import Patches


def start_before_all_tasks_are_set_up() -> Patches:
    return (patch.object(group_member, "may_start", lambda members, generation: True),)


def start_in_two_regions() -> Patches:
    """Start the programs of connected tasks wherever they are."""

    def may_start_apart(members: Sequence[Job], generation: int) -> bool:
        apart = [_disconnect(member) for member in members]
        return may_start(apart, generation)

    return (patch.object(group_member, "may_start", may_start_apart),)


def _disconnect(job: Job) -> Job:
    return replace(job, task=replace(job.task, group=replace(get_role(job), is_connected=False)))


def ended_task_is_waited_for() -> Patches:
    """Hold the programs of a generation until a task that has ended is set up too."""

    def may_start_with_all(members: Sequence[Job], generation: int) -> bool:
        return may_start(members, generation) and not any(member.status.is_terminal for member in members)

    return (patch.object(group_member, "may_start", may_start_with_all),)


def addresses_not_sent_after_a_recovery() -> Patches:
    """Send the addresses of the others once, at the start of a program."""
    send = GroupMember._send

    async def send_once(self: Any, job: Job, members: Sequence[Job], attempt: Attempt, cluster: Cluster) -> None:
        if self._sent is None or self._sent[0] != attempt.number:
            await send(self, job, members, attempt, cluster)

    return (patch.object(GroupMember, "_send", send_once),)


def one_task_is_forgotten_at_a_restart() -> Patches:
    """Let the newest task of the group continue through a restart."""

    def judge_others(job: Job, members: Sequence[Job], now_s: float) -> Judgement:
        found = judge(job, members, now_s)
        return Judgement() if found.step is GroupStep.RESTART and job.id == members[-1].id else found

    return (patch.object(group_member, "judge", judge_others),)


def success_of_the_primary_tasks_ends_no_other() -> Patches:
    def judge_failures(job: Job, members: Sequence[Job], now_s: float) -> Judgement:
        found = judge(job, members, now_s)
        return Judgement() if found.step is GroupStep.FINISH else found

    return (patch.object(group_member, "judge", judge_failures),)


def first_success_ends_the_group() -> Patches:
    """End the auxiliary tasks with the first of several primary tasks."""

    def judge_early(job: Job, members: Sequence[Job], now_s: float) -> Judgement:
        done = [each for each in members if each.status is JobStatus.SUCCEEDED and get_role(each).is_primary]
        return Judgement(step=GroupStep.FINISH) if done and not get_role(job).is_primary else judge(job, members, now_s)

    return (patch.object(group_member, "judge", judge_early),)


def termination_delay_ignored() -> Patches:
    def judge_at_once(job: Job, members: Sequence[Job], now_s: float) -> Judgement:
        return judge(job, members, now_s + get_role(job).termination_delay_s)

    return (patch.object(group_member, "judge", judge_at_once),)


def cancelled_task_ends_no_other() -> Patches:
    """Treat a cancelled task as one that the others can do without."""

    def judge_failures(job: Job, members: Sequence[Job], now_s: float) -> Judgement:
        culprit = find_culprit(job, members)
        is_cancel = culprit is not None and culprit.status is JobStatus.CANCELLED
        return Judgement() if is_cancel else judge(job, members, now_s)

    return (patch.object(group_member, "judge", judge_failures),)


def success_is_overwritten_by_a_failure() -> Patches:
    """Cancel every task of the group with the one that fails, also one that has succeeded."""
    finish = OutcomeRecorder.finish_job

    def finish_all(self: Any, job: Job, status: JobStatus, *rest: Any) -> float:
        wait_s = finish(self, job, status, *rest)
        if status is JobStatus.FAILED and job.task.group is not None:
            self._store.execute("DROP TRIGGER IF EXISTS jobs_terminal")
            self._store.write(
                "UPDATE jobs SET status = 'CANCELLED' WHERE pipeline = ? AND status = 'SUCCEEDED'", (job.pipeline,)
            )
        return wait_s

    return (patch.object(OutcomeRecorder, "finish_job", finish_all),)


def running_group_moves_at_once() -> Patches:
    """Move a running group as soon as one of its tasks finds no capacity."""
    return (patch.object(group_placement, "BLOCKED_RUNNING_S", 0.0),)


def both_tasks_move_to_each_other() -> Patches:
    """Let each controller take the place of the others for that of the group, even where they are apart."""
    find_move = GroupPlacement.find_move

    def find_move_to_others(self: Any, job: Job, members: Sequence[Job], attempt: Attempt) -> str:
        others = [each for each in members if each.id != job.id and not each.status.is_terminal]
        anchor, here = find_anchor(others), locate(attempt.placement)
        if anchor is not None and attempt.released_s is None and anchor.region != here.region:
            return "the other tasks run elsewhere"
        return find_move(self, job, members, attempt)

    return (patch.object(GroupPlacement, "find_move", find_move_to_others),)


def budget_counts_the_whole_group() -> Patches:
    """Count what all tasks of the group have spent against the budget of each."""

    def find_overspending(self: JobLimits, job: Job) -> str:
        budget_usd = job.task.goal.budget_usd if job.task.goal else None
        members = self._store.jobs.list_pipeline(job.pipeline) if job.pipeline else [job]
        now_s = self._clock.now_s()
        spent_usd = sum(self._store.bills.spend_usd(job_id=each.id, now_s=now_s) for each in members)
        return "the budget is used up" if budget_usd is not None and spent_usd >= budget_usd else ""

    return (patch.object(JobLimits, "_find_overspending", find_overspending),)


def retry_joins_the_old_group() -> Patches:
    """Submit the retried tasks into the group that has failed."""
    add = JobRows.add

    def add_to_old(self: Any, name: str, *rest: Any, resumes: Job | None = None, **more: Any) -> Job:
        if resumes is not None and resumes.task.group is not None:
            more["pipeline"] = resumes.pipeline
        return add(self, name, *rest, resumes=resumes, **more)

    return (patch.object(JobRows, "add", add_to_old),)


def group_is_retried_in_several_commits() -> Patches:
    retry_group = submission.retry_group

    def retry_one_by_one(store: Any, members: Sequence[Job], **more: Any) -> Sequence[Job]:
        loose: Any = SimpleNamespace(jobs=store.jobs, draw_uid=store.draw_uid, transaction=nullcontext)
        return retry_group(loose, members, **more)

    return (patch("tests.simulation.stories.retry_group", retry_one_by_one),)


def addresses_of_a_lost_task_are_kept() -> Patches:
    """Give the newest attempt of a task for its live one, so that its peers never learn of its loss."""

    def find_newest(job: Job) -> Attempt | None:
        ready = [each for each in job.attempts if each.ready_s is not None]
        return find_live(job) if not ready else ready[0]

    describe = group_member.describe_peers

    def describe_first(job: Job, members: Sequence[Job], find_cluster: Any) -> dict[str, object]:
        with patch.object(group_member, "find_live", find_newest):
            return describe(job, members, find_cluster)

    return (patch.object(group_member, "describe_peers", describe_first),)
