"""Transitions from a node of the grid to the next one: their cost, and the events that may happen on the way.

As in `broker.spot.rows`, the loops over the age classes are written out.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from broker.spot.rows import Chances, Row
from broker.spot.starts import AGEING


@dataclass(frozen=True, kw_only=True, slots=True)
class Transition:
    """The chances from one node to the next during an open or a closed period, by its age class, the oldest first.

    `ahead` has for each class: the price of the mean time until an event or the next node, the probability of no event,
    and two weights of the next node, if the period ends and if it enters the next age class. `here` has those two
    weights of this node.
    """

    ahead: Chances
    here: Chances

    def evaluate_next(self, following: Row, ended_next: float) -> Row:
        """Return the part of the value of continuing that depends only on the next node, by age class.

        `following` is the row of the next node, and `ended_next` the value after the end of the period there.
        """
        f0, f1, f2, f3, f4, f5, f6, f7, f8 = following
        (
            p0, s0, e0, _, p1, s1, e1, a1, p2, s2, e2, a2, p3, s3, e3, a3, p4, s4, e4, a4,
            p5, s5, e5, a5, p6, s6, e6, a6, p7, s7, e7, a7, p8, s8, e8, a8,
        ) = self.ahead  # fmt: skip
        return [
            p0 + s0 * f0 + e0 * ended_next,
            p1 + s1 * f1 + e1 * ended_next + a1 * f0,
            p2 + s2 * f2 + e2 * ended_next + a2 * f1,
            p3 + s3 * f3 + e3 * ended_next + a3 * f2,
            p4 + s4 * f4 + e4 * ended_next + a4 * f3,
            p5 + s5 * f5 + e5 * ended_next + a5 * f4,
            p6 + s6 * f6 + e6 * ended_next + a6 * f5,
            p7 + s7 * f7 + e7 * ended_next + a7 * f6,
            p8 + s8 * f8 + e8 * ended_next + a8 * f7,
        ]

    def evaluate_continuing(self, ahead_values: Row, ended: float) -> Row:
        """Return the value of continuing, given that part and the value after the end of the period at this node."""
        l0, l1, l2, l3, l4, l5, l6, l7, l8 = ahead_values
        e0, _, e1, a1, e2, a2, e3, a3, e4, a4, e5, a5, e6, a6, e7, a7, e8, a8 = self.here
        g0 = l0 + e0 * ended
        g1 = l1 + e1 * ended + a1 * g0
        g2 = l2 + e2 * ended + a2 * g1
        g3 = l3 + e3 * ended + a3 * g2
        g4 = l4 + e4 * ended + a4 * g3
        g5 = l5 + e5 * ended + a5 * g4
        g6 = l6 + e6 * ended + a6 * g5
        g7 = l7 + e7 * ended + a7 * g6
        return [g0, g1, g2, g3, g4, g5, g6, g7, l8 + e8 * ended + a8 * g7]

    def evaluate_best(self, ahead_values: Row, ended: float, others: Row) -> tuple[Row, Row]:
        """Return the value of the best action, and of continuing; `others` are the values of the alternatives."""
        l0, l1, l2, l3, l4, l5, l6, l7, l8 = ahead_values
        e0, _, e1, a1, e2, a2, e3, a3, e4, a4, e5, a5, e6, a6, e7, a7, e8, a8 = self.here
        o0, o1, o2, o3, o4, o5, o6, o7, o8 = others
        g0 = l0 + e0 * ended
        b0 = o0 if o0 < g0 else g0
        g1 = l1 + e1 * ended + a1 * b0
        b1 = o1 if o1 < g1 else g1
        g2 = l2 + e2 * ended + a2 * b1
        b2 = o2 if o2 < g2 else g2
        g3 = l3 + e3 * ended + a3 * b2
        b3 = o3 if o3 < g3 else g3
        g4 = l4 + e4 * ended + a4 * b3
        b4 = o4 if o4 < g4 else g4
        g5 = l5 + e5 * ended + a5 * b4
        b5 = o5 if o5 < g5 else g5
        g6 = l6 + e6 * ended + a6 * b5
        b6 = o6 if o6 < g6 else g6
        g7 = l7 + e7 * ended + a7 * b6
        b7 = o7 if o7 < g7 else g7
        g8 = l8 + e8 * ended + a8 * b7
        b8 = o8 if o8 < g8 else g8
        return [b0, b1, b2, b3, b4, b5, b6, b7, b8], [g0, g1, g2, g3, g4, g5, g6, g7, g8]


@lru_cache(maxsize=256)  # value functions share hazards and nodes
def list_transitions(hazards: tuple[float, ...], nodes: tuple[float, ...], price: float) -> tuple[Transition, ...]:
    """List for each node but the first the transition to the node below, in periods that end with these hazards."""
    return tuple(_find_transition(hazards, high - low, price) for low, high in itertools.pairwise(nodes))


def _find_transition(hazards: Sequence[float], hours: float, price: float) -> Transition:
    ahead, here = list[float](), list[float]()
    for end, age in zip(reversed(hazards), reversed(AGEING), strict=True):
        stay, paid, ends, ends_next, ages, ages_next = _follow(end, age, hours, price)
        ahead += (paid, stay, ends_next, ages_next)
        here += (ends, ages)
    return Transition(ahead=tuple(ahead), here=tuple(here))


def _follow(end_rate: float, age_rate: float, hours: float, price: float) -> tuple[float, ...]:
    """Follow a transition in one class; with r, the sum of both rates, E[t; t < h] = (1 - e^{-rh}) / r - h e^{-rh}."""
    rate = max(end_rate + age_rate, 1e-9)
    stay = math.exp(-rate * hours)
    passed = -math.expm1(-rate * hours) / rate
    ahead = passed / hours - stay
    here = 1 - stay - ahead
    ends, ages = end_rate / rate, age_rate / rate
    return stay, price * passed, ends * here, ends * ahead, ages * here, ages * ahead
