"""Search the states of all tasks by branch and bound: prove optimality, or report the remaining gap."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from broker.frozen import frozen
from broker.pipelines.bounds import RELATIVE_ERROR, CostField

SWEEPS_AT_ROOT = 60
SWEEPS_BELOW = 4
PROGRESS_MIN = 0.02  # of the gap, by one pair of sweeps: below this, branching is more effective


@frozen
class SearchResult:
    """The best choice, and a lower bound on every choice. `value` is infinite if no choice was found."""

    choice: tuple[int, ...]
    value: float
    lower_bound: float
    is_optimal: bool
    steps: int


def search(
    field: CostField,
    start: Sequence[int],
    *,
    evaluate: Callable[[Sequence[int]], float],
    improve: Callable[[list[int], float], tuple[list[int], float]],
    offset: float = 0.0,
    work_max: float,
) -> SearchResult:
    """Minimize `evaluate`, which for every choice is at least the field's costs plus `offset`.

    `start` is any choice; `improve` improves a choice by local moves, or returns it unchanged. After `work_max`
    additions the search stops without a proof. Work is counted, not timed, so that results are reproducible.
    """
    return _BranchAndBound(field, start, evaluate, improve, offset, work_max).run()


class _BranchAndBound:
    def __init__(
        self,
        field: CostField,
        start: Sequence[int],
        evaluate: Callable[[Sequence[int]], float],
        improve: Callable[[list[int], float], tuple[list[int], float]],
        offset: float,
        work_max: float,
    ) -> None:
        self._root, self._evaluate, self._improve = field, evaluate, improve
        self._offset, self._work_max = offset, work_max
        self._best, self._value = improve(list(start), evaluate(start))
        self._seen = set[tuple[int, ...]]()
        self._steps = 0
        self._work, self._root_size = 0.0, field.size

    def run(self) -> SearchResult:
        # (bound, field, task, position of its state); deepest last, to keep memory small
        stack: list[tuple[float, CostField, int, int]] = [(self._root.bound, self._root, -1, 0)]
        while stack:
            bound, field, task, place = stack.pop()
            if self._is_hopeless(bound):
                continue
            if self._work >= self._work_max:
                stack.append((bound, field, task, place))
                break
            if task >= 0:
                field = field.copy()
                field.restrict(task, [place])
            self._steps += 1
            if self._tighten(field, SWEEPS_AT_ROOT if task < 0 else SWEEPS_BELOW):
                stack.extend(self._branch(field))
        lower = min([self._value, *(bound + self._offset for bound, *_ in stack)])
        is_optimal = all(self._is_hopeless(bound) for bound, *_ in stack)
        return SearchResult(
            choice=tuple(self._best),
            value=self._value,
            lower_bound=self._value if is_optimal else lower,
            is_optimal=is_optimal,
            steps=self._steps,
        )

    def _is_hopeless(self, bound: float) -> bool:
        return bound + self._offset >= self._value - abs(self._value) * RELATIVE_ERROR

    def _tighten(self, field: CostField, sweeps: int) -> bool:
        """Raise the bound while sweeps are effective. Return False if no better choice is left in this field."""
        for _ in range(sweeps):
            before = field.bound
            self._work += 2 * field.size
            for is_forward in (True, False):
                if not field.sweep(self._value - self._offset, is_forward=is_forward):
                    return False
            self._try(field)
            if self._is_hopeless(field.bound):
                return False
            if field.is_decided:
                return False  # the single choice that is left has just been evaluated
            if field.bound - before < PROGRESS_MIN * (self._value - self._offset - field.bound):
                break
        return True

    def _try(self, field: CostField) -> None:
        choice = [kept[place] for kept, place in zip(field.kept, field.round_off(), strict=True)]
        if tuple(choice) in self._seen:
            return
        self._seen.add(tuple(choice))
        self._work += self._root_size  # local moves look at all states, open or not
        better, value = self._improve(choice, self._evaluate(choice))
        if value < self._value:
            self._best, self._value = better, value

    def _branch(self, field: CostField) -> list[tuple[float, CostField, int, int]]:
        """Make one field for every open state of one task, the most promising last because the stack pops it first."""
        task = max((v for v, kept in enumerate(field.kept) if len(kept) > 1), key=lambda v: (self._rate(field, v), -v))
        ranked = sorted(((each, i) for i, each in enumerate(field.marginals[task])), reverse=True)
        return [(max(bound, field.bound), field, task, place) for bound, place in ranked]

    def _rate(self, field: CostField, task: int) -> float:
        """Rate the benefit of branching on a task: edges to undecided tasks, and the gap to its second-best state."""
        edges = [e for e in (*field.earlier[task], *field.later[task])]
        open_edges = sum(1 for e in edges if all(len(field.kept[end]) > 1 for end in field.edges[e]))
        first, second = sorted(field.marginals[task])[:2]
        return open_edges + (second - first) / (1 + abs(self._value))
