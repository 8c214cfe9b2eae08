"""The store: all persistent state in one database, with a repository for each type."""

from __future__ import annotations

import importlib
from functools import cached_property
from typing import TYPE_CHECKING, Generic, TypeVar

from broker.state.database import SqliteDatabase

if TYPE_CHECKING:
    from broker.state.calls import ResponseTimeRows, RetryBudgetRows
    from broker.state.claims import Claims
    from broker.state.clusters import BillRows, ClusterRows, IntentRows
    from broker.state.events import EventRows
    from broker.state.forecasts import ForecastRows
    from broker.state.history import HistoryRows
    from broker.state.jobs import JobRows
    from broker.state.leader import LeaderRow
    from broker.state.limits import CommitmentRows, LimitRows
    from broker.state.meta import MetaRows
    from broker.state.people import AuditRows, OwnerRows, TokenRows
    from broker.state.queue import QueueRows
    from broker.state.refusals import RefusalRows
    from broker.state.retention import Compaction
    from broker.state.schedules import ScheduleRows
    from broker.state.secret_files import SecretStore
    from broker.state.services import ServiceRows

R = TypeVar("R")


class Rows(Generic[R]):
    """A repository of a store, created on first use: `plan` reads three of them, and imports no others."""

    def __init__(self, entry: str) -> None:
        self._entry = entry

    def __set_name__(self, owner: type[Store], name: str) -> None:
        self._name = name

    def __get__(self, store: Store, owner: type[Store]) -> R:
        module, _, made = self._entry.partition(":")
        rows: R = getattr(importlib.import_module(f"broker.state.{module}"), made)(store)
        # If two threads get here at once, both must use the same one: some repositories keep data.
        rows = store.__dict__.setdefault(self._name, rows)
        return rows


class Store(SqliteDatabase):
    """The repositories of one state file; their methods are synchronous, short, and durable when they return.

    Writes by several repositories within one `transaction` of the store form one commit.
    """

    clusters: Rows[ClusterRows] = Rows("clusters:ClusterRows")
    intents: Rows[IntentRows] = Rows("clusters:IntentRows")
    bills: Rows[BillRows] = Rows("clusters:BillRows")
    services: Rows[ServiceRows] = Rows("services:ServiceRows")
    schedules: Rows[ScheduleRows] = Rows("schedules:ScheduleRows")
    events: Rows[EventRows] = Rows("events:EventRows")
    refusals: Rows[RefusalRows] = Rows("refusals:RefusalRows")
    queue: Rows[QueueRows] = Rows("queue:QueueRows")
    forecasts: Rows[ForecastRows] = Rows("forecasts:ForecastRows")
    history: Rows[HistoryRows] = Rows("history:HistoryRows")
    response_times: Rows[ResponseTimeRows] = Rows("calls:ResponseTimeRows")
    retries: Rows[RetryBudgetRows] = Rows("calls:RetryBudgetRows")
    retention: Rows[Compaction] = Rows("retention:Compaction")
    leader: Rows[LeaderRow] = Rows("leader:LeaderRow")
    claims: Rows[Claims] = Rows("claims:Claims")
    tokens: Rows[TokenRows] = Rows("people:TokenRows")
    owners: Rows[OwnerRows] = Rows("people:OwnerRows")
    audit: Rows[AuditRows] = Rows("people:AuditRows")
    limits: Rows[LimitRows] = Rows("limits:LimitRows")
    commitments: Rows[CommitmentRows] = Rows("limits:CommitmentRows")
    meta: Rows[MetaRows] = Rows("meta:MetaRows")

    @cached_property
    def jobs(self) -> JobRows:
        """Jobs and their attempts, with the secrets of live jobs."""
        from broker.state.jobs import JobRows

        return JobRows(self, self.open_secrets())

    def open_secrets(self) -> SecretStore:
        """Open the secrets of live jobs: files next to the state file."""
        from broker.state.secret_files import SecretFiles

        return SecretFiles(self.path.parent / "secrets", self)
