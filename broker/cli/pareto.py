"""`broker plan --pareto`: plot cost against time in the terminal or to a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from broker.cli.plan_table import MODELS
from broker.cli.render import print_line, print_table, print_wrapped
from broker.errors import UsageError
from broker.formatting import format_hours, format_usd
from broker.optimizer.pareto import find_frontier, list_timed
from broker.types import Estimate, Plan

WIDTH, HEIGHT = 64, 14
MARKS = "123456789abcdefghijklmnopqrstuvwxyz"


def show_pareto(plan: Plan, file: Path | None) -> None:
    """Print the plot and a table of the Pareto-optimal placements. Raises UsageError for a task without work."""
    points = list_timed(plan.estimates)
    if not points:
        raise UsageError(
            "`--pareto` requires the amount of work, which the task does not specify",
            hints=["add `goal: {work: 100h}` to the task, or compare with `--what-if work=100h`"],
        )
    frontier = find_frontier(points)[: len(MARKS)]
    print_line("\nUSD to finish against time; numbers mark Pareto-optimal placements:")
    for line in draw(points, frontier):
        print_line(line)
    rows = [
        [
            mark, format_usd(each.expected_usd), format_hours(each.expected_hours), each.placement.offer.cloud,
            each.placement.offer.zone or each.placement.offer.region, each.placement.offer.instance_type,
            MODELS[each.strategy],
        ]
        for mark, each in zip(MARKS, frontier, strict=False)
    ]  # fmt: skip
    print_table(["#", "USD", "TIME", "CLOUD", "REGION/ZONE", "INSTANCE", "MODEL"], rows, right=("USD", "TIME"))
    from broker.optimizer.terms import describe_hour_value

    print_wrapped(f"The choice weighs cost against time: {describe_hour_value(plan)}.", indent=0)
    if file is not None:
        write_plot(file, points, frontier, title=f"{plan.task.name or 'task'}: cost against time")
        print_line(f"Wrote {file}")


def draw(points: Sequence[Estimate], frontier: Sequence[Estimate]) -> list[str]:
    """Draw a character plot: cost upwards, time to the right; an axis with a wide range is logarithmic."""
    from broker.axes import Axis

    hours = Axis([point.expected_hours or 0.0 for point in points])
    usd = Axis([point.expected_usd or 0.0 for point in points])
    cells = [[" "] * WIDTH for _ in range(HEIGHT)]

    def put(each: Estimate, mark: str) -> None:
        column = round(hours.place(each.expected_hours or 0.0) * (WIDTH - 1))
        row = round((1 - usd.place(each.expected_usd or 0.0)) * (HEIGHT - 1))
        cells[row][column] = mark

    for each in points:
        put(each, "·")
    for mark, each in reversed(list(zip(MARKS, frontier, strict=False))):
        put(each, mark)
    labels = {0: format_usd(usd.high), HEIGHT - 1: format_usd(usd.low)}
    lines = [f"{labels.get(row, ''):>11} │{''.join(line)}".rstrip() for row, line in enumerate(cells)]
    left, right = format_hours(hours.low), format_hours(hours.high)
    gap = " " * max(1, WIDTH - len(left) - len(right))
    return [*lines, f"{'USD':>11} └{'─' * WIDTH}", f"{'':>13}{left}{gap}{right}"]


def write_plot(file: Path, points: Sequence[Estimate], frontier: Sequence[Estimate], *, title: str) -> None:
    """Write an SVG file. Raises UsageError for any other suffix, or if the file cannot be written."""
    from broker.cli.svg import draw_svg

    if file.suffix.lower() != ".svg":
        raise UsageError(
            f"`--plot` must name a .svg file, not `{file}`",
            hints=[f"write `--plot {file.with_suffix('.svg')}`; browsers and editors show SVG and export it as PNG"],
        )
    try:
        file.write_text(draw_svg(points, frontier, title=title), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write `{file}`: {(error.strerror or 'no access').lower()}") from None
