"""Draw cost against time as SVG, with classes of the stylesheet instead of colours."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from broker.axes import Axis
from broker.dashboard.html import Markup, element, make_scrollable
from broker.formatting import format_hours, format_usd
from broker.types import Estimate

WIDTH, HEIGHT = 860, 400
LEFT, RIGHT, TOP, BOTTOM = 84, 28, 40, 56
LABELS_MAX = 6
KINDS = {"on-demand": "on-demand", "spot": "spot", "spot, then on-demand": "mixed"}


def draw_pareto(points: Sequence[Estimate], frontier: Sequence[Estimate]) -> Markup:
    """Draw all placements as dots by market, and the Pareto-optimal ones as a labelled line."""
    hours = Axis([each.expected_hours or 0.0 for each in (*points, *frontier)])
    usd = Axis([each.expected_usd or 0.0 for each in (*points, *frontier)])

    def at(each: Estimate) -> tuple[float, float]:
        x = LEFT + hours.place(each.expected_hours or 0.0) * (WIDTH - LEFT - RIGHT)
        y = TOP + (1 - usd.place(each.expected_usd or 0.0)) * (HEIGHT - TOP - BOTTOM)
        return round(x, 1), round(y, 1)

    seen: dict[tuple[float, float], Estimate] = {}
    for each in points:
        seen.setdefault(at(each), each)
    dots = [element("circle", cx=str(x), cy=str(y), r=3, class_=KINDS[each.strategy]) for (x, y), each in seen.items()]
    places = [at(each) for each in frontier]
    path = " ".join(f"{x},{y}" for x, y in places)
    picture = element(
        "svg",
        element("title", "Expected cost against expected time; the table below lists the marked placements"),
        *_draw_axes(hours, usd), *dots, element("polyline", points=path, class_="frontier"),
        *_draw_frontier(frontier, places), *_draw_legend({each.strategy for each in points}),
        viewBox=f"0 0 {WIDTH} {HEIGHT}", class_="chart", role="img",
    )  # fmt: skip
    return make_scrollable(picture, "Cost against time")


def _draw_axes(hours: Axis, usd: Axis) -> Iterator[Markup]:
    bottom, right = HEIGHT - BOTTOM + 10, WIDTH - RIGHT
    for tick in hours.list_ticks():
        x = f"{LEFT + hours.place(tick) * (WIDTH - LEFT - RIGHT):.1f}"
        yield element("line", x1=x, x2=x, y1=TOP, y2=bottom, class_="grid")
        yield element("text", format_hours(tick), x=x, y=bottom + 16, class_="tick")
    for tick in usd.list_ticks():
        y = f"{TOP + (1 - usd.place(tick)) * (HEIGHT - TOP - BOTTOM):.1f}"
        yield element("line", x1=LEFT - 10, x2=right, y1=y, y2=y, class_="grid")
        yield element("text", format_usd(tick), x=LEFT - 16, y=y, class_="tick end")
    yield element("text", "expected time to finish", x=(LEFT + right) // 2, y=HEIGHT - 8, class_="tick")
    yield element("text", "expected USD to finish", x=12, y=16)


def _draw_frontier(frontier: Sequence[Estimate], places: Sequence[tuple[float, float]]) -> Iterator[Markup]:
    for number, (each, (x, y)) in enumerate(zip(frontier, places, strict=True), start=1):
        offer = each.placement.offer
        tip = (
            f"{number}. {offer.cloud} {offer.zone or offer.region}, {offer.instance_type}, {each.strategy}: "
            f"{format_usd(each.expected_usd)} USD, {format_hours(each.expected_hours)}"
        )
        mark = element("circle", element("title", tip), cx=str(x), cy=str(y), r=5, class_="best")
        yield mark
        if number <= LABELS_MAX:
            side = "start" if x < WIDTH / 2 else "end"
            shift = 8 if side == "start" else -8
            yield element("text", f"{number}", x=f"{x + shift:.1f}", y=f"{y - 6:.1f}", class_=side)


def _draw_legend(strategies: set[str]) -> Iterator[Markup]:
    x = LEFT + 190
    for strategy, kind in KINDS.items():
        if strategy in strategies:
            yield element("circle", cx=x, cy=12, r=4, class_=kind)
            yield element("text", strategy, x=x + 9, y=16)
            x += 40 + 7 * len(strategy)
