"""The database interface of the repositories, and helpers to read rows. Another backend only implements `Database`.

Each repository uses a `Database` and its own SQL, with `?` for parameters, or `?1` for parameters that are used twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Protocol, TypeVar

from broker.clock import Clock
from broker.errors import DamagedRowError, FencedError
from broker.frozen import frozen

UID_LETTERS = "abcdefghjkmnpqrstuvwxyz23456789"  # no letters that look alike: 28 million IDs of length 5
UID_LENGTH = 5
TIME_S_MAX = 1e11  # the year 5138
T = TypeVar("T")


class Row(Protocol):
    """A result row; values are read by column name or index."""

    def __getitem__(self, key: Any, /) -> Any: ...
    def __iter__(self) -> Iterator[Any]: ...
    def keys(self) -> Any:
        """Return the names of the columns."""


class Cursor(Protocol):
    """The result of one statement."""

    @property
    def rowcount(self) -> int:
        """Number of rows that the statement changed."""

    def fetchone(self) -> Any:
        """Return the next row; None after the last."""


@frozen
class Fence:
    """The claim under which a task works: it may only write while the claim of this job still has this epoch."""

    job_id: int
    epoch: int


# The claim of the current task, inherited by the tasks that it starts; None if no claim is needed.
FENCE: ContextVar[Fence | None] = ContextVar("FENCE", default=None)


class Database(Protocol):
    """A database with short transactions, never with an await inside one.

    Every method raises StateError if the database fails.
    """

    path: Path  # of the state file; data that is not in rows, such as the secrets of live jobs, is in the same folder
    clock: Clock
    draw_uid: Callable[[], str]
    epoch: int | None  # set while this store leads: every write is checked against the epoch in the file
    is_shared: bool  # several controller processes share the jobs, by claims
    lock_and_skip: str  # appended to a SELECT: lock its rows, and skip rows that another transaction has locked
    lock_to_read: str  # appended to a SELECT: prevent other transactions from changing its rows before this one ends

    def transaction(self, *, is_durable: bool = True) -> AbstractContextManager[None]:
        """Run the block as one transaction; an inner transaction joins the outer one.

        A transaction that is not durable may be lost in a power cut, but never in a crash of broker. Raises
        FencedError for a replaced leader, and under a claim (`FENCE`) that another controller has taken over.
        """

    def snapshot(self) -> AbstractContextManager[None]:
        """Run a block that only reads, on the state of one moment, however long it takes."""

    def after_commit(self, act: Callable[[], None]) -> None:
        """Call `act` once the current transaction, with all outer ones, is committed; at once if there is none.

        For what a rollback cannot undo, such as the deletion of a file.
        """

    def claiming(self, *, is_durable: bool) -> AbstractContextManager[None]:
        """Run the block as a transaction that only touches `controllers` and `claims`, and ignores `FENCE`.

        It does not wait for the transactions of other processes if the backend can lock single rows.
        """

    def execute(self, sql: str, parameters: Sequence[Any] = ()) -> Cursor:
        """Execute one statement; a statement that writes must be inside a transaction."""

    def write(self, sql: str, parameters: Sequence[Any] = (), *, is_durable: bool = True) -> Cursor:
        """Execute one statement in the current transaction, or in a separate one if there is none."""

    def rows(self, sql: str, parameters: Sequence[Any] = ()) -> Sequence[Row]:
        """Return all rows of a query."""
        ...

    def row(self, sql: str, parameters: Sequence[Any] = ()) -> Row | None:
        """Return the first row of a query; None if there is none."""
        ...

    def read_time_s(self) -> float:
        """Return the time of the store, which is the same for all processes that share it."""

    def skip_used_ids(self, tables: Sequence[str]) -> None:
        """Ensure that new rows of these tables get larger IDs than all imported ones."""

    def reclaim_space(self) -> None:
        """Return free space to the file system, if there is a lot."""


def check_claim(database: Database) -> None:
    """Raise FencedError if another controller has taken over the job of the current task.

    The claim cannot change until the transaction ends, so that no takeover happens between this check and the writes.
    """
    fence = FENCE.get()
    if fence is None:
        return
    found = database.row(f"SELECT epoch FROM claims WHERE job_id = ?{database.lock_to_read}", (fence.job_id,))
    if found is None or found["epoch"] != fence.epoch:
        raise FencedError(f"another controller has taken over job {fence.job_id}")


def draw_uid() -> str:
    """Draw a random unique ID from the operating system's source."""
    import secrets  # imports hashlib and random, which a plan does not need

    return "".join(secrets.choice(UID_LETTERS) for _ in range(UID_LENGTH))


def read_row(table: str, key: object, decode: Callable[[], T]) -> T:
    """Decode a row with `decode`. Raises DamagedRowError if its content is not valid."""
    try:
        return decode()
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, AssertionError) as error:
        raise DamagedRowError(table, str(key), str(error)) from error


def keep_readable(rows: Sequence[Callable[[], T]], on_damage: Callable[[DamagedRowError], None] | None) -> list[T]:
    """Read all rows. A damaged row is reported to `on_damage` and omitted; with None, its error is raised."""
    found = []
    for read in rows:
        try:
            found.append(read())
        except DamagedRowError as error:
            if on_damage is None:
                raise
            on_damage(error)
    return found


def read_s(value: object) -> float:
    """Read a point in time, in seconds since the epoch. Raises TypeError or ValueError for an invalid one."""
    if not isinstance(value, int | float):
        raise TypeError(f"time expected, found {type(value).__name__}")
    if not abs(value) < TIME_S_MAX:
        raise ValueError(f"{value} is not a point in time")
    return float(value)


def read_text(value: object) -> str:
    """Read a text. Raises TypeError for other types, which SQLite accepts in any column."""
    if not isinstance(value, str):
        raise TypeError(f"text expected, found {type(value).__name__}")
    return value
