"""The table of docs/FRAMEWORKS.md, made from the kept results."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

HEADER = (
    "| template | version | start-up, CPU s | after kill -9 of a worker | after a preemption | end |\n"
    "| --- | --- | --- | --- | --- | --- |"
)


def show(rows: Iterable[dict[str, Any]]) -> str:
    return "\n".join([HEADER, *map(show_row, rows)])


def show_row(row: dict[str, Any]) -> str:
    end = "bit-identical" if row["is_identical"] else f"losses differ by up to {row['loss_difference_max']:.1g}"
    cells = [
        f"`{row['framework']}.yaml`",
        row["version"],
        f"{row['start_cpu_s']:.1f}",
        show_loss(row["kill"]),
        show_loss(row["preemption"]),
        end,
    ]
    return f"| {' | '.join(cells)} |"


def show_loss(found: dict[str, Any]) -> str:
    lost = found["lost_steps"]
    if not found.get("is_restarted", True):
        return f"{found['recovery_s']:.0f} s to a new worker; the others continue"
    return f"{found['recovery_s']:.0f} s, {lost} step{'' if lost == 1 else 's'} again"
