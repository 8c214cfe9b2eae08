"""Make the content of the pages that are the same for everyone, from the context and the arguments in the path.

Each function runs once for all concurrent visitors (`sharing.py`), so it receives no request.
"""

from __future__ import annotations

import math
from dataclasses import replace

from broker.app import jobs
from broker.app.checks import read_checks
from broker.app.container import Context
from broker.app.forecasts import list_paid
from broker.app.job_sentences import list_expectations
from broker.app.services import describe_services, list_service_events
from broker.app.spending import Grouping, read_day_shares, read_spending
from broker.dashboard import pages
from broker.dashboard.chances import JobExpectation
from broker.dashboard.cloud_page import show_clouds
from broker.dashboard.cost_page import show_cost
from broker.dashboard.html import Markup
from broker.dashboard.model import NEWEST, read_job, read_overview
from broker.dashboard.pages import JobContent
from broker.dashboard.place_history import read_places
from broker.dashboard.place_page import show_places
from broker.dashboard.plan_page import show_choices
from broker.dashboard.service_page import show_service, show_services
from broker.jobs.start_costs import measure_start_cost

SAVED_S = 5.0
LOG_BYTES_MAX = 2 << 20  # of a log, which may have gigabytes and is read for each change


class OverviewPage:
    """The overview of one state folder. Savings are summed at most once in `SAVED_S`, because that reads every bill."""

    def __init__(self) -> None:
        self._saved_usd = 0.0
        self._read_s = -math.inf

    def make(self, context: Context) -> Markup:
        """Make the overview, and restart a dead daemon while jobs are live."""
        context.restart_daemon_if_needed()
        is_due = not 0.0 <= context.clock.now_s() - self._read_s < SAVED_S
        overview = read_overview(context, has_ondemand=is_due)
        if overview.month_saved_usd is not None:
            self._saved_usd, self._read_s = overview.month_saved_usd, overview.now_s
        return pages.show_overview(replace(overview, month_ondemand_usd=overview.month_usd + self._saved_usd))


def make_job(context: Context, job_id: int, expectation: JobExpectation) -> JobContent:
    """Make the page of a job. Raises UsageError for an unknown one."""
    log, is_log_cut = jobs.read_log_end(context, job_id, bytes_max=LOG_BYTES_MAX)
    page = read_job(context, jobs.find_job(context, job_id))
    starts = measure_start_cost(page.job, expectation.forecast)
    expectations = list_expectations(page.job, forecast=expectation.forecast, starts=starts)
    return pages.show_job(
        replace(page, chances=expectation.chances, expectations=tuple(expectations)), log, is_log_cut=is_log_cut
    )


def make_clusters(context: Context) -> Markup:
    """Make the list of clusters."""
    store, now_s = context.store, context.clock.now_s()
    clusters = store.clusters.list(on_damage=context.warn)
    spent = {each.name: store.bills.spend_usd(cluster=each.name, now_s=now_s) for each in clusters}
    return pages.show_clusters(clusters, spent, now_s)


def make_places(context: Context) -> Markup:
    """Make the page of locations."""
    store, now_s = context.store, context.clock.now_s()
    return show_places(read_places(context), store.refusals.list_active(now_s), now_s)


def make_cost(context: Context, by: Grouping) -> Markup:
    """Make the page of costs."""
    store, now_s = context.store, context.clock.now_s()
    spending = read_spending(store, by, now_s, on_damage=context.warn)
    lines = store.jobs.list_lines(on_damage=context.warn)
    shares = read_day_shares(store, now_s, on_damage=context.warn)
    names = {line.id: line.name for line in lines}
    return show_cost(by, spending, names, shares, list_paid(context))


def make_clouds(context: Context) -> Markup:
    """Make the page of recorded checks."""
    return show_clouds(read_checks(context.config), context.clock.now_s())


def make_services(context: Context) -> Markup:
    """Make the list of services."""
    return show_services(describe_services(context), context.clock.now_s())


def make_service(context: Context, name: str) -> Markup:
    """Make the page of a service. Raises UsageError for an unknown one."""
    (line,) = describe_services(context, [name])
    return show_service(line, list_service_events(context, name), context.clock.now_s())


def make_choices(context: Context) -> Markup:
    """Make the list of jobs whose plans can be shown."""
    lines = context.store.jobs.list_lines(NEWEST, on_damage=context.warn)[:NEWEST]
    return show_choices([(line.id, line.name) for line in lines], context.store.jobs.count())
