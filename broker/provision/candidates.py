"""The order in which one search requests placements.

1. Placements whose intents an earlier process left open: all at once, before anything else.
2. A placement that was postponed because its region was suspect, once the region is no longer suspect.
3. The next placement of the plan, preferably among the next few in a zone without a launch in progress.
4. Last resort: a placement that has refused and may be requested again, best first.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from broker.types import Placement

REQUESTS_MAX = 2  # requests per placement in one search
LAST_RESORT_MAX = 32  # refused placements kept for step 4; a plan may contain thousands
OTHER_ZONE_AMONG = 16  # placements examined in step 3: a zone that hangs does so for all its instance types

Zone = tuple[str, str]  # cloud, and zone or region


class RankedPlacement(NamedTuple):
    """A placement with its position in the plan."""

    rank: int  # position in the plan: 0 is best
    placement: Placement


class Candidates:
    """The remaining placements to request. The plan is read lazily, because it may contain thousands."""

    def __init__(self, placements: Iterable[Placement], resumed: Sequence[Placement]) -> None:
        self._plan: Iterator[RankedPlacement] = (RankedPlacement(*ranked) for ranked in enumerate(placements))
        self._ahead: list[RankedPlacement] = []
        self._resumed = list(resumed)
        self._postponed: list[RankedPlacement] = []
        self._last_resort: list[RankedPlacement] = []
        self._request_counts = Counter[Placement]()

    def take_resumed(self) -> Placement | None:
        """Return the next placement of an earlier, interrupted launch; None if none remains."""
        return self._resumed.pop(0) if self._resumed else None

    def take_next(self, busy: frozenset[Zone], is_suspect: Callable[[Placement], bool]) -> RankedPlacement | None:
        """Remove and return the best placement of steps 2 and 3. `busy`: zones of the launches in progress."""
        return self._take_postponed(is_suspect) or self._take_planned(busy)

    def take_last_resort(self, is_due: Callable[[Placement], bool]) -> RankedPlacement | None:
        """Remove and return the best-ranked refused placement that `is_due` again; None if there is none."""
        due = next((candidate for candidate in self._last_resort if is_due(candidate.placement)), None)
        if due is not None:
            self._last_resort.remove(due)
        return due

    def list_last_resort(self) -> Sequence[Placement]:
        """List the placements that may be retried, best rank first."""
        return [candidate.placement for candidate in self._last_resort]

    def put_back(self, rank: int, placement: Placement) -> None:
        """Return an untried placement to the front of the plan."""
        self._ahead.insert(0, RankedPlacement(rank, placement))

    def postpone(self, rank: int, placement: Placement) -> None:
        """Postpone a placement in a suspect region; the search returns to it once the region is cleared."""
        self._postponed.append(RankedPlacement(rank, placement))

    def keep_as_last_resort(self, rank: int, placement: Placement) -> None:
        """Keep a refused placement for a retry, within the limits on their number and requests."""
        if len(self._last_resort) < LAST_RESORT_MAX and self._request_counts[placement] < REQUESTS_MAX:
            insort(self._last_resort, RankedPlacement(rank, placement), key=lambda candidate: candidate.rank)

    def count_request(self, placement: Placement) -> None:
        """Count a request, to limit retries of one placement."""
        self._request_counts[placement] += 1

    def _take_postponed(self, is_suspect: Callable[[Placement], bool]) -> RankedPlacement | None:
        cleared = [candidate for candidate in self._postponed if not is_suspect(candidate.placement)]
        best = min(cleared, key=lambda candidate: candidate.rank, default=None)
        if best is not None:
            self._postponed.remove(best)
        return best

    def _take_planned(self, busy: frozenset[Zone]) -> RankedPlacement | None:
        if not busy:
            return self._ahead.pop(0) if self._ahead else next(self._plan, None)
        self._ahead += islice(self._plan, max(0, OTHER_ZONE_AMONG - len(self._ahead)))
        elsewhere = (i for i, candidate in enumerate(self._ahead) if find_zone(candidate.placement) not in busy)
        return self._ahead.pop(next(elsewhere, 0)) if self._ahead else None


def find_zone(placement: Placement) -> Zone:
    """Return the cloud and zone of a placement, or its region if the offer has no zone."""
    offer = placement.offer
    return offer.cloud, offer.zone or offer.region
