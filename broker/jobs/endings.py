"""How attempts and jobs end: one commit for the attempt's outcome, the job's status and a plain sentence."""

from __future__ import annotations

from dataclasses import replace

from broker.clock import Clock
from broker.jobs.budget import find_overspending
from broker.jobs.checkpoints import is_saving, keeps_its_own
from broker.jobs.deaths import (
    count_deaths,
    describe_cause,
    is_counted,
    is_restart_due,
    measure_headway,
)
from broker.jobs.judgement import Verdict
from broker.jobs.order import get_recovery
from broker.jobs.run_end import RunEnd
from broker.state.store import Store
from broker.types import Attempt, Job, JobStatus

FAILED_OUTCOME = "failed"
STALLED_OUTCOME = "stalled"
APART_OUTCOME = "fell apart"
UNFLUSHED_OUTCOME = "files did not arrive"
OVERSPENT_OUTCOME = "out of budget"
NOT_STARTED_OUTCOME = "not started"
REFUSED_OUTCOME = "refused"
END_S_MAX = 120.0  # for a program to end on all nodes: SIGTERM, grace, SIGKILL, and the head's last word
LAST_LINES_KIND = "last lines"  # of events
START_TRIES_MAX = 3
REPEATS_MAX = 3  # at one step: then it is the program, not the machines


class Endings:
    """Of one job. Each method returns the seconds until the next step: none, as an end is always followed by one."""

    def __init__(self, job_id: int, store: Store, clock: Clock) -> None:
        self._job_id = job_id
        self._store = store
        self._clock = clock

    def lose(
        self, attempt: Attempt, reason: str, *, lost_s: float | None = None, kept_until_s: float | None = None
    ) -> float:
        """The cloud took what it ran on, or a part of it."""
        gone_s = self._clock.now_s() if lost_s is None else lost_s
        reason = f"preempted: {reason}"
        return self._restart(attempt, reason, kind="preempted", told=reason, lost_s=gone_s, kept_until_s=kept_until_s)

    def leave_unattended(self, attempt: Attempt, reason: str, *, lost_s: float | None = None) -> float:
        """Its nodes ended themselves while no broker renewed their lease: no market took them."""
        return self._restart(attempt, reason, told=f"{reason}: restarted on new nodes", lost_s=lost_s)

    def conclude(self, job: Job, attempt: Attempt, verdict: Verdict, run: RunEnd) -> float:
        """The run has ended by itself."""
        if verdict is Verdict.SUCCEEDED:
            return self.end(job, attempt, JobStatus.SUCCEEDED, "succeeded", "")
        if verdict is Verdict.CANCELLED:
            failure = find_overspending(job, self._store, self._clock)
            if failure:  # it was us, before a crash: nobody asked for a cancel
                return self.end(job, attempt, JobStatus.FAILED, OVERSPENT_OUTCOME, failure)
            return self.end(job, attempt, JobStatus.CANCELLED, "cancelled", "the run was cancelled on its cluster")
        if verdict is Verdict.APART:
            return self.repeat(job, attempt, APART_OUTCOME, f"the gang fell apart ({run.reason})", run)
        if verdict is Verdict.FAILED_SETUP:
            failure = f"`setup` exited with code {run.returncode}"
            if is_in_place(job, attempt):  # it has passed on fresh nodes, and need not bear what a run left behind
                return self._restart(attempt, "failed in setup", told=f"{failure} on used nodes: new nodes are tried")
            with self._store.transaction():
                self._tell_last_lines(attempt, run)
                return self.end(job, attempt, JobStatus.FAILED_SETUP, "failed in setup", failure)
        return self._fail(job, attempt, run)

    def _fail(self, job: Job, attempt: Attempt, run: RunEnd) -> float:
        """The program ended with an exit code of its own: it is started again while that promises anything."""
        if run.unflushed:  # it succeeded: nothing is gained by running it again
            failure = f"the program succeeded, but {run.unflushed}; they are lost with the nodes, which are given back"
            return self.end(job, attempt, JobStatus.FAILED, UNFLUSHED_OUTCOME, failure)
        recovery, steps = get_recovery(job.task), self._store.list_steps(job.id)
        reached = measure_headway(steps, until=attempt.number)
        deaths = count_deaths(recovery, job.attempts, steps, present=attempt.number)
        is_due = is_restart_due(
            recovery,
            run.returncode,
            failures=sum(1 for old in job.attempts if is_counted(recovery, old)),
            deaths=deaths,
            reached=reached,
            keeps_checkpoints=is_saving(job.task) or keeps_its_own(job.task),
        )
        outcome = f"{FAILED_OUTCOME} with exit code {run.returncode}"
        cause = describe_cause(run.returncode, run.last_lines)
        code = f"code {run.returncode}" + (f" ({cause})" if cause else "")
        attempt = replace(attempt, returncode=run.returncode)
        with self._store.transaction():
            self._tell_last_lines(attempt, run)
            if is_due:
                step = f" at step {reached}" if reached else ""
                told = f"the program exited with {code}{step} and is restarted"
                return self._restart_here(job, attempt, outcome, told, run)
            times = f", {deaths} times at step {reached}" if deaths > 1 else ""
            return self.end(job, attempt, JobStatus.FAILED, outcome, f"`run` exited with {code}{times}")

    def repeat(self, job: Job, attempt: Attempt, outcome: str, what: str, run: RunEnd) -> float:
        """Restarted on new nodes, unless the same has happened too often at this very step."""
        step = run.progress.step if run.progress else 0
        outcome = f"{outcome} at step {step}"
        times = 1 + sum(1 for old in job.attempts if old.outcome == outcome)
        with self._store.transaction():
            self._tell_last_lines(attempt, run)
            if times >= REPEATS_MAX:
                return self.end(job, attempt, JobStatus.FAILED, outcome, f"{what}, {times} times at step {step}")
            return self._restart_here(job, attempt, outcome, f"{what} at step {step}: restarted", run)

    def _restart_here(self, job: Job, attempt: Attempt, outcome: str, told: str, run: RunEnd) -> float:
        """On the same nodes where all of them are well, unless that was just tried and brought no headway."""
        steps = self._store.list_steps(job.id)
        reached, before = (measure_headway(steps, until=number) for number in (attempt.number, attempt.number - 1))
        is_sick = is_in_place(job, attempt) and reached == before
        is_known = attempt.started_s > self._store.restored_s  # else later attempts may run there
        if not run.is_whole or is_sick or not is_known:
            return self._restart(attempt, outcome, told=f"{told} on new nodes")
        until_s = self._clock.now_s() + END_S_MAX
        return self._restart(attempt, outcome, told=f"{told} on the same nodes", kept_until_s=until_s)

    def give_up_nodes(self, attempt: Attempt) -> float:
        """What was kept for the next attempt is given back: that one gets new nodes."""
        with self._store.transaction():
            self._store.put_attempt(replace(attempt, kept_until_s=None))
            self._tell("restart", f"the nodes of attempt {attempt.number} are given back: new ones are asked for")
        return 0.0

    def end(self, job: Job, attempt: Attempt, status: JobStatus, outcome: str, failure: str) -> float:
        with self._store.transaction():
            self._store.put_attempt(replace(attempt, outcome=outcome))
            self.finish(job, status, failure)
        return 0.0

    def refuse(self, attempt: Attempt, outcome: str) -> float:
        """This attempt will not be started. What that means for the job is decided when its nodes are gone: a leader
        that was stopped in the middle of its start call must find none, for an ended job may not start."""
        self._store.put_attempt(replace(attempt, outcome=outcome))
        return 0.0

    def conclude_unstarted(self, job: Job, attempt: Attempt) -> float:
        """After `refuse`, with the nodes confirmed gone: another attempt, unless no cluster would do better."""
        kind, _, reason = attempt.outcome.partition(": ")
        if kind == REFUSED_OUTCOME:
            return self.finish(job, JobStatus.FAILED_PRECHECKS, reason)
        if kind != NOT_STARTED_OUTCOME:
            return 0.0
        tries = sum(1 for each in job.attempts if each.outcome.startswith(NOT_STARTED_OUTCOME))
        if tries >= START_TRIES_MAX:
            failure = f"the program could not be started on {tries} clusters: {reason}"
            return self.finish(job, JobStatus.FAILED_PRECHECKS, failure)
        self._tell("restart", f"not started on {attempt.cluster}, trying another: {reason}")
        return 0.0

    def finish(self, job: Job, status: JobStatus, failure: str) -> float:
        with self._store.transaction():
            if self._store.set_job_status(job.id, status, failure):
                self._tell("ended", f"{status.value}{': ' + failure if failure else ''}")
        return 0.0

    def _restart(
        self,
        attempt: Attempt,
        outcome: str,
        *,
        told: str,
        kind: str = "restart",
        lost_s: float | None = None,
        kept_until_s: float | None = None,
    ) -> float:
        lost_s = self._clock.now_s() if lost_s is None else lost_s
        with self._store.transaction():
            self._store.put_attempt(replace(attempt, outcome=outcome, lost_s=lost_s, kept_until_s=kept_until_s))
            self._store.set_job_status(self._job_id, JobStatus.RECOVERING)
            self._tell(kind, told)
        return 0.0

    def _tell_last_lines(self, attempt: Attempt, run: RunEnd) -> None:
        """Kept apart from the log, in which later attempts follow."""
        if run.last_lines:
            whose = f" of rank {run.failed_rank}" if run.failed_rank is not None else ""
            title = f"last lines{whose} in attempt {attempt.number}:"
            self._tell(LAST_LINES_KIND, "\n".join([title, *run.last_lines]))

    def _tell(self, kind: str, message: str) -> None:
        self._store.add_event(kind, message, job_id=self._job_id)


def is_in_place(job: Job, attempt: Attempt) -> bool:
    """Whether it has the nodes of an earlier attempt."""
    return any(old.cluster == attempt.cluster and old.number < attempt.number for old in job.attempts)
