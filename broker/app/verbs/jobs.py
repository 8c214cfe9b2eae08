"""Verbs on managed jobs: list, follow, explain, wait, cancel and retry."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field

from broker.app import jobs
from broker.app.clusters import LogChunk
from broker.app.container import Context
from broker.app.deadline_chances import ChancePoint, list_chances
from broker.app.forecasts import forecast_job, forecast_jobs
from broker.app.visibility import read_visibility
from broker.errors import UsageError
from broker.frozen import frozen
from broker.jobs.node_samples import read_history
from broker.jobs.start_costs import StartCost, measure_start_cost
from broker.jobs.summary import RunSummary
from broker.state.events import EventRow
from broker.state.jobs import JobLine
from broker.state.people import Owned
from broker.types import Job, JobStatus, JobWait, NodeHistory, Secret
from broker.types.forecasts import JobForecast

FORECASTS_MAX = 10  # live jobs of a list that get a forecast; each takes as long as a plan


@frozen
class PricedJob:
    """A job, its owner on a server, and its cost so far."""

    job: Job
    spent_usd: float
    forecast: JobForecast | None = None
    wait: JobWait | None = None
    user: str | None = None


@frozen
class Queue:
    """The newest jobs and all live ones, newest first; `count` includes older ones that were left out.

    `forecasts` are those of the newest live jobs. `users`: the owner of each job on a server. `other_count`: jobs of
    other users, which were left out.
    """

    lines: tuple[JobLine, ...]
    spent_usd: Mapping[int, float]
    count: int
    forecasts: Mapping[int, JobForecast]
    waits: Mapping[int, JobWait] = field(default_factory=dict)  # of PENDING jobs; empty from an older server
    users: Mapping[int, str] = field(default_factory=dict)
    other_count: int = 0


@frozen
class JobExplanation:
    """A job with its events, the jobs that it needs, the time that recoveries took, its cost and its forecast."""

    job: Job
    events: tuple[EventRow, ...]
    summary: RunSummary
    paid_usd: float
    needs: tuple[Job, ...]
    forecast: JobForecast | None
    chances: tuple[ChancePoint, ...] = ()  # of meeting the deadline, over time; empty from an older server
    nodes: tuple[NodeHistory, ...] = ()  # reported by its nodes; empty from an older server
    wait: JobWait | None = None
    starts: StartCost | None = None


@frozen
class Cancellation:
    """A job whose end was requested; `is_live` is False if it had already ended."""

    job_id: int
    name: str
    status: JobStatus
    is_live: bool


@frozen
class Cancelled:
    """The jobs of a cancellation, and an error for every name that is unknown."""

    jobs: tuple[Cancellation, ...]
    missing: tuple[UsageError, ...]


def list_queue(context: Context, *, newest: int | None, of_all_users: bool = True) -> Queue:
    """List the `newest` jobs and every live one; all jobs if None.

    On a server, list the caller's own jobs unless `of_all_users`.
    """
    visibility = read_visibility(context, Owned.JOB, of_all_users=of_all_users)
    lines = context.store.jobs.list_lines(None if visibility.only else newest, on_damage=context.warn)
    count = all_count = context.store.jobs.count()
    if visibility.only:
        own = [line for line in lines if visibility.shows(line.id)]
        lines = [line for place, line in enumerate(own) if newest is None or place < newest or line.ended_s is None]
        count = len(own)
    context.restart_daemon_if_needed()
    spent = context.store.bills.list_spend_usd(now_s=context.clock.now_s())
    live = [line.id for line in lines if not line.status.is_terminal][:FORECASTS_MAX]
    found = [job for job_id in live if (job := context.store.jobs.get(job_id)) is not None]
    return Queue(
        lines=tuple(lines),
        spent_usd=spent,
        count=count,
        forecasts=forecast_jobs(context, found, spent),
        waits=explain_waits(context, lines),
        users={line.id: user for line in lines if (user := visibility.owners.get(str(line.id))) is not None},
        other_count=all_count - count,
    )


def list_jobs(context: Context, *, of_all_users: bool = True) -> tuple[PricedJob, ...]:
    """List all jobs in full, oldest first. On a server, list the caller's own jobs unless `of_all_users`."""
    visibility = read_visibility(context, Owned.JOB, of_all_users=of_all_users)
    found = [job for job in context.store.jobs.list(on_damage=context.warn) if visibility.shows(job.id)]
    context.restart_daemon_if_needed()
    spent = context.store.bills.list_spend_usd(now_s=context.clock.now_s())
    live = [job for job in found if not job.status.is_terminal][-FORECASTS_MAX:]
    forecasts = forecast_jobs(context, live, spent)
    waits = explain_waits(context, found)
    return tuple(
        PricedJob(
            job=job, spent_usd=spent.get(job.id, 0.0), forecast=forecasts.get(job.id), wait=waits.get(job.id),
            user=visibility.owners.get(str(job.id)),
        )
        for job in found
    )  # fmt: skip


def explain_waits(context: Context, jobs: Sequence[Job | JobLine]) -> Mapping[int, JobWait]:
    """Return the reasons why PENDING jobs among these wait. Without any, nothing is read."""
    wanted = {each.id for each in jobs if each.status is JobStatus.PENDING}
    return context.job_queue.explain(wanted) if wanted else {}


def show_job(context: Context, *, job: str) -> PricedJob:
    """Find a job by ID, or the newest job with a name. Raises UsageError if there is none."""
    return _view(context, jobs.find_job(context, job))


def find_members(context: Context, *, job: str) -> tuple[Job, ...]:
    """Find the jobs of a pipeline or job group, oldest first; empty if `job` is the ID or name of one job."""
    return tuple(jobs.list_members(context.store.jobs.list(on_damage=context.warn), job))


def _view(context: Context, job: Job) -> PricedJob:
    return PricedJob(job=job, spent_usd=context.store.bills.spend_usd(job_id=job.id, now_s=context.clock.now_s()))


def follow_log(
    context: Context,
    *,
    job: str,
    on_chunk: Callable[[LogChunk], None],
    is_following: bool = True,
    offset: int = 0,
) -> None:
    """Pass a job's output, starting at `offset`, to `on_chunk`, across recoveries, until the job ends."""
    found = jobs.find_job(context, job)
    if not is_following:
        context.restart_daemon_if_needed()
        for chunk in jobs.read_chunks(context, found.id, offset=offset):
            on_chunk(chunk)
        return

    async def follow() -> None:
        async for chunk in jobs.follow_chunks(context, found.id, offset=offset):
            on_chunk(chunk)

    asyncio.run(follow())


def list_events(context: Context, *, job: str) -> tuple[EventRow, ...]:
    """List the events of a job, oldest first."""
    context.restart_daemon_if_needed()
    return tuple(context.store.events.list(job_id=jobs.find_job(context, job).id))


def explain_job(context: Context, *, job: str) -> JobExplanation:
    """Explain the status of a job: its history, recoveries and cost."""
    context.restart_daemon_if_needed()
    explanation = jobs.explain(context, jobs.find_job(context, job))
    needs = (context.store.jobs.get(need) for need in explanation.job.needs)
    forecast = forecast_job(context, explanation.job, paid_usd=explanation.paid_usd)
    return JobExplanation(
        job=explanation.job,
        events=explanation.events,
        summary=explanation.summary,
        paid_usd=explanation.paid_usd,
        needs=tuple(other for other in needs if other),
        forecast=forecast,
        chances=list_chances(context, explanation),
        wait=explain_waits(context, [explanation.job]).get(explanation.job.id),
        nodes=read_history(context.config.logs, explanation.job.id, now_s=context.clock.now_s()),
        starts=measure_start_cost(explanation.job, forecast),
    )


def wait_for_job(context: Context, *, job: str, status: JobStatus, timeout_s: float = 0.0) -> PricedJob:
    """Wait until a job reaches a status or ends. Raises WaitTimeoutError."""
    found = jobs.find_job(context, job)
    return _view(context, asyncio.run(jobs.wait_for(context, found.id, status, timeout_s=timeout_s)))


def cancel_jobs(context: Context, *, names: tuple[str, ...], is_all: bool = False) -> Cancelled:
    """Cancel jobs by ID, name or pipeline, or all live jobs. Raises UsageError if none of the names is known."""
    known = context.store.jobs.list(on_damage=context.warn)
    wanted: list[Job] = [job for job in known if not job.status.is_terminal] if is_all else []
    missing: list[UsageError] = []
    for text in () if is_all else names:
        try:
            wanted += jobs.list_members(known, text) or [jobs.find_job(context, text)]
        except UsageError as error:
            missing.append(error)
    if missing and not wanted:
        raise missing[0]
    wanted = list({job.id: job for job in wanted}.values())  # a job may be named twice: by its ID and its name
    for job in wanted:
        context.check_owner(Owned.JOB, str(job.id))
    done = tuple(
        Cancellation(job_id=job.id, name=job.name, status=job.status, is_live=context.store.jobs.request_cancel(job.id))
        for job in wanted
    )
    if wanted:
        context.ensure_daemon()
    return Cancelled(jobs=done, missing=tuple(missing))


def retry_job(context: Context, *, job: str, secrets: Mapping[str, Secret], request_id: str | None) -> Job:
    """Resubmit an ended job, which resumes from its checkpoints."""
    given = {name: secret.value for name, secret in secrets.items()}
    return jobs.retry(context, jobs.find_job(context, job), secrets=given, request_id=request_id)


def retry_group(
    context: Context, *, job: str, secrets: Mapping[str, Secret], request_id: str | None
) -> tuple[Job, ...]:
    """Resubmit all jobs of an ended job group as a new group; `job` is the name of the group."""
    given = {name: secret.value for name, secret in secrets.items()}
    return jobs.retry_group(context, job, secrets=given, request_id=request_id)
