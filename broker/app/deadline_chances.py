"""The chance of meeting a job's deadline, at each recorded moment of its past.

The current forecast is applied to the work and the time that remained at that moment.

Nothing is stored for it. The attempts and the spot policy's decisions show how much work was saved at which time;
prices and market data are current.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from enum import StrEnum

from broker.app.container import Context
from broker.app.forecasts import plan_goal, read_start_hours
from broker.app.jobs import Explanation
from broker.frozen import frozen
from broker.jobs.replanning import cut_to_rest, measure_begun_start
from broker.state.history import StepRange
from broker.types import Attempt, EventKind, Job, JobStatus, Progress

POINTS_MAX = 60  # the first, the last and the most recent ones in between


class Moment(StrEnum):
    """The recorded fact that a point belongs to."""

    SUBMITTED = "submitted"
    STARTED = "started"
    LOST = "lost"
    DECIDED = "decided"
    NOW = "now"


@frozen
class ChancePoint:
    """The remaining work of a job at one moment, and the chance of meeting its deadline from there.

    `work_left_hours` excludes work since the newest checkpoint. `spot_chance` is the chance if the job stays on spot
    to the end; None if the plan does not use spot.
    """

    time_s: float
    moment: Moment
    work_left_hours: float
    time_left_hours: float
    chance: float
    spot_chance: float | None


def list_chances(context: Context, explanation: Explanation) -> tuple[ChancePoint, ...]:
    """List the chance of meeting the deadline at each recorded moment, oldest first.

    Empty without a deadline or without work.
    """
    from broker.optimizer.forecast import find_deadline_chances

    job = explanation.job
    goal = job.task.goal
    if goal is None or not goal.work_hours or goal.deadline_hours is None:
        return ()
    plan = plan_goal(context, job, paid_usd=explanation.paid_usd)
    if plan is None:
        return ()
    points = []
    now_s = context.clock.now_s()
    moments = sorted(_list_moments(explanation, context.store.jobs.list_steps(job.id), now_s), key=lambda each: each[0])
    kept = moments if len(moments) <= POINTS_MAX else [moments[0], *moments[1 - POINTS_MAX :]]
    for time_s, moment, then in kept:
        rest = cut_to_rest(then, now_s=time_s, spent_usd=0.0).goal
        assert rest is not None and rest.work_hours is not None and rest.deadline_hours is not None
        chance, spot_chance = find_deadline_chances(
            plan, work_hours=rest.work_hours, deadline_hours=rest.deadline_hours,
            begun=measure_begun_start(then, start_hours=read_start_hours(plan), now_s=time_s),
        )  # fmt: skip
        points.append(
            ChancePoint(
                time_s=time_s, moment=moment, work_left_hours=rest.work_hours,
                time_left_hours=goal.deadline_hours - (time_s - job.submitted_s) / 3600,
                chance=chance, spot_chance=spot_chance,
            )
        )  # fmt: skip
    return tuple(points)


def _list_moments(
    explanation: Explanation, steps: Mapping[int, StepRange], now_s: float
) -> Iterator[tuple[float, Moment, Job]]:
    """Yield each moment with the job as it was then: its earlier attempts, and the progress that was saved."""
    job = explanation.job
    total = job.progress.total if job.progress else None
    yield job.submitted_s, Moment.SUBMITTED, replace(job, attempts=(), progress=None)
    if job.attempts and not total:
        return  # the program does not report its progress
    for attempt in job.attempts:
        yield attempt.started_s, Moment.STARTED, _reconstruct_job(job, steps, attempt.started_s)
        end_s = attempt.lost_s or attempt.ended_s
        if end_s is not None:
            yield end_s, Moment.LOST, _reconstruct_job(job, steps, end_s)
    assert job.task.goal is not None and job.task.goal.work_hours
    for event in explanation.events:
        left = event.data.get("work_left_hours")
        if event.kind is EventKind.DECISION and total and isinstance(left, int | float):
            done = round((1 - left / job.task.goal.work_hours) * total)
            yield event.time_s, Moment.DECIDED, _make_past(job, event.time_s, saved_step=done)
    if not job.status.is_terminal and job.status is not JobStatus.CANCELLING:
        yield now_s, Moment.NOW, job


def _reconstruct_job(job: Job, steps: Mapping[int, StepRange], time_s: float) -> Job:
    """Return the job as of an attempt's start or end, when the checkpoints of all ended attempts are known."""

    def is_over(attempt: Attempt) -> bool:
        end_s = attempt.lost_s or attempt.ended_s
        return end_s is not None and end_s <= time_s

    saved = [steps[each.number].checkpoint_step or 0 for each in job.attempts if each.number in steps and is_over(each)]
    return _make_past(job, time_s, saved_step=max(saved, default=0))


def _make_past(job: Job, time_s: float, *, saved_step: int) -> Job:
    total = job.progress.total if job.progress else None
    return replace(
        job,
        attempts=tuple(each for each in job.attempts if each.started_s <= time_s),
        progress=Progress(step=saved_step, total=total, checkpoint_step=saved_step),
    )
