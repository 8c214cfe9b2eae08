"""Schedules of managed jobs: the specification in a task, the stored schedule, and the outcome of each due time."""

from __future__ import annotations

from enum import StrEnum

from broker.frozen import frozen


class Overlap(StrEnum):
    """The action at a due time while the previous job is live. The values are those of `overlap`."""

    SKIP = "skip"
    QUEUE = "queue"  # start when the previous job has ended; at most one due time waits


@frozen
class ScheduleSpec:
    """The times when a task starts: five cron fields in a time zone. `until` is a local date or time, inclusive."""

    cron: str
    timezone: str = "UTC"
    overlap: Overlap = Overlap.SKIP
    until: str | None = None


class DueOutcome(StrEnum):
    """The outcomes of a due time. The values are stored, and shown by `--json`."""

    STARTED = "started"
    WAITING = "waiting"  # for the end of the previous job
    SKIPPED = "skipped"  # the previous job was alive, or another due time waited
    MISSED = "missed"  # no controller was running, and a later due time was processed instead
    REFUSED = "refused"  # like a launch: by a limit or a setting, or because nothing fits


@frozen
class DueTime:
    """The outcome of one due time; a `missed` one represents `count` of them, up to `last_s`."""

    due_s: float
    outcome: DueOutcome
    job_id: int | None = None
    detail: str = ""
    count: int = 1
    last_s: float | None = None


@frozen
class Payee:
    """The user and project against whose limits the jobs of a schedule count; empty without a server."""

    user: str = ""
    project: str = ""


@frozen
class JobSchedule:
    """A stored schedule. `next_s` is None if it has ended because no due time remains.

    `user` and `project` come from the token that created it on a server, and are empty otherwise.
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
