"""Bound the hours of every state of a pipeline, and find the earliest possible end."""

from __future__ import annotations

from collections.abc import Sequence
from operator import add

from broker.pipelines.bounds import EDGE_OVERHEAD, RELATIVE_ERROR, Row
from broker.pipelines.branch_and_bound import SearchResult
from broker.pipelines.problem import Problem


class Timetable:
    """Hours of each task's open states, and of moving data between them. Copies share rows."""

    def __init__(self, problem: Problem) -> None:
        self.edges = [(u, v) for u, v, _ in problem.edges]
        self.earlier: list[list[int]] = [[] for _ in problem.states]
        self.later: list[list[int]] = [[] for _ in problem.states]
        for e, (u, v) in enumerate(self.edges):
            self.later[u].append(e)
            self.earlier[v].append(e)
        self.kept = [list(range(len(states))) for states in problem.states]
        self.hours = [[state.hours for state in states] for states in problem.states]
        self.tables: list[tuple[list[Row], list[Row]]] = [
            (list(rows), list(zip(*rows, strict=True))) for rows in problem.edge_hours
        ]

    def copy(self) -> Timetable:
        """Return a copy for one branch of the search; edges are shared because they never change."""
        twin = Timetable.__new__(Timetable)
        twin.edges, twin.earlier, twin.later = self.edges, self.earlier, self.later
        twin.kept, twin.hours, twin.tables = list(self.kept), list(self.hours), list(self.tables)
        return twin

    def restrict(self, v: int, keep: Sequence[int]) -> None:
        """Keep only these of task v's open states, by position."""
        self.kept[v] = [self.kept[v][i] for i in keep]
        self.hours[v] = [self.hours[v][i] for i in keep]
        for edges, side in ((self.later[v], 0), (self.earlier[v], 1)):
            for e in edges:
                tables = self.tables[e]
                rows: list[Row] = [tables[side][i] for i in keep]
                columns: list[Row] = [[row[i] for i in keep] for row in tables[1 - side]]
                self.tables[e] = (rows, columns) if side == 0 else (columns, rows)

    @property
    def size(self) -> int:
        """Return the approximate work of bounding all ends, in additions."""
        return sum(len(self.hours[u]) * len(self.hours[v]) + EDGE_OVERHEAD for u, v in self.edges)

    def bound_ends(self) -> list[list[float]]:
        """Return the earliest end by task and state, as if each of its inputs chose for it alone."""
        ends = list[list[float]]()
        for v, hours in enumerate(self.hours):
            start = [0.0] * len(hours)
            for e in self.earlier[v]:
                before = ends[self.edges[e][0]]
                start = [
                    max(each, min(map(add, row, before))) for each, row in zip(start, self.tables[e][1], strict=True)
                ]
            ends.append(list(map(add, start, hours)))
        return ends

    def bound_rests(self) -> list[list[float]]:
        """Return the least hours from each state's end to the end of all successors, as if each chose for it alone."""
        rests: list[list[float]] = [[] for _ in self.hours]
        for u in reversed(range(len(self.hours))):
            rest = [0.0] * len(self.hours[u])
            for e in self.later[u]:
                w = self.edges[e][1]
                after = list(map(add, self.hours[w], rests[w]))
                rest = [max(each, min(map(add, row, after))) for each, row in zip(rest, self.tables[e][0], strict=True)]
            rests[u] = rest
        return rests

    def list_timely(self, limit: float) -> list[tuple[int, list[int]]] | None:
        """List the tasks that have states which cannot end by `limit`, each with the positions of its other states.

        None if a task has no other state: no choice ends by `limit`.
        """
        timely = list[tuple[int, list[int]]]()
        for v, (ends, rests) in enumerate(zip(self.bound_ends(), self.bound_rests(), strict=True)):
            keep = [i for i, (end, rest) in enumerate(zip(ends, rests, strict=True)) if end + rest <= limit]
            if not keep:
                return None
            if len(keep) < len(ends):
                timely.append((v, keep))
        return timely

    def close_late(self, limit: float) -> bool:
        """Close states that cannot be part of a choice that ends by `limit`. Return False if no choice ends by then."""
        while True:
            timely = self.list_timely(limit)
            if timely is None:
                return False
            if not timely:
                return True
            for v, keep in timely:
                self.restrict(v, keep)

    def bound_end(self) -> float:
        """Return a lower bound on the end of every choice among the open states."""
        both = zip(self.bound_ends(), self.bound_rests(), strict=True)
        soonest: list[float] = [min(map(add, ends, rests)) for ends, rests in both]
        return max(soonest)

    def round_off(self) -> list[int]:
        """Return a choice, by position: in task order, each takes the state with the earliest end and shortest rest."""
        rests = self.bound_rests()
        chosen, ended = list[int](), list[float]()
        for v, hours in enumerate(self.hours):
            ends = list(hours)
            for e in self.earlier[v]:
                u = self.edges[e][0]
                row = self.tables[e][0][chosen[u]]
                ends = [max(end, ended[u] + move + own) for end, move, own in zip(ends, row, hours, strict=True)]
            whole = list(map(add, ends, rests[v]))
            best = whole.index(min(whole))
            chosen.append(best)
            ended.append(ends[best])
        return chosen


def find_soonest(problem: Problem, *, work_max: float) -> SearchResult:
    """Minimize the hours of the longest path, by branch and bound."""
    best: Sequence[int] = problem.greedy
    value = problem.measure_hours(best)
    root = Timetable(problem)
    stack = [(root.bound_end(), root, -1, 0)]
    steps, work = 0, 0.0
    while stack and work < work_max:
        bound, times, task, place = stack.pop()
        if bound >= value * (1 - RELATIVE_ERROR):
            continue
        steps += 1
        times = times.copy()
        if task >= 0:
            times.restrict(task, [place])
        work += 4 * times.size
        choice = [kept[i] for kept, i in zip(times.kept, times.round_off(), strict=True)]
        hours = problem.measure_hours(choice)
        if hours < value:
            best, value = choice, hours
        if times.close_late(value * (1 - RELATIVE_ERROR)):
            stack.extend(_branch(times, bound))
    bounds = [bound for bound, *_ in stack if bound < value * (1 - RELATIVE_ERROR)]
    return SearchResult(
        choice=tuple(best), value=value, lower_bound=min(bounds, default=value), is_optimal=not bounds, steps=steps
    )


def _branch(times: Timetable, bound: float) -> list[tuple[float, Timetable, int, int]]:
    """List all open states of the task with the most dependents, the fastest last because the stack pops it first."""
    undecided = [v for v, kept in enumerate(times.kept) if len(kept) > 1]
    if not undecided:
        return []
    task = max(undecided, key=lambda v: (len(times.later[v]) + len(times.earlier[v]), -v))
    ends, rests = times.bound_ends()[task], times.bound_rests()[task]
    ranked = sorted(((end + rest, i) for i, (end, rest) in enumerate(zip(ends, rests, strict=True))), reverse=True)
    return [(max(bound, each), times, task, i) for each, i in ranked]
