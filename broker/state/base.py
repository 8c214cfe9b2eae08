"""The database as the repositories see it, and how they read its rows. Another backend implements `Database` only.

Repositories take the `Database` and write their own SQL; its parameters are `?`, and `?1` where one is used twice.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, TypeVar

from broker.clock import Clock
from broker.errors import DamagedRowError

UID_LETTERS = "abcdefghjkmnpqrstuvwxyz23456789"  # none that looks like another: 28 million ids of five
UID_LENGTH = 5
TIME_S_MAX = 1e11  # the year 5138
T = TypeVar("T")


class Row(Protocol):
    """One row of an answer: a value by the name or the number of its column."""

    def __getitem__(self, key: Any, /) -> Any: ...
    def keys(self) -> Any: ...


class Cursor(Protocol):
    """The answer to one statement."""

    @property
    def rowcount(self) -> int: ...
    @property
    def lastrowid(self) -> int | None: ...
    def fetchone(self) -> Any: ...


class Database(Protocol):
    """Short transactions, never an await inside one. Every method raises StateError where the database fails."""

    path: Path  # of the state file; what is no row, such as the secrets of live jobs, lies beside it
    clock: Clock
    draw_uid: Callable[[], str]
    epoch: int | None  # a leader's; every write of a store that leads is checked against the file's

    def transaction(self, *, is_durable: bool = True) -> AbstractContextManager[None]:
        """All or nothing; an inner transaction joins the outer one. Raises FencedError for a leader that was replaced.

        One that is not durable may be lost in a power cut, never in a crash of ours.
        """

    def execute(self, sql: str, parameters: Sequence[Any] = ()) -> Cursor:
        """One statement, inside a transaction if it writes."""

    def write(self, sql: str, parameters: Sequence[Any] = (), *, is_durable: bool = True) -> Cursor:
        """One statement in a transaction of its own, or in the one under way."""

    def rows(self, sql: str, parameters: Sequence[Any] = ()) -> Sequence[Row]: ...
    def row(self, sql: str, parameters: Sequence[Any] = ()) -> Row | None: ...


def draw_uid() -> str:
    return "".join(random.SystemRandom().choices(UID_LETTERS, k=UID_LENGTH))


def read_row(table: str, key: object, decode: Callable[[], T]) -> T:
    """What `decode` makes of a row. Raises DamagedRowError where its content is not what was written."""
    try:
        return decode()
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, AssertionError) as error:
        raise DamagedRowError(table, str(key), str(error)) from error


def keep_readable(rows: Sequence[Callable[[], T]], on_damage: Callable[[DamagedRowError], None] | None) -> list[T]:
    """What each row says. A damaged one is told to `on_damage` and left out, or raised where there is none."""
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
    """A point in time, in seconds. Raises ValueError, TypeError for what is none."""
    if not isinstance(value, int | float):
        raise TypeError(f"time expected, found {type(value).__name__}")
    if not abs(value) < TIME_S_MAX:
        raise ValueError(f"{value} is no point in time")
    return float(value)


def read_text(value: object) -> str:
    """SQLite keeps any kind of value in any column. Raises TypeError for one that is no text."""
    if not isinstance(value, str):
        raise TypeError(f"text expected, found {type(value).__name__}")
    return value
