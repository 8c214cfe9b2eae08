"""The worth of every state of a job on a spot market: a decision process, solved backwards into a table.

State: work left w, spare hours u (how long nothing may happen before on-demand must start), whether the market is
open or closed and the age of that spell, and what runs: spot, on-demand or nothing. Spot runs at the price c and
on-demand at 1, per hour of work; a start takes d hours that are paid and bring no work. An open spell of age a ends at
the hazard h(a), a closed one at g(a). The least expected cost V satisfies, for instance on spot,
    0 = min over actions of  c + h (V_closed - V) + dV/da - dV/dw,
and waiting costs nothing but spare time, -dV/du. Derivatives become jumps to the next coarser node of a grid (H. J.
Kushner and P. Dupuis, "Numerical Methods for Stochastic Control Problems in Continuous Time", 2001, chapter 5): nodes
lie d apart where spare time is scarce and in growing steps where it is not.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from broker.spot.spells import AGES, class_of, hours_in_classes

CLASSES = len(AGES)
OLDEST = CLASSES - 1
WORK_GROWTH, SPARE_GROWTH = 1.4, 1.25  # of the steps of the grids: the worth bends little with work, more with time
# An hour of waiting counts as so much of an on-demand hour: of plans that cost the same the sooner is better.
WAIT_PRICE = 0.02
SURVIVAL_WEIGHT = 4.0  # so many spells seen weigh as much as the hazards, in whether a start is survived
PASSES_MAX = 12
TOLERANCE = 5e-4  # hours of on-demand price

Row = list[float]  # the worth at one node for each class of age, the oldest first
_NOTHING: Row = [0.0] * CLASSES  # no work left: worth 0; rows are replaced, never changed
# At which rate a spell of some age becomes one of the next class; the oldest stays what it is.
_AGEING = tuple(1 / (AGES[index + 1] - AGES[index]) if index < OLDEST else 0.0 for index in range(CLASSES))[::-1]


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What a table is made for. Hazards per hour, one for each class of age; prices in on-demand prices."""

    open_hazards: tuple[float, ...]
    closed_hazards: tuple[float, ...]
    spot_price: float
    start_hours: float
    work_hours: float
    spare_hours: float
    second_chance: float = 0.0  # that another place is open when spot is lost


class Table:
    """The worth of one way to go on, at every node."""

    def __init__(self, work: Sequence[float], spare: Sequence[float]) -> None:
        self._work, self._spare = work, spare
        self.rows: list[Row] = [_NOTHING] * (len(work) * len(spare))

    def read(self, age_class: int, work: float, spare: float) -> float:
        """At any work left and spare time, by bilinear interpolation."""
        rows, k = self.rows, OLDEST - age_class
        j, across = _place(self._work, work)
        i, up = _place(self._spare, spare)
        at = i * len(self._work) + j
        near = rows[at][k] + across * (rows[at + 1][k] - rows[at][k])
        at += len(self._work)
        far = rows[at][k] + across * (rows[at + 1][k] - rows[at][k])
        return near + up * (far - near)


class Outlook:
    """`Outlook(terms)` solves. Each table is the worth of a state, or of an action from there on:

    `run` on spot; `wait_open`, `wait_closed`: nothing runs, and nothing is started yet; `idle_open`, `idle_closed`:
    nothing runs, and the best is done; `sure_open`, `sure_closed`: on-demand runs, and the best is done.
    """

    def __init__(self, terms: Terms) -> None:
        self.terms = terms
        self.work = grow_nodes(max(0.25, terms.start_hours), terms.work_hours, even=2, growth=WORK_GROWTH)
        self.spare = grow_nodes(max(terms.start_hours, 0.01), max(terms.spare_hours, 0.02), even=5, growth=SPARE_GROWTH)
        tables = [Table(self.work, self.spare) for _ in range(7)]
        self.run, self.wait_open, self.wait_closed, self.idle_open, self.idle_closed = tables[:5]
        self.sure_open, self.sure_closed = tables[5:]
        self._starts = _list_starts(terms)
        for j in range(1, len(self.work)):
            for i in range(len(self.spare)):
                _Cell(self, i, j).solve()

    def enter_usd(self, age_class: int, work: float, spare: float, *, seen: tuple[float, float] = (0.0, 0.0)) -> float:
        """The worth of a start on spot: it is survived, or lost halfway.

        `seen`: spells that were as old as this one, and those of them that outlived such a start.
        """
        terms, after = self.terms, spare - self.terms.start_hours
        survive, landing = self._starts[age_class]
        survive = (SURVIVAL_WEIGHT * survive + seen[1]) / (SURVIVAL_WEIGHT + seen[0])
        on = self.run.read(landing, work, after)
        off = self.lost_usd(work, after) + terms.start_hours / 2 * terms.spot_price
        return survive * (terms.start_hours * terms.spot_price + on) + (1 - survive) * off

    def lost_usd(self, work: float, spare: float) -> float:
        """The worth of having just lost spot: another place may be open."""
        rho, closed = self.terms.second_chance, self.idle_closed.read(0, work, spare)
        return rho * self.idle_open.read(0, work, spare) + (1 - rho) * closed if rho else closed


class _Cell:
    """All states at one node of work and spare time: they lead to each other, so passes are made until they agree."""

    def __init__(self, outlook: Outlook, i: int, j: int) -> None:
        self.outlook, self.terms, self.i = outlook, outlook.terms, i
        width = len(outlook.work)
        self.at, self.before, self.below = i * width + j, i * width + j - 1, (i - 1) * width + j
        self.work = outlook.work[j]
        self.pace = 1 / (self.work - outlook.work[j - 1])
        self.drain = 1 / (outlook.spare[i] - outlook.spare[i - 1]) if i else 0.0
        self.opened, self.closed = self.terms.open_hazards[::-1], self.terms.closed_hazards[::-1]
        self.low, self.high, self.share = self._find_back(width, j)
        sure_end, start = self.work, self.terms.start_hours
        if i:  # a first guess from the node below, so that few passes are needed
            for table in (outlook.run, outlook.idle_open, outlook.idle_closed, outlook.sure_open, outlook.sure_closed):
                table.rows[self.at] = list(table.rows[self.below])
        else:
            for table in (outlook.idle_open, outlook.idle_closed):
                table.rows[self.at] = [sure_end + start] * CLASSES
            for table in (outlook.wait_open, outlook.wait_closed):
                table.rows[self.at] = [math.inf] * CLASSES
            for table in (outlook.sure_open, outlook.sure_closed):
                table.rows[self.at] = [sure_end] * CLASSES

    def _find_back(self, width: int, j: int) -> tuple[int, int, float]:
        """The nodes between which one start less of spare time lies, and the share of the lower; (-1, -1, 0): none."""
        spare = self.outlook.spare
        left = spare[self.i] - self.terms.start_hours
        if left < -1e-9:
            return -1, -1, 0.0
        below = min(max(bisect_right(spare, left + 1e-12) - 1, 0), len(spare) - 2)
        share = 1 - (left - spare[below]) / (spare[below + 1] - spare[below])
        return below * width + j, (below + 1) * width + j, min(max(share, 0.0), 1.0)

    def solve(self) -> None:
        guess, change_before = self.outlook.idle_closed.rows[self.at][-1], 0.0
        for _ in range(PASSES_MAX):
            self._pass_spot(guess)
            if not self.i:
                return
            self._pass_open(guess)
            self._pass_closed()
            self._pass_sure()
            found = self.outlook.idle_closed.rows[self.at][-1]
            change = found - guess
            if abs(change) < TOLERANCE:
                return
            rate = change / change_before if change_before else 0.0
            if 0 < rate < 0.95:  # passes contract by a near constant factor: go to where they lead (Aitken)
                guess, change_before = found + change * rate / (1 - rate), 0.0
            else:
                guess, change_before = found, change

    def _pass_spot(self, closed_usd: float) -> None:
        outlook, terms = self.outlook, self.terms
        rho, pace, price, later = terms.second_chance, self.pace, terms.spot_price, 0.0
        drop = rho * outlook.idle_open.rows[self.at][-1] + (1 - rho) * closed_usd
        row = []
        for h, g, after in zip(self.opened, _AGEING, outlook.run.rows[self.before], strict=True):
            later = (price + h * drop + g * later + pace * after) / (h + g + pace)
            row.append(later)
        outlook.run.rows[self.at] = row

    def _pass_open(self, closed_usd: float) -> None:
        """Nothing runs and the market is open: wait, enter, or start on-demand."""
        outlook, drain, later = self.outlook, self.drain, 0.0
        waits, bests = [], []
        options = zip(self._list_enters(), self._list_sures(outlook.sure_open), strict=True)
        below = outlook.idle_open.rows[self.below]
        for h, g, after, (enter, sure) in zip(self.opened, _AGEING, below, options, strict=True):
            wait = (WAIT_PRICE + h * closed_usd + g * later + drain * after) / (h + g + drain)
            later = min(wait, enter, sure)
            waits.append(wait)
            bests.append(later)
        outlook.wait_open.rows[self.at], outlook.idle_open.rows[self.at] = waits, bests

    def _pass_closed(self) -> None:
        outlook, drain, later = self.outlook, self.drain, 0.0
        waits, bests = [], []
        reopened = outlook.idle_open.rows[self.at][-1]
        below, sures = outlook.idle_closed.rows[self.below], self._list_sures(outlook.sure_closed)
        for h, g, after, sure in zip(self.closed, _AGEING, below, sures, strict=True):
            wait = (WAIT_PRICE + h * reopened + g * later + drain * after) / (h + g + drain)
            later = wait if wait < sure else sure
            waits.append(wait)
            bests.append(later)
        outlook.wait_closed.rows[self.at], outlook.idle_closed.rows[self.at] = waits, bests

    def _pass_sure(self) -> None:
        """On-demand runs: open and closed markets lead to each other, so both are taken to where they agree."""
        guess = self.outlook.sure_closed.rows[self.at][-1]
        first = self._round_sure(guess)
        if abs(first - guess) < TOLERANCE / 4:
            return
        second = self._round_sure(first)
        rate = (second - first) / (first - guess)
        if 0 < rate < 0.99:
            self._round_sure(second + (second - first) * rate / (1 - rate))

    def _round_sure(self, closed_usd: float) -> float:
        outlook, at, before = self.outlook, self.at, self.before
        opened, closed = outlook.sure_open, outlook.sure_closed
        row = self._go_on_sure(self.opened, closed_usd, opened.rows[before], outlook.idle_open.rows[at])
        opened.rows[at] = row
        row = self._go_on_sure(self.closed, row[-1], closed.rows[before], outlook.idle_closed.rows[at])
        closed.rows[at] = row
        return row[-1]

    def _go_on_sure(self, hazards: Sequence[float], changed_usd: float, before: Row, idle: Row) -> Row:
        pace, later = self.pace, 0.0
        row = []
        for h, g, after, quit_usd in zip(hazards, _AGEING, before, idle, strict=True):
            later = (1 + h * changed_usd + g * later + pace * after) / (h + g + pace)
            if quit_usd < later:
                later = quit_usd
            row.append(later)
        return row

    def _list_sures(self, table: Table) -> Row:
        """Starting on-demand, by class."""
        start = self.terms.start_hours
        if self.low < 0:
            return [start + self.work] * CLASSES
        share, rest = self.share, 1 - self.share
        return [
            start + share * low + rest * high
            for low, high in zip(table.rows[self.low], table.rows[self.high], strict=True)
        ]

    def _list_enters(self) -> Row:
        """Starting on spot, by class."""
        if self.low < 0:
            return [math.inf] * CLASSES
        outlook, terms, share, rest = self.outlook, self.terms, self.share, 1 - self.share
        low, high, rho = outlook.run.rows[self.low], outlook.run.rows[self.high], terms.second_chance
        closed, opened = outlook.idle_closed.rows, outlook.idle_open.rows
        off = (1 - rho) * (share * closed[self.low][-1] + rest * closed[self.high][-1])
        off += rho * (share * opened[self.low][-1] + rest * opened[self.high][-1])
        paid = terms.start_hours * terms.spot_price
        off += paid / 2
        return [
            survive * (paid + share * low[OLDEST - landing] + rest * high[OLDEST - landing]) + (1 - survive) * off
            for survive, landing in reversed(outlook._starts)
        ]


def grow_nodes(step: float, end: float, *, even: int, growth: float) -> tuple[float, ...]:
    """0, some even steps, then steps that grow, up to `end` or just beyond."""
    nodes = [0.0]
    while nodes[-1] < end or len(nodes) < 3:
        if len(nodes) > even:
            step *= growth
        nodes.append(nodes[-1] + step)
    return tuple(nodes)


def _place(nodes: Sequence[float], value: float) -> tuple[int, float]:
    below = min(max(bisect_right(nodes, value) - 1, 0), len(nodes) - 2)
    return below, min(max((value - nodes[below]) / (nodes[below + 1] - nodes[below]), 0.0), 1.0)


def _list_starts(terms: Terms) -> list[tuple[float, int]]:
    """For a start begun at each class of age: the chance to survive it, and the class of age afterwards."""
    found, length = [], terms.start_hours
    for begin in AGES:
        hazard = sum(terms.open_hazards[each] * hours for each, hours in hours_in_classes(begin, begin + length))
        found.append((math.exp(-hazard), class_of(begin + length)))
    return found
