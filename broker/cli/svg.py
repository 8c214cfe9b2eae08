"""Plot cost against time as SVG, without a library."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from xml.sax.saxutils import escape

from broker.axes import Axis
from broker.formatting import format_hours, format_usd
from broker.types import Estimate

WIDTH, HEIGHT = 860, 520
LEFT, RIGHT, TOP, BOTTOM = 84, 28, 56, 64
COLOURS = {"on-demand": "#8a94a6", "spot": "#3b82c4", "spot, then on-demand": "#c98a2b"}
DARK, PALE, LINE = "#1f2933", "#e6e9ee", "#d64545"
LABELS_MAX = 8


def draw_svg(points: Sequence[Estimate], frontier: Sequence[Estimate], *, title: str) -> str:
    """Draw all placements as dots by pricing model, and the frontier as a labelled line."""
    picture = _Picture(points)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'font-family="system-ui, sans-serif" font-size="12" fill="{DARK}">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="28" font-size="17" font-weight="600">{escape(title)}</text>',
        *picture.draw_axes(),
        *picture.draw_points(points),
        *picture.draw_frontier(frontier),
        *picture.draw_legend({point.strategy for point in points}),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


class _Picture:
    def __init__(self, points: Sequence[Estimate]) -> None:
        self.hours = Axis([point.expected_hours or 0.0 for point in points])
        self.usd = Axis([point.expected_usd or 0.0 for point in points])

    def x(self, hours: float) -> float:
        return round(LEFT + self.hours.place(hours) * (WIDTH - LEFT - RIGHT), 1)

    def y(self, usd: float) -> float:
        return round(TOP + (1 - self.usd.place(usd)) * (HEIGHT - TOP - BOTTOM), 1)

    def at(self, each: Estimate) -> tuple[float, float]:
        return self.x(each.expected_hours or 0.0), self.y(each.expected_usd or 0.0)

    def draw_axes(self) -> Iterator[str]:
        bottom, right = HEIGHT - BOTTOM + 14, WIDTH - RIGHT
        for tick in self.hours.list_ticks():
            x = self.x(tick)
            yield f'<line x1="{x}" y1="{TOP}" x2="{x}" y2="{bottom}" stroke="{PALE}"/>'
            yield f'<text x="{x}" y="{bottom + 17}" text-anchor="middle">{format_hours(tick)}</text>'
        for tick in self.usd.list_ticks():
            y = self.y(tick)
            yield f'<line x1="{LEFT - 14}" y1="{y}" x2="{right}" y2="{y}" stroke="{PALE}"/>'
            yield f'<text x="{LEFT - 20}" y="{y + 4}" text-anchor="end">{format_usd(tick)}</text>'
        yield f'<text x="{(LEFT + right) / 2}" y="{HEIGHT - 12}" text-anchor="middle">time to finish</text>'
        yield f'<text x="20" y="{TOP - 14}">USD to finish</text>'

    def draw_points(self, points: Sequence[Estimate]) -> Iterator[str]:
        """Draw one dot per position, because thousands of placements overlap."""
        seen = dict[tuple[float, float], Estimate]()
        for each in points:
            seen.setdefault(self.at(each), each)
        for (x, y), each in seen.items():
            colour = COLOURS[each.strategy]
            yield f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}" fill-opacity="0.55"/>'

    def draw_frontier(self, frontier: Sequence[Estimate]) -> Iterator[str]:
        places = [self.at(each) for each in frontier]
        path = " ".join(f"{x},{y}" for x, y in places)
        yield f'<polyline points="{path}" fill="none" stroke="{LINE}" stroke-width="1.5"/>'
        for number, (each, (x, y)) in enumerate(zip(frontier, places, strict=True)):
            offer = each.placement.offer
            words = f"{offer.cloud} {offer.zone or offer.region}, {offer.instance_type}, {each.strategy}"
            tip = f"{words}: {format_usd(each.expected_usd)} USD, {format_hours(each.expected_hours)}"
            yield f'<circle cx="{x}" cy="{y}" r="5" fill="{LINE}"><title>{escape(tip)}</title></circle>'
            if number < LABELS_MAX:
                is_left = x < WIDTH / 2
                anchor, shift = ("start", 9) if is_left else ("end", -9)
                label = escape(f"{offer.cloud} {offer.instance_type}")
                yield f'<text x="{x + shift}" y="{y - 7}" text-anchor="{anchor}" font-size="11">{label}</text>'

    def draw_legend(self, strategies: set[str]) -> Iterator[str]:
        x = WIDTH - RIGHT - 10
        for strategy in reversed([colour for colour in COLOURS if colour in strategies]):
            yield f'<text x="{x}" y="28" text-anchor="end">{strategy}</text>'
            x -= 7 * len(strategy) + 12
            yield f'<circle cx="{x}" cy="24" r="4" fill="{COLOURS[strategy]}"/>'
            x -= 18
