"""Sentences about a managed job for `broker jobs why` and its page: the reason for its status, and its forecast."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from broker.formatting import format_duration, format_hours, format_usd
from broker.types import Job, JobStatus
from broker.wording import describe_wait

if TYPE_CHECKING:
    from broker.jobs.start_costs import StartCost
    from broker.types import JobWait
    from broker.types.forecasts import JobForecast

USD_MIN = 0.01  # smaller savings are not mentioned
# What each status means.
MEANING = {
    JobStatus.PENDING: "is waiting for the jobs it depends on, or for capacity",
    JobStatus.STARTING: "is acquiring its nodes",
    JobStatus.RUNNING: "is running",
    JobStatus.RECOVERING: "is recovering: on its nodes if they are usable, otherwise on new ones",
    JobStatus.CANCELLING: "was cancelled; its nodes are being terminated",
    JobStatus.SUCCEEDED: "succeeded",
    JobStatus.CANCELLED: "was cancelled",
    JobStatus.FAILED: "failed",
    JobStatus.FAILED_SETUP: "failed in `setup`, before `run`",
    JobStatus.FAILED_PRECHECKS: "could not be started",
    JobStatus.FAILED_NO_RESOURCE: "found no matching offer",
    JobStatus.FAILED_CONTROLLER: "failed because of a bug in broker",
}


def list_reasons(
    job: Job, *, paid_usd: float, wait: JobWait | None, needs: Sequence[Job], now_s: float
) -> Iterator[str]:
    """Yield sentences that explain the status of a job; `needs` are the jobs that it depends on."""
    reason = f": {job.failure}" if job.failure else ""
    clause = describe_wait(wait, now_s=now_s) if wait is not None else ""
    meaning = "is waiting" if clause and job.status is JobStatus.PENDING else MEANING[job.status]
    yield f"Job {job.id} ({job.name}) {meaning}{reason}."
    if not job.status.is_terminal and (sentence := _describe_allowance(job, paid_usd, now_s)):
        yield f"It {sentence}."
    if clause:
        yield f"It waits {clause}."
    if job.resumes:
        yield f"It continues from the checkpoints of job {job.resumes}."
    if job.task.group is not None:
        yield f"{explain_role(job)}."
    for other in needs:
        yield f"It depends on job {other.id} ({other.name}): {other.status.value}."


def list_expectations(job: Job, *, forecast: JobForecast | None, starts: StartCost | None) -> Iterator[str]:
    """Yield sentences about the rest of a job: its cost, time and deadline, and the cost of its starts."""
    if forecast is not None:
        yield f"Forecast: {describe_forecast(forecast)}."
    if starts is not None and (sentence := describe_starts(starts)):
        yield f"{sentence}."
        if starts.left_usd is not None and job.task.setup and not job.task.recovery.caches_setup:
            yield "`job_recovery: {cache_setup: true}` lets later starts restore what `setup` wrote."


def describe_starts(starts: StartCost) -> str:
    """Return what a shorter setup would save or would have saved; empty if less than a cent."""
    lasted = format_duration(starts.mean_s)
    each = f"{lasted} at its start" if starts.count == 1 else f"{lasted} at each of {starts.count} starts"
    spent = f"`setup`, data and restore took {each}"
    if starts.starts_left is None or starts.left_usd is None:
        return "" if starts.paid_usd < USD_MIN else f"{spent} and cost {format_usd(starts.paid_usd)} USD"
    if starts.left_usd < USD_MIN:
        return ""
    return (
        f"{spent}; if they took half as long, the {starts.starts_left:.1f} starts still expected would cost "
        f"{format_usd(starts.left_usd / 2)} USD less"
    )


def explain_role(job: Job) -> str:
    """Return a job's role in its group, and the effect of its loss on the other tasks."""
    role = job.task.group
    assert role is not None, "only called for jobs of a group"
    part = "a primary" if role.is_primary else "an auxiliary"
    others = "restart" if role.may_restart_group else "continue"
    return f"It is {part} task of group {job.pipeline}; if it is lost, the other tasks {others}"


def describe_forecast(forecast: JobForecast) -> str:
    """Return total cost and remaining time (p50, p10 to p90), and the chance of meeting the deadline."""
    from broker.optimizer.explain import show_chance

    usd, hours = forecast.usd, forecast.hours_left
    chance = forecast.deadline_chance
    return (
        f"{format_usd(usd.p50)} USD ({format_usd(usd.p10)} to {format_usd(usd.p90)}) in total, "
        f"{format_hours(hours.p50)} ({format_hours(hours.p10)} to {format_hours(hours.p90)}) left"
        + ("" if chance is None else f", {show_chance(chance)} to meet the deadline")
    )


def _describe_allowance(job: Job, paid_usd: float, now_s: float) -> str:
    """Describe what happens to the job's nodes while this machine is unavailable; empty if they are processes on it."""
    from broker.jobs.allowance import describe_allowance, measure_allowance_s
    from broker.jobs.checkpoints import HERE

    placement = job.attempts[-1].placement if job.attempts else None
    if placement is None or placement.offer.cloud == HERE:
        return ""
    allowed_s = measure_allowance_s(
        job.task, usd_hour=placement.usd_hour, spent_usd=paid_usd, submitted_s=job.submitted_s, now_s=now_s
    )
    return describe_allowance(allowed_s, placement.offer.cloud)
