"""Build the pages. Each is complete without JavaScript; `static/live.js` only replaces `<main>` after a change."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence

from broker.app.limits import LimitUse
from broker.dashboard.chances import show_chances
from broker.dashboard.decisions import show_decisions
from broker.dashboard.html import Content, Markup, element, join, link_job, note_newest, table
from broker.dashboard.model import NEWEST, JobPage, JobRow, Overview, measure_rate_usd_hour
from broker.dashboard.node_charts import show_nodes
from broker.dashboard.progress import show_progress
from broker.dashboard.timeline import draw_timeline
from broker.formatting import format_duration, format_second, format_share, format_usd
from broker.frozen import frozen
from broker.types import Cluster, EventKind, Job, JobStatus
from broker.wording import describe_outcome

PAGES = {
    "/": "Overview", "/jobs": "Jobs", "/clusters": "Clusters", "/services": "Services", "/plan": "Plan",
    "/places": "Locations", "/cost": "Cost", "/clouds": "Clouds",
}  # fmt: skip
SAVED = (
    "On-demand: the same node hours at on-demand prices; clusters without a job count at their own price. "
    "Work that was repeated after preemptions is not subtracted."
)
EVENTS_SHOWN = 200  # the newest
LINES_SHOWN = 200  # of a log


def lay_out(
    title: str,
    *content: Content,
    path: str = "",
    notes: Sequence[str] = (),
    is_live: bool = True,
    targets: Mapping[str, str] = PAGES,
    newest: int = 0,
    job_id: int | None = None,
    now_s: float | None = None,
) -> str:
    """Make a whole page: head, navigation to `targets`, notes of this request, content, and the time.

    A page that is not live is not reloaded. `newest`: the id of the newest event when the page was read. `job_id`: the
    job whose events change the page; None for all jobs.
    """
    links = [
        element("a", name, href=target, aria_current="page" if target == path else None)
        for target, name in targets.items()
    ]
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", f"{title} · broker"),
        element("link", rel="stylesheet", href="/static/style.css"),
        element("link", rel="icon", href="data:,"),
        element("script", src="/static/live.js", defer=True) if is_live else None,
    )
    warnings = [element("p", note, class_="note", role="status") for note in notes]
    skip = element("a", "Skip to content", href="#main", class_="skip")
    body = element(
        "body",
        skip,
        element("header", element("nav", *links, aria_label="Pages")),
        element("main", element("h1", title), *warnings, *content, _show_now(now_s), id="main"),
        data_newest=newest,
        data_job=job_id,
    )
    return "<!doctype html>" + element("html", head, body, lang="en")


def _show_now(now_s: float | None) -> Markup | None:
    """Name the time of the page and its zone, which is that of the dashboard, not of the visitor."""
    if now_s is None:
        return None
    stamp = time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(now_s))
    return element("p", f"As of {stamp}; all times are in this time zone.", class_="faint as-of")


def show_overview(overview: Overview) -> Markup:
    """Show spending, problems that require attention, and the newest jobs."""
    figures: dict[str, Content] = {
        "Today": f"{format_usd(overview.today_usd)} USD",
        "This month": f"{format_usd(overview.month_usd)} USD",
        "This month on-demand": _show_usd(overview.month_ondemand_usd),
        "Saved this month": _show_usd(overview.month_saved_usd),
        "Total": f"{format_usd(overview.spent_usd)} USD",
        "Current rate": f"{format_usd(overview.usd_hour)} USD/h",
        "Running jobs": _link_count(overview.running_count, "running"),
        "Waiting jobs": _link_count(overview.live_count - overview.running_count, "waiting"),
        "Clusters without a job": _link_card(len(overview.clusters), "/clusters", "clusters without a job"),
    }
    cards = [element("div", element("dt", name), element("dd", value)) for name, value in figures.items()]
    hidden = overview.job_count - len(overview.jobs)
    return join(
        [
            element("dl", *cards, class_="figures"),
            element("p", SAVED, class_="faint"),
            *_show_limits(overview.limits),
            *_show_attention(overview),
            element("h2", "Jobs"),
            show_jobs(overview.jobs, overview.now_s, caption="Live and newest managed jobs"),
            element("p", element("a", f"All {overview.job_count:,} jobs", href="/jobs")) if hidden > 0 else None,
        ]
    )


def _show_limits(uses: Sequence[LimitUse]) -> Iterator[Markup]:
    if uses:
        cells: list[Sequence[Content]] = [
            [f"{each.limit.scope.value} {each.limit.name}", *each.format()] for each in uses
        ]
        heads = ["Limit of", "USD spent or expected this month", "Allowed USD", "GPUs in use", "Allowed GPUs"]
        yield element("h2", "Budgets and limits")
        yield table(heads, cells, caption="Budgets and limits", right=heads[1:])


def _show_attention(overview: Overview) -> Iterator[Markup]:
    rows, services = overview.attention, overview.failed_services
    if rows or services:
        yield element("h2", "Requires attention")
    if rows:
        cells = [[link_job(row.job_id), row.name, _show_status(row.status), row.reason] for row in rows]
        yield table(["Job", "Name", "Status", "Reason"], cells, caption="Jobs that require attention", right=["Job"])
        if len(rows) == NEWEST:
            yield element("p", f"Only {NEWEST} such jobs are listed.", class_="faint")
    if services:
        found = [[element("a", name, href=f"/services/{name}"), reason] for name, reason in services.items()]
        yield table(["Service", "Reason"], found, caption="Services that require attention")


def show_jobs(rows: Sequence[JobRow], now_s: float, *, caption: str) -> Markup:
    """Show jobs as a table."""
    if not rows:
        return element("p", "No managed jobs; submit one with `broker jobs launch TASK.yaml`.")
    cells: list[Sequence[Content]] = []
    for row in rows:
        line = row.line
        step = "-" if line.step is None else f"{line.step}" + (f"/{line.total}" if line.total else "")
        cells.append(
            [
                link_job(line.id), line.name, _show_status(line.status), step, max(0, line.starts - 1),
                format_duration((line.ended_s or now_s) - line.submitted_s),
                "-" if row.usage is None else format_share(row.usage.cpu_ratio),
                "-" if row.usage is None else format_share(row.usage.gpu_ratio), _show_spent(row),
            ]
        )  # fmt: skip
    heads = ["Job", "Name", "Status", "Step", "Recoveries", "Time", "CPU", "GPU", "USD"]
    return table(heads, cells, caption=caption, right=["Job", *heads[3:]])


def _link_count(count: int, choice: str) -> Markup:
    return _link_card(count, f"/jobs?status={choice}", f"{choice} jobs")


def _link_card(count: int, path: str, noun: str) -> Markup:
    """Link a number, with a name that is complete without the card's title."""
    return element("a", f"{count:,}", href=path, aria_label=f"{count:,} {noun}")


def _show_usd(usd: float | None) -> str:
    sign = "-" if usd is not None and usd < 0 else ""
    return "-" if usd is None else f"{sign}{format_usd(abs(usd))} USD"


def _show_spent(row: JobRow) -> str:
    return format_usd(row.spent_usd) + ("" if row.budget_usd is None else f" of {format_usd(row.budget_usd)}")


def _show_status(status: JobStatus) -> Markup:
    kind = "good" if status in (JobStatus.RUNNING, JobStatus.SUCCEEDED) else "wait"
    return element("span", status.value, class_="bad" if "FAILED" in status.value else kind)


@frozen
class JobContent:
    """The parts of a job's page that are the same for everyone: `head` above the form for its actions, `body` below."""

    job: Job
    head: Markup
    body: Markup

    def show(self, ticket: str) -> Markup:
        """Show the job, with a form for actions if the visitor has a ticket."""
        return join([self.head, _show_action(self.job, ticket), self.body])


def show_job(page: JobPage, log: Sequence[str], *, is_log_cut: bool = False) -> JobContent:
    """Show a job: summary, timeline, attempts, decisions, events and the end of its log.

    `is_log_cut`: earlier lines were left out of `log`.
    """
    job, summary = page.job, page.explanation.summary
    total = f" of {summary.steps_total}" if summary.steps_total else ""
    figures: dict[str, Content] = {
        "Status": _show_status(job.status),
        "Steps": f"{summary.steps}{total}",
        "Steps lost": f"{summary.steps_lost} in {_count(summary.recoveries, 'recovery', 'recoveries')}",
        "Recovery time": format_duration(summary.recovery_s),
        "Time": format_duration(summary.total_s),
        "Paid": f"{format_usd(summary.paid_usd)}{_show_budget(job)} USD",
        "Same hours on-demand": f"{format_usd(summary.ondemand_usd)} USD",
        **_show_deadline(job),
        "Checkpoint": "-" if job.progress is None else _show_count(job.progress.checkpoint_step),
        "Loss": "-" if job.progress is None or job.progress.loss is None else f"{job.progress.loss:g}",
    }
    cards = [element("div", element("dt", name), element("dd", value)) for name, value in figures.items()]
    recorded = [each for each in page.explanation.events if each.kind is not EventKind.LAST_LINES]
    events = [[format_second(each.time_s), each.message] for each in reversed(recorded[-EVENTS_SHOWN:])]
    head = join(
        [
            element("p", " ".join(page.reasons), class_="note" if job.failure else None) if page.reasons else None,
            element("dl", *cards, class_="figures"),
            element("p", " ".join(page.expectations)) if page.expectations else None,
            element(
                "p",
                element("a", "Plan of this task", href=f"/jobs/{job.id}/plan"),
                " · ",
                element("a", "Complete log", href=f"/jobs/{job.id}/log"),
            ),
        ]
    )
    body = join(
        [
            element("h2", "Attempts"),
            draw_timeline(page),
            element("p", "Price of each attempt's machines; dashed: the same machines on-demand.", class_="faint")
            if page.attempts
            else None,
            show_attempts(page),
            show_progress(page, log, is_log_cut=is_log_cut),
            show_nodes(page.nodes),
            show_chances(page.chances),
            show_decisions(page),
            *_show_rows("Events", ["Time", "Event"], events),
            note_newest(len(events), len(recorded), command=f"broker jobs events {job.id}"),
            element("h2", "Log"),
            element("p", f"The newest {LINES_SHOWN} lines; ", element("a", "complete log", href=f"/jobs/{job.id}/log"))
            if is_log_cut or len(log) > LINES_SHOWN
            else None,
            element("pre", "\n".join(log[-LINES_SHOWN:]) or "The program has printed nothing yet.", tabindex=0),
        ]
    )
    return JobContent(job=job, head=head, body=body)


def _show_count(count: int | None) -> str:
    return "-" if count is None else f"step {count}"


def _count(count: int, one: str, more: str) -> str:
    return f"{count:,} {one if count == 1 else more}"


def _show_budget(job: Job) -> str:
    goal = job.task.goal
    return "" if goal is None or goal.budget_usd is None else f" of {format_usd(goal.budget_usd)}"


def _show_deadline(job: Job) -> Mapping[str, str]:
    goal = job.task.goal
    if goal is None or goal.deadline_hours is None:
        return {}
    return {"Deadline": format_second(job.submitted_s + goal.deadline_hours * 3600)}


def _show_rows(title: str, heads: Sequence[str], cells: Sequence[Sequence[Content]]) -> Iterator[Markup]:
    if cells:
        yield element("h2", title)
        yield table(heads, cells, caption=title)


def show_attempts(page: JobPage) -> Markup:
    """Show the attempts of a job with their places, steps and cost."""
    cells: list[Sequence[Content]] = []
    for row in page.attempts:
        offer = row.attempt.placement.offer
        outcome = describe_outcome(row.attempt.outcome) or "-"
        steps = "-" if row.last_step is None else f"{row.first_step} to {row.last_step}"
        cells.append(
            [
                row.attempt.number, f"{offer.cloud} {offer.zone or offer.region}", offer.instance_type,
                "spot" if row.attempt.placement.is_spot else "on-demand", steps,
                "-" if row.checkpoint_step is None else row.checkpoint_step, row.lost_steps,
                format_usd(row.attempt.placement.usd_hour), format_usd(row.usd), outcome,
            ]
        )  # fmt: skip
    heads = ["Attempt", "Location", "Type", "Market", "Steps", "Checkpoint", "Steps lost", "USD/h", "USD", "Outcome"]
    return table(heads, cells, caption="Attempts", right=["Attempt", *heads[4:9]])


def _show_action(job: Job, ticket: str) -> Markup:
    """Offer the actions for a job: cancel a live one, retry an ended one; none without a ticket.

    A job of a group is retried with its group, so its page shows the command instead of a button.
    """
    verb = "retry" if job.status.is_terminal else "cancel"
    if not ticket or job.status in (JobStatus.SUCCEEDED, JobStatus.CANCELLING):
        return Markup("")
    if verb == "retry" and job.task.group is not None:
        return element("p", "Retry it with its group: ", element("code", f"broker jobs retry {job.pipeline}"))
    return element(
        "form",
        element("input", type="hidden", name="ticket", value=ticket),
        element("button", f"{verb.capitalize()} job {job.id}", type="submit"),
        method="post", action=f"/jobs/{job.id}/{verb}",
    )  # fmt: skip


def show_clusters(clusters: Sequence[Cluster], spent: dict[str, float], now_s: float) -> Markup:
    """Show every cluster, including those of jobs."""
    if not clusters:
        return element("p", "No clusters; start one with `broker launch TASK.yaml`.")
    cells: list[Sequence[Content]] = []
    for each in clusters:
        offer = each.placement.offer
        cells.append(
            [
                each.name, each.status.value, f"{each.placement.node_count} x {offer.instance_type}",
                f"{offer.cloud} {offer.zone or offer.region}", "spot" if each.placement.is_spot else "on-demand",
                "-" if each.job_id is None else link_job(each.job_id), format_duration(now_s - each.created_s),
                format_usd(measure_rate_usd_hour(each)), format_usd(spent[each.name]),
            ]
        )  # fmt: skip
    heads = ["Cluster", "Status", "Nodes", "Location", "Market", "Job", "Age", "USD/h", "USD"]
    return table(heads, cells, caption="Clusters", right=["Job", "Age", "USD/h", "USD"])
