"""Verbs about the whole installation: spending and plans."""

from __future__ import annotations

from collections.abc import Mapping

from broker.app.container import Context
from broker.app.planning import check_notices, check_plans, plan_launch
from broker.app.spending import By, Spending, read_spending
from broker.frozen import frozen
from broker.types import Plan, Task


@frozen
class CostReport:
    """Spending by job, cloud or day, with the names of jobs by ID."""

    spending: Spending
    names: Mapping[int, str]


def show_cost(context: Context, *, by: By) -> CostReport:
    """Sum all bills up to now."""
    context.keep_jobs_going()
    store = context.store
    names = {job.id: job.name for job in store.jobs.list_lines(on_damage=context.warn)} if by is By.JOB else {}
    return CostReport(spending=read_spending(store, by, context.clock.now_s(), on_damage=context.warn), names=names)


@frozen
class CloudAnswer:
    """Whether a cloud can launch nodes, and why or why not."""

    cloud: str
    can_launch: bool
    note: str


def check_clouds(context: Context) -> tuple[CloudAnswer, ...]:
    """Return every cloud, and whether it is set up to launch nodes; clouds are not queried."""
    from broker.clouds import CLOUDS

    return tuple(
        CloudAnswer(cloud=name, can_launch=name in context.clouds, note="set up" if name in context.clouds else "")
        for name in CLOUDS
    )


def plan_tasks(context: Context, *, tasks: tuple[Task, ...], is_dryrun: bool = True) -> tuple[Plan, ...]:
    """Rank placements for each task, on every listed cloud, or on those that are set up without `is_dryrun`."""
    found = [context.resolve(task) for task in tasks]
    check_notices(found, is_launch=False, note=context.note)
    plans = tuple(plan_launch(context, task, is_dryrun=is_dryrun) for task in found)
    check_plans(plans, is_launch=False, note=context.note)
    return plans
