"""Show the cost page: spending by one key, each day by cloud, job and payer, and forecasts against actual cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from broker.app.forecasts import PaidForecast
from broker.app.payers import NO_PROJECT, UNOWNED
from broker.app.spending import Grouping, Share, Spending
from broker.dashboard.html import Content, Markup, element, join, link_job, table
from broker.formatting import format_date, format_usd

FORECASTS_SHOWN = 100  # of the newest jobs
ROWS_SHOWN = 300
NOTHING = "Nothing has been spent yet."


def show_cost(
    by: Grouping,
    spending: Spending,
    names: Mapping[int, str],
    shares: Sequence[Share],
    forecasts: Sequence[PaidForecast],
) -> Markup:
    """Show spending by one key; below, each day by cloud, job and payer, and the forecasts of ended jobs."""
    links = [
        element("a", f"by {each.value}", href=f"/cost?by={each.value}", aria_current="page" if each is by else None)
        for each in Grouping
    ]

    def label(key: str) -> Content:
        known = key.isdigit() and int(key) in names
        return join([link_job(int(key)), f" {names[int(key)]}"]) if known else key

    rows = sorted(spending.rows.items(), key=lambda row: row[1][1], reverse=True)
    if by is Grouping.DAY:
        rows.sort(key=lambda row: row[0], reverse=True)
    cells = [
        [label(key) if by is Grouping.JOB else key, f"{hours:.2f}", format_usd(usd)]
        for key, (hours, usd) in rows[:ROWS_SHOWN]
    ]
    heads = [by.value.capitalize(), "Node hours", "USD"]
    return join(
        [
            element("nav", *links, aria_label="Group by", class_="by"),
            table(heads, cells, caption="Cost", right=heads[1:]) if cells else element("p", NOTHING),
            _note_cut(len(cells), len(rows), "newest" if by is Grouping.DAY else "most expensive", by),
            element("p", f"Total: {format_usd(spending.usd)} USD"),
            _note_pruned(spending),
            element("h2", "Days, clouds and jobs"),
            _show_shares(shares, label),
            element("h2", "Forecasts against actual cost"),
            _show_forecasts(forecasts),
        ]
    )


def _note_cut(shown: int, count: int, kind: str, by: Grouping) -> Markup | None:
    if shown >= count:
        return None
    command = element("code", f"broker cost --by {by.value} --json")
    return element("p", f"The {shown:,} {kind} of {count:,}; all are listed by ", command, ".", class_="faint")


def _note_pruned(spending: Spending) -> Markup | None:
    if spending.pruned_before_s is None:
        return None
    day = format_date(spending.pruned_before_s)
    text = f"Jobs that ended before {day} are included as totals only; the table of days below does not have them."
    return element("p", text, class_="faint")


def _show_shares(shares: Sequence[Share], label: Callable[[str], Content]) -> Markup:
    if not shares:
        return element("p", NOTHING)
    has_payers = any((each.user, each.project) != (UNOWNED, NO_PROJECT) for each in shares)
    cells: list[Sequence[Content]] = [
        [
            each.day, each.cloud, label(each.owner), *((each.user, each.project) if has_payers else ()),
            f"{each.node_hours:.2f}", format_usd(each.usd),
        ]
        for each in shares[:ROWS_SHOWN]
    ]  # fmt: skip
    payers = ["User", "Project"] if has_payers else []
    heads = ["Day", "Cloud", "Job or cluster", *payers, "Node hours", "USD"]
    shown = table(heads, cells, caption="Days, clouds and jobs", right=["Node hours", "USD"])
    return join([shown, _note_cut(len(cells), len(shares), "newest", Grouping.DAY)])


def _show_forecasts(forecasts: Sequence[PaidForecast]) -> Markup:
    if not forecasts:
        return element(
            "p",
            "No ended job has a recorded forecast; `broker jobs launch` keeps one for tasks with `goal: {work: ...}`.",
        )
    cells: list[Sequence[Content]] = [
        [
            link_job(each.job_id),
            each.name,
            format_usd(each.forecast_usd),
            format_usd(each.paid_usd),
            f"{each.ratio:.2f}",
        ]
        for each in forecasts[:FORECASTS_SHOWN]
    ]
    heads = ["Job", "Name", "Forecast USD", "Paid USD", "Paid / forecast"]
    right = ["Job", "Forecast USD", "Paid USD", "Paid / forecast"]
    return table(heads, cells, caption="Forecasts against actual cost", right=right)
