"""Schedules of managed jobs: what a task says, what is stored, and what became of each due time."""

from __future__ import annotations

from enum import StrEnum

from broker.frozen import frozen


class Overlap(StrEnum):
    """What happens at a due time while the previous job is alive. The values are the words of `overlap`."""

    SKIP = "skip"
    QUEUE = "queue"  # it starts when the previous job has ended; at most one due time waits


@frozen
class ScheduleSpec:
    """When a task starts: five cron fields in a time zone. `until` is a local date or time, the last one included."""

    cron: str
    timezone: str = "UTC"
    overlap: Overlap = Overlap.SKIP
    until: str | None = None


class DueOutcome(StrEnum):
    """What became of a due time. The values are stored, and shown by `--json`."""

    STARTED = "started"
    WAITING = "waiting"  # for the end of the previous job
    SKIPPED = "skipped"  # the previous job was alive, or another due time waited
    MISSED = "missed"  # no controller ran, and a later due time was caught up instead
    REFUSED = "refused"  # as a launch is: by a limit, by a setting, or because nothing fits


@frozen
class DueTime:
    """What became of one due time; a `missed` one stands for `count` of them, up to `last_s`."""

    due_s: float
    outcome: DueOutcome
    job_id: int | None = None
    detail: str = ""
    count: int = 1
    last_s: float | None = None


@frozen
class JobSchedule:
    """A stored schedule. `next_s` None: it has ended, as no due time is left.

    `user` and `project` are those of the token that created it on a server, otherwise empty.
    """

    name: str
    uid: str
    spec: ScheduleSpec
    next_s: float | None
    is_paused: bool
    created_s: float
    hedge: int
    user: str = ""
    project: str = ""
