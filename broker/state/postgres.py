"""The PostgreSQL backend: the same transactions as with SQLite, for processes on any machine.

Only one writing transaction runs at a time, serialized by an advisory lock: the repositories read, decide and write,
and require the guarantees of SQLite's write lock. Claims lock single rows instead, so a lease never waits for a long
transaction. The server ends the session of a process that was suspended inside a transaction.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn, cast

import psycopg
from psycopg import sql as pg_sql

from broker.clock import Clock
from broker.errors import StateError
from broker.state.base import FENCE, Cursor, Row, check_claim, draw_uid
from broker.state.guard import Guard, read_guard, write_guard
from broker.state.postgres_errors import explain_postgres_error, hide_password
from broker.state.postgres_schema import list_statements
from broker.state.schema import MIGRATIONS

CONNECT_S = 10
# A suspended process must not hold the lock for longer than a lease lasts (`claims.LEASE_S`). With any other isolation,
# which the server's or the role's defaults may set, a transaction would read from a snapshot that it took before it
# waited for the lock: it would not see what the previous one wrote.
ISOLATION = "ISOLATION LEVEL READ COMMITTED, READ WRITE"
SESSION = (
    f"SET SESSION CHARACTERISTICS AS TRANSACTION {ISOLATION}; "
    "SET idle_in_transaction_session_timeout = '5s'; SET lock_timeout = '60s'; SET statement_timeout = '120s'; "
    "SET standard_conforming_strings = on; SET client_encoding = 'UTF8'"
)
BEGIN = f"BEGIN {ISOLATION}"  # again here: a pooler may have given this session's server connection to others
# A dump of a large store takes minutes, also between its statements.
SNAPSHOT = (
    "BEGIN ISOLATION LEVEL REPEATABLE READ, READ ONLY; "
    "SET LOCAL idle_in_transaction_session_timeout = 0; SET LOCAL statement_timeout = 0"
)
# The lock of all writing transactions, one for each schema of the server's database.
LOCK = "SELECT pg_advisory_xact_lock(1651666795, hashtext(current_schema()))"
_PARAMETER = re.compile(r"\?(\d*)|%")


class PostgresRow(tuple[Any, ...]):
    """A row whose values are read by index or by column name."""

    names: dict[str, int]

    def __getitem__(self, key: Any) -> Any:
        return tuple.__getitem__(self, self.names[key] if isinstance(key, str) else key)

    def keys(self) -> list[str]:
        """Return the names of the columns."""
        return list(self.names)


class PostgresDatabase:
    """One connection, which is reopened after a restart of the server.

    `home` holds data outside the database, such as keys and logs. `owner` is the installation's ID, which is the same
    for all processes that share a database.
    """

    is_shared = True
    is_read_only = False
    lock_and_skip = " FOR UPDATE SKIP LOCKED"
    lock_to_read = " FOR SHARE"

    def __init__(
        self,
        url: str,
        *,
        home: Path,
        clock: Clock,
        owner: str | None = None,
        draw_uid: Callable[[], str] = draw_uid,
    ) -> None:
        self.url = url
        self.path = home / "server.db"  # determines the guard's name; the file itself does not exist
        self.clock = clock
        self.draw_uid = draw_uid
        self.epoch: int | None = None  # jobs are claimed individually, and no process leads
        self._owner = owner
        self._depth = 0
        self._after: list[Callable[[], None]] = []  # called after the commit
        self._connection: psycopg.Connection[PostgresRow] | None = None
        self._migrate()
        self._identify()

    def __str__(self) -> str:
        return hide_password(self.url)

    def close(self) -> None:
        """Close the connection, if one was opened."""
        if self._connection is not None:
            self._connection.close()

    @contextmanager
    def transaction(self, *, is_durable: bool = True) -> Iterator[None]:
        """Take the lock of all writers for the transaction, and check the claim (decision 160)."""
        if self._depth:
            yield
            return
        with self._begin(f"{BEGIN}; {_set_sync(is_durable=is_durable)}; {LOCK}"):
            check_claim(self)
            yield

    @contextmanager
    def claiming(self, *, is_durable: bool) -> Iterator[None]:
        """Open an unfenced transaction for claims, without the lock of other writers. It must not be nested."""
        assert not self._depth, "claims use separate transactions"
        token = FENCE.set(None)
        try:
            with self._begin(f"{BEGIN}; {_set_sync(is_durable=is_durable)}"):
                yield
        finally:
            FENCE.reset(token)

    @contextmanager
    def _begin(self, opening: str) -> Iterator[None]:
        try:
            self._run(opening, ())  # on a new connection if the server was restarted since
        except BaseException:
            self._roll_back()  # it may have begun, and failed to acquire the lock
            raise
        self._depth += 1
        try:
            yield
            self._commit()
        except BaseException:
            self._roll_back()
            self._after.clear()
            raise
        finally:
            self._depth -= 1
        after, self._after = self._after, []
        for act in after:
            act()

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """Run a block that only reads; other processes write meanwhile."""
        with self._begin(SNAPSHOT):
            yield

    def after_commit(self, act: Callable[[], None]) -> None:
        """Call `act` after the commit of the outermost transaction; at once without one."""
        if self._depth:
            self._after.append(act)
        else:
            act()

    def _commit(self) -> None:
        """Commit. If the connection is lost, the transaction may or may not be committed.

        Raises StateError if the server rolled back instead, which it reports as a success: a statement had failed, and
        its error was handled inside the transaction.
        """
        if self._run("COMMIT", ()).statusmessage != "COMMIT":
            raise StateError(
                f"the state in {self} was not changed: a statement of the transaction had failed",
                hints=("`broker state check` lists errors in the database.",),
            )

    def _roll_back(self) -> None:
        """Roll back. If that fails, end the session, so that the server rolls back."""
        connection = self._connection
        try:
            if connection is not None and not connection.closed:
                connection.execute("ROLLBACK")
        except psycopg.Error:
            connection.close() if connection is not None else None

    def execute(self, sql: str, parameters: Sequence[Any] = ()) -> Cursor:
        """Execute one statement within a transaction."""
        assert self._depth, "a statement that writes is in a transaction"
        return cast(Cursor, self._run(sql, parameters))

    def write(self, sql: str, parameters: Sequence[Any] = (), *, is_durable: bool = True) -> Cursor:
        """Execute one statement, in a separate transaction if none is open."""
        with self.transaction(is_durable=is_durable):
            return self.execute(sql, parameters)

    def rows(self, sql: str, parameters: Sequence[Any] = ()) -> Sequence[Row]:
        """Return all rows. Raises StateError if the server cannot be reached."""
        return self._run(sql, parameters).fetchall()

    def row(self, sql: str, parameters: Sequence[Any] = ()) -> Row | None:
        """Return the first row; None if there is none. Raises StateError if the server cannot be reached."""
        found = self._run(sql, parameters).fetchone()
        return cast("Row | None", found)

    def read_time_s(self) -> float:
        """Return the time of the server, which is the same for all controllers."""
        return float(self.rows("SELECT extract(epoch FROM clock_timestamp())::float8")[0][0])

    def skip_used_ids(self, tables: Sequence[str]) -> None:
        """Set each table's sequence above its largest ID."""
        for table in tables:
            self.execute(f"SELECT setval(pg_get_serial_sequence('{table}', 'id'), greatest(max(id), 1)) FROM {table}")

    def reclaim_space(self) -> None:
        """Do nothing: the server does this by itself."""

    def copy(self) -> Path:
        """Raise StateError: a PostgreSQL server has its own backups."""
        raise StateError(
            "this state is in PostgreSQL, which broker does not copy",
            hints=("write a file with `broker state export FILE`, or use `pg_dump`",),
        )

    def copy_if_due(self) -> Path | None:
        """Return None: the server has its own backups."""
        return None

    def _run(self, sql: str, parameters: Sequence[Any]) -> psycopg.Cursor[PostgresRow]:
        """Run one statement; outside a transaction, repeat it once on a new connection if the old one was lost."""
        query = translate_parameters(sql)
        values = {str(number): _convert(value) for number, value in enumerate(parameters, 1)}
        for is_last in (bool(self._depth), True):
            connection = self._connect() if not self._depth else self._expect_connection()
            try:
                return connection.execute(query, values)
            except psycopg.Error as error:
                if is_last or not connection.closed:
                    self._fail(error)
        raise AssertionError("unreachable")

    def _connect(self) -> psycopg.Connection[PostgresRow]:
        if self._connection is None or self._connection.closed:
            try:
                self._connection = psycopg.connect(
                    self.url,
                    autocommit=True,
                    connect_timeout=CONNECT_S,
                    application_name="broker",
                    keepalives_idle=10,
                    keepalives_interval=3,
                    keepalives_count=3,
                    tcp_user_timeout=10_000,
                    row_factory=_make_rows,
                    cursor_factory=psycopg.ClientCursor,
                )
                self._connection.execute(pg_sql.SQL(SESSION))
            except psycopg.Error as error:
                self._fail(error)
        return self._connection

    def _expect_connection(self) -> psycopg.Connection[PostgresRow]:
        assert self._connection is not None, "a transaction has a connection"
        return self._connection

    def _fail(self, error: psycopg.Error) -> NoReturn:
        raise explain_postgres_error(self.url, error) from error

    def _migrate(self) -> None:
        if self._read_schema() == len(MIGRATIONS):
            return
        with self._begin(f"{BEGIN}; {LOCK}"):
            version = self._read_schema()  # again: another process may just have migrated
            if version > len(MIGRATIONS):
                raise StateError(
                    f"{self} was written by a newer broker (schema {version}; this one supports {len(MIGRATIONS)})",
                    hints=("upgrade broker",),
                )
            if version == len(MIGRATIONS):
                return
            for statement in list_statements(version):
                self.execute(statement)
            if not version:
                lineage = secrets.token_hex(8)
                self.execute("INSERT INTO meta (key, value) VALUES ('lineage', ?)", (lineage,))
            self.execute(
                "INSERT INTO meta (key, value) VALUES ('schema', ?) ON CONFLICT (key) DO UPDATE SET "
                "value = excluded.value",
                (str(len(MIGRATIONS)),),
            )

    def _read_schema(self) -> int:
        # `to_regclass` uses a cache of this session, which may not contain what another session has just created.
        if not self.rows("SELECT 1 FROM pg_tables WHERE schemaname = current_schema() AND tablename = 'meta'"):
            return 0
        return int(self.rows("SELECT value FROM meta WHERE key = 'schema'")[0][0])

    def _identify(self) -> None:
        """Compare the database with the guard of this folder and with the owner; write what is missing."""
        guard = read_guard(self.path)
        known = {str(row["key"]): str(row["value"]) for row in self.rows("SELECT key, value FROM meta")}
        lineage, owner = known["lineage"], known.get("installation", "")
        if guard is not None and guard.lineage and guard.lineage != lineage:
            raise StateError(
                f"{self} is not the database that this folder has used: it is new, or a different one",
                details=(f"expected lineage {guard.lineage}, found {lineage}",),
                hints=(f"correct `state` in `config.toml`, or rename {self.path.with_name('server.guard')}",),
            )
        if self._owner is not None and owner not in ("", self._owner):
            raise StateError(
                f"{self} belongs to installation {owner}, but the file `owner` contains {self._owner}",
                details=("All machines that share a database have the same ID.",),
                hints=("write the ID in the database to `owner` with `broker state restore --owner`",),
            )
        if self._owner and not owner:
            self.write(
                "INSERT INTO meta (key, value) VALUES ('installation', ?) ON CONFLICT (key) DO NOTHING", (self._owner,)
            )
        wanted = Guard(
            lineage=lineage,
            owner=owner or self._owner or "",
            created_s=(guard.created_s if guard else 0.0) or self.clock.now_s(),
            schema=len(MIGRATIONS),
        )
        if guard != wanted and self.path.parent.is_dir():
            write_guard(self.path, wanted)


def _set_sync(*, is_durable: bool) -> str:
    return f"SET LOCAL synchronous_commit = {'on' if is_durable else 'off'}"


def _make_rows(cursor: psycopg.Cursor[Any]) -> Callable[[Sequence[Any]], PostgresRow]:
    names = {column.name: index for index, column in enumerate(cursor.description or ())}

    def make(values: Sequence[Any]) -> PostgresRow:
        row = PostgresRow(values)
        row.names = names
        return row

    return make


@lru_cache(maxsize=512)
def translate_parameters(sql: str) -> str:
    """Rename `?` and `?1` to `%(1)s`. Our statements have no question marks or percent signs in literals."""
    count = 0

    def rename(match: re.Match[str]) -> str:
        nonlocal count
        if match[0] == "%":
            return "%%"
        count += not match[1]
        return f"%({match[1] or count})s"

    return _PARAMETER.sub(rename, sql)


def _convert(value: Any) -> Any:
    """Convert JSON bytes to text; PostgreSQL's text cannot contain NUL."""
    if isinstance(value, bytes):
        value = value.decode()
    return value.replace("\0", "\ufffd") if isinstance(value, str) else value
