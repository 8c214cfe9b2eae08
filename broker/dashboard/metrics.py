"""Render `/metrics`: the families about spending, jobs, clusters, places, events, nodes and services."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from broker.app.container import Context
from broker.app.services import describe_services
from broker.dashboard.event_metrics import EventTally
from broker.dashboard.families import Family, Histogram, render_families, render_job_label
from broker.dashboard.job_metrics import JobChances, list_job_families
from broker.dashboard.model import JobRow, Overview, PlaceRow, find_starts, list_places, read_overview
from broker.dashboard.node_metrics import list_node_families, list_nodes
from broker.dashboard.service_metrics import list_service_families
from broker.dashboard.work_metrics import JobWork
from broker.state.daemon_stats import STEP_BOUNDS_S, DaemonStats
from broker.state.leader import STALE_S
from broker.state.store import Store

SERIES_MAX = 1000  # jobs with series of their own: the live ones and those that ended within an hour
ENDED_S = 3600.0
PLACES_S = 60.0


class MetricsPage:
    """`/metrics` of one state folder. Stays on spot and savings are summed at most once in `PLACES_S`."""

    def __init__(self) -> None:
        self._places: Sequence[PlaceRow] = ()
        self._saved_usd = self._ondemand_usd = 0.0
        self._cloud_usd: Mapping[str, float] = {}
        self._read_s = -math.inf
        self._tally = EventTally()
        self._chances = JobChances()
        self._work = JobWork()

    def render(self, context: Context) -> str:
        """Read the store and render all families."""
        store = context.store
        overview = read_overview(context, newest=SERIES_MAX, usage_max=0, has_ondemand=False)
        live = [row.line.id for row in overview.jobs if row.line.ended_s is None]
        nodes = list_nodes(context.config.logs, live, now_s=overview.now_s)
        if not 0.0 <= overview.now_s - self._read_s < PLACES_S:
            self._places, self._read_s = list_places(store), overview.now_s
            month_s = find_starts(overview.now_s)[1]
            self._ondemand_usd = store.bills.ondemand_total_usd(now_s=overview.now_s)
            ondemand_usd = store.bills.ondemand_since_usd(month_s, now_s=overview.now_s)
            self._saved_usd = ondemand_usd - overview.month_usd
            self._cloud_usd = store.bills.list_cloud_spend_usd(now_s=overview.now_s)
        overview = replace(overview, month_ondemand_usd=overview.month_usd + self._saved_usd)
        self._tally.update(store.events)
        chances = self._chances.update(context, live)
        steps = store.history.list_steps([row.line.id for row in list_recent(overview)])
        self._work.update(store.history, steps)
        return render_families(
            [
                *list_families(overview, self._places),
                *list_daemon_families(store),
                *list_cloud_families(self._cloud_usd, ondemand_usd=self._ondemand_usd),
                *self._tally.list_families(),
                *list_job_families(steps, chances, live),
                *self._work.list_families(live, now_s=overview.now_s),
                *list_service_families(describe_services(context)),
                *list_node_families(nodes),
            ]
        )


def list_daemon_families(store: Store) -> Iterator[Family]:
    """List the families about the process that drives the jobs, or about the processes that share them."""
    if store.is_shared:
        load = store.claims.measure_load()
        yield Family("broker_controllers", "gauge", "Controllers with a lease.", [({}, float(load.controller_count))])
        yield from _list_stats_families(store.claims.list_stats())
        return
    age_s = store.leader.measure_beat_age_s()
    is_up = 0.0 <= age_s < STALE_S
    yield Family("broker_controllers", "gauge", "Controllers with a lease.", [({}, float(is_up))])
    text = "Number of daemons that have led this state folder."
    yield Family("broker_daemon_epoch", "gauge", text, [({}, float(store.leader.read_epoch()))])
    if age_s < ENDED_S:
        text = "Time since the daemon's last heartbeat."
        yield Family("broker_daemon_heartbeat_age_seconds", "gauge", text, [({}, age_s)])
    stats = store.leader.read_stats() if is_up else None
    if stats is not None:
        yield from _list_stats_families({"leader": stats})


def _list_stats_families(stats: Mapping[str, DaemonStats]) -> Iterator[Family]:
    """List the families about the work of each process that drives jobs."""
    steps = [
        ({"controller": name}, Histogram.of(STEP_BOUNDS_S, each.step_counts, each.step_s))
        for name, each in stats.items()
    ]
    text = "Duration of the steps of controllers."
    yield Family("broker_daemon_step_seconds", "histogram", text, histograms=steps)
    failures = [({"controller": name}, float(each.failures)) for name, each in stats.items()]
    yield Family("broker_daemon_errors_total", "counter", "Steps that ended in an unexpected error.", failures)
    lags = [({"controller": name}, each.lag_s) for name, each in stats.items()]
    yield Family("broker_daemon_lag_seconds", "gauge", "Delay of the newest turn of the main loop.", lags)


def list_cloud_families(spent_usd: Mapping[str, float], *, ondemand_usd: float) -> Iterator[Family]:
    """List the families about spending by cloud, and about the price of the same machines on-demand."""
    text = "Price of the machines so far, had they been on-demand."
    yield Family("broker_spend_on_demand_usd_total", "counter", text, [({}, ondemand_usd)])
    spent = [({"cloud": cloud}, usd) for cloud, usd in spent_usd.items()]
    yield Family("broker_cloud_spend_usd_total", "counter", "Money spent on nodes of a cloud.", spent)


def list_recent(overview: Overview) -> Sequence[JobRow]:
    """List the jobs that have series of their own."""
    now_s = overview.now_s
    rows = [row for row in overview.jobs if row.line.ended_s is None or now_s - row.line.ended_s < ENDED_S]
    return rows[:SERIES_MAX]


def list_families(overview: Overview, places: Sequence[PlaceRow]) -> Iterator[Family]:
    """List the families about spending, jobs, clusters and places."""
    jobs = list_recent(overview)
    yield Family("broker_spend_usd_total", "counter", "Money spent on nodes.", [({}, overview.spent_usd)])
    yield Family("broker_month_spend_usd", "gauge", "Money spent since the month began.", [({}, overview.month_usd)])
    if overview.month_ondemand_usd is not None:
        text = "Price of this month's machines on-demand."
        yield Family("broker_month_on_demand_usd", "gauge", text, [({}, overview.month_ondemand_usd)])
    yield Family("broker_price_usd_per_hour", "gauge", "Price of all billed nodes.", [({}, overview.usd_hour)])
    counts = [({"status": status}, float(count)) for status, count in overview.counts.items()]
    yield Family("broker_jobs", "gauge", "Managed jobs by status.", counts)
    waiting = float(len(overview.attention))
    yield Family("broker_attention_jobs", "gauge", "Jobs that require attention.", [({}, waiting)])
    yield Family("broker_clusters", "gauge", "Clusters that belong to no job.", [({}, len(overview.clusters))])
    info = [({"job": str(row.line.id), "name": row.line.name, "status": row.line.status.value}, 1.0) for row in jobs]
    yield Family("broker_job_info", "gauge", "Name and status of a live or recently ended job.", info)
    yield from _list_job_families(jobs)
    where = [
        {"cloud": each.cloud, "region": each.region, "zone": each.zone or "", "instance_type": each.instance_type}
        for each in places
    ]
    lost = [(labels, float(each.preemptions)) for labels, each in zip(where, places, strict=True)]
    yield Family("broker_preemptions_total", "counter", "Preemptions of your gangs.", lost)
    hazards = [
        (labels, each.hazard_per_hour)
        for labels, each in zip(where, places, strict=True)
        if each.hazard_per_hour is not None
    ]
    yield Family("broker_hazard_per_hour", "gauge", "Preemptions per gang-hour on spot.", hazards)


def _list_job_families(jobs: Sequence[JobRow]) -> Iterator[Family]:
    """List the families with one sample per job."""
    rows = [(render_job_label(row.line.id), row, row.line) for row in jobs]
    steps = [(label, float(line.step)) for label, _, line in rows if line.step is not None]
    yield Family("broker_job_step", "gauge", "Newest step of a job.", steps)
    shares = [(label, (line.step or 0) / line.total) for label, _, line in rows if line.total]
    yield Family("broker_job_progress_ratio", "gauge", "Share of a job's steps that are done.", shares)
    spent = [(label, row.spent_usd) for label, row, _ in rows]
    yield Family("broker_job_spend_usd_total", "counter", "Money spent on a job.", spent)
    losses = [(label, line.loss) for label, _, line in rows if line.loss is not None]
    yield Family("broker_job_loss", "gauge", "Newest loss that a job reported.", losses)
    used = [(label, row.spent_usd / row.budget_usd) for label, row, _ in rows if row.budget_usd]
    yield Family("broker_job_budget_used_ratio", "gauge", "Share of a job's budget that is spent.", used)
    starts = [(label, float(max(0, line.starts - 1))) for label, _, line in rows]
    yield Family("broker_job_recoveries_total", "counter", "Recoveries of a job.", starts)
