"""Draw a job's steps over time and its loss by step as SVG; work that was lost and repeated is hatched."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence

from broker.axes import Axis
from broker.dashboard.html import Markup, element, join, make_scrollable
from broker.dashboard.model import AttemptRow, JobPage
from broker.formatting import format_duration

WIDTH, HEIGHT = 900, 220
LEFT, RIGHT, TOP, BOTTOM = 70, 40, 14, 34
ATTEMPTS_MAX = 200  # the newest
POINTS_MAX = 1500
TICKS = 4
# A line of the bundled trainers and bridges: `step 40/100  loss 2.3125  1,024 tokens/s`.
_LINE = re.compile(r"step (\d{1,12})(?:/\d+)?\s+(?:.*\s)?loss (-?\d+(?:\.\d+)?(?:e[+-]?\d+)?)(?:\s|$)")


def draw_steps(page: JobPage) -> Markup | None:
    """Draw the steps that each attempt reached over time, with its last checkpoint; None before any step."""
    rows = [row for row in page.attempts[-ATTEMPTS_MAX:] if row.last_step is not None and row.attempt.running_s]
    if not rows:
        return None
    begin_s = rows[0].attempt.started_s
    end_s = max(begin_s + 1, page.job.ended_s or page.now_s)
    high = max(1, *(row.last_step or 0 for row in rows))
    parts = [*draw_grid(_make_time_ticks(end_s - begin_s), [(f"{tick:g}", tick / high) for tick in _pick(high)])]
    for row in rows:
        parts += _draw_attempt(row, begin_s=begin_s, end_s=end_s, high=high)
    return make_chart(
        f"Steps of job {page.job.id} over time; hatched steps were lost and repeated", parts, hatch_id="hatch-steps"
    )


def _draw_attempt(row: AttemptRow, *, begin_s: float, end_s: float, high: int) -> Iterator[Markup]:
    attempt, first, last = row.attempt, row.first_step or 0, row.last_step or 0

    def at(time_s: float, step: float) -> tuple[float, float]:
        return to_x((min(max(time_s, begin_s), end_s) - begin_s) / (end_s - begin_s)), to_y(step / high)

    from_s = attempt.resumed_s or attempt.running_s or attempt.started_s
    until_s = max(from_s, attempt.lost_s or attempt.ended_s or end_s)
    low_step = last - row.lost_steps
    if row.lost_steps:
        share = max(0.0, (low_step - first) / (last - first)) if last > first else 0.0
        x, y = at(from_s + share * (until_s - from_s), low_step)
        x_end, y_end = at(until_s, last)
        yield element(
            "polygon", element("title", f"attempt {attempt.number}: {row.lost_steps} steps lost"),
            points=f"{x:.1f},{y:.1f} {x_end:.1f},{y_end:.1f} {x_end:.1f},{y:.1f}", fill="url(#hatch-steps)",
        )  # fmt: skip
    (x, y), (x_end, y_end) = at(from_s, first), at(until_s, last)
    market = "spot" if attempt.placement.is_spot else "on-demand"
    tip = f"attempt {attempt.number}, {market}: steps {first} to {last}"
    yield element(
        "polyline", element("title", tip), points=f"{x:.1f},{y:.1f} {x_end:.1f},{y_end:.1f}", class_=f"curve {market}"
    )
    if row.checkpoint_step is not None:
        share = (row.checkpoint_step - first) / (last - first) if last > first else 0.0
        x, y = at(from_s + min(1.0, max(0.0, share)) * (until_s - from_s), row.checkpoint_step)
        yield element(
            "circle", element("title", f"newest checkpoint of attempt {attempt.number}: step {row.checkpoint_step}"),
            cx=f"{x:.1f}", cy=f"{y:.1f}", r=4, class_="checkpoint",
        )  # fmt: skip


def read_losses(lines: Sequence[str]) -> list[list[tuple[int, float]]]:
    """Read (step, loss) from a log, one list for each stretch of growing steps.

    >>> read_losses(["step 1/4  loss 2.5", "step 2/4  loss 2.25", "restored", "step 2/4  loss 2.25"])
    [[(1, 2.5), (2, 2.25)], [(2, 2.25)]]
    """
    stretches: list[list[tuple[int, float]]] = []
    for line in lines:
        found = _LINE.match(line)
        if found is None:
            continue
        step, loss = int(found[1]), float(found[2])
        if not math.isfinite(loss):
            continue
        if not stretches or stretches[-1][-1][0] >= step:
            stretches.append([])
        stretches[-1].append((step, loss))
    return stretches


def draw_losses(page: JobPage, lines: Sequence[str]) -> Markup | None:
    """Draw the loss by step of each stretch in the log, and the lost steps as hatched bands; None without losses."""
    stretches = read_losses(lines)
    points = [point for stretch in stretches for point in stretch]
    if len(points) < 2:
        return None
    steps, losses = Axis([float(step) for step, _ in points]), Axis([loss for _, loss in points])
    steps.is_logarithmic = False
    grid = draw_grid(
        [(f"{tick:g}", steps.place(tick)) for tick in steps.list_ticks()],
        [(f"{tick:g}", losses.place(tick)) for tick in losses.list_ticks()],
    )
    parts = [*grid]
    for row in page.attempts[-ATTEMPTS_MAX:]:
        if row.lost_steps and row.last_step is not None and row.last_step > steps.low:
            low, high = (
                min(1.0, max(0.0, steps.place(step))) for step in (row.last_step - row.lost_steps, row.last_step)
            )
            tip = (
                f"attempt {row.attempt.number}: steps {row.last_step - row.lost_steps + 1} to {row.last_step} were lost"
            )
            parts.append(
                element(
                    "rect", element("title", tip), x=f"{to_x(low):.1f}", y=TOP,
                    width=f"{max(1.0, to_x(high) - to_x(low)):.1f}",
                    height=HEIGHT - TOP - BOTTOM, fill="url(#hatch-loss)",
                )
            )  # fmt: skip
    every = max(1, len(points) // POINTS_MAX)
    for stretch in stretches:
        kept = [*stretch[::every], stretch[-1]]
        path = " ".join(f"{to_x(steps.place(step)):.1f},{to_y(losses.place(loss)):.1f}" for step, loss in kept)
        parts.append(element("polyline", points=path, class_="curve spot"))
    return make_chart(
        f"Loss of job {page.job.id} by step; hatched steps were lost and repeated", parts, hatch_id="hatch-loss"
    )


def make_chart(title: str, parts: Sequence[Markup], *, hatch_id: str) -> Markup:
    """Make the picture, with the pattern for lost work under `hatch_id`, which must be unique on the page."""
    hatch = element(
        "defs",
        element(
            "pattern", element("path", d="M0,8 L8,0", class_="hatch"), id=hatch_id, width=8, height=8,
            patternUnits="userSpaceOnUse",
        ),
    )  # fmt: skip
    picture = element(
        "svg", element("title", title), hatch, *parts, viewBox=f"0 0 {WIDTH} {HEIGHT}", class_="chart", role="img"
    )
    return make_scrollable(picture, title)


def draw_grid(across: Sequence[tuple[str, float]], up: Sequence[tuple[str, float]]) -> Iterator[Markup]:
    """Draw ticks of (text, share of the width) across and (text, share of the height) up."""
    for text, share in across:
        x = f"{to_x(share):.1f}"
        yield element("line", x1=x, x2=x, y1=TOP, y2=HEIGHT - BOTTOM, class_="grid")
        yield element("text", text, x=x, y=HEIGHT - BOTTOM + 16, class_="tick")
    for text, share in up:
        y = f"{to_y(share):.1f}"
        yield element("line", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y, class_="grid")
        yield element("text", text, x=LEFT - 8, y=y, class_="tick end")


def _make_time_ticks(span_s: float) -> Sequence[tuple[str, float]]:
    return [(format_duration(span_s * tick / TICKS), tick / TICKS) for tick in range(TICKS + 1)]


def _pick(high: int) -> Sequence[float]:
    axis = Axis([0.0, float(high)])
    axis.is_logarithmic = False
    return axis.list_ticks()


def to_x(share: float) -> float:
    """Return the horizontal position of a share of the width."""
    return LEFT + share * (WIDTH - LEFT - RIGHT)


def to_y(share: float) -> float:
    """Return the vertical position of a share of the height."""
    return TOP + (1 - share) * (HEIGHT - TOP - BOTTOM)


def show_progress(page: JobPage, lines: Sequence[str], *, is_log_cut: bool = False) -> Markup:
    """Show the charts of steps and loss for which there is data. `is_log_cut`: earlier lines of the log are missing."""
    parts: list[Markup] = []
    hatched = "Hatched: steps that were lost and repeated. "
    about = {"Steps": f"{hatched}Circles: the newest checkpoint of each attempt.", "Loss": hatched}
    for title, chart in (("Steps", draw_steps(page)), ("Loss", draw_losses(page, lines))):
        if chart is not None:
            cut = "The log is long: losses of its first part are left out." if title == "Loss" and is_log_cut else ""
            parts += [element("h2", title), chart, element("p", about[title] + cut, class_="faint")]
    return join(parts)
