"""Find the cheapest choice whose longest path ends by a deadline.

Every path that is too long gets a price per hour (a Lagrange multiplier). With lateness priced, the problem is an
ordinary sum of costs, whose bound, less the value of the deadline's own hours, is a bound here; the search proves the
rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from operator import add
from typing import Self

from broker.pipelines.bounds import CostField, Row
from broker.pipelines.branch_and_bound import SearchResult, search
from broker.pipelines.label_setting import TooManyLabelsError, find_by_labels, is_forest
from broker.pipelines.local_search import TimelyMoves
from broker.pipelines.problem import Problem
from broker.pipelines.schedule import Timetable

ROUNDS = 30
ROUNDS_WITHOUT_PROGRESS = 8
ROUNDING = 1e-12  # of the deadline: a plan that takes exactly that long is on time


class TimedField(CostField):
    """A field that also closes states that are late whatever the other tasks choose."""

    def __init__(self, unary: Sequence[Row], tables: Sequence[Sequence[Row]], times: Timetable, limit: float) -> None:
        super().__init__(unary, times.edges, tables)
        self.kept = list(times.kept)
        self.times = times
        self.limit = limit

    def copy(self) -> Self:
        """Return a copy with its own timetable."""
        twin = super().copy()
        twin.times, twin.limit = self.times.copy(), self.limit
        return twin

    @property
    def size(self) -> int:
        """Return the approximate work of one sweep, in additions."""
        return 3 * super().size  # hours are bounded forwards and backwards in addition

    def restrict(self, v: int, keep: Sequence[int]) -> None:
        """Keep only these states of task `v`, in costs and in hours."""
        super().restrict(v, keep)
        self.times.restrict(v, keep)

    def sweep(self, upper: float, *, is_forward: bool) -> bool:
        """Exclude states that are too late, then improve the bound of costs; return whether a plan is left."""
        if is_forward:
            while timely := self.times.list_timely(self.limit):
                for v, keep in timely:
                    self.restrict(v, keep)
            if timely is None:
                return False
        return super().sweep(upper, is_forward=is_forward)


@dataclass(kw_only=True)
class _Prices:
    """USD per hour by path (task indexes), and their sum on every task and edge."""

    by_path: dict[tuple[int, ...], float] = field(default_factory=dict)

    def spread(self, problem: Problem) -> tuple[list[float], list[float]]:
        number = {(u, v): e for e, (u, v, _) in enumerate(problem.edges)}
        tasks, edges = [0.0] * len(problem.states), [0.0] * len(problem.edges)
        for path, usd in self.by_path.items():
            for v in path:
                tasks[v] += usd
            for pair in pairwise(path):
                edges[number[pair]] += usd
        return tasks, edges


def find_cheapest_in_time(
    problem: Problem, start: Sequence[int], deadline_hours: float, *, work_max: float
) -> SearchResult:
    """Return the cheapest choice whose longest path is at most the deadline. `start` is any choice that is on time."""
    limit = deadline_hours * (1 + ROUNDING)
    moves = TimelyMoves(problem, limit)
    assert problem.measure_hours(start) <= limit, "the start is on time"
    best, value = moves.improve(list(start), problem.add_cost(start))
    times = Timetable(problem)
    if not times.close_late(limit):
        return SearchResult(choice=tuple(best), value=value, lower_bound=value, is_optimal=True, steps=0)
    prices, best, value, times = _raise_prices(problem, times, moves, best, value, limit)
    offset = -limit * sum(prices.by_path.values())
    root = _make_field(problem, times, prices, limit)
    if not all(root.sweep(value - offset, is_forward=is_forward) for is_forward in (True, False, True, False)):
        return SearchResult(choice=tuple(best), value=value, lower_bound=value, is_optimal=True, steps=0)
    if is_forest(len(problem.states), root.edges):
        with suppress(TooManyLabelsError):
            better = find_by_labels(problem, root, root.times, upper=value - offset, limit=limit, work_max=work_max)
            if better is not None:
                best, value = better, problem.add_cost(better)
            return SearchResult(choice=tuple(best), value=value, lower_bound=value, is_optimal=True, steps=0)
    return search(root, best, evaluate=moves.evaluate, improve=moves.improve, offset=offset, work_max=work_max)


def _raise_prices(
    problem: Problem, times: Timetable, moves: TimelyMoves, best: list[int], value: float, limit: float
) -> tuple[_Prices, list[int], float, Timetable]:
    """Take subgradient steps of Polyak's length: raise prices of late paths, lower prices of early ones."""
    prices, top, top_prices, idle, pace = _Prices(), float("-inf"), _Prices(), 0, 1.0
    for _ in range(ROUNDS):
        offset = -limit * sum(prices.by_path.values())
        root = _make_field(problem, times, prices, limit)
        is_open = all(root.sweep(value - offset, is_forward=is_forward) for is_forward in (True, False, True, False))
        if not is_open:  # no cheaper choice is left: the bound holds
            return prices, best, value, times
        times = root.times
        bound = root.bound + offset
        choice = [kept[i] for kept, i in zip(root.kept, root.round_off(), strict=True)]
        repaired = moves.repair(choice)
        if repaired is not None:
            repaired, usd = moves.improve(repaired, problem.add_cost(repaired))
            if usd < value:
                best, value = repaired, usd
        if bound > top:
            top, top_prices, idle = bound, _Prices(by_path=dict(prices.by_path)), 0
        else:
            idle, pace = idle + 1, pace / 2 if idle % 2 else pace
        if idle >= ROUNDS_WITHOUT_PROGRESS or value - top <= value * 1e-9:
            break
        _step(problem, prices, choice, limit, pace * (value - bound))
    return top_prices, best, value, times


def _step(problem: Problem, prices: _Prices, choice: Sequence[int], limit: float, gap: float) -> None:
    path, _ = find_longest_path(problem, choice)
    prices.by_path.setdefault(path, 0.0)
    late = {each: _measure_path(problem, choice, each) - limit for each in prices.by_path}
    late = {each: hours for each, hours in late.items() if hours > 0 or prices.by_path[each] > 0}
    squares = sum(hours * hours for hours in late.values())
    if not squares:
        prices.by_path.pop(path)
        return
    for each, hours in late.items():
        prices.by_path[each] = max(0.0, prices.by_path[each] + gap / squares * hours)
    for each in [each for each, usd in prices.by_path.items() if not usd]:
        del prices.by_path[each]


def find_longest_path(problem: Problem, choice: Sequence[int]) -> tuple[tuple[int, ...], float]:
    """Return the longest path of a choice, and its hours."""
    ends = [0.0] * len(problem.states)
    before = [-1] * len(problem.states)
    incoming: list[list[tuple[int, float]]] = [[] for _ in problem.states]
    for (u, v, _), table in zip(problem.edges, problem.edge_hours, strict=True):
        incoming[v].append((u, table[choice[u]][choice[v]]))
    for v, edges in enumerate(incoming):
        for u, hours in edges:
            if before[v] < 0 or ends[u] + hours > ends[v]:
                before[v], ends[v] = u, ends[u] + hours
        ends[v] += problem.states[v][choice[v]].hours
    at = ends.index(max(ends))
    hours = ends[at]
    path = [at]
    while before[path[-1]] >= 0:
        path.append(before[path[-1]])
    return tuple(reversed(path)), hours


def _measure_path(problem: Problem, choice: Sequence[int], path: Sequence[int]) -> float:
    number = {(u, v): e for e, (u, v, _) in enumerate(problem.edges)}
    hours = sum(problem.states[v][choice[v]].hours for v in path)
    return hours + sum(problem.edge_hours[number[(u, v)]][choice[u]][choice[v]] for u, v in pairwise(path))


def _make_field(problem: Problem, times: Timetable, prices: _Prices, limit: float) -> TimedField:
    """Make costs with lateness priced, for the states that the timetable has open."""
    by_task, by_edge = prices.spread(problem)
    times = times.copy()
    unary = [
        [problem.states[v][i].cost + by_task[v] * problem.states[v][i].hours for i in kept]
        for v, kept in enumerate(times.kept)
    ]
    tables = list[list[Row]]()
    for e, (u, v) in enumerate(times.edges):
        columns, price = times.kept[v], by_edge[e]
        rows: list[Row] = [[row[j] for j in columns] for row in (problem.edge_usd[e][i] for i in times.kept[u])]
        if price:
            rows = [
                list(map(add, row, [price * each for each in hours]))
                for row, hours in zip(rows, times.tables[e][0], strict=True)
            ]
        tables.append(rows)
    return TimedField(unary, tables, times, limit)
