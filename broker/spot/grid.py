"""Nodes of a grid whose steps grow, and the node below a value."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence


def grow_nodes(step: float, end: float, *, even: int, growth: float) -> tuple[float, ...]:
    """Return nodes from 0: `even` equal steps, then growing ones, up to `end` or just beyond."""
    nodes = [0.0]
    while nodes[-1] < end or len(nodes) < 3:
        if len(nodes) > even:
            step *= growth
        nodes.append(nodes[-1] + step)
    return tuple(nodes)


def find_node(nodes: Sequence[float], value: float) -> tuple[int, float]:
    """Return the node below and the fraction of the step to the next one; values beyond the ends are clamped."""
    below = bisect_right(nodes, value) - 1
    if below < 0:
        return 0, 0.0
    last = len(nodes) - 2
    if below > last:
        return last, 1.0
    return below, (value - nodes[below]) / (nodes[below + 1] - nodes[below])
