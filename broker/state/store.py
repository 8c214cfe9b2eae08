"""The store: everything broker remembers, in one file. Each noun has its module; this joins them."""

from __future__ import annotations

from broker.state.calls import Pace, PaceRows, RetryBudgetRows
from broker.state.clusters import Bill, BillRows, ClusterRows, Intent, IntentRows
from broker.state.events import EventRow, EventRows, Refusal, RefusalRows
from broker.state.history import HistoryRows
from broker.state.jobs import JobLine, JobRows, LogOffset, StepRange
from broker.state.leader import LeaderRow
from broker.state.meta import MetaRows
from broker.state.retention import Compaction, Total

__all__ = ["Bill", "EventRow", "Intent", "JobLine", "LogOffset", "Pace", "Refusal", "StepRange", "Store", "Total"]


class Store(
    ClusterRows,
    IntentRows,
    BillRows,
    JobRows,
    EventRows,
    RefusalRows,
    HistoryRows,
    PaceRows,
    RetryBudgetRows,
    Compaction,
    LeaderRow,
    MetaRows,
):
    """Opened with `Store(path, clock=clock)`; methods are synchronous, short, and durable when they return."""
