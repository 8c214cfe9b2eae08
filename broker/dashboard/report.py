"""Write the report of a month as Markdown, and as one HTML file without scripts or links to other hosts."""

from __future__ import annotations

import re
from collections.abc import Sequence

from broker.app.reporting import Report
from broker.dashboard.html import Content, element, table
from broker.dashboard.paper import show_figures, write_paper
from broker.formatting import format_count, format_minute, format_usd, strip_control

BOUGHT = ["Cloud", "Type", "Market", "Node hours", "USD", "On-demand USD"]
JOBS = ["Job", "Name", "Status", "USD", "On-demand USD", "Preemptions", "Steps lost", "USD lost"]
FORECASTS = ["Job", "Name", "Forecast USD", "Paid USD", "Paid / forecast"]
RIGHT = ["Job", "Node hours", "USD", "On-demand USD", "Preemptions", "Steps lost", "USD lost", "Forecast USD",
         "Paid USD", "Paid / forecast"]  # fmt: skip
NO_FORECASTS = "No job that succeeded in this month has a recorded forecast; jobs with `goal: {work: ...}` have one."


def list_figures(report: Report) -> Sequence[tuple[str, str]]:
    """List the totals as (name, text)."""
    error = report.forecast_error_ratio
    share = report.saved_usd / report.ondemand_usd if report.ondemand_usd else 0.0
    return [
        ("Paid", f"{format_usd(report.usd)} USD for {report.node_hours:.2f} node hours"),
        ("The same hours on-demand", f"{format_usd(report.ondemand_usd)} USD"),
        ("Saved", f"{'-' if report.saved_usd < 0 else ''}{format_usd(abs(report.saved_usd))} USD ({share:.0%})"),
        ("Lost to preemptions", _describe_losses(report)),
        (
            "Mean error of forecasts",
            "-" if error is None else f"{error:.0%} in {format_count(len(report.forecasts), 'job')}",
        ),
    ]


def _describe_losses(report: Report) -> str:
    steps, count = format_count(report.steps_lost, "step"), format_count(report.preemptions, "preemption")
    return f"{steps} in {count}, about {format_usd(report.lost_usd)} USD for repeated steps and starts"


def list_tables(report: Report) -> Sequence[tuple[str, Sequence[str], Sequence[Sequence[str]]]]:
    """List the tables as (title, heads, rows of text)."""
    bought = [
        [each.cloud, each.instance_type, each.market, f"{each.node_hours:.2f}", format_usd(each.usd),
         format_usd(each.ondemand_usd)]
        for each in report.bought
    ]  # fmt: skip
    jobs = [
        [str(each.job_id), each.name, each.status, format_usd(each.usd), format_usd(each.ondemand_usd),
         str(each.preemptions), str(each.steps_lost), format_usd(each.lost_usd)]
        for each in report.jobs
    ]  # fmt: skip
    forecasts = [
        [str(each.job_id), each.name, format_usd(each.forecast_usd), format_usd(each.paid_usd), f"{each.ratio:.2f}"]
        for each in report.forecasts
    ]
    return [("Bought", BOUGHT, bought), ("Jobs", JOBS, jobs), ("Forecasts", FORECASTS, forecasts)]


def write_markdown(report: Report) -> str:
    """Write Markdown. Untrusted names are escaped, so that they create neither markup nor columns."""
    lines = [f"# Report for {report.period.name}", "", f"Written {format_minute(report.made_s)}, local time.", ""]
    lines += [f"- {name}: {text}" for name, text in list_figures(report)]
    for title, heads, rows in list_tables(report):
        lines += ["", f"## {title}", ""]
        if rows:
            lines.append(f"| {' | '.join(heads)} |")
            lines.append(f"| {' | '.join('---:' if head in RIGHT else '---' for head in heads)} |")
            lines += [f"| {' | '.join(_escape(cell) for cell in row)} |" for row in rows]
        else:
            lines.append(NO_FORECASTS if title == "Forecasts" else "None.")
    return "\n".join(lines) + "\n"


def write_html(report: Report) -> str:
    """Write one HTML file with its style inside."""
    made = element("p", f"Written {format_minute(report.made_s)}, local time.", class_="faint")
    parts: list[Content] = [made, show_figures(list_figures(report))]
    for title, heads, rows in list_tables(report):
        parts.append(element("h2", title))
        empty = NO_FORECASTS if title == "Forecasts" else "None."
        parts.append(table(heads, rows, caption=title, right=RIGHT) if rows else element("p", empty))
    return write_paper(f"Report for {report.period.name}", *parts)


def _escape(text: str) -> str:
    return re.sub(r"([\\`*_{}\[\]<>|#])", r"\\\1", strip_control(text).replace("\n", " "))
