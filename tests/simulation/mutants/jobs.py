"""Bugs planted into jobs, their daemon and its memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from broker.jobs import (
    allowance,
    controller,
    daemon,
    in_place,
    lost_gang,
    node_retention,
    outcome_recorder,
    teardown,
)
from broker.jobs.controller import JobController
from broker.jobs.health import HealthSignals, Verdict, classify, list_lost_ranks
from broker.jobs.job_limits import JobLimits
from broker.jobs.node_health import NodeHealth
from broker.jobs.outcome_recorder import OutcomeRecorder
from broker.state.database import SqliteDatabase
from broker.state.jobs import JobRows
from broker.types import Attempt, Job, JobStatus, Outcome, RunStatus

Patches = Sequence[Any]


def controller_death_fails_the_job() -> Patches:
    """Fail a job when its controller dies (SkyPilot #10061: FAILED_CONTROLLER)."""
    start = daemon._Daemon.run

    async def run(self: Any) -> None:
        for job_id in self._store.jobs.list_live_ids():
            if self._store.jobs.list_attempts(job_id):
                self._store.jobs.set_status(job_id, JobStatus.FAILED_CONTROLLER, "its controller died")
        await start(self)

    return (patch.object(daemon._Daemon, "run", run),)


def terminal_state_overwritten() -> Patches:
    """Let a starting daemon treat every job with something left as running."""
    start = daemon._Daemon.run

    async def run(self: Any) -> None:
        self._store.execute("DROP TRIGGER IF EXISTS jobs_terminal")
        for job_id in self._store.jobs.list_unfinished_ids():
            if self._store.jobs.list_attempts(job_id):
                self._store.write(
                    "UPDATE jobs SET status = 'RECOVERING', is_terminal = 0, ended_s = NULL WHERE id = ?", (job_id,)
                )
        await start(self)

    return (patch.object(daemon._Daemon, "run", run),)


def stale_epoch_writes() -> Patches:
    """Let a leader that slept through its replacement continue."""
    return (patch.object(SqliteDatabase, "_check_epoch", lambda self: None),)


def two_leaders() -> Patches:
    """Let every daemon lead, without a lock."""

    @contextmanager
    def hold(config: Any) -> Iterator[bool]:
        yield True

    return (patch.object(daemon, "hold_lock", hold), patch.object(SqliteDatabase, "_check_epoch", lambda self: None))


def broken_gpu_is_kept() -> Patches:
    """Restart a gang whose node has a broken GPU in place, as after any other failure."""

    async def replace_nothing(self: Any, *_: Any) -> bool:
        return False

    return (patch.object(NodeHealth, "observe", replace_nothing),)


def outcome_ignored() -> Patches:
    """Recover a program that has succeeded because a node was lost (SkyPilot #6133)."""

    def judge_nodes_first(signs: HealthSignals) -> Verdict:
        return Verdict.LOST if list_lost_ranks(signs.nodes) or signs.unreachable else classify(signs)

    return (patch.object(controller, "classify", judge_nodes_first),)


def lost_node_is_the_users_failure() -> Patches:
    def judge_program_first(signs: HealthSignals) -> Verdict:
        return Verdict.FAILED if signs.status is RunStatus.FAILED else classify(signs)

    return (patch.object(controller, "classify", judge_program_first),)


def cancel_forgotten_in_recovery() -> Patches:
    get = JobRows.get

    def get_without_cancel(self: Any, job_id: int) -> Job | None:
        job = get(self, job_id)
        is_recovering = job is not None and job.attempts and job.attempts[-1].outcome
        return replace(job, cancel_requested=False) if job and is_recovering else job

    return (
        patch.object(JobRows, "get", get_without_cancel),
        patch.object(JobRows, "is_cancel_requested", lambda self, job_id: False),
    )


def budget_unchecked() -> Patches:
    return (patch.object(JobLimits, "_find_overspending", lambda self, job: ""),)


def lease_never_given() -> Patches:
    """Give no lease, so nodes do not end by themselves when no broker is left."""
    return (patch.object(JobLimits, "find_lease_s", lambda self, job, cluster: None),)


def lease_of_a_quarter_of_an_hour() -> Patches:
    """Keep the former lease: a laptop closed for longer ends every job's machines."""
    return (patch.object(JobLimits, "find_lease_s", lambda self, job, cluster: 900.0),)


def lease_regardless_of_the_budget() -> Patches:
    def find(self: Any, job: Any, cluster: Any) -> float:
        return allowance.get_unattended_s(job.task)

    return (patch.object(JobLimits, "find_lease_s", find),)


def failure_left_behind_is_the_programs() -> Patches:
    """Count the exit code that the head left as the program's, whatever ended the nodes."""
    return (
        patch.object(
            lost_gang, "is_programs_failure", lambda left, nodes, unreachable: left.status is RunStatus.FAILED
        ),
    )


def outcome_left_behind_is_not_read() -> Patches:
    async def read(self: Any, job: Any, attempt: Any, cluster: Any) -> None:
        return None

    return (patch.object(lost_gang.LostGang, "_read_result", read),)


def lease_never_renewed() -> Patches:
    async def renew(self: Any, job: Any, watch: Any, cluster: Any) -> None:
        return

    return (patch.object(JobController, "_renew_lease", renew),)


def request_id_ignored() -> Patches:
    add = JobRows.add

    def add_again(self: Any, name: str, task: Any, request_id: str | None = None, **more: Any) -> Any:
        return add(self, name, task, None, **more)

    return (patch.object(JobRows, "add", add_again),)


def retry_restarts_attempt_numbers() -> Patches:
    """Make a retried job's attempts look older than those whose checkpoints it continues from."""
    add = JobRows.add

    def add_from_one(self: Any, *arguments: Any, resumes: Any = None, **more: Any) -> Any:
        job = add(self, *arguments, resumes=resumes, **more)
        self._database.write("UPDATE jobs SET first_attempt = 1 WHERE id = ?", (job.id,))
        return replace(job, first_attempt=1)

    return (patch.object(JobRows, "add", add_from_one),)


def outcome_and_status_in_two_commits() -> Patches:
    """Split the commit: in between, a job whose program succeeded looks like one that lost its machines."""

    def end_job(self: Any, job: Job, attempt: Attempt, status: JobStatus, outcome: Outcome, failure: str) -> float:
        self._store.jobs.put_attempt(replace(attempt, outcome=outcome))
        return float(self.finish_job(job, status, outcome.kind, failure))

    return (patch.object(OutcomeRecorder, "end_job", end_job),)


def restarted_without_headway() -> Patches:
    """Restart every program that dies, as long as there is money."""
    return (patch.object(outcome_recorder, "is_restart_due", lambda *arguments, **more: True),)


def started_beside_the_old_program() -> Patches:
    """Restart in place without waiting until the old program has ended."""
    return (patch.object(in_place, "has_ended", lambda report: True),)


def report_of_the_old_run_counts() -> Patches:
    """Share one run between all attempts on a cluster."""
    return tuple(
        patch.object(module, "get_run_id", lambda attempt, cluster: 1) for module in (teardown, controller, in_place)
    )


def nodes_given_back_at_every_restart() -> Patches:
    return (patch.object(controller, "are_running", lambda nodes: False),)


def restart_in_place_in_two_commits() -> Patches:
    """Split the commit: in between, the job has a gang that none of its attempts knows."""
    begin = in_place.InPlace.begin_attempt

    def begin_later(self: Any, job: Job, old: Attempt) -> Attempt:
        self._teardown.close(replace(old, kept_until_s=None))
        return begin(self, job, old)

    return (patch.object(in_place.InPlace, "begin_attempt", begin_later),)


def survivors_given_back() -> Patches:
    """End all nodes when one is lost."""
    return (
        patch.object(node_retention.NodeRetention, "find_until_s", lambda self, job, attempt, cluster, report: None),
    )


def needs_ignored() -> Patches:
    """Start all jobs of a pipeline at once."""
    return (patch.object(JobController, "_wait_for_others", lambda self, job: 0.0),)
