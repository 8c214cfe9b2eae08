"""Candidates as plain numbers, and a sequence that converts them to Estimates on access.

Thousands of placements fit a task, but only a few are ever read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import NamedTuple, overload

from broker.optimizer.cost import GangPrices, RunForecast
from broker.optimizer.data_cost import DataCost
from broker.types import Estimate, Offer


class RankedOffer(NamedTuple):
    """One placement. The first fields define the order: lowest score first, with ties in a fixed order."""

    score: float  # USD to finish and the value of its time, or USD per hour if no work is given
    usd: float  # to finish, or per hour if no work is given
    usd_hour: float  # price of the whole gang
    cloud: str
    region: str
    zone: str
    instance_type: str
    is_spot: bool
    offer: Offer
    forecast: RunForecast | None
    prices: GangPrices
    data: DataCost
    alternative: int = 0  # the first alternative of the task that the offer fits

    @property
    def hours(self) -> float:
        """Expected hours to finish; 0 for a task without an amount of work."""
        return 0.0 if self.forecast is None else self.forecast.hours


RANK = itemgetter(slice(0, 8))
IDENTITY = itemgetter(slice(3, 8))
SAME_SCORE = 1.01  # the fastest placement within this factor of the best is chosen


def rank_by_score(candidates: Sequence[RankedOffer], hour_value_usd: float) -> list[RankedOffer]:
    """Rank by USD plus the value of the time; of those within `SAME_SCORE` of the best, the fastest comes first."""
    ranked = [RankedOffer._make((each.usd + hour_value_usd * each.hours, *each[1:])) for each in candidates]
    ranked.sort(key=RANK)
    if not ranked:
        return ranked
    most = ranked[0].score * SAME_SCORE
    fastest = 0
    for index, each in enumerate(ranked):
        if each.score > most:
            break
        if each.hours < ranked[fastest].hours * (1 - 1e-9):
            fastest = index
    if fastest == 0:
        return ranked
    best = ranked[fastest]
    equal = [each for each in ranked if (each.score, each.hours) == (best.score, best.hours)]  # zones stay together
    return [*equal, *(each for each in ranked if (each.score, each.hours) != (best.score, best.hours))]


class LazyEstimates(Sequence[Estimate]):
    """Candidates in order; each is converted to an Estimate on first access and cached."""

    def __init__(self, candidates: Sequence[RankedOffer], make: Callable[[RankedOffer], Estimate]) -> None:
        self._candidates = candidates
        self._make = make
        self._made = dict[int, Estimate]()

    @property
    def candidates(self) -> Sequence[RankedOffer]:
        """The same placements as plain numbers, in the same order."""
        return self._candidates

    def __len__(self) -> int:
        return len(self._candidates)

    @overload
    def __getitem__(self, index: int) -> Estimate: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Estimate, ...]: ...
    def __getitem__(self, index: int | slice) -> Estimate | tuple[Estimate, ...]:
        if isinstance(index, slice):
            return tuple(self[i] for i in range(*index.indices(len(self))))
        place = range(len(self))[index]  # negative indices count from the end; IndexError out of range
        estimate = self._made.get(place)
        if estimate is None:
            estimate = self._made[place] = self._make(self._candidates[place])
        return estimate

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and not isinstance(other, str) and tuple(self) == tuple(other)

    __hash__ = None  # type: ignore[assignment]
