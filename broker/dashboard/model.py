"""Define the read model of the pages, `broker top` and `/metrics`. It reads the store and never writes to it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from itertools import islice
from typing import TYPE_CHECKING

from broker.app.container import Context
from broker.app.limits import LimitUse, list_uses
from broker.errors import DamagedRowError
from broker.frozen import frozen
from broker.jobs.node_samples import read_history, read_usages
from broker.state.jobs import JobLine
from broker.types import Attempt, Cluster, ClusterStatus, EventKind, Job, JobStatus, JobUsage, NodeHistory

if TYPE_CHECKING:
    from broker.app.deadline_chances import ChancePoint
    from broker.app.jobs import Explanation
    from broker.state.events import EventRow
    from broker.state.store import Store

NEWEST = 50  # jobs and attention rows on a page
SCANNED_MAX = 1000  # jobs whose newest event is read for the attention list
FAILED_HOURS = 24.0  # how long a failed job requires attention
ATTENTION_KINDS = (  # a live job whose newest event is of one of these kinds may require attention
    EventKind.LATE, EventKind.WAITING, EventKind.UNSEEN, EventKind.UNFIT, EventKind.LAUNCH_RETRIED,
    EventKind.REPLACEMENT_FAILED, EventKind.ACCESS_NOT_RENEWED, EventKind.CALL_FAILED,
    EventKind.LOGIN_NEEDED,
)  # fmt: skip


@frozen
class JobRow:
    """A job in a list, with its cost so far."""

    line: JobLine
    spent_usd: float
    usage: JobUsage | None = None  # of its nodes now
    budget_usd: float | None = None


@frozen
class Attention:
    """A job that may require attention, and the event or failure that explains why."""

    job_id: int
    name: str
    status: JobStatus
    reason: str


@frozen
class Overview:
    """Live jobs and clusters, cost, and the jobs that require attention. Days and months are in local time."""

    now_s: float
    spent_usd: float
    today_usd: float
    month_usd: float
    month_ondemand_usd: float | None  # this month's machines at on-demand prices; None if not requested
    usd_hour: float  # of the nodes that are billed now
    counts: Mapping[str, int]  # jobs by status
    attention: tuple[Attention, ...]
    jobs: tuple[JobRow, ...]  # the live ones, then those that ended; newest first
    clusters: tuple[Cluster, ...]
    cluster_usd: Mapping[str, float]
    limits: tuple[LimitUse, ...] = ()  # of a server's users and projects
    failed_services: Mapping[str, str] = field(default_factory=dict)  # name -> reason

    @property
    def month_saved_usd(self) -> float | None:
        """USD saved this month compared with the same machines on-demand; repeated work is not subtracted."""
        return None if self.month_ondemand_usd is None else self.month_ondemand_usd - self.month_usd

    @property
    def job_count(self) -> int:
        """Number of jobs in any status."""
        return sum(self.counts.values())

    @property
    def running_count(self) -> int:
        """Number of jobs whose program runs."""
        return self.counts.get(JobStatus.RUNNING.value, 0)

    @property
    def live_count(self) -> int:
        """Number of jobs that have not ended."""
        return sum(count for status, count in self.counts.items() if not JobStatus(status).is_terminal)


def read_overview(
    context: Context, *, newest: int = NEWEST, usage_max: int = NEWEST, has_ondemand: bool = True
) -> Overview:
    """Read the overview; damaged rows are reported to `context.note` and left out.

    `usage_max`: the number of newest jobs for which the samples of their nodes are read.
    """
    store, now_s = context.store, context.clock.now_s()
    midnight_s, month_s = find_starts(now_s)
    lines = store.jobs.list_lines(newest, limit=max(newest, SCANNED_MAX), on_damage=context.warn)
    shown = [line.id for line in lines[:newest]]
    spent = store.bills.list_spend_usd(shown, now_s=now_s)
    clusters = store.clusters.list(on_damage=context.warn, with_jobs=False)
    usage = read_usages(context.config.logs, lines[:usage_max], now_s=now_s)
    budgets = store.jobs.list_goals(shown)
    sums = store.bills.sum_spend(midnight_s=midnight_s, month_s=month_s, now_s=now_s)
    return Overview(
        now_s=now_s,
        spent_usd=sums.total_usd,
        today_usd=sums.today_usd,
        month_usd=sums.month_usd,
        month_ondemand_usd=store.bills.ondemand_since_usd(month_s, now_s=now_s) if has_ondemand else None,
        usd_hour=sums.usd_hour,
        counts=store.jobs.count_by_status(),
        attention=tuple(islice(list_attention(store, lines[:SCANNED_MAX], now_s), newest)),
        jobs=tuple(
            JobRow(
                line=line, spent_usd=spent.get(line.id, 0.0), usage=usage.get(line.id), budget_usd=budgets.get(line.id)
            )
            for line in lines[:newest]
        ),
        clusters=tuple(clusters),
        limits=tuple(list_uses(store)),
        failed_services=store.services.list_failures(),
        cluster_usd={each.name: store.bills.spend_usd(cluster=each.name, now_s=now_s) for each in clusters},
    )


def find_starts(now_s: float) -> tuple[float, float]:
    """Return when today and this month began in local time, in seconds since the epoch."""
    day = time.localtime(now_s)
    begin = (0, 0, 0, 0, 0, -1)
    midnight_s = time.mktime((day.tm_year, day.tm_mon, day.tm_mday, *begin))
    return midnight_s, time.mktime((day.tm_year, day.tm_mon, 1, *begin))


def list_attention(store: Store, lines: Sequence[JobLine], now_s: float) -> Iterator[Attention]:
    """List jobs that wait, are late or cannot be reached, and those that failed within a day."""
    live = [line.id for line in lines if not line.status.is_terminal]
    newest = store.events.list_newest(live, kinds=ATTENTION_KINDS)
    for line in lines:
        if line.ended_s is not None and now_s - line.ended_s < FAILED_HOURS * 3600 and "FAILED" in line.status.value:
            job = store.jobs.get(line.id)
            yield Attention(job_id=line.id, name=line.name, status=line.status, reason=job.failure if job else "")
        elif (event := newest.get(line.id)) is not None:
            yield Attention(job_id=line.id, name=line.name, status=line.status, reason=event.message)


@frozen
class AttemptRow:
    """An attempt with its cost and the steps that it reached."""

    attempt: Attempt
    usd: float
    first_step: int | None
    last_step: int | None
    checkpoint_step: int | None
    lost_steps: int  # repeated by the next attempt


@frozen
class JobPage:
    """The data shown on the page of one job."""

    now_s: float
    explanation: Explanation
    attempts: tuple[AttemptRow, ...]
    chances: tuple[ChancePoint, ...] = ()  # of the deadline, oldest first
    nodes: tuple[NodeHistory, ...] = ()  # samples of its nodes
    reasons: tuple[str, ...] = ()  # sentences that explain its status
    expectations: tuple[str, ...] = ()  # sentences about its remainder

    @property
    def job(self) -> Job:
        """The job that the page shows."""
        return self.explanation.job

    @property
    def decisions(self) -> Sequence[EventRow]:
        """The decisions of the spot policy, newest first."""
        return [event for event in reversed(self.explanation.events) if event.kind is EventKind.DECISION]


def read_job(context: Context, job: Job) -> JobPage:
    """Read a job's page."""
    from broker.app.job_sentences import list_reasons
    from broker.app.jobs import explain
    from broker.app.verbs.jobs import explain_waits

    now_s, explanation = context.clock.now_s(), explain(context, job)
    steps = {each.number: each for each in explanation.summary.attempts}
    rows = []
    for attempt in explanation.job.attempts:
        reached = steps.get(attempt.number)
        rows.append(
            AttemptRow(
                attempt=attempt,
                usd=attempt.usd,
                first_step=None if reached is None else reached.first_step,
                last_step=None if reached is None else reached.last_step,
                checkpoint_step=None if reached is None else reached.checkpoint_step,
                lost_steps=0 if reached is None else reached.steps_lost,
            )
        )
    nodes = read_history(context.config.logs, job.id, now_s=now_s)
    needs, wait = list[Job](), None
    try:
        needs += [other for need in job.needs if (other := context.store.jobs.get(need)) is not None]
        wait = explain_waits(context, [job]).get(job.id)
    except DamagedRowError as error:  # of a job that it depends on
        context.warn(error)
    reasons = list_reasons(job, paid_usd=explanation.paid_usd, wait=wait, needs=needs, now_s=now_s)
    return JobPage(
        now_s=now_s, explanation=explanation, attempts=tuple(rows), nodes=nodes, reasons=tuple(reasons),
    )  # fmt: skip


@frozen
class PlaceRow:
    """Observations of one place: this installation's time on spot there."""

    cloud: str
    region: str
    zone: str | None
    instance_type: str
    stays: int
    hours: float
    preemptions: int

    @property
    def hazard_per_hour(self) -> float | None:
        """Preemptions per gang-hour; None without hours."""
        return self.preemptions / self.hours if self.hours > 0 else None


def list_places(store: Store) -> Sequence[PlaceRow]:
    """List the locations where broker ran on spot, the most preempted first."""
    rows = [
        PlaceRow(
            cloud=each.place[0], region=each.place[1], zone=each.place[2], instance_type=each.place[3],
            stays=each.stays, hours=each.hours, preemptions=each.preemptions,
        )
        for each in store.history.sum_stays()
    ]  # fmt: skip
    return sorted(rows, key=lambda row: (-row.preemptions, -row.hours))


def measure_rate_usd_hour(cluster: Cluster) -> float:
    """Return the current cost of a cluster per hour: 0 while it is stopped."""
    return 0.0 if cluster.status is ClusterStatus.STOPPED else cluster.placement.usd_hour
