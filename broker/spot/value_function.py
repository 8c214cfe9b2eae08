"""The worth of every state of a job on a spot market: a decision process, solved backwards into a table.

State: work left w, spare hours u (how long nothing may happen before on-demand must start), whether the market is
open or closed and the age of that spell, and what runs: spot, on-demand or nothing. Spot runs at the price c and
on-demand at 1, per hour of work; a start takes d hours that are paid and bring no work. An open spell of age a ends at
the hazard h(a), a closed one at g(a). The least expected cost V satisfies, for instance on spot,
    0 = min over actions of  c + h (V_closed - V) + dV/da - dV/dw,
and waiting costs nothing but spare time, -dV/du. It is solved on a grid, along the way from each node to the next one
(M. Falcone and R. Ferretti, "Semi-Lagrangian Approximation Schemes for Linear and Hamilton-Jacobi Equations", 2013):
either nothing happens for exactly so long, or the spell ends or grows older on the way, where the worth is taken to be
linear. Nodes lie half of d apart where spare time is scarce, and in growing steps where it is not.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from broker.spot.durations import AGES, class_of

CLASSES = len(AGES)
OLDEST = CLASSES - 1
# The age of the spell at a second place, as at any moment one mostly meets long ones. Taken young, losses look too
# dear; five hours or more would be too much trust where places close together.
SECOND_CLASS = class_of(2.0)
WORK_GROWTH, SPARE_GROWTH = 1.2, 1.15  # of the steps of the grids: the worth bends little with work, more with time
# An hour of waiting counts as so much of an on-demand hour: of plans that cost the same the sooner is better.
WAIT_PRICE = 0.02
SURVIVAL_WEIGHT = 4.0  # so many spells seen weigh as much as the hazards, in whether a start is survived
PASSES_MAX = 12
TOLERANCE = 5e-4  # hours of on-demand price

Row = list[float]  # the worth at one node for each class of age, the oldest first
_NOTHING: Row = [0.0] * CLASSES  # no work left: worth 0; rows are replaced, never changed
# At which rate a spell of some age becomes one of the next class; the oldest stays what it is.
_AGEING = tuple(1 / (AGES[index + 1] - AGES[index]) if index < OLDEST else 0.0 for index in range(CLASSES))
_SECOND = OLDEST - SECOND_CLASS  # in a row
EVEN_NODES = 10  # of spare time, half a start apart
LEAPS, LEAP_HOURS = 3, 1e-4  # at whole starts of spare time the worth leaps: a node lies just below each of the first
START_PARTS = 50  # a start is followed through so many steps


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


Point = tuple[int, float, float]  # a node, and the share of the way to the next one of work and of spare time


class Table:
    """The worth of one way to go on, at every node."""

    def __init__(self, width: int, height: int) -> None:
        self.width = width  # nodes of work in a row of the grid
        self.rows: list[Row] = [_NOTHING] * (width * height)

    def read(self, age_class: int, point: Point) -> float:
        """At any point of the grid, by bilinear interpolation."""
        rows, k = self.rows, OLDEST - age_class
        at, across, up = point
        near = rows[at][k] + across * (rows[at + 1][k] - rows[at][k])
        at += self.width
        far = rows[at][k] + across * (rows[at + 1][k] - rows[at][k])
        return near + up * (far - near)


class ValueFunction:
    """`Outlook(terms)` solves. Each table is the worth of a state, or of an action from there on:

    `run` on spot; `wait_open`, `wait_closed`: nothing runs, and nothing is started yet; `idle_open`, `idle_closed`:
    nothing runs, and the best is done; `keep_open`, `keep_closed`: on-demand runs and is kept for now; `sure_open`,
    `sure_closed`: on-demand runs, and the best is done.
    """

    def __init__(self, terms: Terms) -> None:
        self.terms = terms
        self.work = grow_nodes(max(0.25, terms.start_hours), terms.work_hours, even=2, growth=WORK_GROWTH)
        self.spare = _list_spare(terms)
        tables = [Table(len(self.work), len(self.spare)) for _ in range(9)]
        self.run, self.wait_open, self.wait_closed, self.idle_open, self.idle_closed = tables[:5]
        self.keep_open, self.keep_closed, self.sure_open, self.sure_closed = tables[5:]
        self.paces, self.drains = _list_ways(terms, self.work), _list_ways(terms, self.spare)
        self.starts = starts = _follow_starts(terms)
        backs = [_find_back(self.spare, here, terms.start_hours) for here in self.spare]
        losses = [[_find_back(self.spare, here, each.lost_hours) for each in starts] for here in self.spare]
        for j in range(1, len(self.work)):
            for i in range(len(self.spare)):
                _Cell(self, i, j, starts, backs[i], losses[i]).solve()

    def locate(self, work: float, spare: float) -> Point:
        """Where to read the tables for any work left and spare time."""
        j, across = _place(self.work, work)
        i, up = _place(self.spare, spare)
        return i * len(self.work) + j, across, up

    def enter_usd(self, age_class: int, work: float, spare: float, *, seen: tuple[float, float] = (0.0, 0.0)) -> float:
        """The worth of a start on spot: it is survived, or lost halfway.

        `seen`: spells that were as old as this one, and those of them that outlived such a start.
        """
        price, start = self.terms.spot_price, self.terms.start_hours
        way = self.starts[OLDEST - age_class]
        survive = (SURVIVAL_WEIGHT * way.survive + seen[1]) / (SURVIVAL_WEIGHT + seen[0])
        point = self.locate(work, spare - start)
        on = sum(chance * self.run.read(OLDEST - place, point) for place, chance in way.landings)
        on = start * price + on / max(way.survive, 1e-9)
        off = way.lost_hours * price + self.lost_usd(work, spare - way.lost_hours)
        return survive * on + (1 - survive) * off

    def lost_usd(self, work: float, spare: float) -> float:
        """The worth of having just lost spot: another place may be open."""
        rho, point = self.terms.second_chance, self.locate(work, spare)
        closed = self.idle_closed.read(0, point)
        return rho * self.idle_open.read(SECOND_CLASS, point) + (1 - rho) * closed if rho else closed


# For a class of age: chance that nothing happens; hours until something does or the next node is reached; the chances
# that the spell ends, and that it grows older, each split into what is read here and what at the next node.
Way = tuple[float, float, float, float, float, float]
Ways = tuple[tuple[Way, ...], tuple[Way, ...]]  # of open and of closed spells, the oldest first
Back = tuple[int, int, float]  # two nodes of spare time, and the share of the lower; (-1, -1, 0): none


def _list_ways(terms: Terms, nodes: Sequence[float]) -> list[Ways]:
    """For each node, what may happen on the way to the one below it; nothing for the first."""
    found: list[Ways] = [((), ())]
    for low, high in itertools.pairwise(nodes):
        opened, closed = (
            tuple(_find_way(h, g, high - low) for h, g in zip(hazards, _AGEING, strict=True))[::-1]
            for hazards in (terms.open_hazards, terms.closed_hazards)
        )
        found.append((opened, closed))
    return found


def _find_way(end_rate: float, age_rate: float, hours: float) -> Way:
    """With r both rates: the time t of an event has E[t; t < hours] = (1 - e^{-r hours}) / r - hours e^{-r hours}."""
    rate = max(end_rate + age_rate, 1e-9)
    stay = math.exp(-rate * hours)
    passed = -math.expm1(-rate * hours) / rate
    ahead = passed / hours - stay
    here = 1 - stay - ahead
    ends, ages = end_rate / rate, age_rate / rate
    return stay, passed, ends * here, ends * ahead, ages * here, ages * ahead


@dataclass(frozen=True, kw_only=True)
class _Start:
    """A start on spot begun at one class of age: when it is lost on average, and where it leads to otherwise."""

    survive: float
    lost_hours: float
    landings: tuple[tuple[int, float], ...]  # (place in a row, chance), survived starts only


def _follow_starts(terms: Terms) -> list[_Start]:
    """For each class of age, the oldest first."""
    found, step = [], terms.start_hours / START_PARTS
    for begin in range(CLASSES):
        alive, lost, lost_hours = [0.0] * CLASSES, 0.0, 0.0
        alive[begin] = 1.0
        for part in range(START_PARTS):
            following = [0.0] * CLASSES
            for index in range(begin, CLASSES):
                if alive[index] > 0:
                    ends, ages = terms.open_hazards[index], _AGEING[index]
                    stay = math.exp(-(ends + ages) * step)
                    left = alive[index] * (1 - stay) / max(ends + ages, 1e-9)
                    following[index] += alive[index] * stay
                    lost += left * ends
                    lost_hours += left * ends * (part + 0.5) * step
                    if index < OLDEST:
                        following[index + 1] += left * ages
            alive = following
        landings = tuple((OLDEST - index, share) for index, share in enumerate(alive) if share > 1e-6)
        mean = lost_hours / lost if lost > 0 else terms.start_hours / 2
        found.append(_Start(survive=1 - lost, lost_hours=mean, landings=landings))
    return found[::-1]


def _find_back(spare: Sequence[float], here: float, hours: float) -> Back:
    """The nodes between which so much less of spare time lies."""
    left = here - hours
    if left < -1e-9:
        return -1, -1, 0.0
    below = min(max(bisect_right(spare, left + 1e-12) - 1, 0), len(spare) - 2)
    share = 1 - (left - spare[below]) / (spare[below + 1] - spare[below])
    return below, below + 1, min(max(share, 0.0), 1.0)


class _Cell:
    """All states at one node of work and spare time: they lead to each other, so passes are made until they agree."""

    def __init__(
        self, outlook: ValueFunction, i: int, j: int, starts: Sequence[_Start], back: Back, losses: Sequence[Back]
    ) -> None:
        self.outlook, self.terms, self.i, self.starts = outlook, outlook.terms, i, starts
        width = len(outlook.work)
        self.at, self.before, self.below = i * width + j, i * width + j - 1, (i - 1) * width + j
        self.losses = [(low * width + j, high * width + j, share) for low, high, share in losses]
        self.work = outlook.work[j]
        self.paces, self.drains = outlook.paces[j], outlook.drains[i]
        self._guess()
        low, high, share = back
        self.is_reachable = low >= 0
        low, high = low * width + j, high * width + j
        self.sures_open = self._list_sures(outlook.sure_open, low, high, share)
        self.sures_closed = self._list_sures(outlook.sure_closed, low, high, share)
        self.survivals = self._list_survivals(low, high, share)

    def _guess(self) -> None:
        outlook = self.outlook
        sure_end, start = self.work, self.terms.start_hours
        if self.i:  # a first guess from the node below, so that few passes are needed
            for table in (outlook.run, outlook.idle_open, outlook.idle_closed, outlook.sure_open, outlook.sure_closed):
                table.rows[self.at] = list(table.rows[self.below])
            return
        for table in (outlook.idle_open, outlook.idle_closed, outlook.wait_open, outlook.wait_closed):
            table.rows[self.at] = [sure_end + start] * CLASSES
        for table in (outlook.keep_open, outlook.keep_closed, outlook.sure_open, outlook.sure_closed):
            table.rows[self.at] = [sure_end] * CLASSES

    def _list_sures(self, table: Table, low: int, high: int, share: float) -> Row:
        """Starting on-demand, by class."""
        start = self.terms.start_hours
        if not self.is_reachable:
            return [start + self.work] * CLASSES
        rest = 1 - share
        return [
            start + share * less + rest * more for less, more in zip(table.rows[low], table.rows[high], strict=True)
        ]

    def _list_survivals(self, low: int, high: int, share: float) -> Row:
        """Of starting on spot what comes of surviving it, weighed by its chance, by class."""
        if not self.is_reachable:
            return [math.inf] * CLASSES
        paid, rest = self.terms.start_hours * self.terms.spot_price, 1 - share
        near, far = self.outlook.run.rows[low], self.outlook.run.rows[high]
        runs = [share * less + rest * more for less, more in zip(near, far, strict=True)]
        return [
            each.survive * paid + sum(chance * runs[place] for place, chance in each.landings) for each in self.starts
        ]

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

    def _drop(self, at: int) -> float:
        """Spot was lost at that node."""
        rho, closed = self.terms.second_chance, self.outlook.idle_closed.rows[at][-1]
        return rho * self.outlook.idle_open.rows[at][_SECOND] + (1 - rho) * closed if rho else closed

    def _pass_spot(self, closed_usd: float) -> None:
        outlook, rho = self.outlook, self.terms.second_chance
        drop = rho * outlook.idle_open.rows[self.at][_SECOND] + (1 - rho) * closed_usd
        before = outlook.run.rows[self.before]
        outlook.run.rows[self.at] = _go_on(
            self.paces[0], self.terms.spot_price, before, drop, self._drop(self.before), None
        )[0]

    def _pass_open(self, closed_usd: float) -> None:
        """Nothing runs and the market is open: wait, enter, or start on-demand."""
        outlook = self.outlook
        below, next_closed = outlook.idle_open.rows[self.below], outlook.idle_closed.rows[self.below][-1]
        others = [min(enter, sure) for enter, sure in zip(self._list_enters(), self.sures_open, strict=True)]
        bests, waits = _go_on(self.drains[0], WAIT_PRICE, below, closed_usd, next_closed, others)
        outlook.wait_open.rows[self.at], outlook.idle_open.rows[self.at] = waits, bests

    def _list_enters(self) -> Row:
        """Starting on spot, by class: survived, or lost on the way."""
        if not self.is_reachable:
            return self.survivals
        price, found = self.terms.spot_price, []
        for survival, each, (low, high, share) in zip(self.survivals, self.starts, self.losses, strict=True):
            lost = price * each.lost_hours + share * self._drop(low) + (1 - share) * self._drop(high)
            found.append(survival + (1 - each.survive) * lost)
        return found

    def _pass_closed(self) -> None:
        outlook = self.outlook
        reopened, next_open = outlook.idle_open.rows[self.at][-1], outlook.idle_open.rows[self.below][-1]
        below = outlook.idle_closed.rows[self.below]
        bests, waits = _go_on(self.drains[1], WAIT_PRICE, below, reopened, next_open, self.sures_closed)
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
        opened, closed = outlook.sure_open.rows, outlook.sure_closed.rows
        quit_open, quit_closed = outlook.idle_open.rows[at], outlook.idle_closed.rows[at]
        opened[at], outlook.keep_open.rows[at] = _go_on(
            self.paces[0], 1.0, opened[before], closed_usd, closed[before][-1], quit_open
        )
        closed[at], outlook.keep_closed.rows[at] = _go_on(
            self.paces[1], 1.0, closed[before], opened[at][-1], opened[before][-1], quit_closed
        )
        return closed[at][-1]


def _go_on(
    ways: Sequence[Way], price: float, following: Row, ended: float, ended_next: float, others: Row | None
) -> tuple[Row, Row]:
    """By class: the worth of the best, and of going on to the next node, whose row is `following`.

    `ended`, `ended_next`: the worth of the spell's end, here and at the next node; `others`: what else may be done.
    """
    bests, goes = [], []
    older = older_next = 0.0
    for k, (stay, hours, end, end_next, age, age_next) in enumerate(ways):
        go = price * hours + stay * following[k] + end * ended + end_next * ended_next
        go += age * older + age_next * older_next
        older, older_next = go, following[k]
        if others is not None and others[k] < go:
            older = others[k]
        goes.append(go)
        bests.append(older)
    return bests, goes


def _list_spare(terms: Terms) -> tuple[float, ...]:
    """Nodes of spare time. At one start's length, and again at two, a way to go on is lost at once: the worth leaps."""
    nodes = grow_nodes(
        max(terms.start_hours / 2, 0.01), max(terms.spare_hours, 0.02), even=EVEN_NODES, growth=SPARE_GROWTH
    )
    leaps = [count * terms.start_hours - LEAP_HOURS for count in range(1, LEAPS + 1)]
    return tuple(sorted({*nodes, *(hours for hours in leaps if hours > LEAP_HOURS)}))


def grow_nodes(step: float, end: float, *, even: int, growth: float) -> tuple[float, ...]:
    """0, some even steps, then steps that grow, up to `end` or just beyond."""
    nodes = [0.0]
    while nodes[-1] < end or len(nodes) < 3:
        if len(nodes) > even:
            step *= growth
        nodes.append(nodes[-1] + step)
    return tuple(nodes)


def _place(nodes: Sequence[float], value: float) -> tuple[int, float]:
    """The node below, and how far it is to the next one; what lies beyond the ends counts as there."""
    below = bisect_right(nodes, value) - 1
    if below < 0:
        return 0, 0.0
    last = len(nodes) - 2
    if below > last:
        return last, 1.0
    return below, (value - nodes[below]) / (nodes[below + 1] - nodes[below])
