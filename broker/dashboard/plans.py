"""Read the plan of a recorded job: its placements now, and those of a changed task. Starts and records nothing."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING

from broker.app.what_if import change_task
from broker.errors import NoOfferError, TaskError, UsageError
from broker.frozen import frozen
from broker.optimizer.pareto import find_frontier, list_timed

if TYPE_CHECKING:
    from broker.app.container import Context
    from broker.types import Estimate, Job, Plan

TOP = 10  # placements in the table, as in `broker plan`
POINTS_MAX = 3000  # dots of the plot
TERMS_OF = 3  # placements whose terms are listed
CHANGE_MAX = 200  # characters of a change


@frozen
class PlanPage:
    """The plan of a job's task. `changed` is the plan for the task with `change`; `problem` is why there is none."""

    job_id: int
    name: str
    plan: Plan
    top: tuple[Estimate, ...]
    explained: tuple[Estimate, ...]  # the best placement of each instance type and market
    points: tuple[Estimate, ...]  # the first of those with a known time and cost
    timed_count: int  # of all with a known time and cost
    frontier: tuple[Estimate, ...]  # of all of them
    change: str = ""
    changed: Plan | None = None
    problem: str = ""


def read_plan(context: Context, job: Job, change: str) -> PlanPage:
    """Plan a job's task again with the current catalog and history. Raises NoOfferError, NotImportedError."""
    plan = context.plan(context.resolve(job.task))
    changed, problem = _read_change(context, plan, change[:CHANGE_MAX]) if change else (None, "")
    timed = list_timed(plan.estimates)
    return PlanPage(
        job_id=job.id,
        name=job.name,
        plan=plan,
        top=tuple(plan.estimates[:TOP]),
        explained=tuple(pick_kinds(plan.estimates, TERMS_OF)),
        points=tuple(timed[:POINTS_MAX]),
        timed_count=len(timed),
        frontier=tuple(find_frontier(timed)),
        change=change[:CHANGE_MAX],
        changed=changed,
        problem=problem,
    )


def _read_change(context: Context, plan: Plan, change: str) -> tuple[Plan | None, str]:
    try:
        return context.plan(context.resolve(change_task(plan.task, change))), ""
    except (NoOfferError, TaskError, UsageError) as error:
        return None, "; ".join([error.message, *error.details, *error.hints])


def pick_kinds(estimates: Sequence[Estimate], count: int) -> Sequence[Estimate]:
    """Return the first estimate of each cloud, instance type and market, at most `count`."""
    found: dict[tuple[str, str, str], Estimate] = {}
    for each in islice(estimates, 200):
        offer = each.placement.offer
        found.setdefault((offer.cloud, offer.instance_type, each.strategy), each)
        if len(found) == count:
            break
    return list(found.values())
