"""Exact elimination of tasks with at most two neighbours; it solves chains, trees and series-parallel pipelines.

A task's best response to each choice of its neighbours is computed once and added to the remaining costs: to the total,
to its one neighbour's costs, or to the edge between its two (bucket elimination: Dechter 1999). What remains is a core
in which every task has three or more neighbours, for the search.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import add

Row = Sequence[float]
# additions to eliminate one task between two neighbours; above this, it is left to the search
PAIR_WORK_MAX = 2_000_000


class EliminationGraph:
    """Costs by task, and tables by unordered pair (lower, higher), from which tasks are eliminated one by one."""

    def __init__(self, unary: Sequence[Row], tables: dict[tuple[int, int], Sequence[Row]]) -> None:
        self.unary = dict(enumerate(list(row) for row in unary))
        self.tables = dict(tables)
        self.total = 0.0
        self._neighbours: dict[int, set[int]] = {v: set() for v in self.unary}
        for u, v in tables:
            self._neighbours[u].add(v)
            self._neighbours[v].add(u)
        self._folded: list[tuple[int, list[float], list[tuple[int, list[Row]]]]] = []

    def fold(self) -> None:
        """Eliminate tasks with at most two neighbours until none is left."""
        waiting = sorted(self.unary, reverse=True)
        while waiting:
            v = waiting.pop()
            if v in self.unary and self._can_fold(v):
                touched = self._fold_one(v)
                waiting.extend(sorted(touched, reverse=True))

    def unfold(self, chosen: dict[int, int]) -> dict[int, int]:
        """Extend the core's choice to all tasks: eliminated tasks respond in reverse order."""
        chosen = dict(chosen)
        for v, costs, links in reversed(self._folded):
            for neighbour, rows in links:
                costs = list(map(add, costs, rows[chosen[neighbour]]))
            chosen[v] = costs.index(min(costs))
        return chosen

    def _can_fold(self, v: int) -> bool:
        neighbours = self._neighbours[v]
        if len(neighbours) < 2:
            return True
        work = len(self.unary[v])
        for each in neighbours:
            work *= len(self.unary[each])
        return len(neighbours) == 2 and work <= PAIR_WORK_MAX

    def _fold_one(self, v: int) -> set[int]:
        neighbours = self._neighbours.pop(v)
        costs = self.unary.pop(v)
        links = [(each, self._take_rows(each, v)) for each in sorted(neighbours)]
        self._folded.append((v, costs, links))
        for each in neighbours:
            self._neighbours[each].discard(v)
        if not links:
            self.total += min(costs)
        elif len(links) == 1:
            ((u, rows),) = links
            self.unary[u] = [each + min(map(add, row, costs)) for each, row in zip(self.unary[u], rows, strict=True)]
        else:
            (u, to_u), (w, to_w) = links
            loaded = [list(map(add, row, costs)) for row in to_u]
            bridge = [[min(map(add, row, other)) for other in to_w] for row in loaded]
            existing = self.tables.get((u, w))
            if existing is not None:
                bridge = [list(map(add, old, new)) for old, new in zip(existing, bridge, strict=True)]
            self.tables[(u, w)] = bridge
            self._neighbours[u].add(w)
            self._neighbours[w].add(u)
        return neighbours

    def _take_rows(self, neighbour: int, v: int) -> list[Row]:
        """Remove the table between the two from the core; return it by the neighbour's state."""
        if neighbour < v:
            return list(self.tables.pop((neighbour, v)))
        return list(zip(*self.tables.pop((v, neighbour)), strict=True))
