"""The places between which a job on spot may move: those that cost about the same."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

from broker.types import Offer

PLACES_MAX = 6  # the largest recorded group; further places add little
NEAR_PRICE = 1.25  # places that cost less by more than this factor are not candidates beside a more expensive choice


class CandidatePlaces:
    """Spot offers in order of their fault-free cost, the cheapest of each zone."""

    def __init__(self, offers: Iterable[tuple[float, Offer]]) -> None:
        first = dict[tuple[str, str, str | None], tuple[float, Offer]]()
        for usd, offer in sorted(offers, key=lambda each: each[0]):
            first.setdefault((offer.cloud, offer.region, offer.zone), (usd, offer))
        self._places = list(first.values())
        self._usd = [usd for usd, _ in self._places]

    def list_near(self, usd: float, own: Offer) -> list[tuple[float, Offer]]:
        """List (USD, offer) of other places from `usd` / `NEAR_PRICE` on, cheapest first.

        One more place at any price makes no choice more expensive: places below this bound are better choices
        themselves.
        """
        index = bisect_left(self._usd, usd / NEAR_PRICE)
        where = (own.cloud, own.region, own.zone)
        found = [
            each
            for each in self._places[index : index + PLACES_MAX]
            if (each[1].cloud, each[1].region, each[1].zone) != where
        ]
        return found[: PLACES_MAX - 1]
