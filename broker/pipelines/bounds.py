"""Compute a lower bound on a sum of unary and pairwise costs, by sequential message passing.

Costs are moved between tasks and edges without changing any choice's total, so the sum of all minima never exceeds the
optimum, and each sweep brings it closer (TRW-S: Kolmogorov 2006, "Convergent tree-reweighted message passing"; in the
form of SRMP, Kolmogorov 2015). On a chain, one sweep in each direction is a dynamic program, and exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import add, sub
from typing import Self

Row = Sequence[float]
EDGE_OVERHEAD = 100  # measured, in units of `CostField.size`: cost of an edge with one state at each end
RELATIVE_ERROR = 1e-9  # sums of a few hundred doubles are far more exact than this; prices are far less


class CostField:
    """Costs of the open states of each task, and the current bound. Copies share unchanged rows.

    `kept[v]` has the caller's numbers of task v's open states. `tables[e]` holds edge e's costs twice: rows by source
    and rows by target. `offsets[e]` is the cost moved into the edge at its source and target (negative: out).
    `marginals[v]` bounds the best total with each of v's states, as of the last sweep.
    """

    def __init__(self, unary: Sequence[Row], edges: Sequence[tuple[int, int]], tables: Sequence[Sequence[Row]]) -> None:
        """Make the field. `edges` go from lower to higher tasks, each pair once; pairwise costs are at least 0."""
        self.edges = edges
        self.earlier: list[list[int]] = [[] for _ in unary]
        self.later: list[list[int]] = [[] for _ in unary]
        for e, (u, v) in enumerate(edges):
            self.later[u].append(e)
            self.earlier[v].append(e)
        self.kept = [list(range(len(row))) for row in unary]
        self.unary = [list(row) for row in unary]
        self.tables: list[tuple[list[Row], list[Row]]] = [
            (list(rows), list(zip(*rows, strict=True))) for rows in tables
        ]
        self.offsets = [([0.0] * len(unary[u]), [0.0] * len(unary[v])) for u, v in edges]
        self.marginals = [list(row) for row in unary]
        self._rest = [min(row) for row in unary]
        self._held = [0.0] * len(edges)
        self.bound = sum(self._rest)

    def copy(self) -> Self:
        """Return a copy for one branch of the search; edges are shared because they never change."""
        twin = type(self).__new__(type(self))
        twin.edges, twin.earlier, twin.later = self.edges, self.earlier, self.later
        twin.kept, twin.unary, twin.tables = list(self.kept), list(self.unary), list(self.tables)
        twin.offsets, twin.marginals = list(self.offsets), list(self.marginals)
        twin._rest, twin._held, twin.bound = list(self._rest), list(self._held), self.bound
        return twin

    @property
    def is_decided(self) -> bool:
        """Whether each task has one state left."""
        return all(len(each) == 1 for each in self.kept)

    @property
    def size(self) -> int:
        """Return the approximate work of one sweep, in additions."""
        return sum(len(self.unary[u]) * len(self.unary[v]) + EDGE_OVERHEAD for u, v in self.edges)

    def sweep(self, upper: float, *, is_forward: bool) -> bool:
        """Pass over all tasks once, raise `bound`, and close states that cannot be part of a total below `upper`.

        Return False if some task has no open state left: no total is below `upper`.
        """
        total = sum(self._rest) + sum(self._held)
        closed = dict[int, list[int]]()
        upper -= abs(upper) * RELATIVE_ERROR
        behind, ahead = (self.earlier, self.later) if is_forward else (self.later, self.earlier)
        mine, others = (1, 0) if is_forward else (0, 1)  # side of the edges already passed
        for v in range(len(self.unary)) if is_forward else reversed(range(len(self.unary))):
            total -= self._rest[v]
            marginal = self.unary[v]
            for e in behind[v]:
                total -= self._held[e]
                other = self.offsets[e][others]
                message = [min(map(add, row, other)) for row in self.tables[e][mine]]
                marginal = list(map(add, marginal, message))
                self._move(e, mine, [-each for each in message], held=0.0)
            for e in ahead[v]:
                marginal = list(map(sub, marginal, self.offsets[e][others]))
            best = min(marginal)
            total += best
            limit = upper - total + best
            if max(marginal) >= limit:
                keep = [i for i, each in enumerate(marginal) if each < limit]
                if not keep:
                    return False
                closed[v] = keep
            self.marginals[v] = [total - best + each for each in marginal]
            share = 1 / max(len(behind[v]), len(ahead[v]), 1)
            moved = [share * each for each in marginal]
            for e in ahead[v]:
                self._move(e, others, list(map(add, self.offsets[e][others], moved)), held=share * best)
            self._rest[v] = (1 - share * len(ahead[v])) * best
        self.bound = max(self.bound, sum(self._rest) + sum(self._held))
        for v, keep in closed.items():
            self.restrict(v, keep)
        return True

    def _move(self, e: int, side: int, offset: list[float], *, held: float) -> None:
        pair = self.offsets[e]
        self.offsets[e] = (offset, pair[1]) if side == 0 else (pair[0], offset)
        self._held[e] = held

    def restrict(self, v: int, keep: Sequence[int]) -> None:
        """Keep only these of task v's open states, by position."""
        self.kept[v] = [self.kept[v][i] for i in keep]
        self.unary[v] = [self.unary[v][i] for i in keep]
        self.marginals[v] = [self.marginals[v][i] for i in keep]
        for edges, side in ((self.later[v], 0), (self.earlier[v], 1)):
            for e in edges:
                pair, tables = self.offsets[e], self.tables[e]
                offset = [pair[side][i] for i in keep]
                rows: list[Row] = [tables[side][i] for i in keep]
                columns: list[Row] = [[row[i] for i in keep] for row in tables[1 - side]]
                self.offsets[e] = (offset, pair[1]) if side == 0 else (pair[0], offset)
                self.tables[e] = (rows, columns) if side == 0 else (columns, rows)

    def round_off(self) -> list[int]:
        """Return a choice, by position: in order, each task takes its best state given earlier ones and bounds."""
        chosen = [0] * len(self.unary)
        for v, costs in enumerate(self.unary):
            for e in self.later[v]:
                costs = list(map(sub, costs, self.offsets[e][0]))
            for e in self.earlier[v]:
                costs = list(map(add, costs, self.tables[e][0][chosen[self.edges[e][0]]]))
            chosen[v] = costs.index(min(costs))
        return chosen
