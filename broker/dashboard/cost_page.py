"""Show the cost page: spending by day, job or cloud, each day's clouds and jobs, and forecasts against actual cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from broker.app.forecasts import PaidForecast
from broker.app.spending import By, Share, Spending
from broker.dashboard.html import Content, Markup, element, join, table
from broker.formatting import format_usd

FORECASTS_SHOWN = 100  # of the newest jobs
SHARES_SHOWN = 300  # the newest days first


def show_cost(
    by: By, spending: Spending, names: Mapping[int, str], shares: Sequence[Share], forecasts: Sequence[PaidForecast]
) -> Markup:
    """Show spending by one key; below, each day by cloud and job, and the forecasts of ended jobs."""
    links = [
        element("a", f"by {each.value}", href=f"/cost?by={each.value}", aria_current="page" if each is by else None)
        for each in By
    ]

    def label(key: str) -> Content:
        known = key.isdigit() and int(key) in names
        return join([_link_job(int(key)), f" {names[int(key)]}"]) if known else key

    cells = [
        [label(key) if by is By.JOB else key, f"{hours:.2f}", format_usd(usd)]
        for key, (hours, usd) in spending.rows.items()
    ]
    return join(
        [
            element("nav", *links, aria_label="Group by", class_="by"),
            table([by.value.capitalize(), "Node hours", "USD"], cells, caption="Cost", right=["Node hours", "USD"]),
            element("p", f"Total: {format_usd(spending.usd)} USD"),
            element("h2", "Days, clouds and jobs"),
            _show_shares(shares, label),
            element("h2", "Forecasts against actual cost"),
            _show_forecasts(forecasts),
        ]
    )


def _show_shares(shares: Sequence[Share], label: Callable[[str], Content]) -> Markup:
    newest = sorted(shares, key=lambda each: each.day, reverse=True)
    cells: list[Sequence[Content]] = [
        [each.day, each.cloud, label(each.owner), f"{each.node_hours:.2f}", format_usd(each.usd)]
        for each in newest[:SHARES_SHOWN]
    ]
    if not cells:
        return element("p", "Nothing has been spent yet.")
    heads = ["Day", "Cloud", "Job or cluster", "Node hours", "USD"]
    rest = len(newest) - len(cells)
    return join(
        [
            table(heads, cells, caption="Days, clouds and jobs", right=["Node hours", "USD"]),
            element("p", f"and {rest:,} more; see `broker cost --by day --json`") if rest > 0 else None,
        ]
    )


def _show_forecasts(forecasts: Sequence[PaidForecast]) -> Markup:
    if not forecasts:
        return element(
            "p",
            "No ended job has a recorded forecast; `broker jobs launch` keeps one for tasks with `goal: {work: ...}`.",
        )
    cells: list[Sequence[Content]] = [
        [
            _link_job(each.job_id),
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


def _link_job(job_id: int) -> Markup:
    return element("a", str(job_id), href=f"/jobs/{job_id}")
