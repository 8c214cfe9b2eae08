"""Candidates as plain numbers, and a sequence that converts them to Estimates on access.

Thousands of placements fit a task, but only a few are ever read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import NamedTuple, overload

from broker.optimizer.cost import RunForecast
from broker.optimizer.data_cost import DataCost
from broker.types import Estimate, Offer


class RankedOffer(NamedTuple):
    """One placement. The first fields define the order: cheapest first, with ties in a fixed order."""

    usd: float  # to finish, or per hour if no work is given
    usd_hour: float  # of the whole gang
    cloud: str
    region: str
    zone: str
    instance_type: str
    is_spot: bool
    offer: Offer
    forecast: RunForecast | None
    data: DataCost
    hazard: float
    alternative: int = 0  # of the task: the first one that the offer fits


RANK = itemgetter(slice(0, 7))
IDENTITY = itemgetter(slice(2, 7))


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
        found = self._made.get(place)
        if found is None:
            found = self._made[place] = self._make(self._candidates[place])
        return found

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and not isinstance(other, str) and tuple(self) == tuple(other)

    __hash__ = None  # type: ignore[assignment]
