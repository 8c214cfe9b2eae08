"""Show the decisions of a job's spot policy with the numbers behind them, as recorded in its events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from broker.dashboard.html import Content, Markup, element, join, note_newest, table
from broker.dashboard.model import JobPage
from broker.formatting import format_second, format_usd

SHOWN = 200  # the newest
HEADS = [
    "Time", "Decision", "Location", "USD per hour of work", "On-demand", "Work left", "Time left", "Spare",
    "Expected USD", "Reason",
]  # fmt: skip
RIGHT = ["USD per hour of work", "On-demand", "Work left", "Time left", "Spare"]


def show_decisions(page: JobPage) -> Markup:
    """Show the decisions, newest first; nothing if the job has none."""
    rows = [_list_cells(each.time_s, each.data) for each in page.decisions[:SHOWN]]
    if not rows:
        return Markup("")
    return join(
        [
            element("h2", "Decisions of the spot policy"),
            table(HEADS, rows, caption="Decisions of the spot policy", right=RIGHT),
            note_newest(len(rows), len(page.decisions), command=f"broker jobs why {page.job.id} --json"),
            element("p", "Spare: hours until on-demand must start to meet the deadline.", class_="faint"),
        ]
    )


def _list_cells(time_s: float, data: Mapping[str, Any]) -> Sequence[Content]:
    place = data.get("place")
    where = "-"
    if isinstance(place, Mapping):
        market = "spot" if place.get("is_spot") else "on-demand"
        zones = place.get("zones") or ["?"]
        where = f"{place.get('cloud')} {zones[0]}, {place.get('instance_type')} {market}"
    weighed = data.get("expected_usd")
    costs = [f"{name}: {format_usd(usd)}" for name, usd in weighed.items()] if isinstance(weighed, Mapping) else []
    return [
        format_second(time_s), str(data.get("action", "-")), where,
        _show(data.get("usd_work_hour"), ".2f"), _show(data.get("ondemand_usd_work_hour"), ".2f"),
        _show(data.get("work_left_hours"), ".1f", " h"), _show(data.get("time_left_hours"), ".1f", " h"),
        _show(data.get("spare_hours"), ".1f", " h"), ", ".join(costs) or "-", str(data.get("reason") or "-"),
    ]  # fmt: skip


def _show(number: object, form: str, unit: str = "") -> str:
    return f"{number:{form}}{unit}" if isinstance(number, int | float) else "-"
