"""Show all managed jobs in pages of `ROWS`, filtered by status and by a part of their name."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from urllib.parse import urlencode

from broker.app.container import Context
from broker.dashboard.html import Markup, element, join
from broker.dashboard.model import JobRow
from broker.dashboard.pages import show_jobs
from broker.frozen import frozen
from broker.jobs.node_samples import read_usages
from broker.types import JobStatus

ROWS = 100
NAME_MAX = 200  # characters of a name that are compared


class JobFilter(StrEnum):
    """The jobs of a list."""

    ALL = "all"
    LIVE = "live"
    RUNNING = "running"
    WAITING = "waiting"  # live, but no program runs
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    def holds(self, status: JobStatus) -> bool:
        """Return whether jobs of this status are listed."""
        return {
            JobFilter.ALL: True,
            JobFilter.LIVE: not status.is_terminal,
            JobFilter.RUNNING: status is JobStatus.RUNNING,
            JobFilter.WAITING: not status.is_terminal and status is not JobStatus.RUNNING,
            JobFilter.SUCCEEDED: status is JobStatus.SUCCEEDED,
            JobFilter.FAILED: "FAILED" in status.value,
            JobFilter.CANCELLED: status is JobStatus.CANCELLED,
        }[self]


@frozen
class JobList:
    """One page of the requested jobs, newest first."""

    now_s: float
    rows: tuple[JobRow, ...]
    count: int  # of all pages
    choice: JobFilter
    name: str
    before: int | None  # the page shows jobs with smaller IDs
    next_before: int | None  # of the next page; None on the last page


def read_jobs(context: Context, *, choice: JobFilter, name: str = "", before: int | None = None) -> JobList:
    """Read a page of jobs whose name contains `name`, regardless of case, with IDs below `before` if it is given."""
    store, now_s = context.store, context.clock.now_s()
    part = name[:NAME_MAX].casefold()
    found = [
        line
        for line in store.jobs.list_lines(on_damage=context.warn)
        if choice.holds(line.status) and part in line.name.casefold()
    ]
    rest = [line for line in found if before is None or line.id < before]
    shown = rest[:ROWS]
    ids = [line.id for line in shown]
    spent, budgets = store.bills.list_spend_usd(ids, now_s=now_s), store.jobs.list_goals(ids)
    usage = read_usages(context.config.logs, shown, now_s=now_s)
    rows = tuple(
        JobRow(line=line, spent_usd=spent.get(line.id, 0.0), usage=usage.get(line.id), budget_usd=budgets.get(line.id))
        for line in shown
    )
    return JobList(
        now_s=now_s, rows=rows, count=len(found), choice=choice, name=name, before=before,
        next_before=ids[-1] if len(rest) > ROWS else None,
    )  # fmt: skip


def show_list(found: JobList) -> Markup:
    """Show the form, the jobs, and links to the first and the next page."""
    options = [
        element("option", each.value, value=each.value, selected=each is found.choice) for each in JobFilter
    ]  # fmt: skip
    form = element(
        "form",
        element("label", "Status ", element("select", *options, name="status")),
        " ",
        element("label", "Name contains ", element("input", name="name", value=found.name, maxlength=NAME_MAX)),
        " ",
        element("button", "Show", type="submit"),
        method="get", action="/jobs", role="search",
    )  # fmt: skip
    count = f"{found.count:,} job" + ("" if found.count == 1 else "s")
    shown = show_jobs(found.rows, found.now_s, caption="Managed jobs") if found.rows else None
    return join([form, element("p", count, role="status"), shown, _link_pages(found)])


def _link_pages(found: JobList) -> Markup:
    links: Sequence[Markup] = [
        *([_link(found, "First page", None)] if found.before is not None else []),
        *([_link(found, "Next page", found.next_before)] if found.next_before is not None else []),
    ]
    return element("nav", *links, aria_label="Pages of jobs") if links else Markup("")


def _link(found: JobList, text: str, before: int | None) -> Markup:
    wanted: dict[str, str | int] = {"status": found.choice.value, "name": found.name}
    return element("a", text, href=f"/jobs?{urlencode(wanted if before is None else {**wanted, 'before': before})}")
