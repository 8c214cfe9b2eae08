"""A broker's process as its host sees it: it can be killed, stopped and resumed, and its disk may fail it."""

from __future__ import annotations

import asyncio
import random
import sqlite3
import tempfile
from collections.abc import Callable, Coroutine, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from broker.clock import SystemClock
from broker.state.database import UID_LENGTH, UID_LETTERS
from broker.state.store import Store
from tests.simulation.shuffled import CURRENT, ShuffledLoop

SQLITE_FAULTS = {
    "sqlite:busy": "database is locked",
    "sqlite:full": "database or disk is full",
    "sqlite:ioerr": "disk I/O error",
}


FREQUENT = {"UPDATE jobs SET progress =": "progress", "UPDATE leader SET beat_s =": "beat"}
TRIFLES = frozenset(("progress", "beat", "attempt_steps", "log_offsets"))  # what is seen again anyway
TRIFLE = "trifle"


class Crash(BaseException):
    """kill -9: no handler of the product's may catch it."""


class Process:
    """Dead, it can do nothing more, whichever of its tasks still wakes up: every port asks `check` first."""

    def __init__(
        self,
        name: str,
        loop: ShuffledLoop,
        *,
        on_point: Callable[[Process, str], None],
        on_fault: Callable[[str], None],
    ) -> None:
        self.name = name
        self.loop = loop
        self.is_alive = True
        self.is_stopped = False
        self.tasks: list[asyncio.Task[Any]] = []
        self.dead: asyncio.Future[None] = loop.create_future()
        self.was_killed = self.was_stopped = False
        self.main: asyncio.Task[Any] | None = None
        self.store: Store | None = None  # of a broker: the one that knows its epoch
        self.connections: list[SimulatedConnection] = []
        self.statements_left: int | None = None  # until one fails with `statement_fault`
        self.statement_fault = "sqlite:busy"
        self.is_fault_sticky = False
        self._on_point = on_point
        self.on_fault = on_fault

    def begin(self, work: Coroutine[Any, Any, Any]) -> None:
        self.main = self.loop.begin(work, self)

    def check(self) -> None:
        if not self.is_alive:
            raise Crash(self.name)

    def pass_by(self, point: str) -> None:
        """A deed or commit is just before or behind us: this is where it may be killed."""
        self.check()
        self._on_point(self, point)
        self.check()

    def kill(self) -> None:
        if not self.is_alive:
            return
        self.is_alive = False
        self.was_killed = True
        for connection in self.connections:
            connection.abandon()  # at once: whoever writes next finds no lock of the dead
        self.resume()
        self.loop.call_world(0.0, self._bury)

    def stop(self) -> None:
        if not self.is_stopped and self.is_alive:
            self.is_stopped = self.was_stopped = True
            self.loop.stopped_count += 1

    def resume(self) -> None:
        if self.is_stopped:
            self.is_stopped = False
            self.loop.stopped_count -= 1
            self.loop.unpark()

    def kill_rest(self) -> None:
        """It has exited: whatever it left running ends with it."""
        self.is_alive = False
        self._bury()

    def mend(self) -> None:
        """The disk works again."""
        self.statements_left = None

    def prune(self) -> None:
        self.tasks = [task for task in self.tasks if not task.done()]

    def _bury(self) -> None:
        for task in self.tasks:
            task.cancel()
        if not self.dead.done():
            self.dead.set_result(None)


def get_process() -> Process | None:
    process = CURRENT.get()
    assert process is None or isinstance(process, Process)
    return process


class ProcessClock:
    """The host's wall clock: it may jump. A dead process does not even read it."""

    def __init__(self, loop: ShuffledLoop) -> None:
        self._loop = loop
        self.offset_s = 0.0

    def now_s(self) -> float:
        process = CURRENT.get()
        if process is not None and not process.is_alive:  # type: ignore[attr-defined]
            raise Crash
        return self._loop.time() + self.offset_s

    async def sleep(self, duration_s: float) -> None:
        await asyncio.sleep(duration_s)


class SimulatedFile:
    """The store's file: one database in memory, which every process sees.

    Nobody waits inside a transaction, so one at a time is open; the dead one's is rolled back at once, as SQLite
    does for a process that is gone. No power cut is played, so nothing needs a disk.
    """

    def __init__(self) -> None:
        self.connection = sqlite3.connect(":memory:", isolation_level=None, cached_statements=512)
        self.connection.deserialize(_make_empty())
        self.connection.row_factory = sqlite3.Row
        self.writer: Process | None = None  # whose transaction is open

    def close(self) -> None:
        self.connection.close()

    def begin(self, process: Process) -> None:
        other = self.writer
        assert not self.connection.in_transaction, f"{other.name if other else 'nobody'} waits in its transaction"
        self.writer = process

    def abandon(self, process: Process) -> None:
        if self.writer is process and self.connection.in_transaction:
            self.connection.rollback()


@cache
def _make_empty() -> bytes:
    """The tables, as the product makes them."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "state.db"
        Store(path, clock=SystemClock()).close()
        connection = sqlite3.connect(path, isolation_level=None)  # no journal mode changes in a transaction
        connection.execute("UPDATE meta SET value = 'simulated' WHERE key = 'lineage'")  # it is random
        connection.commit()  # the journal's mode does not change within a transaction
        connection.execute("PRAGMA journal_mode=DELETE")  # a database in memory has no log beside it
        connection.close()
        return path.read_bytes()


@cache
def find_table(sql: str) -> str:
    """Which table it writes; "progress" and "beat" are the columns that change all the time."""
    for prefix, name in FREQUENT.items():
        if sql.startswith(prefix):
            return name
    words = sql.split(None, 5)
    return words[1] if words[0] == "UPDATE" else words[words.index("INTO" if words[0] == "INSERT" else "FROM") + 1]


class SimulatedConnection:
    """A process's connection to the store's file: counts statements, fails the chosen one, tells of commits."""

    def __init__(self, file: SimulatedFile, process: Process, on_commit: Callable[..., None]) -> None:
        self._file = file
        self._connection = file.connection
        self._process = process
        self._on_commit = on_commit
        self._written: list[str] = []
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
        if sql.startswith("BEGIN"):
            self._file.begin(process)
        cursor = self._connection.execute(sql, parameters)
        if sql.startswith(("UPDATE", "INSERT", "DELETE")):
            self._written.append(sql)
        elif sql.startswith(("BEGIN", "ROLLBACK")):
            self._written.clear()
        return cursor

    def close(self) -> None:
        """The file stays open for the others."""
        assert not self.in_transaction

    def abandon(self) -> None:
        self._file.abandon(self._process)

    def _commit(self) -> sqlite3.Cursor:
        tables = tuple(find_table(sql) for sql in self._written)
        self._written = []
        point = TRIFLE if TRIFLES.issuperset(tables) else "commit"
        self._process.pass_by(f"{point}:before")
        cursor = self._connection.execute("COMMIT")
        if tables:
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
    """From the generator that is seeded for each history."""
    return "".join(random.choices(UID_LETTERS, k=UID_LENGTH))


class SimulatedStore(Store):
    """The store itself, on a connection that belongs to a process. Nothing lies at `path` but what is beside it."""

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
