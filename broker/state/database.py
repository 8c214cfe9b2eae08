"""One SQLite file: how it is opened, migrated and written. Short transactions, never an await inside one."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from broker.clock import Clock
from broker.errors import FencedError, StateError
from broker.state.schema import MIGRATIONS

BUSY_TIMEOUT_MS = 60_000  # a command waits this long for another broker's transaction before it gives up


class Database:
    """WAL and synchronous=FULL: a committed intent survives a power cut (measured 0.14 ms a commit)."""

    def __init__(self, path: Path, *, clock: Clock) -> None:
        self.path = path
        self.clock = clock
        self._depth = 0
        self._is_durable = True
        self._epoch: int | None = None  # a leader's; every write of a store that leads is checked against the file's
        try:
            self._connection = self._open()
            self._migrate()
        except (sqlite3.Error, OSError) as error:
            raise self._explain(error) from error

    def close(self) -> None:
        self._connection.close()

    @contextmanager
    def transaction(self, *, is_durable: bool = True) -> Iterator[None]:
        """All or nothing; an inner transaction joins the outer one. The write lock is taken at once.

        One that is not durable may be lost in a power cut, never in a crash of ours: for what is seen again anyway.
        """
        if self._depth:
            yield
            return
        if is_durable != self._is_durable:
            self._execute(f"PRAGMA synchronous={'FULL' if is_durable else 'NORMAL'}")
            self._is_durable = is_durable
        self._execute("BEGIN IMMEDIATE")
        self._depth += 1
        try:
            self._check_epoch()
            yield
            self._commit()
        except BaseException:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise
        finally:
            self._depth -= 1

    def _check_epoch(self) -> None:
        """A process that slept through its own replacement may not write any more (a fencing token)."""
        if self._epoch is not None and self._rows("SELECT epoch FROM leader")[0][0] != self._epoch:
            raise FencedError("another daemon of this state folder has taken over")

    def _commit(self) -> None:
        self._execute("COMMIT")

    def _execute(self, sql: str, parameters: Sequence[Any] = ()) -> sqlite3.Cursor:
        try:
            return self._connection.execute(sql, parameters)
        except sqlite3.OperationalError as error:
            raise self._explain(error) from error

    def _write(self, sql: str, parameters: Sequence[Any] = (), *, is_durable: bool = True) -> sqlite3.Cursor:
        with self.transaction(is_durable=is_durable):
            return self._execute(sql, parameters)

    def _rows(self, sql: str, parameters: Sequence[Any] = ()) -> list[sqlite3.Row]:
        return self._execute(sql, parameters).fetchall()

    def _row(self, sql: str, parameters: Sequence[Any] = ()) -> sqlite3.Row | None:
        rows = self._rows(sql, parameters)
        return rows[0] if rows else None

    def _open(self) -> sqlite3.Connection:
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Made by us first, so that the file never exists with a wider mode; SQLite gives -wal and -shm the same one.
        os.close(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600))
        connection = sqlite3.connect(self.path, timeout=BUSY_TIMEOUT_MS / 1000, isolation_level=None)
        connection.row_factory = sqlite3.Row
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute("PRAGMA foreign_keys=ON")
        return connection

    def _migrate(self) -> None:
        if self._schema_version() == len(MIGRATIONS):
            return
        with self.transaction():
            version = self._schema_version()  # read again: another process may have just migrated
            if version > len(MIGRATIONS):
                raise StateError(
                    f"{self.path} was written by a newer broker (schema {version}, this one knows {len(MIGRATIONS)})",
                    hints=("Upgrade broker, or point `BROKER_HOME` at another folder.",),
                )
            for statements in MIGRATIONS[version:]:
                for statement in statements:
                    self._execute(statement)
            self._execute(f"PRAGMA user_version={len(MIGRATIONS)}")

    def _schema_version(self) -> int:
        return int(self._rows("PRAGMA user_version")[0][0])

    def _explain(self, error: Exception) -> StateError:
        return StateError(
            f"the state file {self.path} cannot be used: {error}",
            hints=("Check that the folder is writable and the disk not full, or set `BROKER_HOME`.",),
        )
