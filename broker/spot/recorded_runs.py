"""Outcomes of jobs replayed over recorded markets: a grid for each scenario, with interpolation between its nodes.

The table is made by `python -m broker.lab.recorded_runs` and names the sources of its recordings. A scenario is a
recorded market and an hour of submission; its runs, one for each cell of the grid, are those of the production policy.
Recordings retain effects that a hazard by age omits: storms, quiet weeks, and places that close together.
"""

from __future__ import annotations

import itertools
import json
import math
import operator
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from broker.frozen import frozen

TABLE = Path(__file__).parent / "data/recorded_runs.json"
WORKS_HOURS = (12.0, 48.0)
DEADLINES = (1.08, 1.3, 1.8)  # as multiples of work; a start-up time is added to each
STARTS_HOURS = (0.05, 0.3)
START_HOURS_MAX = 1.0  # the grid is extrapolated linearly up to here
ALONE = len(DEADLINES)  # the column of a job that runs on spot alone, without a deadline
PER_MILLE = 1000

# Of one cell, without the first start: spot hours, on-demand hours and hours over work, preemptions per hour of work,
# and the share of the billed hours that is on spot.
CellShares = tuple[float, float, float, float, float]
# Of one scenario: the most hours over work of some cells, those of each cell, and the scenario's weight.
WeightedHours = tuple[float, tuple[float, ...], float]


@frozen
class Scenario:
    """A recorded market and an hour of submission, with one run for each cell of the grid.

    Long runs on spot alone were preempted `preempted` times in `spot_hours` in this market; `is_open` is its state at
    submission. `spot`, `ondemand` and `hours` are in thousandths of the work, one for each cell; `preemptions` are
    counts, one for each cell. `is_assembled`: its places are copies of recordings that begin at other hours.
    """

    family: str
    market: str
    places: int
    is_open: bool
    preempted: int
    spot_hours: float
    spot: tuple[int, ...]
    ondemand: tuple[int, ...]
    hours: tuple[int, ...]
    preemptions: tuple[int, ...]
    is_assembled: bool = False


@frozen
class RecordedRun:
    """The outcome of one scenario: `spot_hours` and `ondemand_hours` are billed, the rest of `hours` is waiting."""

    spot_hours: float
    ondemand_hours: float
    hours: float
    preemptions: float


@lru_cache(maxsize=1)
def read_scenarios() -> tuple[Scenario, ...]:
    """Read the shipped table."""
    return parse_scenarios(json.loads(TABLE.read_text()))


def parse_scenarios(table: Mapping[str, Any]) -> tuple[Scenario, ...]:
    """Return the scenarios of the table that `broker.lab.recorded_runs` writes."""
    lists = ("spot", "ondemand", "hours", "preemptions")
    return tuple(Scenario(**{**row, **{name: tuple(row[name]) for name in lists}}) for row in table["scenarios"])


def interpolate_runs(
    scenarios: Iterable[Scenario], *, work_hours: float, deadline_hours: float | None, start_hours: float
) -> list[RecordedRun]:
    """Interpolate each scenario at any work, deadline and start-up time; without a deadline the job stays on spot.

    Between the nodes, runs are linear in the logarithm of work, in work over deadline and in start-up time. Outside the
    range of work, a run keeps its proportions except for its first start.
    """
    table = [read_cells(each) for each in scenarios]
    return _interpolate(table, work_hours, deadline_hours, start_hours)


def interpolate_mean(
    cells: Sequence[CellShares], *, work_hours: float, deadline_hours: float | None, start_hours: float
) -> RecordedRun:
    """Interpolate mean cells, as `average_cells` returns them.

    This is the mean of the interpolated runs, but for the bound of their hours (`BoundedHours`), as long as the
    start-up time is within the grid.
    """
    return _interpolate([cells], work_hours, deadline_hours, start_hours)[0]


class BoundedHours:
    """The mean hours of weighted scenarios of which none ends after its deadline. Weights add up to 1.

    The deadline bounds the hours of each run by itself, so mean cells do not have this mean. But few runs reach it:
    from the mean without a bound, only their hours beyond it are subtracted.
    """

    def __init__(self, scenarios: Sequence[Scenario], weights: Sequence[float]) -> None:
        self._columns = list(zip(*([shares[2] for shares in read_cells(each)] for each in scenarios), strict=True))
        self._weights = weights
        self._means = [sum(map(operator.mul, column, weights)) for column in self._columns]
        self._longest = dict[tuple[int, ...], tuple[list[float], list[WeightedHours]]]()

    def mean(self, *, work_hours: float, deadline_hours: float, start_hours: float) -> float:
        """Return the mean of the hours of `interpolate_runs`. The deadline must be later than work and start-up."""
        corners, sure = _weigh_corners(work_hours, deadline_hours - start_hours, start_hours)
        shares = [share for _, share in corners]
        most = (deadline_hours - start_hours) / work_hours - sure
        reach = sum(share for share in shares if share > 0)  # a blend is at most this times the most hours of its cells
        bounds, rows = self._list_longest(tuple([cell for cell, _ in corners]))
        mean: float = sure + sum(share * self._means[cell] for cell, share in corners)
        for _, hours, weight in rows[: bisect_left(bounds, -most / reach)]:
            blend: float = sum(map(operator.mul, hours, shares))
            if blend > most:
                mean -= weight * (blend - most)
        return start_hours + mean * work_hours

    def _list_longest(self, cells: tuple[int, ...]) -> tuple[list[float], list[WeightedHours]]:
        """List the scenarios by the most hours in any of these cells, descending, and these hours, negated."""
        found = self._longest.get(cells)
        if found is None:
            rows = list(zip(*(self._columns[cell] for cell in cells), strict=True))
            longest = sorted(zip(map(max, rows), rows, self._weights, strict=True), reverse=True)
            found = self._longest[cells] = [-most for most, _, _ in longest], longest
        return found


def _interpolate(
    table: Sequence[Sequence[CellShares]], work_hours: float, deadline_hours: float | None, start_hours: float
) -> list[RecordedRun]:
    start = min(start_hours, START_HOURS_MAX)
    allowed = None if deadline_hours is None else deadline_hours - start_hours
    if allowed is not None and allowed <= work_hours:  # no room for spot
        hours = work_hours + start_hours
        return [RecordedRun(spot_hours=0.0, ondemand_hours=hours, hours=hours, preemptions=0.0) for _ in table]
    corners, sure = _weigh_corners(work_hours, allowed, start)
    return [_blend(cells, corners, sure, work_hours, deadline_hours, start_hours) for cells in table]


def read_cells(scenario: Scenario) -> tuple[CellShares, ...]:
    """Return the run of each cell without its first start, which does not scale with work."""
    return _read_cells(scenario.spot, scenario.ondemand, scenario.hours, scenario.preemptions)


@lru_cache(maxsize=4096)
def _read_cells(
    spot: tuple[int, ...], ondemand: tuple[int, ...], hours: tuple[int, ...], preemptions: tuple[int, ...]
) -> tuple[CellShares, ...]:
    found = list[CellShares]()
    for cell, spot_hours in enumerate(spot):
        node = WORKS_HOURS[cell // ((ALONE + 1) * len(STARTS_HOURS))]
        first = STARTS_HOURS[cell % len(STARTS_HOURS)] / node
        billed = max(spot_hours + ondemand[cell], 1)
        keep = (1 - first * PER_MILLE / billed) / PER_MILLE
        found.append(
            (
                spot_hours * keep, ondemand[cell] * keep, hours[cell] / PER_MILLE - first, preemptions[cell] / node,
                spot_hours / billed,
            )
        )  # fmt: skip
    return tuple(found)


def average_cells(tables: Sequence[tuple[Sequence[CellShares], float]]) -> tuple[CellShares, ...]:
    """Average cells by weights that add up to 1."""
    weights = [weight for _, weight in tables]
    found = list[CellShares]()
    for cell in zip(*(cells for cells, _ in tables), strict=True):
        spot, ondemand, hours, preemptions, share = (
            sum(map(operator.mul, values, weights)) for values in zip(*cell, strict=True)
        )
        found.append((spot, ondemand, hours, preemptions, share))
    return tuple(found)


def _weigh_corners(work: float, allowed: float | None, start: float) -> tuple[list[tuple[int, float]], float]:
    """Return (cell, weight) of the nodes around a point, and the weight of running on-demand alone."""
    across = _weigh_log(work)
    deep = _weigh_deadline(0.0 if allowed is None else work / allowed)
    low, high = STARTS_HOURS
    share = (start - low) / (high - low)
    found = []
    for i, by_work in across:
        for j, by_deadline in deep:
            for k, by_start in ((0, 1 - share), (1, share)):
                cell = (i * (ALONE + 1) + j) * len(STARTS_HOURS) + k
                if weight := by_work * by_deadline * by_start:
                    found.append((cell, weight))
    return found, 1 - sum(weight for _, weight in deep)


def _weigh_log(work: float) -> list[tuple[int, float]]:
    low, high = WORKS_HOURS
    share = min(max(math.log(max(work, 1e-6) / low) / math.log(high / low), 0.0), 1.0)
    return [(0, 1 - share), (1, share)]


def _weigh_deadline(fullness: float) -> list[tuple[int, float]]:
    """Return (column, weight) by work over allowed time: 0 is spot alone; 1, on-demand alone, has no column."""
    nodes: Sequence[tuple[float, int | None]] = (
        (1.0, None), *((1 / each, column) for column, each in enumerate(DEADLINES)), (0.0, ALONE),
    )  # fmt: skip
    for (above, first), (below, second) in itertools.pairwise(nodes):
        if fullness >= below:
            share = (fullness - below) / (above - below)
            return [(column, part) for column, part in ((first, share), (second, 1 - share)) if column is not None]
    raise AssertionError("work over time is negative")


def _blend(
    cells: Sequence[CellShares],
    corners: Sequence[tuple[int, float]],
    sure: float,
    work: float,
    deadline: float | None,
    start: float,
) -> RecordedRun:
    """Blend cells linearly, so that the blend of mean cells is the mean of the blends, but for the bounds."""
    spot, ondemand, hours, preemptions, spot_share = 0.0, sure, sure, 0.0, 0.0
    for cell, weight in corners:
        own = cells[cell]
        spot += weight * own[0]
        ondemand += weight * own[1]
        hours += weight * own[2]
        preemptions += weight * own[3]
        spot_share += weight * own[4]
    spot_hours, ondemand_hours = spot * work + start * spot_share, ondemand * work + start * (1 - spot_share)
    whole = hours * work + start
    whole = whole if deadline is None else min(whole, deadline)
    if start > STARTS_HOURS[-1]:  # an extrapolated run may take less than its work, or bill more than it lasts
        least = work + start
        whole = max(whole, least)
        ondemand_hours = min(max(ondemand_hours, 0.0), whole)
        spot_hours = min(max(spot_hours, least - ondemand_hours, 0.0), whole - ondemand_hours)
        preemptions = max(preemptions, 0.0)
    return RecordedRun(
        spot_hours=spot_hours, ondemand_hours=ondemand_hours, hours=whole, preemptions=preemptions * work
    )
