"""The store on PostgreSQL: the same repositories as on SQLite, on another backend. Imported only for such a store."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from broker.clock import Clock
from broker.state.base import draw_uid
from broker.state.postgres import PostgresDatabase
from broker.state.secret_files import SecretStore
from broker.state.secret_rows import SecretRows
from broker.state.store import Store


class PostgresStore(PostgresDatabase, Store):  # type: ignore[misc]
    """A `Store` whose database is PostgreSQL: every method of the backend comes from `PostgresDatabase`."""

    def __init__(
        self,
        url: str,
        *,
        home: Path,
        clock: Clock,
        owner: str | None = None,
        draw_uid: Callable[[], str] = draw_uid,
    ) -> None:
        PostgresDatabase.__init__(self, url, home=home, clock=clock, owner=owner, draw_uid=draw_uid)

    def open_secrets(self) -> SecretStore:
        """Open the secrets of live jobs: encrypted rows of this database."""
        return SecretRows(self)
