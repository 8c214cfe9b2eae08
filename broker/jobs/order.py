"""Where to try next, and what is left to do. Pure: plans, attempts and progress in, a plan's order or a task out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from broker.types import Attempt, Estimate, Job, Placement, Plan, Task


def order_plan(plan: Plan, attempts: Sequence[Attempt]) -> Plan:
    """The plan in the order that the task's recovery strategy asks for, after the last attempt's place."""
    if not attempts:
        return plan
    last = attempts[-1].placement
    strategy = plan.task.recovery.strategy

    def rank(estimate: Estimate) -> int:
        """Stable: equal ranks keep the plan's order, cheapest first."""
        if strategy == "cheapest":
            return 0
        if strategy == "eager_next_region":
            return int(_is_region(estimate.placement, last))
        return _count_differences(estimate.placement, last)

    return replace(plan, estimates=tuple(sorted(plan.estimates, key=rank)))


def _is_region(one: Placement, other: Placement) -> bool:
    return (one.offer.cloud, one.offer.region) == (other.offer.cloud, other.offer.region)


def _count_differences(one: Placement, other: Placement) -> int:
    """0 the same place, 1 the same machines elsewhere in the region, 2 anything else."""
    kind = (one.offer.instance_type, one.is_spot, one.node_count)
    if not _is_region(one, other) or kind != (other.offer.instance_type, other.is_spot, other.node_count):
        return 2
    return int(one.offer.zone != other.offer.zone)


def cut_to_rest(job: Job, *, now_s: float, spent_usd: float) -> Task:
    """The task with what is left of its goal: work by the share of steps that are saved, time, and money."""
    goal = job.task.goal
    if goal is None:
        return job.task
    saved = job.progress.checkpoint_step if job.progress else None
    total = job.progress.total if job.progress else None
    done = min(1.0, saved / total) if saved and total else 0.0
    # A plan counts from when the gang runs: after an attempt the recovery comes first.
    recovery_s = job.task.checkpoint.restart_s if job.attempts else 0.0
    hours = (now_s - job.submitted_s + recovery_s) / 3600
    rest = replace(
        goal,
        work_hours=None if goal.work_hours is None else goal.work_hours * (1 - done),
        deadline_hours=None if goal.deadline_hours is None else max(0.0, goal.deadline_hours - hours),
        budget_usd=None if goal.budget_usd is None else max(0.0, goal.budget_usd - spent_usd),
    )
    return replace(job.task, goal=rest)


def drop_limits(task: Task) -> Task:
    """Without deadline: a job that is late already still wants to finish. The budget stays."""
    return replace(task, goal=replace(task.goal, deadline_hours=None)) if task.goal else task
