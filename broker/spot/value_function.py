"""State values of a job on a spot market: a Markov decision process, solved backwards into tables.

State: remaining work w, spare time u (how long the job may idle before on-demand must start), the market (open or
closed), the age of its period, and the running mode: spot, on-demand or nothing. Spot runs at the price c and on-demand
at 1, per hour of work; a start takes d hours that are billed and do no work. An open period of age a ends with the
hazard h(a), a closed one with g(a). The least expected cost V satisfies, for instance on spot,
    0 = min over actions of  c + h (V_closed - V) + dV/da - dV/dw,
and waiting uses up spare time, -dV/du, at the small price `WAIT_PRICE`. The equation is solved on a grid by a
semi-Lagrangian scheme, along the path from each node to the next one (M. Falcone and R. Ferretti, "Semi-Lagrangian
Approximation Schemes for Linear and Hamilton-Jacobi Equations", 2013): either no event happens on the path, or the
period ends or enters the next age class on it, where the value is interpolated linearly. Nodes are d / 2 apart where
spare time is scarce, and increasingly far apart elsewhere.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from broker.spot.durations import class_of
from broker.spot.grid import find_node, grow_nodes
from broker.spot.starts import AGEING, CLASSES, OLDEST, Start, follow_starts

# The assumed age of the period at a second place, as a random moment falls mostly into long periods. A young age makes
# losses look too expensive; five hours or more is too optimistic where places close together.
SECOND_CLASS = class_of(2.0)
WORK_GROWTH, SPARE_GROWTH = 1.2, 1.15  # of the grid steps: the value has little curvature in work, more in spare time
# The price of an hour of waiting, in on-demand hours: of plans with equal cost, the faster one is better.
WAIT_PRICE = 0.02
SURVIVAL_WEIGHT = 4.0  # observed periods that weigh as much as the hazards, for the survival of a start
PASSES_MAX = 12
TOLERANCE = 5e-4  # hours of on-demand price

Row = list[float]  # the values at one node by age class, the oldest first
_NOTHING: Row = [0.0] * CLASSES  # no work left: value 0; rows are replaced, never modified
_SECOND = OLDEST - SECOND_CLASS  # its index in a row
EVEN_NODES = 10  # of spare time, half a start apart
LEAPS, LEAP_HOURS = 3, 1e-4  # the value jumps at multiples of a start: a node just below each of the first


@dataclass(frozen=True, kw_only=True)
class Terms:
    """The parameters of a value function. Hazards per hour by age class; prices as multiples of on-demand."""

    open_hazards: tuple[float, ...]
    closed_hazards: tuple[float, ...]
    spot_price: float
    start_hours: float
    work_hours: float
    spare_hours: float
    second_chance: float = 0.0  # probability that another place is open when spot is lost


Point = tuple[int, float, float]  # a node, and the fractions of the steps to the next node of work and of spare time


class ValueTable:
    """The values of one state or action at every node."""

    def __init__(self, width: int, height: int) -> None:
        self.width = width  # nodes of work in a row of the grid
        self.rows: list[Row] = [_NOTHING] * (width * height)

    def read(self, age_class: int, point: Point) -> float:
        """Interpolate bilinearly at any point of the grid."""
        rows, k = self.rows, OLDEST - age_class
        at, across, up = point
        near = rows[at][k] + across * (rows[at + 1][k] - rows[at][k])
        at += self.width
        far = rows[at][k] + across * (rows[at + 1][k] - rows[at][k])
        return near + up * (far - near)


class ValueFunction:
    """The solved decision process for one set of terms.

    Each table holds the values of a state, or of an action in it. `run`: spot runs; `wait_open`, `wait_closed`: nothing
    runs, and nothing is started yet; `idle_open`, `idle_closed`: nothing runs, and the best action is taken;
    `keep_open`, `keep_closed`: on-demand runs and is kept for now; `ondemand_open`, `ondemand_closed`: on-demand
    runs, and the best action is taken.
    """

    def __init__(self, terms: Terms) -> None:
        self.terms = terms
        self.work = grow_nodes(max(0.25, terms.start_hours), terms.work_hours, even=2, growth=WORK_GROWTH)
        self.spare = _list_spare(terms)
        tables = [ValueTable(len(self.work), len(self.spare)) for _ in range(9)]
        self.run, self.wait_open, self.wait_closed, self.idle_open, self.idle_closed = tables[:5]
        self.keep_open, self.keep_closed, self.ondemand_open, self.ondemand_closed = tables[5:]
        self.spot_ways = _list_ways(terms, self.work, terms.spot_price)
        self.ondemand_ways = _list_ways(terms, self.work, 1.0)
        self.wait_ways = _list_ways(terms, self.spare, WAIT_PRICE)
        self.drops = [0.0] * len(self.run.rows)  # the value just after the loss of spot, by node
        self.starts = starts = follow_starts(terms.open_hazards, terms.start_hours)
        self.backs = [_find_back(self.spare, here, terms.start_hours) for here in self.spare]
        self.losses = [[_find_back(self.spare, here, each.lost_hours) for each in starts] for here in self.spare]
        self.solved = [0] * len(self.work)  # by node of work: the number of solved nodes of spare time

    def locate(self, work: float, spare: float) -> Point:
        """Return the grid point for any remaining work and spare time, of which the tables then hold the values."""
        j, across = find_node(self.work, work)
        i, up = find_node(self.spare, spare)
        if self.solved[j + 1] < i + 2:
            self._solve(i + 2, j + 1)
        return i * len(self.work) + j, across, up

    def _solve(self, count: int, last: int) -> None:
        """Solve `count` nodes of spare time up to this node of work. Each depends on those with less of either only."""
        for j in range(1, last + 1):
            for i in range(self.solved[j], count):
                _Cell(self, i, j, self.starts, self.backs[i], self.losses[i]).solve()
            self.solved[j] = max(self.solved[j], count)

    def enter_usd(self, age_class: int, work: float, spare: float, *, seen: tuple[float, float] = (0.0, 0.0)) -> float:
        """Return the value of starting on spot, which is either survived or lost on the way.

        `seen` counts the periods that reached this age, and those of them that outlived such a start.
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
        """Return the value just after the loss of spot, when another place may be open."""
        rho, point = self.terms.second_chance, self.locate(work, spare)
        closed = self.idle_closed.read(0, point)
        return rho * self.idle_open.read(SECOND_CLASS, point) + (1 - rho) * closed if rho else closed


# For one age class: the probability of no event; the price of the mean time until an event or the next node; the
# probabilities that the period ends, and that it enters the next age class, each split into weights of this node and of
# the next one.
Way = tuple[float, float, float, float, float, float]
Ways = tuple[tuple[Way, ...], tuple[Way, ...]]  # of open and of closed periods, the oldest first
Back = tuple[int, int, float]  # two nodes of spare time, and the weight of the lower; (-1, -1, 0): none


def _list_ways(terms: Terms, nodes: Sequence[float], price: float) -> list[Ways]:
    """List for each node cost and event probabilities on the way to the one below it; none for the first."""
    found: list[Ways] = [((), ())]
    for low, high in itertools.pairwise(nodes):
        opened, closed = (
            tuple(_find_way(h, g, high - low, price) for h, g in zip(hazards, AGEING, strict=True))[::-1]
            for hazards in (terms.open_hazards, terms.closed_hazards)
        )
        found.append((opened, closed))
    return found


def _find_way(end_rate: float, age_rate: float, hours: float, price: float) -> Way:
    """Return the way by E[t; t < hours] = (1 - e^{-r hours}) / r - hours e^{-r hours}, with r the sum of both rates."""
    rate = max(end_rate + age_rate, 1e-9)
    stay = math.exp(-rate * hours)
    passed = -math.expm1(-rate * hours) / rate
    ahead = passed / hours - stay
    here = 1 - stay - ahead
    ends, ages = end_rate / rate, age_rate / rate
    return stay, price * passed, ends * here, ends * ahead, ages * here, ages * ahead


def _find_back(spare: Sequence[float], here: float, hours: float) -> Back:
    """Return the nodes that bracket the spare time `here - hours`."""
    left = here - hours
    if left < -1e-9:
        return -1, -1, 0.0
    below = min(max(bisect_right(spare, left + 1e-12) - 1, 0), len(spare) - 2)
    share = 1 - (left - spare[below]) / (spare[below + 1] - spare[below])
    return below, below + 1, min(max(share, 0.0), 1.0)


class _Cell:
    """All states at one node of work and spare time. They depend on each other, so they are solved by iteration."""

    def __init__(
        self, outlook: ValueFunction, i: int, j: int, starts: Sequence[Start], back: Back, losses: Sequence[Back]
    ) -> None:
        self.outlook, self.terms, self.i, self.starts = outlook, outlook.terms, i, starts
        width = len(outlook.work)
        self.at, self.before, self.below = i * width + j, i * width + j - 1, (i - 1) * width + j
        self.losses = [(low * width + j, high * width + j, share) for low, high, share in losses]
        self.work = outlook.work[j]
        self.spot_ways, self.ondemand_ways = outlook.spot_ways[j][0], outlook.ondemand_ways[j]
        self.wait_ways = outlook.wait_ways[i]
        self._guess()
        low, high, share = back
        self.is_reachable = low >= 0
        low, high = low * width + j, high * width + j
        self.ondemands_open = self._list_ondemands(outlook.ondemand_open, low, high, share)
        self.ondemands_closed = self._list_ondemands(outlook.ondemand_closed, low, high, share)
        self.survivals = self._list_survivals(low, high, share)

    def _guess(self) -> None:
        outlook = self.outlook
        sure_end, start = self.work, self.terms.start_hours
        if self.i:  # start from the values at the node below, so that few passes are needed
            for table in (
                outlook.run,
                outlook.idle_open,
                outlook.idle_closed,
                outlook.ondemand_open,
                outlook.ondemand_closed,
            ):
                table.rows[self.at] = list(table.rows[self.below])
            return
        for table in (outlook.idle_open, outlook.idle_closed, outlook.wait_open, outlook.wait_closed):
            table.rows[self.at] = [sure_end + start] * CLASSES
        for table in (outlook.keep_open, outlook.keep_closed, outlook.ondemand_open, outlook.ondemand_closed):
            table.rows[self.at] = [sure_end] * CLASSES

    def _list_ondemands(self, table: ValueTable, low: int, high: int, share: float) -> Row:
        """List the values of starting on-demand, by age class."""
        start = self.terms.start_hours
        if not self.is_reachable:
            return [start + self.work] * CLASSES
        rest = 1 - share
        return [
            start + share * less + rest * more for less, more in zip(table.rows[low], table.rows[high], strict=True)
        ]

    def _list_survivals(self, low: int, high: int, share: float) -> Row:
        """List the contributions of survival to the value of starting on spot, by age class."""
        if not self.is_reachable:
            return [math.inf] * CLASSES
        paid, rest = self.terms.start_hours * self.terms.spot_price, 1 - share
        near, far = self.outlook.run.rows[low], self.outlook.run.rows[high]
        runs = [share * less + rest * more for less, more in zip(near, far, strict=True)]
        return [
            each.survive * paid + sum(chance * runs[place] for place, chance in each.landings) for each in self.starts
        ]

    def solve(self) -> None:
        self._iterate()
        if self.i:
            self._pass_ondemand()  # no other state of this node depends on it
        self.outlook.drops[self.at] = self._drop()

    def _iterate(self) -> None:
        guess, change_before = self.outlook.idle_closed.rows[self.at][-1], 0.0
        for _ in range(PASSES_MAX):
            self._pass_spot(guess)
            if not self.i:
                return
            self._pass_open(guess)
            self._pass_closed()
            found = self.outlook.idle_closed.rows[self.at][-1]
            change = found - guess
            if abs(change) < TOLERANCE:
                return
            rate = change / change_before if change_before else 0.0
            if 0 < rate < 0.95:  # passes contract by a nearly constant factor: extrapolate (Aitken)
                guess, change_before = found + change * rate / (1 - rate), 0.0
            else:
                guess, change_before = found, change

    def _drop(self) -> float:
        """Return the value just after the loss of spot at this node."""
        rho, closed = self.terms.second_chance, self.outlook.idle_closed.rows[self.at][-1]
        return rho * self.outlook.idle_open.rows[self.at][_SECOND] + (1 - rho) * closed if rho else closed

    def _pass_spot(self, closed_usd: float) -> None:
        outlook, rho = self.outlook, self.terms.second_chance
        drop = rho * outlook.idle_open.rows[self.at][_SECOND] + (1 - rho) * closed_usd
        before = outlook.run.rows[self.before]
        outlook.run.rows[self.at] = _go_on(self.spot_ways, before, drop, outlook.drops[self.before])

    def _pass_open(self, closed_usd: float) -> None:
        """Update the states where nothing runs and the market is open: wait, enter spot, or start on-demand."""
        outlook = self.outlook
        below, next_closed = outlook.idle_open.rows[self.below], outlook.idle_closed.rows[self.below][-1]
        others = [min(enter, sure) for enter, sure in zip(self._list_enters(), self.ondemands_open, strict=True)]
        bests, waits = _go_on_or_change(self.wait_ways[0], below, closed_usd, next_closed, others)
        outlook.wait_open.rows[self.at], outlook.idle_open.rows[self.at] = waits, bests

    def _list_enters(self) -> Row:
        """List the values of starting on spot, survived or lost on the way, by age class."""
        if not self.is_reachable:
            return self.survivals
        drops, price = self.outlook.drops, self.terms.spot_price
        drops[self.at] = self._drop()
        return [
            survival + (1 - each.survive) * (price * each.lost_hours + share * drops[low] + (1 - share) * drops[high])
            for survival, each, (low, high, share) in zip(self.survivals, self.starts, self.losses, strict=True)
        ]

    def _pass_closed(self) -> None:
        outlook = self.outlook
        reopened, next_open = outlook.idle_open.rows[self.at][-1], outlook.idle_open.rows[self.below][-1]
        below = outlook.idle_closed.rows[self.below]
        bests, waits = _go_on_or_change(self.wait_ways[1], below, reopened, next_open, self.ondemands_closed)
        outlook.wait_closed.rows[self.at], outlook.idle_closed.rows[self.at] = waits, bests

    def _pass_ondemand(self) -> None:
        """Update the states where on-demand runs, iterating over open and closed, which depend on each other."""
        guess = self.outlook.ondemand_closed.rows[self.at][-1]
        first = self._round_ondemand(guess)
        if abs(first - guess) < TOLERANCE / 4:
            return
        second = self._round_ondemand(first)
        rate = (second - first) / (first - guess)
        if 0 < rate < 0.99:
            self._round_ondemand(second + (second - first) * rate / (1 - rate))

    def _round_ondemand(self, closed_usd: float) -> float:
        outlook, at, before = self.outlook, self.at, self.before
        opened, closed = outlook.ondemand_open.rows, outlook.ondemand_closed.rows
        quit_open, quit_closed = outlook.idle_open.rows[at], outlook.idle_closed.rows[at]
        opened[at], outlook.keep_open.rows[at] = _go_on_or_change(
            self.ondemand_ways[0], opened[before], closed_usd, closed[before][-1], quit_open
        )
        closed[at], outlook.keep_closed.rows[at] = _go_on_or_change(
            self.ondemand_ways[1], closed[before], opened[at][-1], opened[before][-1], quit_closed
        )
        return closed[at][-1]


def _go_on(ways: Sequence[Way], following: Row, ended: float, ended_next: float) -> Row:
    """Return by age class the value of continuing to the next node, whose row is `following`.

    `ended` and `ended_next` are the values after the end of the period, here and at the next node.
    """
    goes = []
    older = older_next = 0.0
    for (stay, paid, end, end_next, age, age_next), going in zip(ways, following, strict=True):
        older = paid + stay * going + end * ended + end_next * ended_next + (age * older + age_next * older_next)
        older_next = going
        goes.append(older)
    return goes


def _go_on_or_change(
    ways: Sequence[Way], following: Row, ended: float, ended_next: float, others: Row
) -> tuple[Row, Row]:
    """Return by age class the value of the best action, and of `_go_on`; `others` are the values of the alternatives.

    Repeats the lines of `_go_on`: a call for each age class would double the time to solve a table.
    """
    bests, goes = [], []
    older = older_next = 0.0
    for (stay, paid, end, end_next, age, age_next), going, other in zip(ways, following, others, strict=True):
        go = paid + stay * going + end * ended + end_next * ended_next + (age * older + age_next * older_next)
        older_next = going
        older = other if other < go else go
        goes.append(go)
        bests.append(older)
    return bests, goes


def _list_spare(terms: Terms) -> tuple[float, ...]:
    """List nodes of spare time. The value jumps at whole multiples of a start, where an action becomes infeasible."""
    nodes = grow_nodes(
        max(terms.start_hours / 2, 0.01), max(terms.spare_hours, 0.02), even=EVEN_NODES, growth=SPARE_GROWTH
    )
    leaps = [count * terms.start_hours - LEAP_HOURS for count in range(1, LEAPS + 1)]
    return tuple(sorted({*nodes, *(hours for hours in leaps if hours > LEAP_HOURS)}))
