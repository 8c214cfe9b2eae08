"""Take slots for waiting jobs of higher priority, and end the program of a job that must return its slot.

The request is a column of the displaced job, written in one transaction with the decision, so that one slot is taken
for one waiting job by any number of controllers. The displaced job's own controller does the rest: the program saves as
before a preemption, its machines are released, and the job becomes PENDING again (`slots.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from broker.clock import Clock
from broker.jobs.displacing import Holder, choose_victim
from broker.jobs.monitor import is_due
from broker.jobs.teardown import AttemptTeardown
from broker.state.store import Store
from broker.types import Attempt, Cluster, EventKind, Job, JobStatus, JobWait, Outcome, OutcomeKind, make_event
from broker.wording import describe_displacement

SAVE_S_MAX = 60.0  # for a program to save its state


def take_slot(
    store: Store, clock: Clock, job: Job, wait: JobWait, list_holders: Callable[[], Sequence[Holder]], *, after_s: float
) -> None:
    """Request a slot for a job that has waited for `after_s` since it was queued, or since it last requested one."""
    newest = store.events.list_newest([job.id]).get(job.id)
    now_s = clock.now_s()
    if newest is None or not is_due(newest.time_s, after_s, now_s):
        return
    if newest.kind is not EventKind.QUEUED and newest.kind is not EventKind.DISPLACING:
        return  # it is not recorded as waiting for a slot

    def choose() -> int | None:
        project = wait.project or None
        return choose_victim(job.id, job.task.priority, list_holders(), now_s=now_s, project=project)

    if choose() is None:  # most checks end here, without a lock
        return
    with store.transaction():
        current = store.jobs.get(job.id)
        victim = choose()
        if current is None or current.status is not JobStatus.PENDING or current.cancel_requested or victim is None:
            return
        store.queue.displace(victim, job.id)
        store.events.add(make_event(EventKind.DISPLACING, victim=victim), job_id=job.id)
        store.events.add(make_event(EventKind.DISPLACED, by=job.id), job_id=victim)


class Displacement:
    """End the program of one job in favour of a waiting one."""

    def __init__(self, store: Store, clock: Clock, teardown: AttemptTeardown) -> None:
        self._store = store
        self._clock = clock
        self._teardown = teardown

    async def step(self, job: Job, attempt: Attempt, cluster: Cluster) -> bool:
        """Return whether the attempt was ended, so that the job returns its slot."""
        if job.displaced_by is None:
            return False
        with self._store.transaction():
            waiting = self._store.jobs.get(job.displaced_by)
            if waiting is None or waiting.status is not JobStatus.PENDING or waiting.cancel_requested:
                self._store.queue.end_displacement(job.id)  # it has a slot by now, or no longer needs one
                return False
            outcome = Outcome(kind=OutcomeKind.DISPLACED, detail=describe_displacement(job.displaced_by))
            self._store.jobs.put_attempt(replace(attempt, outcome=outcome, lost_s=self._clock.now_s()))
            self._store.jobs.set_status(job.id, JobStatus.RECOVERING)
        await self._teardown.end_program(attempt, cluster, grace_s=SAVE_S_MAX)
        return True
