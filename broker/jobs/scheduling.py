"""Decide what happens to the due times of a schedule. Pure; `scheduler.py` carries out the decision.

Example, `overlap: skip`, daily at 02:00, and no controller from Monday to Thursday noon:

    previous job ended    missed Mon 02:00 (3 of them, to Wed 02:00)    started Thu 02:00
    previous job alive    missed Mon 02:00 (3 of them, to Wed 02:00)    skipped Thu 02:00
"""

from __future__ import annotations

from broker.frozen import frozen
from broker.task.due_times import find_due
from broker.types import DueOutcome, DueTime, JobSchedule, Overlap

BUSY = "the previous job was still alive"
FULL = "another due time was already waiting for the previous job"


@frozen
class DueStep:
    """The next step of a schedule: due times to record, the one to start a job for, and the next due time."""

    records: tuple[DueTime, ...]
    start_s: float | None
    next_s: float | None

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self.records and self.start_s is None


def decide_step(schedule: JobSchedule, *, waiting_s: float | None, is_busy: bool, now_s: float) -> DueStep:
    """Decide what to record and start now. `waiting_s` is the due time that waits for the previous job.

    A job starts for at most one due time: the waiting one, else the newest. Raises UsageError for a time zone that is
    unknown on this machine.
    """
    due = None if schedule.next_s is None else find_due(schedule.spec, schedule.next_s, now_s)
    if due is None:
        is_free = waiting_s is not None and not is_busy
        return DueStep(records=(), start_s=waiting_s if is_free else None, next_s=schedule.next_s)
    records: list[DueTime] = []
    if due.missed_count:
        records.append(
            DueTime(
                due_s=due.first_s, outcome=DueOutcome.MISSED, count=due.missed_count, last_s=due.last_missed_s,
                detail="no controller was running",
            )
        )  # fmt: skip
    start_s = None
    if waiting_s is not None:
        start_s = None if is_busy else waiting_s
        records.append(_hold_back(schedule, due.due_s, has_waiting=is_busy))
    elif is_busy:
        records.append(_hold_back(schedule, due.due_s, has_waiting=False))
    else:
        start_s = due.due_s
    return DueStep(records=tuple(records), start_s=start_s, next_s=due.next_s)


def _hold_back(schedule: JobSchedule, due_s: float, *, has_waiting: bool) -> DueTime:
    """Return the outcome of a due time whose job cannot start yet: it waits, or is skipped."""
    if schedule.spec.overlap is Overlap.QUEUE and not has_waiting:
        return DueTime(due_s=due_s, outcome=DueOutcome.WAITING)
    return DueTime(due_s=due_s, outcome=DueOutcome.SKIPPED, detail=FULL if has_waiting else BUSY)
