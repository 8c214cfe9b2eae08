"""Show the page of locations: stays on spot over time, preemptions, refusals and prices."""

from __future__ import annotations

import time
from collections.abc import Sequence

from broker.dashboard.html import Content, Markup, element, join, make_scrollable, show_key, table
from broker.dashboard.place_history import SHOWN_DAYS, PlaceHistory
from broker.dashboard.timeline import LEFT, ROW, TOP, WIDTH
from broker.formatting import format_duration, format_usd
from broker.state.history import KEPT_DAYS_MAX
from broker.state.refusals import Refusal

ROWS_MAX = 40
DAYS_PER_TICK = 2
MEANING = (
    f"Stays, hours and preemptions are those of the last {KEPT_DAYS_MAX:.0f} days; a stay is an attempt of a job "
    "there, with any number of nodes. Prices are those of one machine in the price catalog."
)
KEY = {"spot": "running on spot", "lost": "preempted", "refused": "spot was refused"}


def show_places(places: Sequence[PlaceHistory], refusals: Sequence[Refusal], now_s: float) -> Markup:
    """Show observations of each location, and the refusals that are in force."""
    cells: list[Sequence[Content]] = [
        [
            f"{row.cloud} {row.zone or row.region}", row.instance_type, row.stays, f"{row.hours:.2f}", row.preemptions,
            "-" if row.hazard_per_hour is None else f"{row.hazard_per_hour:.3f}", len(each.refused_s),
            _show_price(each.spot_usd_hour), _show_price(each.ondemand_usd_hour),
        ]
        for each in places
        for row in [each.row]
    ]  # fmt: skip
    heads = [
        "Location", "Type", "Stays", "Hours", "Preemptions", "Preemptions/h",
        f"Refusals in {SHOWN_DAYS:.0f} days", "Spot USD/h", "On-demand USD/h",
    ]  # fmt: skip
    refused: list[Sequence[Content]] = [
        [
            f"{each.cloud} {each.zone or each.region or 'all regions'}", each.instance_type or "all",
            "spot" if each.is_spot else "on-demand", format_duration(max(0.0, each.expires_s - now_s)), each.reason,
        ]
        for each in refusals
    ]  # fmt: skip
    parts: list[Content] = [element("h2", "Your time on spot")]
    if cells:
        parts += [
            draw_days(places, now_s),
            table(heads, cells, caption="Your time on spot", right=heads[2:]),
            element("p", MEANING, class_="faint"),
        ]
    else:
        parts.append(element("p", "No node has run on spot yet."))
    if refused:
        columns = ["Location", "Type", "Market", "Expires in", "Reason"]
        parts += [element("h2", "Current refusals"), table(columns, refused, caption="Current refusals")]
    return join(parts)


def _show_price(usd_hour: float | None) -> str:
    return "-" if usd_hour is None else format_usd(usd_hour)


def draw_days(places: Sequence[PlaceHistory], now_s: float) -> Markup:
    """Draw the last days of each location: a bar where a gang ran, a mark where it was preempted or refused."""
    active = [each for each in places if each.spans or each.refused_s]
    shown = active[:ROWS_MAX]
    if not shown:
        return element("p", f"There was no spot activity in the last {SHOWN_DAYS:.0f} days.")
    begin_s = now_s - SHOWN_DAYS * 86400
    height = TOP + ROW * len(shown) + 8

    def place(time_s: float) -> float:
        share = (min(max(time_s, begin_s), now_s) - begin_s) / (now_s - begin_s)
        return LEFT + (WIDTH - LEFT - 40) * share

    parts: list[Markup] = []
    for day in range(0, int(SHOWN_DAYS) + 1, DAYS_PER_TICK):
        x = f"{place(begin_s + day * 86400):.0f}"
        label = time.strftime("%b %d", time.localtime(begin_s + day * 86400))
        parts.append(element("line", x1=x, x2=x, y1=TOP - 6, y2=height, class_="grid"))
        parts.append(element("text", label, x=x, y=14, class_="tick"))
    for index, each in enumerate(shown):
        y, row = TOP + ROW * index, each.row
        label = f"{row.cloud} {row.zone or row.region} {row.instance_type}"
        tip = f"{label}: {len(each.spans)} stays, {len(each.refused_s)} refusals in {SHOWN_DAYS:.0f} days"
        marks = [element("title", tip), element("text", label[:34], x=4, y=y + ROW - 9)]
        for span in each.spans:
            width = max(1.0, place(span.end_s) - place(span.begin_s))
            bar = element(
                "rect", x=f"{place(span.begin_s):.1f}", y=y + 4, width=f"{width:.1f}", height=ROW - 8, class_="spot"
            )
            marks += [bar, _mark(place(span.end_s), y, "lost")] if span.is_preempted else [bar]
        marks += [_mark(place(time_s), y, "refused") for time_s in each.refused_s]
        parts.append(element("g", *marks))
    title = f"Locations on spot in the last {SHOWN_DAYS:.0f} days"
    picture = element(
        "svg", element("title", title), *parts, viewBox=f"0 0 {WIDTH} {height}", class_="timeline", role="img"
    )
    cut = f"The picture has {len(shown)} of {len(active)} locations." if len(active) > len(shown) else None
    return join([make_scrollable(picture, title), show_key(KEY), element("p", cut, class_="faint") if cut else None])


def _mark(x: float, y: int, kind: str) -> Markup:
    return element("line", x1=f"{x:.1f}", x2=f"{x:.1f}", y1=y + 1, y2=y + ROW - 1, class_=kind)
