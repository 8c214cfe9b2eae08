"""The host's disk: the store's file in memory, shared by every process; it may fail, fill up, or lose power."""

from __future__ import annotations

import random
import sqlite3
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from broker.clock import SystemClock
from broker.state.base import UID_LENGTH, UID_LETTERS
from broker.state.store import Store
from tests.simulation.processes import Process, ProcessClock

SQLITE_FAULTS = {
    "sqlite:busy": "database is locked",
    "sqlite:full": "database or disk is full",
    "sqlite:ioerr": "disk I/O error",
}


FREQUENT = {"UPDATE jobs SET progress =": "progress", "UPDATE leader SET beat_s =": "beat"}
TRIFLES = frozenset(("progress", "beat", "attempt_steps", "log_offsets"))  # observed again anyway
TRIFLE = "trifle"
Statement = tuple[str, Sequence[Any]]


class SimulatedFile:
    """The store's file: one database in memory, which every process sees.

    No process waits inside a transaction, so one at a time is open; the dead one's is rolled back at once, as SQLite
    does for a process that is gone. Of a power cut it keeps what SQLite promises with a write-ahead log: everything up
    to the last commit made with `synchronous=FULL`, and of the later ones any number, in their order.
    """

    def __init__(self, *, may_lose_power: bool = False) -> None:
        self.connection = sqlite3.connect(":memory:", isolation_level=None, cached_statements=512)
        self.connection.deserialize(_make_empty())
        self.connection.row_factory = sqlite3.Row
        self.writer: Process | None = None  # whose transaction is open
        self.is_full = False
        self._may_lose_power = may_lose_power  # otherwise no image is kept: it costs time
        self._synced: bytes | None = None  # the durable image, while any commit is unsynced
        self._unsynced: list[list[Statement]] = []  # commits since

    def keep_image(self) -> None:
        """Keep an image before the first write of a transaction that will not be synced."""
        if self._may_lose_power and not self._unsynced:
            self._synced = self.connection.serialize()

    def note_commit(self, statements: list[Statement], *, is_synced: bool) -> None:
        if is_synced:
            self._unsynced = []
        else:
            self._unsynced.append(statements)

    def is_intent_synced(self, token: str) -> bool:
        """Return whether a power cut would preserve what the file records of this intent."""
        written = (each for statements in self._unsynced for each in statements)
        return not any(sql.startswith("INSERT INTO intents") and token in parameters for sql, parameters in written)

    def cut_power(self, chance: Random) -> int:
        """Cut the power and return how many commits are lost."""
        assert self._may_lose_power and not self.connection.in_transaction
        if not self._unsynced:
            return 0
        assert self._synced is not None
        kept = chance.randint(0, len(self._unsynced))
        lost = len(self._unsynced) - kept
        self.connection.deserialize(self._synced)
        for statements in self._unsynced[:kept]:
            self.connection.execute("BEGIN")
            for sql, parameters in statements:
                self.connection.execute(sql, parameters)
            self.connection.execute("COMMIT")
        self._unsynced = []
        return lost

    def close(self) -> None:
        self.connection.close()

    def begin(self, process: Process) -> None:
        other = self.writer
        assert not self.connection.in_transaction, f"{other.name if other else 'no process'} waits in its transaction"
        self.writer = process

    def abandon(self, process: Process) -> None:
        if self.writer is process and self.connection.in_transaction:
            self.connection.rollback()


@cache
def _make_empty() -> bytes:
    """Create the tables as the product does."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "state.db"
        Store(path, clock=SystemClock()).close()
        connection = sqlite3.connect(path, isolation_level=None)
        connection.execute("UPDATE meta SET value = 'simulated' WHERE key = 'lineage'")  # it is random
        connection.execute("PRAGMA journal_mode=DELETE")  # a database in memory has no log file
        connection.close()
        return path.read_bytes()


@cache
def find_table(sql: str) -> str:
    """Return the table that the statement writes; "progress" and "beat" are the columns that change constantly."""
    for prefix, name in FREQUENT.items():
        if sql.startswith(prefix):
            return name
    words = sql.split(None, 5)
    return words[1] if words[0] == "UPDATE" else words[words.index("INTO" if words[0] == "INSERT" else "FROM") + 1]


class SimulatedConnection:
    """A process's connection to the store's file: it counts statements, fails the chosen one and reports commits."""

    def __init__(self, file: SimulatedFile, process: Process, on_commit: Callable[..., None]) -> None:
        self._file = file
        self._connection = file.connection
        self._process = process
        self._on_commit = on_commit
        self._written: list[Statement] = []
        self._is_synced = True  # as the product opens it
        process.connections.append(self)

    @property
    def in_transaction(self) -> bool:
        return self._process.is_alive and self._connection.in_transaction and self._file.writer is self._process

    def execute(self, sql: str, parameters: Sequence[Any] = ()) -> sqlite3.Cursor:
        process = self._process
        process.check()
        if process.statements_left is not None and sql != "ROLLBACK":
            self._maybe_fail(process)
        if sql.startswith("SELECT"):
            return self._connection.execute(sql, parameters)
        if sql == "COMMIT":
            return self._commit()
        if sql.startswith(("UPDATE", "INSERT", "DELETE")):
            return self._write(sql, parameters)
        if sql.startswith("PRAGMA synchronous="):
            self._is_synced = sql.endswith("FULL")
            return self._connection.execute("SELECT 1")
        if sql.startswith("BEGIN"):
            self._file.begin(process)
        if sql.startswith(("BEGIN", "ROLLBACK")):
            self._written.clear()
        return self._connection.execute(sql, parameters)

    def _write(self, sql: str, parameters: Sequence[Any]) -> sqlite3.Cursor:
        if self._file.is_full:
            raise sqlite3.OperationalError(SQLITE_FAULTS["sqlite:full"])
        if not self._written and not self._is_synced:
            self._file.keep_image()
        cursor = self._connection.execute(sql, parameters)
        self._written.append((sql, parameters))
        return cursor

    def close(self) -> None:
        """Leave the file open for the other processes."""
        assert not self.in_transaction

    def abandon(self) -> None:
        self._file.abandon(self._process)

    def _commit(self) -> sqlite3.Cursor:
        written, self._written = self._written, []
        tables = tuple(find_table(sql) for sql, _ in written)
        point = TRIFLE if TRIFLES.issuperset(tables) else "commit"
        self._process.pass_by(f"{point}:before")
        cursor = self._connection.execute("COMMIT")
        if tables:
            self._file.note_commit(written, is_synced=self._is_synced)
            self._on_commit(self._process, tables)
        self._process.pass_by(f"{point}:after")
        return cursor

    def _maybe_fail(self, process: Process) -> None:
        assert process.statements_left is not None
        process.statements_left -= 1
        if process.statements_left >= 0:
            return
        fault = process.statement_fault
        if process.is_fault_sticky:
            process.statements_left = 0
        else:
            process.statements_left = None
        process.on_fault(fault)
        raise sqlite3.OperationalError(SQLITE_FAULTS[fault])


def draw_seeded_uid() -> str:
    """Draw from the generator that is seeded for each history."""
    return "".join(random.choices(UID_LETTERS, k=UID_LENGTH))


class SimulatedStore(Store):
    """The store itself, on a connection owned by a process. Only the files next to the store exist at `path`."""

    def __init__(
        self,
        path: Path,
        *,
        clock: ProcessClock,
        process: Process,
        file: SimulatedFile,
        on_commit: Callable[..., None],
    ) -> None:
        self._make_connection = lambda: SimulatedConnection(file, process, on_commit)
        self._process = process
        super().__init__(path, clock=clock, draw_uid=draw_seeded_uid)

    def _open(self) -> Any:
        self._process.check()
        return self._make_connection()
