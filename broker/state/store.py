"""The store: all persistent state in one database, with a repository for each type."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from broker.clock import Clock
from broker.state.base import draw_uid
from broker.state.calls import ResponseTime, ResponseTimeRows, RetryBudgetRows
from broker.state.claims import Claims
from broker.state.clusters import Bill, BillRows, ClusterRows, Intent, IntentRows
from broker.state.database import SqliteDatabase
from broker.state.events import EventRow, EventRows, Refusal, RefusalRows
from broker.state.forecasts import ForecastRows
from broker.state.history import HistoryRows
from broker.state.jobs import JobLine, JobRows, LogOffset, StepRange
from broker.state.leader import LeaderRow
from broker.state.limits import CommitmentRows, LimitRows
from broker.state.meta import MetaRows
from broker.state.people import AuditRows, OwnerRows, TokenRows
from broker.state.queue import QueueRows
from broker.state.retention import Compaction, Total
from broker.state.schedules import ScheduleRows
from broker.state.secret_files import SecretFiles, SecretStore
from broker.state.services import ServiceRows

__all__ = [
    "Bill",
    "EventRow",
    "Intent",
    "JobLine",
    "LogOffset",
    "Refusal",
    "ResponseTime",
    "StepRange",
    "Store",
    "Total",
]


class Store(SqliteDatabase):
    """The repositories of one state file; their methods are synchronous, short, and durable when they return.

    Writes by several repositories within one `transaction` of the store form one commit.
    """

    def __init__(
        self, path: Path, *, clock: Clock, owner: str | None = None, draw_uid: Callable[[], str] = draw_uid
    ) -> None:
        super().__init__(path, clock=clock, owner=owner, draw_uid=draw_uid)
        self.add_repositories(SecretFiles(path.parent / "secrets"))

    def add_repositories(self, secrets: SecretStore) -> None:
        """Create the repositories, which share this store's transactions."""
        self.clusters = ClusterRows(self)
        self.intents = IntentRows(self)
        self.bills = BillRows(self)
        self.jobs = JobRows(self, secrets)
        self.services = ServiceRows(self)
        self.schedules = ScheduleRows(self)
        self.events = EventRows(self)
        self.refusals = RefusalRows(self)
        self.queue = QueueRows(self)
        self.forecasts = ForecastRows(self)
        self.history = HistoryRows(self)
        self.response_times = ResponseTimeRows(self)
        self.retries = RetryBudgetRows(self)
        self.retention = Compaction(self)
        self.leader = LeaderRow(self)
        self.claims = Claims(self)
        self.tokens = TokenRows(self)
        self.owners = OwnerRows(self)
        self.audit = AuditRows(self)
        self.limits = LimitRows(self)
        self.commitments = CommitmentRows(self)
        self.meta = MetaRows(self)
