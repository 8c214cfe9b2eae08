"""Recover a state folder: examine it, restore a copy, or reset it to an empty state file.

These functions work even if the store cannot be opened. The caller holds the daemon's lock, so no job is driven in the
meantime.
"""

from __future__ import annotations

import math
import os
import secrets
import shutil
import sqlite3
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from broker.clock import Clock
from broker.errors import StateError, UsageError
from broker.formatting import format_minute
from broker.frozen import frozen
from broker.state.copies import Copy, get_folder, list_copies, sync_file
from broker.state.faults import FAULTS, explain_fault
from broker.state.guard import Guard, get_path, read_guard, write_guard
from broker.state.meta import ADOPTED, RESTORED, SALT, SEEN
from broker.state.schema import MIGRATIONS
from broker.state.store import Store
from broker.types import EventKind, make_event

BESIDE = ("", "-wal", "-shm")  # suffixes of the database and of the files that SQLite keeps next to it
# Attempts may have been started since the copy was made. The numbers that they may have used are skipped, because a
# checkpoint rejects an attempt whose number is not above all earlier ones. No job has this many attempts between
# copies.
ATTEMPTS_SKIPPED = 1000
PROBLEMS_MAX = 5

# tables with one row per key, and the columns of the key, with which `broker state drop` finds a row
DROPPABLE: Mapping[str, tuple[str, ...]] = {
    "jobs": ("id",),
    "attempts": ("job_id", "number"),
    "clusters": ("name",),
    "intents": ("token",),
    "nodes": ("cloud", "id"),
    "schedules": ("name",),
    "due_times": ("schedule_uid", "due_s"),
}
WITH_A_JOB = ("attempts", "attempt_steps", "log_offsets", "forecasts")


@frozen
class Condition:
    """The condition of a state file. A field is None if it cannot be read; `problems` is empty for an intact file."""

    path: Path
    size_bytes: int | None
    schema: int | None
    lineage: str | None
    installation: str | None
    problems: tuple[str, ...]
    copies: tuple[Copy, ...]


def examine(database: Path) -> Condition:
    """Examine a state file; never raises, but lists errors as problems."""
    try:
        copies = tuple(list_copies(database))
    except OSError as error:
        copies, problems = (), [f"the copies cannot be listed: {error.strerror}"]
    else:
        problems = []
    size_bytes = schema = None
    known: Mapping[str, str] = {}
    try:
        guard = read_guard(database)
        if not database.exists():
            problems.append("there is no state file" + (", but there was one" if guard else " yet"))
        else:
            size_bytes = database.stat().st_size
            schema, known = _read_identity(database)
            problems += check_integrity(database)
    except StateError as error:
        problems.append(error.message)
    except FAULTS as error:
        problems.append(explain_fault(database, error).message)
    return Condition(
        path=database,
        size_bytes=size_bytes,
        schema=schema,
        lineage=known.get("lineage"),
        installation=known.get("installation"),
        problems=tuple(problems),
        copies=copies,
    )


def check_integrity(database: Path) -> Sequence[str]:
    """Run SQLite's integrity check; return its findings, empty for an intact file.

    Raises sqlite3.Error for a file that is not a database.
    """
    with closing(_open_to_read(database)) as connection:
        found = [str(row[0]) for row in connection.execute(f"PRAGMA integrity_check({PROBLEMS_MAX})")]
    return [] if found == ["ok"] else found


def find_copy(database: Path, name: str | None, *, now_s: float = math.inf) -> Path:
    """Find a copy by its name in `backups/` or by its path; None means the newest. Raises StateError, UsageError.

    A copy that is dated after `now_s`, while the clock was wrong, is older than it says: others come first.
    """
    try:
        copies = list_copies(database)
    except OSError as error:
        raise explain_fault(database, error) from error
    if name is None:
        if not copies:
            raise StateError(
                f"there is no copy in {get_folder(database)}",
                hints=(
                    "`broker state restore FILE` restores a copy from another location",
                    "`broker state reset` starts with an empty one",
                ),
            )
        return min(copies, key=lambda copy: copy.time_s > now_s).path
    for path in (get_folder(database) / name, Path(name).expanduser()):
        if path.is_file():
            return path
    known = ", ".join(f"`{copy.path.name}`" for copy in copies) or "none"
    raise UsageError(f"unknown copy `{name}`", hints=(f"copies in {get_folder(database)}: {known}",))


def restore(database: Path, copy: Path, *, clock: Clock, owner: str | None) -> Path | None:
    """Replace the state file with `copy`; return the new path of the old file, or None if there was none.

    The copy is checked, prepared in a temporary folder, then renamed. After an interruption at any point, the next
    command either finds the old file, or reports that it is missing and how to repeat the restore. Raises StateError.
    """
    try:
        _check_copy(copy)
        guard = read_guard(database) or Guard(lineage="")
        guard = replace(guard, restores=guard.restores + 1)
        folder = database.parent / f".restoring-{secrets.token_hex(8)}"
        folder.mkdir(mode=0o700)
        try:
            ready = _make_ready(copy, folder / database.name, clock=clock, owner=owner, restores=guard.restores)
            write_guard(database, guard)  # the count first, so that no attempt number is ever used twice
            aside = _set_aside(database, clock.now_s())
            (folder / database.name).replace(database)
            write_guard(database, replace(ready, restores=guard.restores))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    except FAULTS as error:
        raise explain_fault(database, error) from error
    return aside


def reset(database: Path, *, clock: Clock, owner: str) -> Path | None:
    """Start with an empty state file; return the new path of the old one, or None if there was none.

    The owner stays the same, so that running machines are found by its tag and adopted. Raises StateError.
    """
    try:
        now_s = clock.now_s()
        before = read_guard(database) or Guard(lineage="")
        aside = _set_aside(database, now_s)
        get_path(database).unlink(missing_ok=True)
        logs = database.parent / "logs" / "jobs"
        if logs.is_dir():  # job IDs, and thus log names, start from 1 again
            logs.rename(_find_free(logs, now_s))
    except FAULTS as error:
        raise explain_fault(database, error) from error
    store = Store(database, clock=clock, owner=owner)
    store.meta.put(SALT, secrets.token_hex(8))
    store.close()
    if (guard := read_guard(database)) and before.restores:
        write_guard(database, replace(guard, restores=before.restores))
    return aside


def drop_row(store: Store, table: str, key: str) -> bool:
    """Delete one damaged row and, for a job, its attempts, steps and log offsets; return whether the row existed.

    Raises UsageError for an unknown table or an invalid key.
    """
    columns = DROPPABLE.get(table)
    if columns is None:
        raise UsageError(f"rows of `{table}` cannot be dropped", hints=(f"rows of {', '.join(DROPPABLE)} can",))
    values = key.split("/", len(columns) - 1)
    if len(values) != len(columns):
        raise UsageError(f"`{key}` is not a valid key of `{table}`", hints=(f"it is {'/'.join(columns).upper()}",))
    where = " AND ".join(f"{column} = ?" for column in columns)
    return store.meta.drop_row(table, where, values, with_job=WITH_A_JOB if table == "jobs" else ())


def _check_copy(copy: Path) -> None:
    try:
        problems = check_integrity(copy)
        schema, _ = _read_identity(copy)
    except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
        raise StateError(f"the copy {copy} is damaged: {error}", hints=("`broker state info` lists others",)) from error
    if problems or not 1 <= schema <= len(MIGRATIONS):
        why = problems[0] if problems else f"it has schema {schema}; this version supports 1 to {len(MIGRATIONS)}"
        raise StateError(f"the copy {copy} cannot be used: {why}", hints=("`broker state info` lists others",))


def _make_ready(copy: Path, target: Path, *, clock: Clock, owner: str | None, restores: int) -> Guard:
    """Copy `copy` to `target`, migrate it, and mark it for comparison with the clouds before anything starts.

    Unfinished starts are deleted: their machines, complete or not, are found by their tags.
    """
    os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    # By SQLite: the newest commits of a copy that was made with `cp` may only be in the WAL file next to it.
    with closing(_open_to_read(copy)) as source, closing(sqlite3.connect(target)) as out:
        source.backup(out)
    store = Store(target, clock=clock, owner=owner)
    with store.transaction():
        store.meta.forget_adoptions(prefixes=(ADOPTED, SEEN))
        store.meta.put(RESTORED, repr(clock.now_s()))
        store.meta.put(SALT, secrets.token_hex(8))
        store.meta.forget_half_done(attempts_skipped=ATTEMPTS_SKIPPED * restores)
        store.events.add(make_event(EventKind.RESTORED, copy=copy.name))
    store.close()
    _merge_log(target)
    sync_file(target)
    found = read_guard(target)
    assert found is not None, "a store writes its guard when it is opened"
    return found


def _set_aside(database: Path, now_s: float) -> Path | None:
    if database.is_file() and database.stat().st_size:  # SQLite would delete the WAL of an empty file
        _merge_log(database)
    aside = _find_free(database, now_s)
    has_any = False
    for suffix in reversed(BESIDE):  # the WAL before the database: without it, the database is only older
        source = database.with_name(database.name + suffix)
        if source.exists():
            source.rename(aside.with_name(aside.name + suffix))
            has_any = True
    return aside if has_any else None


def _merge_log(database: Path) -> None:
    """Disable the file's WAL mode, which merges the log into it, and fails while another process has the file open."""
    try:
        with closing(sqlite3.connect(database, timeout=2.0, isolation_level=None)) as connection:
            connection.execute("PRAGMA journal_mode=DELETE").fetchall()
    except sqlite3.OperationalError as error:
        if (getattr(error, "sqlite_errorcode", 0) & 0xFF) == sqlite3.SQLITE_BUSY:
            raise StateError(
                f"another broker command has {database} open", hints=("retry when it has finished",)
            ) from error
    except (sqlite3.DatabaseError, UnicodeDecodeError):
        pass  # damaged: move it aside unchanged, with its log


def _find_free(path: Path, now_s: float) -> Path:
    date = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now_s))
    names = (f"{path.name}.aside-{date}" + (f"-{n}" if n else "") for n in range(1000))
    return next(free for name in names if not (free := path.with_name(name)).exists())


def _open_to_read(database: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"{database.absolute().as_uri()}?mode=ro", uri=True)


def _read_identity(database: Path) -> tuple[int, Mapping[str, str]]:
    with closing(_open_to_read(database)) as connection:
        schema = int(connection.execute("PRAGMA user_version").fetchone()[0])
        has_meta = connection.execute("SELECT 1 FROM sqlite_schema WHERE name = 'meta'").fetchone()
        rows = connection.execute("SELECT key, value FROM meta").fetchall() if has_meta else []
    return schema, {str(key): str(value) for key, value in rows}


def describe_copy(copy: Copy) -> str:
    """Return name, date and size of a backup as one line."""
    return f"{copy.path.name}  {format_minute(copy.time_s)}  {copy.size_bytes / 1024:,.0f} KiB"
