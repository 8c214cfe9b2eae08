"""Turn an event of a job into a notification, and choose its sinks. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from enum import StrEnum

from broker.formatting import strip_control
from broker.frozen import frozen
from broker.notify.settings import DEFAULT_KINDS
from broker.state.events import EventRow
from broker.types import EventKind, Job, JobStatus, NotificationKind, NotifySpec

# `ended` and `failed` depend on the status.
KINDS = {
    EventKind.ENDED: NotificationKind.ENDED,
    EventKind.ATTEMPT_LOST: NotificationKind.PREEMPTED,
    EventKind.LEASE_EXPIRED: NotificationKind.PREEMPTED,
    EventKind.SLOT_RETURNED: NotificationKind.PREEMPTED,
    EventKind.RECOVERED: NotificationKind.RECOVERED,
    EventKind.LATE: NotificationKind.DEADLINE,
    EventKind.UNSEEN: NotificationKind.ATTENTION,
    EventKind.LOGIN_NEEDED: NotificationKind.ATTENTION,
    EventKind.ACCESS_NOT_RENEWED: NotificationKind.ATTENTION,
}
# The status of a job from this event on, for `event_callback`. For `ended`, the event has the status.
STATUSES = {
    EventKind.ATTEMPT: JobStatus.STARTING,
    EventKind.STARTED: JobStatus.RUNNING,
    EventKind.ATTEMPT_IN_PLACE: JobStatus.STARTING,
    EventKind.ATTEMPT_LOST: JobStatus.RECOVERING,
    EventKind.LEASE_EXPIRED: JobStatus.RECOVERING,
    EventKind.SLOT_RETURNED: JobStatus.PENDING,
    EventKind.PROGRAM_RESTARTED: JobStatus.RECOVERING,
    EventKind.STALL_RESTARTED: JobStatus.RECOVERING,
    EventKind.GANG_RESTARTED: JobStatus.RECOVERING,
    EventKind.GROUP_RESTARTED: JobStatus.RECOVERING,
}
NOTABLE = tuple(dict.fromkeys((*KINDS, *STATUSES)))


class SinkKind(StrEnum):
    """The ways to deliver a notification."""

    WEBHOOK = "webhook"
    SLACK = "slack"
    MAIL = "mail"
    COMMAND = "command"  # the task's `event_callback`, run on the daemon's machine


@frozen
class Sink:
    """A destination. `target`, which may contain a secret, is a URL, an address or a command as the user wrote it.

    `is_limited`: a user of a shared server wrote the URL, which therefore may not lead into the server's machine.
    """

    kind: SinkKind
    target: str
    job_id: int | None = None  # of a command: those of different jobs do not wait for each other
    is_limited: bool = False

    @property
    def key(self) -> str:
        """Return a name of the sink that does not reveal its target."""
        text = f"{self.kind.value} {self.job_id} {self.target}" + (" limited" if self.is_limited else "")
        return hashlib.sha256(text.encode()).hexdigest()[:20]

    def __repr__(self) -> str:
        return f"Sink({self.kind.value}, {self.key})"


@frozen
class Notification:
    """A notification. `id` stays the same if it is sent again; `kind` is None for a mere change of status."""

    id: str
    event_id: int
    event: EventKind
    kind: NotificationKind | None
    time_s: float
    job_id: int
    job_name: str
    status: JobStatus | None
    text: str
    stem: str
    cluster: str = ""


def make_notification(row: EventRow, job: Job, *, lineage: str) -> Notification:
    """Describe an event of a job. The id depends on the content, so that no other event gets it after a restore."""
    status = STATUSES.get(row.kind)
    kind = KINDS.get(row.kind)
    if row.kind is EventKind.ENDED:
        status = _read_status(row.data.get("status"))
        if status is not None and status.value.startswith("FAILED"):
            kind = NotificationKind.FAILED
    content = "|".join((lineage, str(row.id), repr(row.time_s), row.kind.value, job.stem))
    return Notification(
        id=f"broker-{hashlib.sha256(content.encode()).hexdigest()[:24]}",
        event_id=row.id,
        event=row.kind,
        kind=kind,
        time_s=row.time_s,
        job_id=job.id,
        job_name=job.name,
        stem=job.stem,
        status=status,
        text=strip_control(f"job {job.id} ({job.name}): {row.message}"),
        cluster=job.attempts[-1].cluster if job.attempts else "",
    )


def _read_status(value: object) -> JobStatus | None:
    try:
        return JobStatus(str(value))
    except ValueError:
        return None  # a damaged row


def choose_sinks(
    notification: Notification, job: Job, default: NotifySpec, *, is_shared: bool = False
) -> Sequence[Sink]:
    """Return the sinks of a notification: those of the task, or of `default` for settings that the task omits.

    `is_shared`: this is a server, whose operator wrote `default`, and its users the tasks.
    """
    own = job.task.notify or NotifySpec()
    wanted = own.on if own.on is not None else default.on if default.on is not None else DEFAULT_KINDS
    kind = notification.kind
    is_wanted = kind in wanted or (kind is NotificationKind.FAILED and NotificationKind.ENDED in wanted)
    sinks: list[Sink] = []
    if kind is not None and is_wanted:
        if webhook := own.webhook or default.webhook:
            is_limited = is_shared and bool(own.webhook)
            sinks.append(Sink(kind=SinkKind.WEBHOOK, target=webhook, is_limited=is_limited))
        if slack := own.slack or default.slack:
            sinks.append(Sink(kind=SinkKind.SLACK, target=slack, is_limited=is_shared and bool(own.slack)))
        sinks += [Sink(kind=SinkKind.MAIL, target=each) for each in dict.fromkeys(own.mail or default.mail)]
    if job.task.event_callback and notification.status is not None:
        sinks.append(Sink(kind=SinkKind.COMMAND, target=job.task.event_callback, job_id=job.id))
    return sinks
