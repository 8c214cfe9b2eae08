"""Draw a job's attempts as SVG: a bar for each, and below them the price paid, on one time axis."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from broker.dashboard.html import Markup, element, join, make_scrollable
from broker.dashboard.model import AttemptRow, JobPage
from broker.formatting import format_duration, format_usd
from broker.types import Placement
from broker.wording import describe_outcome

WIDTH, LEFT, ROW, TOP = 900, 230, 26, 24
TICKS = 4
ROWS_MAX = 40  # the newest attempts
PRICE = 64  # pixels of the price under the bars


def draw_timeline(page: JobPage) -> Markup:
    """Draw the newest attempts: pale while they wait for machines, solid while they run, with a mark at a loss."""
    rows = page.attempts[-ROWS_MAX:]
    if not rows:
        return element("p", "No attempt has started yet.")
    begin_s = rows[0].attempt.started_s
    end_s = max(begin_s + 1, page.job.ended_s or page.now_s)
    top = TOP + ROW * len(rows) + 8  # of the price
    height = top + PRICE + 8
    parts = [*_draw_axis(end_s - begin_s, height)]
    for index, row in enumerate(rows):
        parts += _draw_attempt(row, index, begin_s=begin_s, end_s=end_s)
    parts += _draw_price(rows, top, begin_s=begin_s, end_s=end_s)
    title = f"Timeline of the attempts of job {page.job.id}, with their prices"
    picture = element(
        "svg", element("title", title), *parts, viewBox=f"0 0 {WIDTH} {height}", class_="timeline", role="img"
    )
    cut = f"The picture has the newest {ROWS_MAX} of {len(page.attempts):,} attempts; the table has all of them."
    is_cut = len(page.attempts) > len(rows)
    return join([make_scrollable(picture, title), element("p", cut, class_="faint") if is_cut else None])


def _draw_axis(span_s: float, height: int) -> Sequence[Markup]:
    parts = []
    for tick in range(TICKS + 1):
        x = LEFT + (WIDTH - LEFT - 40) * tick / TICKS
        parts.append(element("line", x1=f"{x:.0f}", x2=f"{x:.0f}", y1=TOP - 6, y2=height, class_="grid"))
        parts.append(element("text", format_duration(span_s * tick / TICKS), x=f"{x:.0f}", y=14, class_="tick"))
    return parts


def _draw_attempt(row: AttemptRow, index: int, *, begin_s: float, end_s: float) -> Sequence[Markup]:
    attempt, y = row.attempt, TOP + ROW * index
    place = partial(_place, begin_s=begin_s, end_s=end_s)

    def bar(from_s: float, to_s: float, kind: str) -> Markup:
        width = max(1.0, place(to_s) - place(from_s))
        return element("rect", x=f"{place(from_s):.1f}", y=y + 4, width=f"{width:.1f}", height=ROW - 8, class_=kind)

    offer, stop_s = attempt.placement.offer, attempt.ended_s or end_s
    market = "spot" if attempt.placement.is_spot else "on-demand"
    label = f"{attempt.number}. {offer.cloud} {offer.zone or offer.region}"
    outcome = describe_outcome(attempt.outcome) or "running"
    tip = f"Attempt {attempt.number}: {offer.instance_type}, {market}, {format_usd(row.usd)} USD; {outcome}"
    parts = [element("title", tip), element("text", label, x=4, y=y + ROW - 9), bar(attempt.started_s, stop_s, "boot")]
    if attempt.running_s is not None:
        parts.append(bar(attempt.running_s, attempt.lost_s or stop_s, market))
    if attempt.lost_s is not None:
        x = f"{place(attempt.lost_s):.1f}"
        parts.append(element("line", x1=x, x2=x, y1=y + 1, y2=y + ROW - 1, class_="lost"))
    return [element("g", *parts)]


def _place(time_s: float, *, begin_s: float, end_s: float) -> float:
    share = (min(max(time_s, begin_s), end_s) - begin_s) / (end_s - begin_s)
    return LEFT + (WIDTH - LEFT - 40) * share


def _draw_price(rows: Sequence[AttemptRow], top: int, *, begin_s: float, end_s: float) -> Sequence[Markup]:
    """Draw the hourly price of each attempt's machines, and as a line their on-demand price."""
    paid = [row.attempt.placement.usd_hour for row in rows]
    ondemand = [_find_ondemand_usd_hour(row.attempt.placement) for row in rows]
    highest, bottom = max(*paid, *(full for full in ondemand if full is not None), 1e-9), top + PRICE
    parts = [
        element("text", "Price, USD/h", x=4, y=bottom - PRICE // 2),
        element("text", format_usd(highest), x=LEFT - 8, y=top + 10, class_="end"),
        element("text", "0", x=LEFT - 8, y=bottom, class_="end"),
        element("line", x1=LEFT, x2=WIDTH - 40, y1=bottom, y2=bottom, class_="grid"),
    ]
    for row, price, full in zip(rows, paid, ondemand, strict=True):
        left = _place(row.attempt.started_s, begin_s=begin_s, end_s=end_s)
        right = max(left + 1, _place(row.attempt.ended_s or end_s, begin_s=begin_s, end_s=end_s))
        y = bottom - PRICE * price / highest
        tip = f"Attempt {row.attempt.number}: {format_usd(price)} USD/h"
        market = "spot" if row.attempt.placement.is_spot else "on-demand"
        shape = {"x": f"{left:.1f}", "y": f"{y:.1f}", "width": f"{right - left:.1f}", "height": f"{bottom - y:.1f}"}
        drawn = [element("rect", **shape, class_=f"price {market}")]
        if full is not None:
            tip += f"; on-demand {format_usd(full)} USD/h"
            level = f"{bottom - PRICE * full / highest:.1f}"
            ends = {"x1": f"{left:.1f}", "x2": f"{right:.1f}", "y1": level, "y2": level}
            drawn.append(element("line", **ends, class_="full"))
        parts.append(element("g", element("title", tip), *drawn))
    return parts


def _find_ondemand_usd_hour(placement: Placement) -> float | None:
    price = placement.offer.ondemand_usd_hour
    return None if price is None else price * placement.node_count
