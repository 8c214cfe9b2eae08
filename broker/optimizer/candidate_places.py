"""The places between which a job on spot may move: those that cost about the same, and on-demand gangs in time."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from itertools import accumulate
from operator import attrgetter
from typing import NamedTuple

from broker.types import Offer

PLACES_MAX = 6  # the largest recorded group; further places add little
NEAR_PRICE = 1.25  # places that cost less by more than this factor are not candidates beside a more expensive choice
SAME_SPEED = 1.05  # an on-demand gang of another kind is a fallback if it takes at most this much longer


class CandidatePlaces:
    """Spot offers in order of their fault-free cost, the cheapest of each zone."""

    def __init__(self, offers: Iterable[tuple[float, Offer]]) -> None:
        first = dict[tuple[str, str, str | None], tuple[float, Offer]]()
        for usd, offer in sorted(offers, key=lambda each: each[0]):
            first.setdefault((offer.cloud, offer.region, offer.zone), (usd, offer))
        self._places = list(first.items())
        self._usd = [usd for _, (usd, _) in self._places]

    def list_near(self, usd: float, own: Offer) -> list[tuple[float, Offer]]:
        """List (USD, offer) of other places from `usd` / `NEAR_PRICE` on, cheapest first.

        An additional place never makes a choice more expensive. Places below this bound are omitted because they are
        better choices themselves.
        """
        index = bisect_left(self._usd, usd / NEAR_PRICE)
        where = (own.cloud, own.region, own.zone)
        found = [each for place, each in self._places[index : index + PLACES_MAX] if place != where]
        return found[: PLACES_MAX - 1]


class Fallback(NamedTuple):
    """An on-demand gang that finishes in time: USD to finish and per hour, and hours to finish without its start.

    A tuple, because a ranking creates thousands.
    """

    usd: float
    usd_hour: float
    hours: float = 0.0


def read_usd(fallback: Fallback) -> tuple[float, float]:
    """Return (USD to finish, USD per hour), the key by which fallbacks are compared."""
    return fallback.usd, fallback.usd_hour


class Kinds:
    """The machines of all alternatives between which a job may change."""

    def __init__(self, places: CandidatePlaces, fallbacks: Iterable[Fallback]) -> None:
        self.places = places
        by_hours = sorted(fallbacks, key=attrgetter("hours"))
        self._hours = [each.hours for each in by_hours]
        self._cheapest = list(accumulate(by_hours, lambda *pair: min(pair, key=read_usd)))

    def find_fallback(self, hours: float) -> Fallback | None:
        """Return the cheapest on-demand gang that finishes within `hours`."""
        count = bisect_right(self._hours, hours)
        return self._cheapest[count - 1] if count else None
