"""Order recovery placements and compute the remaining work. Pure: plans, attempts and progress in, plan or task out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from broker.optimizer.data_cost import measure_restore_s
from broker.types import Attempt, Estimate, Job, Placement, Plan, Task
from broker.types.forecasts import NOT_BEGUN, BegunStart


def order_plan(plan: Plan, attempts: Sequence[Attempt]) -> Plan:
    """Return the plan ordered by the task's recovery strategy, relative to the last attempt's place."""
    if not attempts:
        return plan
    last = attempts[-1].placement
    strategy = plan.task.recovery.strategy

    def rank(estimate: Estimate) -> int:
        """Return the sort key; the sort is stable, so equal ranks stay cheapest first."""
        if strategy == "cheapest":
            return 0
        if strategy == "eager_next_region":
            return int(_is_region(estimate.placement, last))
        return _count_differences(estimate.placement, last)

    return replace(plan, estimates=tuple(sorted(plan.estimates, key=rank)))


def _is_region(a: Placement, b: Placement) -> bool:
    return (a.offer.cloud, a.offer.region) == (b.offer.cloud, b.offer.region)


def _count_differences(a: Placement, b: Placement) -> int:
    """Return 0 for the same place, 1 for the same machines elsewhere in the region, 2 for anything else."""
    kind = (a.offer.instance_type, a.is_spot, a.node_count)
    if not _is_region(a, b) or kind != (b.offer.instance_type, b.is_spot, b.node_count):
        return 2
    return int(a.offer.zone != b.offer.zone)


def cut_to_rest(job: Job, *, now_s: float, spent_usd: float, restart_s: float | None = None) -> Task:
    """Return the task with the rest of its goal: work (by the share of saved steps), time and budget.

    `restart_s`: measured seconds of a start, if they replace those of the task.
    """
    job = job if restart_s is None else replace(job, task=expect_starts_of(job.task, restart_s))
    goal = job.task.goal
    if goal is None:
        return job.task
    saved = job.progress.checkpoint_step if job.progress else None
    total = job.progress.total if job.progress else None
    share = min(max(saved / total, 0.0), 1.0) if saved and total else 0.0  # a store may hold -1 for "unknown"
    hours = (now_s - job.submitted_s) / 3600  # a plan's hours include the next start
    rest = replace(
        goal,
        work_hours=None if goal.work_hours is None else goal.work_hours * (1 - share),
        deadline_hours=None if goal.deadline_hours is None else max(0.0, goal.deadline_hours - hours),
        budget_usd=None if goal.budget_usd is None else max(0.0, goal.budget_usd - spent_usd),
    )
    return replace(job.task, goal=rest)


def measure_begun_start(job: Job, *, start_hours: float, now_s: float) -> BegunStart:
    """Return the part of a start of `start_hours` that the job's machines had behind them at `now_s`.

    All of it from the first new step on; nothing while the job has no machines.
    """
    begun = [each for each in job.attempts if each.started_s <= now_s]
    if not begun or _has_ended(begun[-1], now_s):
        return NOT_BEGUN
    newest = begun[-1]
    hours = min((now_s - newest.started_s) / 3600, start_hours)
    if newest.resumed_s is not None and newest.resumed_s <= now_s:
        hours = start_hours
    return BegunStart(hours=hours, is_spot=newest.placement.is_spot)


def _has_ended(attempt: Attempt, now_s: float) -> bool:
    end_s = attempt.ended_s if attempt.lost_s is None else attempt.lost_s
    return attempt.outcome is not None if end_s is None else end_s <= now_s


def expect_starts_of(task: Task, start_s: float) -> Task:
    """Return the task whose starts take `start_s` seconds, the restore of a checkpoint included."""
    restore_s = measure_restore_s(task.checkpoint.size_gib)
    return replace(task, checkpoint=replace(task.checkpoint, restart_s=max(start_s - restore_s, 0.0)))


def drop_limits(task: Task) -> Task:
    """Drop the deadline, so that a late job can still finish. The budget is kept."""
    return replace(task, goal=replace(task.goal, deadline_hours=None)) if task.goal else task
