"""The table of docs/FRAMEWORKS.md, made from the kept results."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

HEADER = (
    "| template | version | start-up, CPU s | kill -9 of a worker | preemption | preemption of the first node | end |\n"
    "| --- | --- | --- | --- | --- | --- | --- |"
)


def show(rows: Iterable[dict[str, Any]]) -> str:
    return "\n".join([HEADER, *map(show_row, rows)])


COST_HEADER = "| template | install, s | test, s |\n| --- | --- | --- |"


def show_costs(rows: Iterable[dict[str, Any]]) -> str:
    """Return a table of what the test of each template takes, for those whose environment was just installed."""
    known = [row for row in rows if "install_s" in row]
    lines = [f"| `{row['framework']}.yaml` | {row['install_s']} | {row['run_s']} |" for row in known]
    return "\n".join([COST_HEADER, *lines])


def show_row(row: dict[str, Any]) -> str:
    end = "bit-identical" if row["is_identical"] else f"losses differ by up to {row['loss_difference_max']:.1g}"
    if "repeated_steps" in row:
        end += f"; {row['repeated_steps']} steps repeated in all"
    cells = [
        f"`{row['framework']}.yaml`",
        row["version"],
        f"{row['start_cpu_s']:.1f}",
        show_loss(row["kill"]),
        show_loss(row["preemption"]),
        show_loss(row["first"]) if "first" in row else "",
        end,
    ]
    return f"| {' | '.join(cells)} |"


def show_loss(found: dict[str, Any]) -> str:
    lost = found["lost_steps"]
    repeated = f"{lost} step{'' if lost == 1 else 's'} repeated"
    if not found.get("is_restarted", True):
        seconds = f"{found['recovery_s']:.0f} s to a new worker; the others continue"
        return f"{seconds}, {repeated}" if lost else seconds
    text = f"{found['recovery_s']:.0f} s, {repeated}"
    if "lost_steps_at_join" in found:
        text += f", on one node; {found['lost_steps_at_join']} when the new one joins"
    return text
