"""Find the cheapest choice of a state for every task: eliminate tasks if possible, and search the rest."""

from __future__ import annotations

from collections.abc import Sequence

from broker.pipelines.bounds import CostField
from broker.pipelines.branch_and_bound import SearchResult, search
from broker.pipelines.elimination import EliminationGraph
from broker.pipelines.problem import Problem


def find_cheapest(problem: Problem, *, work_max: float) -> SearchResult:
    """Return the choice with the lowest sum of all tasks and transfers, in USD, the value of time included."""
    core = EliminationGraph(
        [[state.cost for state in states] for states in problem.states],
        {(u, v): table for (u, v, _), table in zip(problem.edges, problem.edge_usd, strict=True)},
    )
    core.fold()
    left = sorted(core.unary)
    if left:
        place = {v: i for i, v in enumerate(left)}
        pairs = sorted((place[u], place[v]) for u, v in core.tables)
        tables = [core.tables[(left[u], left[v])] for u, v in pairs]
        sums = CostTotals([core.unary[v] for v in left], pairs, tables)
        result = search(
            CostField(sums.unary, pairs, tables),
            [problem.greedy[v] for v in left],
            evaluate=sums.add_up,
            improve=sums.improve,
            work_max=work_max,
        )
    else:
        result = SearchResult(choice=(), value=0.0, lower_bound=0.0, is_optimal=True, steps=0)
    chosen = core.unfold(dict(zip(left, result.choice, strict=True)))
    choice = tuple(chosen[v] for v in range(len(problem.states)))
    value = problem.add_cost(choice)
    return SearchResult(
        choice=choice,
        value=value,
        lower_bound=value if result.is_optimal else min(value, result.lower_bound + core.total),
        is_optimal=result.is_optimal,
        steps=result.steps,
    )


class CostTotals:
    """Totals of complete choices, and local moves that lower them."""

    def __init__(
        self,
        unary: Sequence[Sequence[float]],
        edges: Sequence[tuple[int, int]],
        tables: Sequence[Sequence[Sequence[float]]],
    ) -> None:
        self.unary = unary
        self._edges = edges
        self.tables = tables
        # for each task: its neighbours, with the table's rows by the neighbour's state
        self._around: list[list[tuple[int, Sequence[Sequence[float]]]]] = [[] for _ in unary]
        for (u, v), rows in zip(edges, tables, strict=True):
            self._around[v].append((u, rows))
            self._around[u].append((v, list(zip(*rows, strict=True))))

    def add_up(self, choice: Sequence[int]) -> float:
        """Return the total cost of one state per task, transfers included."""
        total = sum(costs[i] for costs, i in zip(self.unary, choice, strict=True))
        return total + sum(rows[choice[u]][choice[v]] for (u, v), rows in zip(self._edges, self.tables, strict=True))

    def improve(self, choice: list[int], value: float) -> tuple[list[int], float]:
        """Move one task at a time to the best state given its neighbours, until nothing changes."""
        choice = list(choice)
        waiting = set(range(len(choice)))
        while waiting:
            v = waiting.pop()
            costs = list(self.unary[v])
            for neighbour, rows in self._around[v]:
                for i, each in enumerate(rows[choice[neighbour]]):
                    costs[i] += each
            best = min(costs)
            if best < costs[choice[v]] * (1 - 1e-12):  # within rounding errors, two moves could undo each other forever
                choice[v] = costs.index(best)
                waiting.update(neighbour for neighbour, _ in self._around[v])
        return choice, self.add_up(choice)
