"""Starts on spot whose first part overlaps with the work of running on-demand machines, by age of the open period.

Both sets of machines are billed while they overlap. If the market closes meanwhile, on-demand continues; later, the job
has lost its machines, as in any other start.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from operator import itemgetter
from typing import Any

from broker.spot.starts import OLDEST, follow_starts
from broker.spot.value_tables import ValueParameters


@dataclass(frozen=True, kw_only=True)
class OverlappedStart:
    """A start from one age class. The chances of its three ends add up to 1, and `paid` is the mean cost until then.

    `landings` holds the chances of the age classes in which the start ends on spot, the oldest class first in a row;
    `read` picks the values of these classes from such a row. The market closes during the overlap with the chance
    `kept`, after `kept_hours` of work on-demand, and later with the chance `dropped`.
    """

    read: Callable[[Any], tuple[float, ...]]
    landings: tuple[float, ...]
    survive: float
    kept: float
    kept_hours: float
    dropped: float
    survived_paid: float  # cost of a start that is survived, not weighted by its chance
    kept_paid: float
    dropped_paid: float

    @property
    def paid(self) -> float:
        """Return the mean cost of the start."""
        return self.survive * self.survived_paid + self.kept * self.kept_paid + self.dropped * self.dropped_paid


def list_overlapped_starts(parameters: ValueParameters) -> tuple[OverlappedStart, ...]:
    """List the starts by age class, the oldest first; empty if starts do not overlap."""
    if parameters.overlap_hours <= 0:
        return ()
    return _list_starts(
        parameters.open_hazards, parameters.start_hours, parameters.overlap_hours, parameters.spot_hour_price
    )


@lru_cache(maxsize=256)  # value functions share hazards
def _list_starts(
    open_hazards: tuple[float, ...], start_hours: float, overlap_hours: float, price: float
) -> tuple[OverlappedStart, ...]:
    rest = start_hours - overlap_hours
    found = []
    for whole, first in zip(
        follow_starts(open_hazards, start_hours), follow_starts(open_hazards, overlap_hours), strict=True
    ):
        both = overlap_hours * (1 + price)
        found.append(
            OverlappedStart(
                read=itemgetter(*(place for place, _ in whole.landings), OLDEST),
                landings=tuple(chance for _, chance in whole.landings),
                survive=whole.survive,
                kept=1 - first.survive,
                kept_hours=first.lost_hours,
                dropped=max(first.survive - whole.survive, 0.0),
                survived_paid=both + rest * price,
                kept_paid=first.lost_hours * (1 + price),
                dropped_paid=both + rest / 2 * price,
            )
        )
    return tuple(found)
