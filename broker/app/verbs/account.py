"""Verbs about the whole installation: spending and plans."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from broker.app import checking
from broker.app.checking import CloudSummary, find_inspector
from broker.app.checks import CheckedItem, record_findings, record_overview
from broker.app.container import Context
from broker.app.forecasts import list_judged, score_own_forecasts
from broker.app.planning import check_notices, check_plans, plan_launch
from broker.app.reporting import Report, read_month, read_report
from broker.app.spending import Grouping, Share, Spending, read_day_shares, read_spending
from broker.clouds.findings import InspectsTypes, TypeCheckResult
from broker.errors import UsageError
from broker.frozen import frozen
from broker.jobs.scoring import ForecastScore, JudgedForecast
from broker.pipelines.groups import keep_together
from broker.types import Plan, Task


@frozen
class CostReport:
    """Spending by job, cloud, day, user or project, with the names of jobs by ID.

    `shares` are only those of a report by day; empty from an older server.
    """

    spending: Spending
    names: Mapping[int, str]
    shares: tuple[Share, ...] = ()


def show_cost(context: Context, *, by: Grouping) -> CostReport:
    """Sum all bills up to now."""
    context.restart_daemon_if_needed()
    store = context.store
    names = {job.id: job.name for job in store.jobs.list_lines(on_damage=context.warn)} if by is Grouping.JOB else {}
    now_s = context.clock.now_s()
    return CostReport(
        spending=read_spending(store, by, now_s, on_damage=context.warn),
        names=names,
        shares=tuple(read_day_shares(store, now_s, on_damage=context.warn)) if by is Grouping.DAY else (),
    )


@frozen
class CloudAnswer:
    """Whether a cloud can launch nodes, with the reason."""

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
    """Rank placements for each task: on every listed cloud with `is_dryrun`, else on the clouds that are set up."""
    found = [context.resolve(task) for task in tasks]
    check_notices(found, is_launch=False, note=context.note)
    plans = keep_together([plan_launch(context, task, is_dryrun=is_dryrun) for task in found])
    check_plans(plans, home=context.market.home, is_launch=False, note=context.note)
    return plans


def report_month(context: Context, *, month: str | None = None) -> Report:
    """Report a month, YYYY-MM in the local time of the store's machine; None means the current one."""
    return read_report(context, read_month(month, now_s=context.clock.now_s()), on_damage=context.warn)


def score_forecasts(context: Context) -> ForecastScore:
    """Score the forecasts of ended jobs, which may widen the intervals of later plans."""
    return score_own_forecasts(context)


def list_forecasts(context: Context) -> tuple[JudgedForecast, ...]:
    """List the forecast of each job that has succeeded, with its cost and time."""
    return tuple(list_judged(context))


def inspect_clouds(context: Context) -> tuple[CloudSummary, ...]:
    """Check whether each cloud could launch nodes now, and record the results."""
    found = tuple(asyncio.run(checking.check_clouds(context)))
    rows = [(each.name, each.can_launch, each.note) for each in found]
    record_overview(context.config, rows, now_s=context.clock.now_s())
    return found


def inspect_cloud(context: Context, *, cloud: str) -> tuple[CheckedItem, ...]:
    """Check everything that one cloud requires, and record the result. Raises UsageError, CloudError."""
    findings = asyncio.run(checking.inspect_closely(cloud, context))
    items = tuple(
        CheckedItem(
            name=each.name, is_ok=each.is_ok, note=each.note, command=each.command, is_needed=each.is_needed
        )
        for each in findings
    )  # fmt: skip
    record_findings(context.config, cloud, items, now_s=context.clock.now_s())
    return items


def list_startable(context: Context, *, cloud: str) -> tuple[TypeCheckResult, ...]:
    """List accelerators, and whether their smallest machine would start now. Raises UsageError, CloudError."""
    inspector = find_inspector(cloud)
    if not isinstance(inspector, InspectsTypes):
        raise UsageError(
            f"`--types` is not supported for `{cloud}`", hints=("supported: `broker check aws --types`, and `gcp`",)
        )
    offers = context.book.list_offers(cloud)
    return tuple(asyncio.run(inspector.inspect_types(context.config, clock=context.clock, offers=offers)))
