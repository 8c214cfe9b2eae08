"""The guard: a small file next to the state file that records its existence, so that a lost state file is an error.

Without a guard, an empty folder and a lost file look the same, and the first job of the new file would continue from
the checkpoints of the first job of the old one.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from broker.errors import StateError
from broker.formatting import format_minute
from broker.frozen import frozen
from broker.state.copies import list_copies


@frozen
class Guard:
    """The content of a guard file.

    `lineage` is the random ID that a database gets at its creation; empty if the guard is unreadable.
    """

    lineage: str
    owner: str = ""
    created_s: float = 0.0
    schema: int = 0
    restores: int = 0  # number of times that a copy replaced the state file


def get_path(database: Path) -> Path:
    """Return the path of the guard, next to the database."""
    return database.with_name(f"{database.stem}.guard")


def read_guard(database: Path) -> Guard | None:
    """Read the guard; None if there is none. An unreadable guard still proves that there was a database.

    Raises StateError for a folder in its place, and OSError.
    """
    path = get_path(database)
    if path.is_dir():
        raise StateError(f"{path} is a folder, where a file is expected", hints=(f"rename it: `mv {path} {path}.old`",))
    try:
        data = json.loads(path.read_bytes())
        return Guard(
            lineage=str(data["lineage"]),
            owner=str(data["owner"]),
            created_s=float(data["created_s"]),
            schema=int(data["schema"]),
            restores=max(0, int(data["restores"])),
        )
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return Guard(lineage="")


def write_guard(database: Path, guard: Guard) -> None:
    """Write the guard atomically. Raises OSError."""
    path = get_path(database)
    data = {name: getattr(guard, name) for name in ("lineage", "owner", "created_s", "schema", "restores")}
    aside = path.with_name(f".{path.name}-{os.urandom(8).hex()}")
    try:
        with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump(data, file)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def check_not_lost(database: Path, guard: Guard | None) -> None:
    """Raise StateError if there is a guard but the database is missing or empty."""
    if guard is None:
        return
    is_there = database.exists()
    if is_there and (database.is_dir() or database.stat().st_size):
        return
    what = "is empty" if is_there else "is missing"
    since = f" since {format_minute(guard.created_s)}" if guard.created_s else ""
    raise StateError(
        f"the state file {database} {what}, but this folder has contained one{since}",
        details=("Jobs and clusters recorded in it may still be running.",),
        hints=list_ways_back(database),
    )


def check_lineage(database: Path, guard: Guard | None, lineage: str) -> None:
    """Raise StateError if another database has replaced the guarded one."""
    if guard is not None and guard.lineage and guard.lineage != lineage:
        raise StateError(
            f"{database} is not the original state file of this folder: another file has replaced it",
            details=(f"expected lineage {guard.lineage}, found {lineage or 'none'}",),
            hints=list_ways_back(database),
        )


def list_ways_back(database: Path) -> tuple[str, ...]:
    """Return hints for a lost or damaged state file."""
    try:
        copies = list_copies(database)
    except OSError:
        copies = ()
    if copies:
        restore = f"`broker state restore` restores the newest copy, of {format_minute(copies[0].time_s)}"
    else:
        restore = "`broker state restore FILE` restores your own copy; there is none in `backups/`"
    return restore, "`broker state reset` starts with an empty one; running machines are found by their tags"
