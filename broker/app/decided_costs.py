"""Recorded forecasts of jobs against what they cost: the expected cost of each job's first decision."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from broker.frozen import frozen
from broker.types import EventKind, JobStatus

if TYPE_CHECKING:
    from broker.state.events import EventRow
    from broker.state.jobs import JobLine
    from broker.state.store import Store

JOBS_MAX = 500  # ended jobs whose events are read, the newest


@frozen
class DecidedCost:
    """The cost that the spot policy expected when a job started, and what was paid when it had succeeded."""

    job_id: int
    name: str
    forecast_usd: float
    paid_usd: float

    @property
    def ratio(self) -> float:
        """Paid over forecast; 1 is a true forecast."""
        return self.paid_usd / self.forecast_usd


def find_expected_usd(events: Iterable[EventRow]) -> float | None:
    """Return the expected cost to finish that a job's first decision recorded: the least of what it weighed.

    None where that decision weighed nothing; later ones do not count, as part of the cost is paid by then.
    """
    first = next((event for event in events if event.kind is EventKind.DECISION), None)
    weighed = None if first is None else first.data.get("expected_usd")
    if not isinstance(weighed, Mapping):
        return None
    return min((float(usd) for usd in weighed.values() if isinstance(usd, int | float) and usd > 0), default=None)


def list_decided_costs(store: Store, lines: Sequence[JobLine], *, now_s: float) -> Sequence[DecidedCost]:
    """List the forecasts of succeeded jobs, in the order of `lines`; jobs without a recorded one are left out."""
    found = []
    ended = [line for line in lines if line.status is JobStatus.SUCCEEDED]
    for line in ended[:JOBS_MAX]:
        forecast_usd = find_expected_usd(store.events.list(job_id=line.id))
        if forecast_usd is not None:
            paid_usd = store.bills.spend_usd(job_id=line.id, now_s=now_s)
            found.append(DecidedCost(job_id=line.id, name=line.name, forecast_usd=forecast_usd, paid_usd=paid_usd))
    return found
