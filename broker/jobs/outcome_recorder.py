"""Record how attempts and jobs end: one commit for the attempt's outcome, the job's status and the event."""

from __future__ import annotations

from dataclasses import replace

from broker.clock import Clock
from broker.jobs.checkpoints import is_saving, keeps_its_own
from broker.jobs.deaths import (
    REWRITES_MAX,
    count_deaths,
    describe_cause,
    is_counted,
    is_restart_due,
    measure_headway,
)
from broker.jobs.groups import get_role
from broker.jobs.health import Verdict
from broker.jobs.job_limits import Breach, JobLimits
from broker.jobs.run_end import RunEnd
from broker.state.store import Store
from broker.types import Attempt, Event, EventKind, Job, JobStatus, Outcome, OutcomeKind, make_event
from broker.wording import (
    explain_broken_gang,
    explain_cancelled_run,
    explain_exit,
    explain_failed_launches,
    explain_lost_files,
    explain_setup_exit,
    explain_stall,
    explain_unhealthy,
)

END_S_MAX = 120.0  # time for a program to end on all nodes: SIGTERM, grace, SIGKILL, and the head's final report
START_TRIES_MAX = 3
FAULTS_MAX = 5  # attempts in a row, without a step in between, that ended because of a faulty GPU
REPEATS_MAX = 3  # at the same step: the program is at fault, not the machines


class OutcomeRecorder:
    """Record the outcomes of a job and its attempts. Each method returns the seconds until the next step, always 0."""

    def __init__(self, job_id: int, store: Store, clock: Clock, limits: JobLimits | None = None) -> None:
        self._job_id = job_id
        self._limits = limits or JobLimits(store, clock)
        self._store = store
        self._clock = clock

    def record_loss(
        self,
        attempt: Attempt,
        detail: str,
        *,
        step: int | None = None,
        lost_s: float | None = None,
        kept_until_s: float | None = None,
        kept_count: int | None = None,
    ) -> float:
        """Record that the cloud took some or all nodes. `kept_count` of them are kept until `kept_until_s`."""
        kind = OutcomeKind.PREEMPTED if attempt.placement.is_spot else OutcomeKind.NODE_LOST
        return self._record_loss(
            attempt,
            Outcome(kind=kind, detail=detail, step=step),
            lost_s=lost_s,
            kept_until_s=kept_until_s,
            kept_count=kept_count,
        )

    def record_unhealthy(
        self,
        job: Job,
        attempt: Attempt,
        detail: str,
        *,
        step: int | None,
        kept_until_s: float | None = None,
        kept_count: int | None = None,
    ) -> float:
        """Record that nodes with broken GPUs are gone; fail the job if that has happened too often at the same step."""
        outcome = Outcome(kind=OutcomeKind.UNHEALTHY, detail=detail, step=step)
        ends = (old.outcome for old in job.attempts if old.outcome is not None)
        times = 1 + sum(1 for old in ends if (old.kind, old.step) == (outcome.kind, outcome.step))
        if times >= FAULTS_MAX:
            return self.end_job(job, attempt, JobStatus.FAILED, outcome, explain_unhealthy(detail, times=times))
        return self._record_loss(attempt, outcome, kept_until_s=kept_until_s, kept_count=kept_count)

    def record_takedown(self, attempt: Attempt) -> float:
        """Record that a user, not the market, took the attempt's cluster down."""
        return self._record_loss(attempt, Outcome(kind=OutcomeKind.TAKEN_DOWN))

    def record_lease_expiry(
        self, attempt: Attempt, allowance: str, *, step: int | None = None, lost_s: float | None = None
    ) -> float:
        """Record that the nodes shut down because no broker renewed their lease, which is not a preemption."""
        outcome = Outcome(kind=OutcomeKind.LEASE_EXPIRED, detail=allowance, step=step)
        event = make_event(EventKind.LEASE_EXPIRED, allowance=allowance, step=step)
        return self._restart(attempt, outcome, event, lost_s=lost_s)

    def record_exit(self, job: Job, attempt: Attempt, verdict: Verdict, run: RunEnd) -> float:
        """Record a run that has ended without losing its nodes."""
        job, attempt = with_checkpoints(job, attempt, run)
        if verdict is Verdict.SUCCEEDED:
            return self.record_success(job, attempt)
        if verdict is Verdict.CANCELLED:
            if breach := self._limits.find_breach(job):  # broker stopped it before a crash: the user did not cancel it
                return self.record_breach(job, attempt, breach)
            outcome = Outcome(kind=OutcomeKind.CANCELLED)
            return self.end_job(job, attempt, JobStatus.CANCELLED, outcome, explain_cancelled_run())
        if verdict is Verdict.APART:
            return self.record_broken_gang(job, attempt, run)
        if verdict is Verdict.FAILED_SETUP:
            outcome = Outcome(kind=OutcomeKind.SETUP_FAILED, exit_code=run.returncode)
            if is_in_place(job, attempt):  # it succeeded on new nodes; reused nodes keep the state of an earlier run
                event = make_event(EventKind.SETUP_RETRIED, exit_code=run.returncode)
                return self._restart(attempt, outcome, event)
            with self._store.transaction():
                self._record_last_lines(attempt, run)
                failure = explain_setup_exit(run.returncode)
                return self.end_job(job, attempt, JobStatus.FAILED_SETUP, outcome, failure)
        return self._record_program_failure(job, attempt, run)

    def _record_program_failure(self, job: Job, attempt: Attempt, run: RunEnd) -> float:
        """Record a program that exited with an error; restart it while `is_restart_due` allows."""
        if run.unflushed:  # the program succeeded: running it again is useless
            outcome = Outcome(kind=OutcomeKind.FILES_LOST, detail=run.unflushed)
            return self.end_job(job, attempt, JobStatus.FAILED, outcome, explain_lost_files(run.unflushed))
        recovery, steps = job.task.recovery, self._store.jobs.list_steps(job.id)
        headway = measure_headway(steps, job.attempts, until=attempt.number)
        reached, checkpoint = headway.step or None, headway.checkpoint
        deaths = count_deaths(recovery, job.attempts, steps, present=attempt.number)
        rewrites = count_deaths(recovery, job.attempts, steps, present=attempt.number, is_numbered=True)
        is_due = is_restart_due(
            recovery,
            run.returncode,
            failures=sum(1 for old in job.attempts if is_counted(recovery, old)),
            deaths=deaths,
            rewrites=rewrites,
            headway=headway,
            keeps_checkpoints=is_saving(job.task) or keeps_its_own(job.task),
            last_lines=run.last_lines,
        )
        cause = describe_cause(run.returncode, run.last_lines)
        outcome = Outcome(kind=OutcomeKind.PROGRAM_FAILED, detail=cause, step=reached, exit_code=run.returncode)
        with self._store.transaction():
            self._record_last_lines(attempt, run)
            if is_due:
                at = {"step": reached, **({"checkpoint": checkpoint} if checkpoint else {})}
                event = make_event(EventKind.PROGRAM_RESTARTED, exit_code=run.returncode, cause=cause, **at)
                return self._restart_in_place(job, attempt, outcome, event, run)
            times = rewrites if rewrites >= REWRITES_MAX else deaths
            failure = explain_exit(run.returncode, cause=cause, times=times, step=headway.step, checkpoint=checkpoint)
            return self.end_job(job, attempt, JobStatus.FAILED, outcome, failure)

    def record_broken_gang(self, job: Job, attempt: Attempt, run: RunEnd) -> float:
        """Record that the gang lost a rank although no program failed on its own."""
        outcome, times = self._count_repeats(job, OutcomeKind.GANG_BROKEN, run.reason, run)
        failure = explain_broken_gang(run.reason, times=times, step=outcome.step)
        event = make_event(EventKind.GANG_RESTARTED, reason=run.reason, step=outcome.step)
        return self._restart_or_fail(job, attempt, outcome, event, run, times=times, failure=failure)

    def record_stall(self, job: Job, attempt: Attempt, timeout_s: float, run: RunEnd) -> float:
        """Record that the program reported no new step for `timeout_s`."""
        outcome, times = self._count_repeats(job, OutcomeKind.STALLED, "", run)
        failure = explain_stall(timeout_s, times=times, step=outcome.step)
        event = make_event(EventKind.STALL_RESTARTED, timeout_s=timeout_s, step=outcome.step)
        return self._restart_or_fail(job, attempt, outcome, event, run, times=times, failure=failure)

    def record_group_restart(self, job: Job, attempt: Attempt, run: RunEnd, *, cause: str) -> float:
        """Record that the program restarts because its group does."""
        step = run.progress.step if run.progress else 0
        outcome = Outcome(kind=OutcomeKind.GROUP_RESTARTED, detail=cause, step=step)
        event = make_event(EventKind.GROUP_RESTARTED, group=get_role(job).name, cause=cause)
        return self._restart_in_place(job, attempt, outcome, event, run)

    def record_group_move(self, job: Job, attempt: Attempt, *, reason: str) -> float:
        """Record that the nodes are released because the group continues in another region."""
        offer, group = attempt.placement.offer, get_role(job).name
        event = make_event(EventKind.GROUP_MOVE, group=group, place=f"{offer.cloud} {offer.region}", reason=reason)
        return self._restart(attempt, Outcome(kind=OutcomeKind.GROUP_MOVED, detail=reason), event)

    def _count_repeats(self, job: Job, kind: OutcomeKind, detail: str, run: RunEnd) -> tuple[Outcome, int]:
        """Return the outcome, and the number of attempts that ended with it at the same step, including this one."""
        outcome = Outcome(kind=kind, detail=detail, step=run.progress.step if run.progress else 0)
        ends = (old.outcome for old in job.attempts if old.outcome is not None)
        return outcome, 1 + sum(1 for old in ends if (old.kind, old.step) == (kind, outcome.step))

    def _restart_or_fail(
        self, job: Job, attempt: Attempt, outcome: Outcome, event: Event, run: RunEnd, *, times: int, failure: str
    ) -> float:
        """Restart the attempt, or fail the job if this has happened too often at the same step."""
        with self._store.transaction():
            self._record_last_lines(attempt, run)
            if times >= REPEATS_MAX:
                return self.end_job(job, attempt, JobStatus.FAILED, outcome, failure)
            return self._restart_in_place(job, attempt, outcome, event, run)

    def _restart_in_place(self, job: Job, attempt: Attempt, outcome: Outcome, event: Event, run: RunEnd) -> float:
        """Restart on the same nodes if all are healthy, unless the last attempt did so without progress."""
        steps = self._store.jobs.list_steps(job.id)
        reached, before = (
            measure_headway(steps, job.attempts, until=number) for number in (attempt.number, attempt.number - 1)
        )
        is_sick = is_in_place(job, attempt) and reached == before
        is_recorded = attempt.started_s > self._store.meta.restored_s  # otherwise later attempts may run there
        in_place = run.is_whole and not is_sick and is_recorded
        event = make_event(event.kind, **event.data, in_place=in_place)
        until_s = self._clock.now_s() + END_S_MAX if in_place else None
        return self._restart(attempt, outcome, event, kept_until_s=until_s)

    def release_nodes(self, attempt: Attempt) -> float:
        """Release the nodes that were kept for the next attempt, which gets new ones."""
        with self._store.transaction():
            self._store.jobs.put_attempt(replace(attempt, kept_until_s=None))
            self._add_event(make_event(EventKind.NODES_GIVEN_BACK, number=attempt.number))
        return 0.0

    def record_success(self, job: Job, attempt: Attempt) -> float:
        """End the job as SUCCEEDED; the cluster is terminated afterwards."""
        return self.end_job(job, attempt, JobStatus.SUCCEEDED, Outcome(kind=OutcomeKind.SUCCEEDED), "")

    def record_breach(self, job: Job, attempt: Attempt, breach: Breach) -> float:
        """End the job as FAILED because it has reached a limit; its checkpoints are kept."""
        return self.end_job(job, attempt, JobStatus.FAILED, Outcome(kind=breach.kind), breach.failure)

    def end_job(self, job: Job, attempt: Attempt, status: JobStatus, outcome: Outcome, failure: str) -> float:
        """Commit the attempt and the job in one transaction; return 0, so that the teardown follows at once."""
        with self._store.transaction():
            self._store.jobs.put_attempt(replace(attempt, outcome=outcome))
            self.finish_job(job, status, outcome.kind, failure)
        return 0.0

    def record_refusal(self, attempt: Attempt, outcome: Outcome) -> float:
        """Record that this attempt will not be started.

        The job's outcome is decided once its nodes are gone: a leader that was suspended during its start call must not
        find any nodes, because an ended job must not start.
        """
        self._store.jobs.put_attempt(replace(attempt, outcome=outcome))
        return 0.0

    def resolve_refusal(self, job: Job, attempt: Attempt) -> float:
        """Retry after `record_refusal`, once the nodes are confirmed gone, or end the job if no retry would help."""
        outcome = attempt.outcome
        if outcome is None or outcome.kind not in (OutcomeKind.REFUSED, OutcomeKind.LAUNCH_FAILED):
            return 0.0
        if outcome.kind is OutcomeKind.REFUSED:
            return self.finish_job(job, JobStatus.FAILED_PRECHECKS, outcome.kind, outcome.detail)
        tries = sum(1 for each in job.attempts if each.outcome and each.outcome.kind is OutcomeKind.LAUNCH_FAILED)
        if tries >= START_TRIES_MAX:
            failure = explain_failed_launches(tries, outcome.detail)
            return self.finish_job(job, JobStatus.FAILED_PRECHECKS, outcome.kind, failure)
        self._add_event(make_event(EventKind.LAUNCH_RETRIED, cluster=attempt.cluster, error=outcome.detail))
        return 0.0

    def finish_job(self, job: Job, status: JobStatus, kind: OutcomeKind, failure: str) -> float:
        """End the job. `failure` is the text shown to the user."""
        with self._store.transaction():
            if self._store.jobs.set_status(job.id, status, failure, outcome_kind=kind):
                self._add_event(make_event(EventKind.ENDED, status=status.value, outcome=kind.value, failure=failure))
        return 0.0

    def _record_loss(
        self,
        attempt: Attempt,
        outcome: Outcome,
        *,
        lost_s: float | None = None,
        kept_until_s: float | None = None,
        kept_count: int | None = None,
    ) -> float:
        data: dict[str, object] = {"outcome": outcome.kind.value, "detail": outcome.detail, "step": outcome.step}
        if kept_count is not None:
            data.update(kept_count=kept_count, node_count=attempt.placement.node_count)
        event = make_event(EventKind.ATTEMPT_LOST, **data)
        return self._restart(attempt, outcome, event, lost_s=lost_s, kept_until_s=kept_until_s)

    def _restart(
        self,
        attempt: Attempt,
        outcome: Outcome,
        event: Event,
        *,
        lost_s: float | None = None,
        kept_until_s: float | None = None,
    ) -> float:
        lost_s = self._clock.now_s() if lost_s is None else lost_s
        with self._store.transaction():
            self._store.jobs.put_attempt(replace(attempt, outcome=outcome, lost_s=lost_s, kept_until_s=kept_until_s))
            self._store.jobs.set_status(self._job_id, JobStatus.RECOVERING)
            self._add_event(event)
        return 0.0

    def _record_last_lines(self, attempt: Attempt, run: RunEnd) -> None:
        """Record the last lines as an event, because later attempts append to the log."""
        if run.last_lines:
            lines = list(run.last_lines)
            self._add_event(make_event(EventKind.LAST_LINES, number=attempt.number, rank=run.failed_rank, lines=lines))

    def _add_event(self, event: Event) -> None:
        self._store.events.add(event, job_id=self._job_id)


def with_checkpoints(job: Job, attempt: Attempt, run: RunEnd) -> tuple[Job, Attempt]:
    """Return the job and its attempt with the checkpoints that were observed at the run's end.

    Checkpoints from before the job was submitted are those of a job that it retries, or a copied model.
    """
    if run.checkpoints is None or run.checkpoints.time_s < job.submitted_s:
        return job, attempt
    attempt = replace(attempt, checkpoints=run.checkpoints)
    attempts = tuple(attempt if old.number == attempt.number else old for old in job.attempts)
    return replace(job, attempts=attempts), attempt


def is_in_place(job: Job, attempt: Attempt) -> bool:
    """Return whether the attempt reuses the nodes of an earlier one."""
    return any(old.cluster == attempt.cluster and old.number < attempt.number for old in job.attempts)
