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
GROWTH = 1.25  # of the steps of both grids
PASSES_MAX = 12
WAIT_PRICE = 0.02  # of waiting: of plans that cost the same, the sooner is better, and the model knows no storms
TOLERANCE = 1e-3  # hours of on-demand price
_AGEING = tuple(1 / (AGES[index + 1] - AGES[index]) if index + 1 < CLASSES else 0.0 for index in range(CLASSES))


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


class Outlook:
    """`Outlook(terms)` solves; the worth of options is then read off by interpolation.

    Tables are indexed [class of age][spare node * work nodes + work node].
    """

    def __init__(self, terms: Terms) -> None:
        self.terms = terms
        self.work = grow_nodes(max(0.25, terms.start_hours), terms.work_hours, even=2)
        self.spare = grow_nodes(max(terms.start_hours, 0.01), max(terms.spare_hours, 0.02), even=5)
        size = len(self.work) * len(self.spare)

        def table() -> list[list[float]]:
            return [[0.0] * size for _ in range(CLASSES)]

        self.run, self.wait_open, self.wait_closed = table(), table(), table()
        self.sure_open, self.sure_closed = table(), table()  # on-demand that stays for now
        self.idle_open, self.idle_closed = table(), table()  # the best that nothing running can lead to
        self.survive, self.started, self.lost = _list_starts(terms)
        self._solve()

    def _solve(self) -> None:
        width = len(self.work)
        for j in range(1, width):
            for i in range(len(self.spare)):
                self._solve_cell(i, j, i * width + j)

    def _back(self, i: int) -> tuple[int, float] | None:
        """Where one start less of spare time lies: (node, share of the node below it), or None below nothing."""
        left = self.spare[i] - self.terms.start_hours
        if left < -1e-9:
            return None
        below = min(max(bisect_right(self.spare, left + 1e-12) - 1, 0), len(self.spare) - 2)
        return below, max(1 - (left - self.spare[below]) / (self.spare[below + 1] - self.spare[below]), 0.0)

    def _solve_cell(self, i: int, j: int, at: int) -> None:  # noqa: C901
        terms, width = self.terms, len(self.work)
        c, d, rho = terms.spot_price, terms.start_hours, terms.second_chance
        w = self.work[j]
        pace = 1 / (w - self.work[j - 1])
        drain = 1 / (self.spare[i] - self.spare[i - 1]) if i else 0.0
        run, idle_open, idle_closed = self.run, self.idle_open, self.idle_closed
        wait_open, wait_closed, sure_open, sure_closed = (
            self.wait_open, self.wait_closed, self.sure_open, self.sure_closed,
        )  # fmt: skip
        opened, closed = terms.open_hazards, terms.closed_hazards
        before, below = at - 1, at - width
        back = self._back(i)
        low = high = share = 0
        if back is not None:
            low, share = back[0] * width + j, back[1]  # type: ignore[assignment]
            high = low + width
        # A first guess from the next cell, so that few passes are needed.
        guess = idle_closed[0][below] if i else w + d
        reopened = min(guess, idle_open[0][below]) if i else w + d
        for a in range(CLASSES):
            idle_open[a][at] = idle_open[a][below] if i else w + d
            idle_closed[a][at] = idle_closed[a][below] if i else w + d
            sure_open[a][at] = sure_open[a][below] if i else w
            sure_closed[a][at] = sure_closed[a][below] if i else w
            run[a][at] = run[a][below] if i else c * w
        past = math.inf
        for _ in range(PASSES_MAX):
            # on spot
            drop = rho * idle_open[0][at] + (1 - rho) * guess
            later = 0.0
            for a in range(CLASSES - 1, -1, -1):
                h, g = opened[a], _AGEING[a]
                later = (c + h * drop + g * later + pace * run[a][before]) / (h + g + pace)
                run[a][at] = later
            # waiting
            later_open = later_closed = 0.0
            for a in range(CLASSES - 1, -1, -1):
                g = _AGEING[a]
                if i == 0:
                    best = w + d
                    wait_open[a][at] = wait_closed[a][at] = math.inf
                    idle_open[a][at] = idle_closed[a][at] = best
                    if back is None:
                        continue
                h = opened[a]
                if i:
                    value = (WAIT_PRICE + h * guess + g * later_open + drain * idle_open[a][below]) / (h + g + drain)
                    wait_open[a][at] = value
                else:
                    value = w + d
                enter = sure = math.inf
                if back is None:
                    sure = d + w
                else:
                    landed = run[self.started[a]]
                    survive = self.survive[a]
                    enter = survive * (d * c + share * landed[low] + (1 - share) * landed[high]) + (1 - survive) * (
                        self.lost[a] * c + share * idle_closed[0][low] + (1 - share) * idle_closed[0][high]
                    )
                    table = sure_open[a]
                    sure = d + share * table[low] + (1 - share) * table[high]
                later_open = min(value, enter, sure)
                idle_open[a][at] = later_open
            reopened = idle_open[0][at]
            for a in range(CLASSES - 1, -1, -1):
                g, h = _AGEING[a], closed[a]
                if i == 0:
                    continue
                value = (WAIT_PRICE + h * reopened + g * later_closed + drain * idle_closed[a][below]) / (h + g + drain)
                wait_closed[a][at] = value
                if back is None:
                    sure = d + w
                else:
                    table = sure_closed[a]
                    sure = d + share * table[low] + (1 - share) * table[high]
                later_closed = min(value, sure)
                idle_closed[a][at] = later_closed
            # on-demand
            later_open = later_closed = 0.0
            first_open, first_closed = sure_open[0][at], sure_closed[0][at]
            for _again in range(2):
                later_open = later_closed = 0.0
                for a in range(CLASSES - 1, -1, -1):
                    g, h = _AGEING[a], opened[a]
                    later_open = min(
                        (1 + h * first_closed + g * later_open + pace * sure_open[a][before]) / (h + g + pace),
                        idle_open[a][at],
                    )
                    sure_open[a][at] = later_open
                first_open = later_open
                for a in range(CLASSES - 1, -1, -1):
                    g, h = _AGEING[a], closed[a]
                    later_closed = min(
                        (1 + h * first_open + g * later_closed + pace * sure_closed[a][before]) / (h + g + pace),
                        idle_closed[a][at],
                    )
                    sure_closed[a][at] = later_closed
                first_closed = later_closed
            found = idle_closed[0][at]
            change = found - guess
            if abs(change) < TOLERANCE:
                break
            # The passes contract by a near constant factor: go to where they lead (Aitken).
            rate = change / past if past not in (0.0, math.inf) else 0.0
            guess = found + (change * rate / (1 - rate) if 0 < rate < 0.95 else 0.0)
            past = change if not 0 < rate < 0.95 else math.inf

    def read(self, table: Sequence[Sequence[float]], age_class: int, work: float, spare: float) -> float:
        """The worth in a table at any work left and spare time, by bilinear interpolation."""
        row = table[age_class]
        width = len(self.work)
        j, across = _place(self.work, work)
        i, up = _place(self.spare, spare)
        at = i * width + j
        near = row[at] + across * (row[at + 1] - row[at])
        at += width
        far = row[at] + across * (row[at + 1] - row[at])
        return near + up * (far - near)


def grow_nodes(step: float, end: float, *, even: int) -> tuple[float, ...]:
    """0, some even steps, then steps that grow, up to `end` or just beyond."""
    nodes = [0.0]
    while nodes[-1] < end or len(nodes) < 3:
        if len(nodes) > even:
            step *= GROWTH
        nodes.append(nodes[-1] + step)
    return tuple(nodes)


def _place(nodes: Sequence[float], value: float) -> tuple[int, float]:
    below = min(max(bisect_right(nodes, value) - 1, 0), len(nodes) - 2)
    return below, min(max((value - nodes[below]) / (nodes[below + 1] - nodes[below]), 0.0), 1.0)


def _list_starts(terms: Terms) -> tuple[list[float], list[int], list[float]]:
    """For a start begun at each class of age: chance to survive it, class afterwards, mean hours paid if not."""
    survive, started, lost = [], [], []
    d = terms.start_hours
    for index in range(CLASSES):
        begin = AGES[index]
        hazard = sum(terms.open_hazards[each] * hours for each, hours in hours_in_classes(begin, begin + d))
        survive.append(math.exp(-hazard))
        started.append(class_of(begin + d))
        lost.append(d / 2)
    return survive, started, lost
