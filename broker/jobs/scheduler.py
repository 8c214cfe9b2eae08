"""Start the jobs of schedules when they are due, each due time exactly once.

Any number of controllers may call `step`. One transaction compares the schedule with the basis of the decision,
inserts the job under its own request ID, records the due time and advances the schedule to the next one. A process that
is killed before the commit has done nothing; after the commit, nothing remains to be done. Due times are compared with
the store's clock, which all controllers share.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Protocol

from broker.errors import BrokerError, FencedError, StateError
from broker.jobs.scheduling import DueStep, decide_step
from broker.provision.refusals import draw_backoff_s
from broker.state.store import Store
from broker.types import DueOutcome, DueTime, EventKind, Job, JobSchedule, Plan, Task, make_event

log = logging.getLogger(__name__)

POLL_S = 1.0
# Planning blocks the process, which must renew its lease (`claims.LEASE_S`): many schedules may be due at midnight.
STEP_S_MAX = 0.5
PAUSE_S = 0.05  # before the rest of the due schedules
SCHEDULE_REQUEST = "schedule/"  # begins the request IDs of its jobs: schedule/NAME/UID of the schedule/DUE TIME


class LaunchesRuns(Protocol):
    """Plans and submits the job of a due time, as a launch by the owner of the schedule would."""

    def plan(self, schedule: JobSchedule, task: Task) -> Plan:
        """Plan and check the task. Raises BrokerError to refuse the run, or StateError to retry later."""
        ...

    def submit(self, schedule: JobSchedule, task: Task, plan: Plan, *, request_id: str) -> Job:
        """Submit the job, within the caller's transaction; the same `request_id` submits one job.

        Raises BrokerError to refuse the run, for example LimitError, before anything is written.
        """
        ...


class Scheduler:
    """Starts the jobs of all schedules of a store."""

    def __init__(self, store: Store, *, launches: LaunchesRuns) -> None:
        self._store = store
        self._launches = launches
        self._failures: dict[str, int] = {}
        self._retry_s: dict[str, float] = {}

    def step(self) -> float:
        """Process due schedules for about STEP_S_MAX; return seconds until the next step.

        Raises FencedError, StateError. A schedule that fails delays only itself.
        """
        now_s, begin_s = self._store.read_time_s(), self._store.clock.now_s()
        for name in self._store.schedules.list_due(now_s):
            if now_s < self._retry_s.get(name, 0.0) <= now_s + 120.0:
                continue
            if not 0.0 <= self._store.clock.now_s() - begin_s < STEP_S_MAX:
                return PAUSE_S
            try:
                self._serve(name, now_s)
                self._forget(name)
            except FencedError:
                raise
            except Exception as error:  # the outermost edge of one schedule
                self._failures[name] = self._failures.get(name, 0) + 1
                wait_s = draw_backoff_s(self._failures[name], cap_s=60.0)
                self._retry_s[name] = now_s + wait_s
                text = error.message if isinstance(error, BrokerError) else repr(error)
                log.warning("schedule %s: %s; next try in %.1f s", name, text, wait_s, exc_info=error)
        return POLL_S

    def _forget(self, name: str) -> None:
        self._failures.pop(name, None)
        self._retry_s.pop(name, None)

    def _serve(self, name: str, now_s: float) -> None:
        """Carry out the next step of one schedule, if it is still due."""
        schedule = self._store.schedules.get(name)
        if schedule is None or schedule.is_paused:
            return
        step, facts = self._decide(schedule, now_s)
        if step.is_idle:
            return
        plan, refusal = None, None
        task = self._store.schedules.get_task(schedule)
        if step.start_s is not None:  # planning takes a while, so it precedes the transaction
            try:
                plan = self._launches.plan(schedule, task)
            except StateError:
                raise
            except BrokerError as error:
                refusal = error
        with self._store.transaction():
            if self._store.schedules.get(name) != schedule or self._decide(schedule, now_s)[1] != facts:
                return  # another controller or a user was faster: the next step checks again
            # A due time already has a record if the clock was far ahead when it was started, and was set back since.
            for each in step.records:
                if not self._store.schedules.has_outcome(schedule, each.due_s):
                    self._store.schedules.record(schedule, each)
            if step.start_s is not None and not self._store.schedules.has_outcome(schedule, step.start_s):
                started = self._start(schedule, task, step.start_s, plan, refusal)
                self._store.schedules.record(schedule, started)
            self._store.schedules.set_next(schedule, step.next_s)

    def _decide(self, schedule: JobSchedule, now_s: float) -> tuple[DueStep, Mapping[str, object]]:
        """Return the decision and the facts behind it."""
        waiting = self._store.schedules.find_waiting(schedule)
        waiting_s = None if waiting is None else waiting.due_s
        is_busy = self._store.schedules.has_live_job(schedule)
        step = decide_step(schedule, waiting_s=waiting_s, is_busy=is_busy, now_s=now_s)
        return step, {"waiting_s": waiting_s, "is_busy": is_busy}

    def _start(
        self, schedule: JobSchedule, task: Task, due_s: float, plan: Plan | None, refusal: BrokerError | None
    ) -> DueTime:
        """Submit the job of a due time within the caller's transaction; return the outcome of the due time."""
        if refusal is None:
            assert plan is not None
            try:
                job = self._launches.submit(schedule, task, plan, request_id=name_request(schedule, due_s))
            except StateError:
                raise
            except BrokerError as error:
                refusal = error
            else:
                self._store.events.add(
                    make_event(EventKind.SCHEDULED, schedule=schedule.name, due_s=due_s), job_id=job.id
                )
                log.info("schedule %s: job %s", schedule.name, job.id)
                return DueTime(due_s=due_s, outcome=DueOutcome.STARTED, job_id=job.id)
        log.warning("schedule %s: refused: %s", schedule.name, refusal.message)
        return DueTime(due_s=due_s, outcome=DueOutcome.REFUSED, detail=refusal.message)


def name_request(schedule: JobSchedule, due_s: float) -> str:
    """Return the request ID of the job of a due time."""
    return f"{SCHEDULE_REQUEST}{schedule.name}/{schedule.uid}/{int(due_s)}"
