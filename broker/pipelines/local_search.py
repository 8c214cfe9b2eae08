"""Change one task at a time, to save money within a deadline or to meet it again."""

from __future__ import annotations

import math
from collections.abc import Sequence

from broker.pipelines.problem import Problem

PASSES_MAX = 20
MENDS_MAX = 400


class TimelyMoves:
    """Totals of complete choices under a limit of hours, and moves of one task at a time."""

    def __init__(self, problem: Problem, limit: float) -> None:
        self._problem = problem
        self._limit = limit
        self._before: list[list[tuple[int, int]]] = [[] for _ in problem.states]  # (edge, task)
        self._after: list[list[tuple[int, int]]] = [[] for _ in problem.states]
        for e, (u, v, _) in enumerate(problem.edges):
            self._before[v].append((e, u))
            self._after[u].append((e, v))

    def evaluate(self, choice: Sequence[int]) -> float:
        """Return the cost; infinite if late."""
        is_late = self._problem.measure_hours(choice) > self._limit
        return math.inf if is_late else self._problem.add_cost(choice)

    def improve(self, choice: list[int], value: float) -> tuple[list[int], float]:
        """Change one task at a time while that saves money and stays on time. A late choice is returned unchanged."""
        if not math.isfinite(value):
            return choice, value
        choice = list(choice)
        for _ in range(PASSES_MAX):
            has_moved = False
            ends, rests = self._measure(choice)
            for v in range(len(choice)):
                costs = [self._price(choice, v, i) for i in range(len(self._problem.states[v]))]
                timely = (i for i in range(len(costs)) if i == choice[v] or self._fits(choice, v, i, ends, rests))
                best = min(timely, key=costs.__getitem__)
                if costs[best] < costs[choice[v]] * (1 - 1e-12):
                    choice[v] = best
                    ends, rests = self._measure(choice)
                    has_moved = True
            if not has_moved:
                break
        return choice, self._problem.add_cost(choice)

    def repair(self, choice: Sequence[int]) -> list[int] | None:
        """Repair a late choice by changes that each cost the least per hour gained; None if that fails."""
        choice = list(choice)
        for _ in range(MENDS_MAX):
            ends, rests = self._measure(choice)
            whole = max(end + rest for end, rest in zip(ends, rests, strict=True))
            if whole <= self._limit:
                return choice
            best: tuple[float, int, int] | None = None
            for v in range(len(choice)):
                if ends[v] + rests[v] < whole * (1 - 1e-12):
                    continue  # not on a longest path
                own = self._price(choice, v, choice[v])
                for i in range(len(self._problem.states[v])):
                    won = whole - self._through(choice, v, i, ends, rests)
                    if won > whole * 1e-12:
                        rate = (self._price(choice, v, i) - own) / won
                        best = min(best, (rate, v, i)) if best else (rate, v, i)
            if best is None:
                return None
            choice[best[1]] = best[2]
        return None

    def _fits(self, choice: Sequence[int], v: int, i: int, ends: Sequence[float], rests: Sequence[float]) -> bool:
        return self._through(choice, v, i, ends, rests) <= self._limit

    def _through(self, choice: Sequence[int], v: int, i: int, ends: Sequence[float], rests: Sequence[float]) -> float:
        """Return the hours of the longest path through task v in state i, all others as chosen."""
        problem = self._problem
        start = max((ends[u] + problem.edge_hours[e][choice[u]][i] for e, u in self._before[v]), default=0.0)
        rest = max(
            (
                problem.edge_hours[e][i][choice[w]] + problem.states[w][choice[w]].hours + rests[w]
                for e, w in self._after[v]
            ),
            default=0.0,
        )
        return start + problem.states[v][i].hours + rest

    def _price(self, choice: Sequence[int], v: int, i: int) -> float:
        """Return the cost of task v in state i with all its transfers."""
        problem = self._problem
        cost = problem.states[v][i].cost
        cost += sum(problem.edge_usd[e][choice[u]][i] for e, u in self._before[v])
        return cost + sum(problem.edge_usd[e][i][choice[w]] for e, w in self._after[v])

    def _measure(self, choice: Sequence[int]) -> tuple[list[float], list[float]]:
        """Return the hour at which each task ends, and the hours from there to the end of all its successors."""
        problem = self._problem
        count = len(choice)
        ends, rests = [0.0] * count, [0.0] * count
        for v in range(count):
            start = max(
                (ends[u] + problem.edge_hours[e][choice[u]][choice[v]] for e, u in self._before[v]), default=0.0
            )
            ends[v] = start + problem.states[v][choice[v]].hours
        for v in reversed(range(count)):
            rests[v] = max(
                (
                    problem.edge_hours[e][choice[v]][choice[w]] + problem.states[w][choice[w]].hours + rests[w]
                    for e, w in self._after[v]
                ),
                default=0.0,
            )
        return ends, rests
