"""Ways from a node of the grid to the next one: what they cost, and the events that may happen on them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from broker.spot.starts import AGEING
from broker.spot.value_tables import Row


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """A way during an open or a closed period, by its age class, the oldest first.

    `stays` are the probabilities of no event, `paid` the price of the mean time until an event or the next node. The
    probabilities that the period ends, and that it enters the next age class, are split into weights of this node and
    of the next one.
    """

    stays: Row
    paid: Row
    ends: Row
    ends_next: Row
    ages: Row
    ages_next: Row

    def lead(self, following: Row, ended_next: float) -> Row:
        """Return the part of the value of continuing that depends on the next node alone.

        `following` is the row of the next node, and `ended_next` the value after the end of the period there.
        """
        return [
            paid + stay * going + end * ended_next + age * older
            for paid, stay, going, end, age, older in zip(
                self.paid, self.stays, following, self.ends_next, self.ages_next, (0.0, *following), strict=False
            )
        ]

    def go_on(self, lead: Row, ended: float) -> Row:
        """Return the value of continuing, from `lead` and the value after the end of the period at this node."""
        goes, older = [], 0.0
        for base, end, age in zip(lead, self.ends, self.ages, strict=True):
            older = base + end * ended + age * older
            goes.append(older)
        return goes

    def go_on_or_change(self, lead: Row, ended: float, others: Row) -> tuple[Row, Row]:
        """Return the value of the best action, and of continuing; `others` are the values of the alternatives."""
        bests, goes, older = [], [], 0.0
        for base, end, age, other in zip(lead, self.ends, self.ages, others, strict=True):
            older = base + end * ended + age * older
            goes.append(older)
            if other < older:
                older = other
            bests.append(older)
        return bests, goes


@lru_cache(maxsize=256)  # value functions share hazards and nodes
def list_ways(hazards: tuple[float, ...], nodes: tuple[float, ...], price: float) -> tuple[Way, ...]:
    """List for each node but the first the way to the one below it, in periods that end with these hazards."""
    return tuple(_find_way(hazards, high - low, price) for low, high in itertools.pairwise(nodes))


def _find_way(hazards: Sequence[float], hours: float, price: float) -> Way:
    found = [_follow(end, age, hours, price) for end, age in zip(hazards, AGEING, strict=True)]
    stays, paid, ends, ends_next, ages, ages_next = (list(column)[::-1] for column in zip(*found, strict=True))
    return Way(stays=stays, paid=paid, ends=ends, ends_next=ends_next, ages=ages, ages_next=ages_next)


def _follow(end_rate: float, age_rate: float, hours: float, price: float) -> tuple[float, ...]:
    """Follow the way in one class, by E[t; t < hours] = (1 - e^{-r hours}) / r - hours e^{-r hours}, r both rates."""
    rate = max(end_rate + age_rate, 1e-9)
    stay = math.exp(-rate * hours)
    passed = -math.expm1(-rate * hours) / rate
    ahead = passed / hours - stay
    here = 1 - stay - ahead
    ends, ages = end_rate / rate, age_rate / rate
    return stay, price * passed, ends * here, ends * ahead, ages * here, ages * ahead
