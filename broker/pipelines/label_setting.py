"""Find the cheapest choice on time if no two paths meet twice (chains, trees): dynamic programming over (cost, hours).

The part of a tree behind one edge affects the rest through two figures only: its cost, and the length of the path
through that edge. So each state of each task keeps its Pareto-optimal pairs, less those that the bound of priced
lateness proves no better than a known choice (label setting: Dumitrescu and Boland 2003).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import itemgetter

from broker.pipelines.bounds import RELATIVE_ERROR, CostField
from broker.pipelines.problem import Problem
from broker.pipelines.schedule import Timetable

# usd, hours on the open path before the task, hours after it, usd with lateness priced, choices made
Label = tuple[float, float, float, float, "Trace"]
Trace = tuple[int, int, "Trace | None", "Trace | None"]  # task, state, and the traces of two parts
LABEL_WORK = 10  # cost of one label, in additions


class TooManyLabelsError(Exception):
    """The labels exceeded the work limit. The caller of `find_by_labels` then searches instead."""


def is_forest(count: int, edges: Sequence[tuple[int, int]]) -> bool:
    """Return whether no two paths meet twice, ignoring directions."""
    group = list(range(count))

    def find(v: int) -> int:
        while group[v] != v:
            group[v] = group[group[v]]
            v = group[v]
        return v

    for u, v in edges:
        if find(u) == find(v):
            return False
        group[find(u)] = find(v)
    return True


def find_by_labels(
    problem: Problem, field: CostField, times: Timetable, *, upper: float, limit: float, work_max: float
) -> list[int] | None:
    """Return the cheapest choice that ends by `limit`; None if none has a total below `upper`.

    `field` includes the price of lateness and has been swept; `upper` is a bound on its totals. `field` and `times`
    have the same open states. Raises TooManyLabelsError.
    """
    return _Labels(problem, field, times, upper, limit, work_max).run()


class _Labels:
    def __init__(
        self, problem: Problem, field: CostField, times: Timetable, upper: float, limit: float, work_max: float
    ) -> None:
        self._problem, self._field, self._times = problem, field, times
        self._upper = upper - abs(upper) * RELATIVE_ERROR
        self._limit, self._labels_left = limit, work_max / LABEL_WORK
        self._ends, self._rests = times.bound_ends(), times.bound_rests()
        self._done: dict[int, list[list[Label]]] = {}  # by task, then position of its state

    def run(self) -> list[int] | None:
        chosen = [-1] * len(self._problem.states)
        for order in self._list_trees():
            for v, parent_edge, child_edges in order:
                labels = [self._join(v, i, child_edges) for i in range(len(self._field.kept[v]))]
                self._done[v] = [self._thin(v, i, each, parent_edge) for i, each in enumerate(labels)]
                if not any(self._done[v]):
                    return None
            last = [label for each in self._done[order[-1][0]] for label in each]
            _follow(min(last, key=itemgetter(0))[4], chosen)
        return chosen

    def _list_trees(self) -> Iterator[list[tuple[int, int | None, list[int]]]]:
        """Return for every tree: (task, edge to its parent, edges to its children), children first."""
        seen = set[int]()
        for root in range(len(self._field.kept)):
            if root in seen:
                continue
            order = list[tuple[int, int | None, list[int]]]()
            waiting: list[tuple[int, int | None]] = [(root, None)]
            while waiting:
                v, above = waiting.pop()
                seen.add(v)
                below = [e for e in (*self._times.earlier[v], *self._times.later[v]) if e != above]
                order.append((v, above, below))
                waiting.extend((self._other_end(e, v), e) for e in below)
            order.reverse()
            yield order

    def _other_end(self, e: int, v: int) -> int:
        u, w = self._times.edges[e]
        return w if u == v else u

    def _join(self, v: int, i: int, child_edges: Sequence[int]) -> list[Label]:
        """Join the children's labels at task v in state i; keep those that are on time and not dominated."""
        state = self._field.kept[v][i]
        own_hours = self._times.hours[v][i]
        labels: list[Label] = [
            (self._problem.states[v][state].cost, 0.0, 0.0, self._field.unary[v][i], (v, state, None, None))
        ]
        for e in child_edges:
            is_before = self._times.edges[e][1] == v
            arriving = self._carry(e, v, i, is_before=is_before)
            self._spend(len(labels) * len(arriving))
            joined = list[Label]()
            for usd, head, tail, priced, trace in labels:
                for more, hours, _, more_priced, other in arriving:
                    before, after = (max(head, hours), tail) if is_before else (head, max(tail, hours))
                    if before + own_hours + after <= self._limit:
                        joined.append((usd + more, before, after, priced + more_priced, (v, state, trace, other)))
            labels = _keep_unbeaten(joined)
        return labels

    def _carry(self, e: int, v: int, i: int, *, is_before: bool) -> list[Label]:
        """Move a child's labels over its edge, as task v in state i sees them; hours are in second place."""
        child = self._other_end(e, v)
        side = 1 if is_before else 0
        priced_row, hours_row = self._field.tables[e][side][i], self._times.tables[e][side][i]
        own = self._field.kept[v][i]
        usd = self._problem.edge_usd[e]
        carried = list[Label]()
        for k, labels in enumerate(self._done[child]):
            kept = self._field.kept[child][k]
            moving = usd[kept][own] if is_before else usd[own][kept]
            hours, priced_moving = hours_row[k], priced_row[k]
            carried += [
                (cost + moving, time + hours, 0.0, priced + priced_moving, trace)
                for cost, time, _, priced, trace in labels
            ]
        self._spend(len(carried))
        return _keep_unbeaten(carried)

    def _thin(self, v: int, i: int, labels: list[Label], parent_edge: int | None) -> list[Label]:
        """Keep the labels that the parent needs, with the hours of the path towards it in second place."""
        own_hours = self._times.hours[v][i]
        if parent_edge is None or self._times.edges[parent_edge][0] == v:
            turned = [(usd, head + own_hours, 0.0, priced, trace) for usd, head, _, priced, trace in labels]
            longest = self._limit - self._rests[v][i]
        else:
            turned = [(usd, tail + own_hours, 0.0, priced, trace) for usd, _, tail, priced, trace in labels]
            longest = self._limit - self._ends[v][i] + own_hours
        if not turned:
            return []
        # the rest of the pipeline adds at least this to a label's priced total
        outside = self._field.marginals[v][i] - min(label[3] for label in turned)
        longest += abs(self._limit) * RELATIVE_ERROR
        return _keep_unbeaten([each for each in turned if each[1] <= longest and each[3] + outside < self._upper])

    def _spend(self, count: int) -> None:
        self._labels_left -= count
        if self._labels_left < 0:
            raise TooManyLabelsError


def _keep_unbeaten(labels: list[Label]) -> list[Label]:
    """Keep labels that no other matches or beats in money, hours before and hours after."""
    labels.sort(key=itemgetter(0, 1, 2))
    kept = list[Label]()
    if all(label[2] == 0.0 for label in labels):
        least = float("inf")
        for label in labels:
            if label[1] < least:
                least = label[1]
                kept.append(label)
        return kept
    for label in labels:
        if not any(each[1] <= label[1] and each[2] <= label[2] for each in kept):
            kept.append(label)
    return kept


def _follow(trace: Trace, chosen: list[int]) -> None:
    waiting: list[Trace | None] = [trace]
    while waiting:
        at = waiting.pop()
        if at is not None:
            task, state, first, second = at
            chosen[task] = state
            waiting += (first, second)
