"""The values of all states at one node of work and spare time. They depend on each other: solved by iteration."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import mul

from broker.spot.durations import find_class
from broker.spot.grid import find_node
from broker.spot.overlapped_starts import OverlappedStart, list_overlapped_starts
from broker.spot.rows import Row, choose_less, expect_landing, interpolate
from broker.spot.starts import CLASSES, OLDEST, Start
from broker.spot.transitions import list_transitions
from broker.spot.value_tables import Tables, ValueParameters

# The assumed age of the period at a second place, as a random moment falls mostly into long periods. A young age makes
# losses look too expensive; five hours or more is too optimistic where places close together.
SECOND_CLASS = find_class(2.0)
PASSES_MAX = 12
TOLERANCE = 5e-4  # hours of on-demand price
_SECOND = OLDEST - SECOND_CLASS  # its index in a row


@dataclass(frozen=True, kw_only=True, slots=True)
class _Level:
    """The starts from a node of spare time. Nodes are given by their first index; `back` from_next past a start.

    `lost` has by age class, the oldest first, nodes and weights of the value after a loss, and `own` the weight of the
    value at the node itself, which is found by iteration.
    """

    back: tuple[int, int, float]  # two nodes of spare time, and the weight of the lower
    lost: tuple[tuple[int, int, float, float], ...]
    own: Row
    is_reachable: bool


class NodeSolver:
    """Fill the tables, node by node."""

    def __init__(
        self,
        parameters: ValueParameters,
        tables: Tables,
        work: tuple[float, ...],
        spare: tuple[float, ...],
        starts: tuple[Start, ...],
    ) -> None:
        self.parameters, self.work, self.width = parameters, work, len(work)
        self.run, self.idle_open, self.idle_closed = tables.run.rows, tables.idle_open.rows, tables.idle_closed.rows
        self.wait_open, self.wait_closed = tables.wait_open.rows, tables.wait_closed.rows
        self.keep_open, self.keep_closed = tables.keep_open.rows, tables.keep_closed.rows
        self.ondemand_open, self.ondemand_closed = tables.ondemand_open.rows, tables.ondemand_closed.rows
        self.drops = [0.0] * len(self.run)  # the value just after the loss of spot, by node
        opened, closed = parameters.open_hazards, parameters.closed_hazards
        price, self.spare = parameters.spot_hour_price, spare
        self.spot_transitions = list_transitions(opened, tuple([each / parameters.spot_speed for each in work]), price)
        self.gain_share = 1 - 1 / parameters.spot_speed  # the spare time gained by an hour of work on spot
        self.ondemand_transitions = list(
            zip(list_transitions(opened, work, 1.0), list_transitions(closed, work, 1.0), strict=True)
        )
        wait = parameters.wait_price
        self.wait_transitions = list(
            zip(list_transitions(opened, spare, wait), list_transitions(closed, spare, wait), strict=True)
        )
        paid = parameters.start_hours * price
        self.paid = [each.survive * paid + (1 - each.survive) * price * each.lost_hours for each in starts]
        self.landings = tuple(
            dict(each.landings).get(place, 0.0) for own, each in enumerate(starts) for place in range(own + 1)
        )
        self.levels = _list_levels(spare, parameters.start_hours, starts, self.width)
        self.overlapped = list_overlapped_starts(parameters)
        self.overlap_levels = _list_overlap_levels(spare, parameters.start_hours, parameters.overlap_hours, self.width)

    def solve(self, i: int, j: int) -> None:
        """Solve the node `i` of spare time and `j` of work: its neighbours with less of either must be solved."""
        at = i * self.width + j
        below, level = at - self.width, self.levels[i]
        if not i:
            self._guess_without_spare(at, self.work[j])
            drop = self._drop(at)
            self.run[at] = self._run_spot(i, j, drop)
            self.drops[at] = drop
            if self.overlapped and self.overlap_levels[i].is_reachable:
                self._pass_ondemand(i, j)
            return
        # First guesses, so that few passes are needed.
        self.run[at], self.idle_open[at], self.idle_closed[at] = (
            self.run[below], self.idle_open[below], self.idle_closed[below],
        )  # fmt: skip
        self.ondemand_open[at], self.ondemand_closed[at] = self.ondemand_open[below], self.ondemand_closed[below]
        ondemand_starts = (
            self._start_ondemand(self.ondemand_open, level, j),
            self._start_ondemand(self.ondemand_closed, level, j),
        )
        drop = self._iterate(i, j, ondemand_starts, self._start_spot(level, j))
        self.run[at] = self._run_spot(i, j, drop)
        self.drops[at] = self._drop(at)
        self._pass_ondemand(i, j)  # no other state of this node depends on it

    def count_needed(self, j: int, count: int) -> int:
        """Return how many nodes of spare time the first `count` at node `j` of work need at the node before."""
        if self.gain_share <= 0:
            return count
        reached = self.spare[count - 1] + self.gain_share * (self.work[j] - self.work[j - 1])
        return max(count, min(find_node(self.spare, reached)[0] + 2, len(self.spare)))

    def _run_spot(self, i: int, j: int, drop: float) -> Row:
        """List the values of running on spot from this node, by age class; `drop`: the value after a loss there."""
        transition, before = self.spot_transitions[j - 1], i * self.width + j - 1
        if not self.gain_share:
            return transition.evaluate_continuing(transition.evaluate_next(self.run[before], self.drops[before]), drop)
        step, here = self.work[j] - self.work[j - 1], self.spare[i]
        left = here + self.gain_share * step
        if left < 0:  # spare time is used up on the way, where on-demand starts
            done = here / -self.gain_share
            return [done * self.parameters.spot_price + self.parameters.start_hours + self.work[j] - done] * CLASSES
        low, up = find_node(self.spare, left)
        at = low * self.width + j - 1
        far = at + self.width
        runs = [less + up * (more - less) for less, more in zip(self.run[at], self.run[far], strict=True)]
        return transition.evaluate_continuing(
            transition.evaluate_next(runs, self.drops[at] + up * (self.drops[far] - self.drops[at])), drop
        )

    def _guess_without_spare(self, at: int, work: float) -> None:
        """Fill in the states without spare time: on-demand to the end."""
        for rows in (self.idle_open, self.idle_closed, self.wait_open, self.wait_closed):
            rows[at] = [work + self.parameters.start_hours] * CLASSES
        for rows in (self.keep_open, self.keep_closed, self.ondemand_open, self.ondemand_closed):
            rows[at] = [work] * CLASSES

    def _drop(self, at: int) -> float:
        """Return the value just after the loss of spot at this node."""
        rho, closed = self.parameters.second_chance, self.idle_closed[at][-1]
        return rho * self.idle_open[at][_SECOND] + (1 - rho) * closed if rho else closed

    def _start_ondemand(self, rows: Sequence[Row], level: _Level, j: int) -> Row:
        """List the values of starting on-demand, by age class."""
        start = self.parameters.start_hours
        if not level.is_reachable:
            return [start + self.work[j]] * CLASSES
        low, high, share = level.back
        return interpolate(rows[low + j], rows[high + j], share, start)

    def _start_spot(self, level: _Level, j: int) -> Row:
        """List the values of starting on spot by age class, without the value at this node after a loss."""
        if not level.is_reachable:
            return [math.inf] * CLASSES
        drops, (low, high, share) = self.drops, level.back
        landed = expect_landing(self.landings, interpolate(self.run[low + j], self.run[high + j], share))
        return [
            paid + on + less * drops[near + j] + more * drops[far + j]
            for paid, on, (near, far, less, more) in zip(self.paid, landed, level.lost, strict=True)
        ]

    def _iterate(self, i: int, j: int, ondemand_starts: tuple[Row, Row], spot_starts: Row) -> float:
        """Find the states in which nothing runs: wait, enter spot, or start on-demand. Return the value after a loss.

        Passes contract by a nearly constant factor, so they are extrapolated (Aitken).
        """
        at = i * self.width + j
        below, rho = at - self.width, self.parameters.second_chance
        opens, closes = self.wait_transitions[i - 1]
        opened, closed = self.idle_open[below], self.idle_closed[below]
        open_next, closed_next = opens.evaluate_next(opened, closed[-1]), closes.evaluate_next(closed, opened[-1])
        weights = self.levels[i].own
        guess, change_before = closed[-1], 0.0
        for _ in range(PASSES_MAX):
            second = opened[_SECOND]
            drop, lost = rho * second + (1 - rho) * guess, rho * second + (1 - rho) * closed[-1]
            others = choose_less(spot_starts, weights, lost, ondemand_starts[0])
            opened, self.wait_open[at] = opens.evaluate_best(open_next, guess, others)
            closed, self.wait_closed[at] = closes.evaluate_best(closed_next, opened[-1], ondemand_starts[1])
            change = closed[-1] - guess
            if abs(change) < TOLERANCE:
                break
            rate = change / change_before if change_before else 0.0
            if 0 < rate < 0.95:
                guess, change_before = closed[-1] + change * rate / (1 - rate), 0.0
            else:
                guess, change_before = closed[-1], change
        self.idle_open[at], self.idle_closed[at] = opened, closed
        return drop

    def _pass_ondemand(self, i: int, j: int) -> None:
        """Update the states where on-demand runs, iterating over open and closed, which depend on each other."""
        at = i * self.width + j
        opened, closed = self.ondemand_open[at - 1], self.ondemand_closed[at - 1]
        opens, closes = self.ondemand_transitions[j - 1]
        from_next = opens.evaluate_next(opened, closed[-1]), closes.evaluate_next(closed, opened[-1])
        beside = self._start_beside(i, j)
        guess = self.ondemand_closed[at][-1]
        first = self._round_ondemand(at, j, from_next, guess, beside)
        if abs(first - guess) < TOLERANCE / 4:
            return
        second = self._round_ondemand(at, j, from_next, first, beside)
        rate = (second - first) / (first - guess)
        if 0 < rate < 0.99:
            self._round_ondemand(at, j, from_next, second + (second - first) * rate / (1 - rate), beside)

    def _round_ondemand(
        self, at: int, j: int, from_next: tuple[Row, Row], closed_usd: float, beside: Sequence[tuple[float, float]]
    ) -> float:
        opens, closes = self.ondemand_transitions[j - 1]
        others = self.idle_open[at]
        if beside:
            others = [min(idle, base + own * closed_usd) for idle, (base, own) in zip(others, beside, strict=True)]
        opened, self.keep_open[at] = opens.evaluate_best(from_next[0], closed_usd, others)
        closed, self.keep_closed[at] = closes.evaluate_best(from_next[1], opened[-1], self.idle_closed[at])
        self.ondemand_open[at], self.ondemand_closed[at] = opened, closed
        return closed[-1]

    def _start_beside(self, i: int, j: int) -> Sequence[tuple[float, float]]:
        """List the values of starting on spot beside running on-demand machines by age class; empty if out of reach.

        Each is a constant and the weight of the value of on-demand in a young closed period at this node.
        """
        if not self.overlapped or not self.overlap_levels[i].is_reachable:
            return ()
        level, step = self.overlap_levels[i], self.work[j] - self.work[j - 1]
        before = self.parameters.overlap_hours / step  # the weight of the next node of work after the overlap
        low, high, share = level.back
        corners = [
            (near + place, by_spare * by_work)
            for near, by_spare in ((low, share), (high, 1 - share))
            for place, by_work in ((j - 1, before), (j, 1 - before))
            if by_spare * by_work > 0
        ]
        runs = [
            sum(values)
            for values in zip(*([weight * value for value in self.run[at]] for at, weight in corners), strict=True)
        ]
        low, high, share = level.middle
        drop = share * (before * self.drops[low + j - 1] + (1 - before) * self.drops[low + j])
        if share < 1:
            drop += (1 - share) * (before * self.drops[high + j - 1] + (1 - before) * self.drops[high + j])
        closed = self.ondemand_closed[i * self.width + j - 1][-1]
        return [self._start_one_beside(each, runs, drop, closed, step) for each in self.overlapped]

    @staticmethod
    def _start_one_beside(
        start: OverlappedStart, runs: Row, drop: float, closed: float, step: float
    ) -> tuple[float, float]:
        on = sum(map(mul, start.landings, start.read(runs)))
        passed = start.kept_hours / step
        return start.paid + on + start.dropped * drop + start.kept * passed * closed, start.kept * (1 - passed)


@dataclass(frozen=True, kw_only=True, slots=True)
class _OverlapLevel:
    """The starts beside running machines from a node of spare time: after the rest of one, and in its middle."""

    back: tuple[int, int, float]
    middle: tuple[int, int, float]
    is_reachable: bool


@lru_cache(maxsize=256)
def _list_overlap_levels(
    spare: tuple[float, ...], start_hours: float, overlap_hours: float, width: int
) -> tuple[_OverlapLevel, ...]:
    found = []
    for number, here in enumerate(spare):
        # Where nodes are further apart than a start, `_start_spot` reads the node below, as the value at this one is
        # not known yet: a start then costs the whole step. The same excess is charged here, so that both compare.
        step = here - spare[number - 1] if number else 0.0
        low, high, share = _find_back(spare, here, max(start_hours, step) - overlap_hours)
        near, far, less = _find_back(spare, here, (start_hours - overlap_hours) / 2)
        found.append(
            _OverlapLevel(
                back=(low * width, high * width, share), middle=(near * width, far * width, less),
                is_reachable=low >= 0,
            )
        )  # fmt: skip
    return tuple(found)


@lru_cache(maxsize=256)
def _list_levels(
    spare: tuple[float, ...], start_hours: float, starts: tuple[Start, ...], width: int
) -> tuple[_Level, ...]:
    return tuple(_find_level(spare, number, start_hours, starts, width) for number in range(len(spare)))


def _find_level(spare: Sequence[float], number: int, start_hours: float, starts: Sequence[Start], width: int) -> _Level:
    low, high, share = _find_back(spare, spare[number], start_hours)
    lost, owns = [], []
    for each in starts:
        near, far, less = _find_back(spare, spare[number], each.lost_hours)
        weights = {near: (1 - each.survive) * less}
        weights[far] = weights.get(far, 0.0) + (1 - each.survive) * (1 - less)
        owns.append(weights.pop(number, 0.0))
        lost.append((near * width, far * width, weights.get(near, 0.0), weights.get(far, 0.0)))
    return _Level(back=(low * width, high * width, share), lost=tuple(lost), own=owns, is_reachable=low >= 0)


def _find_back(spare: Sequence[float], here: float, hours: float) -> tuple[int, int, float]:
    """Return the nodes that bracket the spare time `here - hours`, and the weight of the lower; (-1, -1, 0): none."""
    left = here - hours
    if left < -1e-9:
        return -1, -1, 0.0
    below = min(max(bisect_right(spare, left + 1e-12) - 1, 0), len(spare) - 2)
    share = 1 - (left - spare[below]) / (spare[below + 1] - spare[below])
    return below, below + 1, min(max(share, 0.0), 1.0)
