"""Acquire machines for a job: plan the remaining work, search for capacity, record the attempt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from broker.clock import Clock
from broker.errors import AccountError, AuthError, CapacityError, DeniedError, InvalidRequestError, NoOfferError
from broker.jobs.group_member import GroupMember
from broker.jobs.job_limits import JobLimits, LimitReached
from broker.jobs.kinds import keep_ranks
from broker.jobs.outcome_recorder import OutcomeRecorder
from broker.jobs.policy_runner import Pause, PolicyRunner
from broker.jobs.replanning import cut_to_rest, drop_limits, order_plan
from broker.jobs.setup_starts import find_restored_start
from broker.jobs.slots import JobQueue
from broker.provision.lifecycle import Provisioner
from broker.provision.refusals import draw_backoff_s
from broker.state.store import Store
from broker.types import (
    Attempt,
    Cluster,
    Event,
    EventKind,
    Job,
    JobStatus,
    OutcomeKind,
    Placement,
    Plan,
    Task,
    make_event,
)
from broker.wording import make_place

WITHOUT_SECRETS = (
    "its secrets are missing: this state was restored from a copy, after which the job ended and they were erased; "
    "pass them again with `broker jobs retry`"
)
NO_OFFER_S = 5.0  # longer than `broker.user_files.SETTLE_S`
Planner = Callable[[Task, Callable[[Placement], bool] | None], Plan]


class Acquisition:
    """Acquire the machines of one job."""

    def __init__(
        self,
        store: Store,
        provisioner: Provisioner,
        planner: Planner,
        clock: Clock,
        policy_runner: PolicyRunner,
        recorder: OutcomeRecorder,
        limits: JobLimits,
        group: GroupMember,
        queue: JobQueue | None = None,
    ) -> None:
        self._store = store
        self._provisioner = provisioner
        self._planner = planner
        self._clock = clock
        self._policy_runner = policy_runner
        self._recorder = recorder
        self._limits = limits
        self._group = group
        self._queue = queue
        self._refusals = 0  # consecutive; only sets the backoff
        self._login_error = ""  # last reported
        self._unplannable_s: float | None = None  # since when no offer fits

    async def begin_attempt(self, job: Job) -> Attempt | float:
        """Return the new attempt once its nodes are up, otherwise the seconds until the next step.

        If the job has reached a limit by then, the attempt is left to that step.
        """
        number = job.next_attempt
        if breach := self._limits.find_breach(job):
            return self._recorder.finish_job(job, JobStatus.FAILED, breach.kind, breach.failure)
        if not self._store.jobs.has_secrets(job):
            return self._recorder.finish_job(job, JobStatus.FAILED_PRECHECKS, OutcomeKind.REFUSED, WITHOUT_SECRETS)
        if self._queue is not None and (wait_s := self._queue.admit(job)):
            return wait_s
        if job.status is JobStatus.PENDING:
            self._store.jobs.set_status(job.id, JobStatus.STARTING)
        try:
            plan = self._policy_runner.plan(job) or order_plan(self.plan_rest(job), job.attempts)
            plan = self._group.place(job, plan)
        except Pause as pause:
            return pause.wait_s
        except NoOfferError as error:
            if job.attempts and not self._is_without_offers():
                return NO_OFFER_S
            return self._recorder.finish_job(job, JobStatus.FAILED_NO_RESOURCE, OutcomeKind.NO_OFFER, error.message)
        self._unplannable_s = None
        try:
            cluster = await self._provisioner.up(
                job.name_cluster(number),
                plan,
                attempt=number,
                job_id=job.id,
                on_event=lambda event: self._add_event(job, event),
                hedge=job.hedge,
                check_budget=lambda: self._limits.check(job),
            )
        except LimitReached as error:
            return self._recorder.finish_job(job, JobStatus.FAILED, error.breach.kind, error.breach.failure)
        except (CapacityError, AuthError) as error:
            return self._wait(job, error)
        except InvalidRequestError as error:
            return self._recorder.finish_job(job, JobStatus.FAILED_PRECHECKS, OutcomeKind.REFUSED, error.message)
        self._refusals, self._login_error = 0, ""
        attempt = self._record(job, number, cluster)
        # The first machines may be older than this call: a killed controller may have requested them.
        is_over = self._limits.find_breach(replace(job, attempts=(*job.attempts, attempt))) is not None
        return 0.0 if is_over else attempt

    def plan_rest(self, job: Job) -> Plan:
        """Plan the remaining work at current prices; drop the deadline if it can no longer be met."""
        now_s = self._clock.now_s()
        spent_usd = self._store.bills.spend_usd(job_id=job.id, now_s=now_s)
        restored = find_restored_start(self._store, job.task, now_s=now_s, job=job)
        rest = cut_to_rest(job, now_s=now_s, spent_usd=spent_usd, restart_s=restored.start_s if restored else None)
        steps = self._store.jobs.list_steps(job.id)
        try:
            return keep_ranks(self._planner(rest, None), job, steps)
        except NoOfferError:
            if not job.attempts or rest.goal is None or rest.goal.deadline_hours is None:
                raise
            plan = keep_ranks(self._planner(drop_limits(rest), None), job, steps)
            self._add_event(job, make_event(EventKind.LATE))
            return plan

    def _record(self, job: Job, number: int, cluster: Cluster) -> Attempt:
        placement = cluster.placement
        attempt = Attempt(
            job_id=job.id, number=number, cluster=cluster.name, placement=placement, started_s=cluster.created_s,
            generation=self._group.find_generation(job),
        )  # fmt: skip
        with self._store.transaction():
            self._store.jobs.put_attempt(attempt)
            place, usd_hour = make_place(placement), placement.usd_hour
            self._add_event(job, make_event(EventKind.ATTEMPT, number=number, place=place, usd_hour=usd_hour))
        return attempt

    def _wait(self, job: Job, error: CapacityError | AuthError) -> float:
        """Back off and retry.

        A job that has never had an attempt fails on a missing permission, and on any login error once its deadline has
        passed; a user may log in again before that.
        """
        is_lasting = isinstance(error, DeniedError) or (
            isinstance(error, AuthError)
            and not isinstance(error, AccountError)
            and is_overdue(job, self._clock.now_s())
        )
        if is_lasting and not job.attempts:
            return self._recorder.finish_job(job, JobStatus.FAILED_PRECHECKS, OutcomeKind.REFUSED, error.message)
        hint = error.hints[0] if isinstance(error, AuthError) and error.hints else ""
        if isinstance(error, AuthError) and error.message != self._login_error:
            self._login_error = error.message
            self._add_event(job, make_event(EventKind.LOGIN_NEEDED, error=error.message, hint=hint))
        self._refusals += 1
        wait_s = draw_backoff_s(self._refusals, base_s=10.0, cap_s=300.0)
        self._add_event(job, make_event(EventKind.WAITING, error=error.message, wait_s=wait_s, hint=hint))
        if not job.attempts:
            self._store.jobs.set_status(job.id, JobStatus.PENDING)
        return wait_s

    def _is_without_offers(self) -> bool:
        """Return whether planning has found no offer for `NO_OFFER_S`.

        Before that, a file of machines or prices may have been half-written.
        """
        now_s = self._clock.now_s()
        if self._unplannable_s is None:
            self._unplannable_s = now_s
        return not 0.0 <= now_s - self._unplannable_s < NO_OFFER_S

    def _add_event(self, job: Job, event: Event) -> None:
        self._store.events.add(event, job_id=job.id)


def is_overdue(job: Job, now_s: float) -> bool:
    """Return whether the job's deadline has passed."""
    goal = job.task.goal
    return (
        goal is not None and goal.deadline_hours is not None and now_s >= job.submitted_s + goal.deadline_hours * 3600
    )
