"""Plot the losses of a sweep over its first numeric parameter, as SVG."""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from broker.axes import Axis
from broker.cli.svg import BOTTOM, DARK, HEIGHT, LEFT, LINE, PALE, RIGHT, TOP, WIDTH
from broker.errors import UsageError
from broker.types import JobStatus

if TYPE_CHECKING:
    from broker.app.verbs.batches import SweepState

FINISHED, OTHER = "#3b82c4", "#8a94a6"


def check_file(file: Path) -> None:
    """Raise UsageError, before the sweep starts, if its plot could not be written."""
    if file.suffix.lower() != ".svg" or not file.absolute().parent.is_dir():
        raise UsageError(f"`--plot` must name a .svg file in a folder that exists, not `{file}`")


def write_plot(file: Path, state: SweepState) -> None:
    """Write one dot per run with a loss; the best is marked. Raises UsageError if the file cannot be written."""
    try:
        file.write_text(draw_plot(state), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write `{file}`: {(error.strerror or 'no access').lower()}") from None


def draw_plot(state: SweepState) -> str:
    """Draw loss against the first parameter whose values are all numbers, else against the number of the run."""
    every = state.configurations
    name = next((each for each in state.parameters if all(_is_number(one[each]) for one in every)), None)
    points = {}
    for run in state.runs:
        if run.progress and run.progress.loss is not None and math.isfinite(run.progress.loss):
            x = float(every[run.number][name]) if name else run.number + 1.0
            points[run.number] = (x, run.progress.loss, run.status is JobStatus.SUCCEEDED)
    legend = "blue: finished, grey: stopped or live" if points else "no run has reported a loss"
    title = f"{state.name}: loss against {name or 'run'} ({legend})"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'font-family="system-ui, sans-serif" font-size="12" fill="{DARK}">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="28" font-size="17" font-weight="600">{escape(title)}</text>',
        *(_draw(points, state.best, name or "run") if points else ()),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _draw(points: dict[int, tuple[float, float, bool]], best: int | None, name: str) -> Iterator[str]:
    across, up = Axis([each[0] for each in points.values()]), Axis([each[1] for each in points.values()])

    def place(x: float, y: float) -> tuple[float, float]:
        column = LEFT + across.place(x) * (WIDTH - LEFT - RIGHT)
        return round(column, 1), round(TOP + (1 - up.place(y)) * (HEIGHT - TOP - BOTTOM), 1)

    for tick in across.list_ticks():
        x, _ = place(tick, up.low)
        yield f'<line x1="{x}" y1="{TOP}" x2="{x}" y2="{HEIGHT - BOTTOM + 8}" stroke="{PALE}"/>'
        yield f'<text x="{x}" y="{HEIGHT - BOTTOM + 25}" text-anchor="middle">{tick:g}</text>'
    for tick in up.list_ticks():
        _, y = place(across.low, tick)
        yield f'<line x1="{LEFT - 8}" y1="{y}" x2="{WIDTH - RIGHT}" y2="{y}" stroke="{PALE}"/>'
        yield f'<text x="{LEFT - 14}" y="{y + 4}" text-anchor="end">{tick:g}</text>'
    yield f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 12}" text-anchor="middle">{escape(name)}</text>'
    for run, (across_value, loss, is_finished) in points.items():
        x, y = place(across_value, loss)
        colour = LINE if run == best else FINISHED if is_finished else OTHER
        tip = escape(f"run {run + 1}: {name} {across_value:g}, loss {loss:.4g}")
        yield f'<circle cx="{x}" cy="{y}" r="{6 if run == best else 4}" fill="{colour}"><title>{tip}</title></circle>'


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False
