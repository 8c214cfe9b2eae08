"""Plot cost against time as PNG with matplotlib, an optional dependency."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path

from broker.cli.svg import COLOURS, LINE
from broker.errors import UsageError
from broker.types import Estimate


def write_png(file: Path, points: Sequence[Estimate], frontier: Sequence[Estimate], *, title: str) -> None:
    """Write the plot. Raises UsageError where matplotlib is not installed."""
    try:
        matplotlib = importlib.import_module("matplotlib")
        matplotlib.use("Agg")
        pyplot = importlib.import_module("matplotlib.pyplot")
    except ImportError:
        raise UsageError(
            "a PNG plot requires matplotlib, which is not installed",
            hints=["install it with `pip install matplotlib`", f"or write SVG: `--plot {file.with_suffix('.svg')}`"],
        ) from None
    figure, axes = pyplot.subplots(figsize=(8.6, 5.2), dpi=150)
    for strategy, colour in COLOURS.items():
        chosen = [each for each in points if each.strategy == strategy]
        if chosen:
            hours, usd = [each.expected_hours for each in chosen], [each.expected_usd for each in chosen]
            axes.scatter(hours, usd, s=12, alpha=0.55, color=colour, label=strategy)
    hours, usd = [each.expected_hours for each in frontier], [each.expected_usd for each in frontier]
    axes.plot(hours, usd, color=LINE, marker="o", linewidth=1.2, label="no other is cheaper and sooner")
    axes.set(title=title, xlabel="hours to finish", ylabel="USD to finish")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file)
    pyplot.close(figure)
