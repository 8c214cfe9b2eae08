"""Forecasts of jobs: of live ones from their remaining work, and of ended ones compared with their outcomes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from broker.app.container import INTERVAL_FACTOR, Context
from broker.app.known_starts import find_restart_s
from broker.app.planning import plan_launch
from broker.errors import BrokerError
from broker.frozen import frozen
from broker.jobs.replanning import cut_to_rest, measure_begun_start
from broker.jobs.scoring import ForecastScore, JudgedForecast, score_forecasts
from broker.optimizer.data_cost import measure_restore_s
from broker.types import Job, JobStatus, Plan, Task
from broker.types.forecasts import NOT_BEGUN, BegunStart, JobForecast, Range


def submit(
    context: Context,
    tasks: Sequence[Task],
    plans: Sequence[Plan],
    *,
    name: str | None,
    request_id: str | None,
    hedge: int,
) -> Sequence[Job]:
    """Submit tasks as managed jobs, as `submit_tasks` does, and store the owner and forecast of each job."""
    from broker.jobs.submission import list_request_ids, submit_tasks
    from broker.optimizer.forecast import record_forecast

    with context.store.transaction():
        if request_id is not None:
            context.check_requests(list_request_ids(request_id, len(tasks)))
        found = submit_tasks(context.store, tasks, name=name, request_id=request_id, hedge=hedge)
        context.own_jobs(found)
        for job, plan in zip(found, plans, strict=True):
            if (forecast := record_forecast(plan)) is not None:
                context.store.forecasts.add(job.id, forecast)
    return found


def forecast_job(context: Context, job: Job, *, paid_usd: float) -> JobForecast | None:
    """Forecast the remainder of a live job from its last checkpoint, as `broker plan` would, on the machines it has.

    Return None for an ended job, a task without a known amount of work, a started job whose program reports no
    progress, and if no placement fits any more.
    """
    goal = job.task.goal
    if job.status.is_terminal or job.status is JobStatus.CANCELLING or goal is None or goal.work_hours is None:
        return None
    if job.attempts and (job.progress is None or not job.progress.total):
        return None
    plan = plan_goal(context, job, paid_usd=paid_usd)
    if plan is None:
        return None
    begun = measure_begun_start(job, start_hours=read_start_hours(plan), now_s=context.clock.now_s())
    hours = (context.clock.now_s() - job.submitted_s) / 3600
    left_hours = None if goal.deadline_hours is None else max(goal.deadline_hours - hours, 0.0)
    return read_rest(plan, paid_usd, begun, deadline_hours=left_hours)


def plan_goal(context: Context, job: Job, *, paid_usd: float) -> Plan | None:
    """Plan the remainder of a live job, or all of an ended one; None if no work remains or nothing fits.

    No placement is rejected for its chance of meeting the deadline, because callers compute that chance. Each plan
    begins with a start: a job that runs on-demand is given the time of the start that its machines have behind them.
    """
    task, begun = job.task, NOT_BEGUN
    if not job.status.is_terminal:
        restart_s, now_s = find_restart_s(context, job.task, job), context.clock.now_s()
        task = cut_to_rest(job, now_s=now_s, spent_usd=paid_usd, restart_s=restart_s)
        start_s = task.checkpoint.restart_s + measure_restore_s(task.checkpoint.size_gib)
        begun = measure_begun_start(job, start_hours=start_s / 3600, now_s=now_s)
    if task.goal is None or not task.goal.work_hours:
        return None
    goal = replace(task.goal, keeps_late=True, budget_usd=None)
    if goal.deadline_hours is not None and not begun.is_spot:
        goal = replace(goal, deadline_hours=goal.deadline_hours + begun.hours)
    return _plan_rest(context, job, replace(task, goal=goal))


def forecast_jobs(context: Context, jobs: Sequence[Job], spent_usd: Mapping[int, float]) -> Mapping[int, JobForecast]:
    """Return the forecast of each job by ID; jobs without a forecast are omitted."""
    found = {job.id: forecast_job(context, job, paid_usd=spent_usd.get(job.id, 0.0)) for job in jobs}
    return {job_id: forecast for job_id, forecast in found.items() if forecast is not None}


def _plan_rest(context: Context, job: Job, rest: Task) -> Plan | None:
    """Plan on the clouds that are set up here, else on those that the job has used; None if nothing fits."""
    used = frozenset(each.placement.offer.cloud for each in job.attempts)
    try:
        return plan_launch(context, rest)
    except BrokerError:
        try:
            return context.plan(rest, usable_clouds=used) if used else None
        except BrokerError:
            return None


def read_start_hours(plan: Plan) -> float:
    """Return the hours of the first start of a plan."""
    parts = plan.choice.breakdown
    return 0.0 if parts is None else parts.recovery_s / 3600


def read_rest(plan: Plan, paid_usd: float, begun: BegunStart, *, deadline_hours: float | None) -> JobForecast:
    """Return the forecast of the rest of a job, of whose first start the part `begun` is over and paid.

    If the plan chooses on-demand, machines running on spot are left and new ones start; else, on-demand ones continue.
    """
    from broker.optimizer.forecast import find_deadline_chances, forecast_plan

    found, choice, goal = forecast_plan(plan), plan.choice, plan.task.goal
    if begun.is_spot and not choice.placement.is_spot:
        begun = NOT_BEGUN
    assert goal is not None and goal.work_hours and choice.breakdown is not None
    unbilled_hours = (choice.breakdown.recovery_s - choice.breakdown.recovery_billed_s) / 3600
    usd = paid_usd - max(begun.hours - unbilled_hours, 0.0) * choice.placement.usd_hour
    chance = None
    if deadline_hours is not None:
        chance, _ = find_deadline_chances(plan, work_hours=goal.work_hours, deadline_hours=deadline_hours, begun=begun)
    if found is None:  # on-demand, whose cost and time are certain
        usd, hours = usd + (choice.expected_usd or 0.0), (choice.expected_hours or 0.0) - begun.hours
        return JobForecast(
            usd=Range(p10=usd, p50=usd, p90=usd),
            hours_left=Range(p10=hours, p50=hours, p90=hours),
            deadline_chance=chance,
            interval_factor=1.0,
        )
    return JobForecast(
        usd=_shift(found.usd, usd, least=paid_usd),
        hours_left=_shift(found.hours, -begun.hours, least=0.0),
        deadline_chance=chance,
        interval_factor=plan.interval_factor,
        preemptions=found.preemptions,
    )


def _shift(values: Range, by: float, *, least: float) -> Range:
    return Range(p10=max(values.p10 + by, least), p50=max(values.p50 + by, least), p90=max(values.p90 + by, least))


def list_judged(context: Context) -> list[JudgedForecast]:
    """List the succeeded jobs that have a stored forecast, oldest first.

    Time spent waiting for other jobs of a pipeline or for a slot is separate, as forecasts know nothing of it.
    """
    store = context.store
    forecasts = store.forecasts.list()
    if not forecasts:
        return []
    spent = store.bills.list_spend_usd(now_s=context.clock.now_s())
    waits = store.forecasts.list_waits()
    return [
        JudgedForecast(
            job_id=line.id,
            name=line.name,
            forecast=forecasts[line.id],
            usd=spent.get(line.id, 0.0),
            hours=max(line.ended_s - line.submitted_s - waits.get(line.id, 0.0), 0.0) / 3600,
            waited_hours=waits.get(line.id, 0.0) / 3600,
        )
        for line in sorted(store.jobs.list_lines(on_damage=context.warn), key=lambda each: each.id)
        if line.id in forecasts and line.status is JobStatus.SUCCEEDED and line.ended_s is not None
    ]


@frozen
class PaidForecast:
    """The mean cost that was forecast at a job's submission, and the cost paid once it had succeeded."""

    job_id: int
    name: str
    forecast_usd: float
    paid_usd: float

    @property
    def ratio(self) -> float:
        """Paid over forecast cost; 1 if the forecast was exact."""
        return self.paid_usd / self.forecast_usd


def list_paid(context: Context) -> Sequence[PaidForecast]:
    """List the forecast and paid cost of succeeded jobs, newest first; jobs without a forecast are omitted."""
    return [
        PaidForecast(job_id=each.job_id, name=each.name, forecast_usd=each.forecast.usd_mean, paid_usd=each.usd)
        for each in reversed(list_judged(context))
        if each.forecast.usd_mean > 0
    ]


def score_own_forecasts(context: Context) -> ForecastScore:
    """Score the forecasts of own jobs, and store the factor by which later plans widen their intervals.

    Called at each submission, before its transaction: with many ended jobs it takes seconds, in which no other process
    could write.
    """
    found = score_forecasts(list_judged(context))
    known = context.store.meta.get(INTERVAL_FACTOR)
    if float(known or 1.0) != found.interval_factor:
        context.store.meta.put(INTERVAL_FACTOR, repr(found.interval_factor))
    return found
