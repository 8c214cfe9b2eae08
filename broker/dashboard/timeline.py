"""Draw a job's attempts as SVG: a bar for each attempt at its location, on one axis of time."""

from __future__ import annotations

from collections.abc import Sequence

from broker.dashboard.html import Markup, element, make_scrollable
from broker.dashboard.model import AttemptRow, JobPage
from broker.formatting import format_duration, format_usd
from broker.wording import describe_outcome

WIDTH, LEFT, ROW, TOP = 900, 230, 26, 24
TICKS = 4
ROWS_MAX = 40  # the newest attempts


def draw_timeline(page: JobPage) -> Markup:
    """Draw the newest attempts: waiting for machines pale, running solid, and a mark where nodes were lost."""
    rows = page.attempts[-ROWS_MAX:]
    if not rows:
        return element("p", "No attempt has started yet.")
    begin_s = rows[0].attempt.started_s
    end_s = max(begin_s + 1, page.job.ended_s or page.now_s)
    height = TOP + ROW * len(rows) + 8
    parts = [*_draw_axis(end_s - begin_s, height)]
    for index, row in enumerate(rows):
        parts += _draw_attempt(row, index, begin_s=begin_s, end_s=end_s)
    title = f"Timeline of the attempts of job {page.job.id}"
    picture = element(
        "svg", element("title", title), *parts, viewBox=f"0 0 {WIDTH} {height}", class_="timeline", role="img"
    )
    return make_scrollable(picture, title)


def _draw_axis(span_s: float, height: int) -> Sequence[Markup]:
    parts = []
    for tick in range(TICKS + 1):
        x = LEFT + (WIDTH - LEFT - 40) * tick / TICKS
        parts.append(element("line", x1=f"{x:.0f}", x2=f"{x:.0f}", y1=TOP - 6, y2=height, class_="grid"))
        parts.append(element("text", format_duration(span_s * tick / TICKS), x=f"{x:.0f}", y=14, class_="tick"))
    return parts


def _draw_attempt(row: AttemptRow, index: int, *, begin_s: float, end_s: float) -> Sequence[Markup]:
    attempt, y = row.attempt, TOP + ROW * index

    def place(time_s: float) -> float:
        share = (min(max(time_s, begin_s), end_s) - begin_s) / (end_s - begin_s)
        return LEFT + (WIDTH - LEFT - 40) * share

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
