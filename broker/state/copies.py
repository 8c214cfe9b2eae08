"""Copies of the state file: dated files in `backups/` next to it, of which the newest `COPIES_MAX` are kept."""

from __future__ import annotations

import os
import re
import sqlite3
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from broker.frozen import frozen

COPIES_MAX = 7
COPY_EVERY_S = 86400.0
_NAME = re.compile(r"state-(\d{8}T\d{6})Z\.db")
_FORMAT = "%Y%m%dT%H%M%S"


@frozen
class Copy:
    """One copy of the database file."""

    path: Path
    time_s: float
    size_bytes: int


def get_folder(database: Path) -> Path:
    """Return the folder of the copies, next to the database."""
    return database.parent / "backups"


def list_copies(database: Path) -> Sequence[Copy]:
    """Return the copies, newest first. Files with other names belong to the user and are ignored. Raises OSError."""
    from calendar import timegm

    folder = get_folder(database)
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        match = _NAME.fullmatch(path.name)
        if match and path.is_file():
            try:
                time_s = float(timegm(time.strptime(match[1], _FORMAT)))
            except ValueError:
                continue  # matches the pattern but is not a date
            found.append(Copy(path=path, time_s=time_s, size_bytes=path.stat().st_size))
    return sorted(found, key=lambda copy: copy.time_s, reverse=True)


def write_copy(database: Path, *, now_s: float) -> Path:
    """Write a consistent copy, while other processes read and write, to a temporary file, which is then renamed.

    Raises sqlite3.Error, OSError.
    """
    folder = get_folder(database)
    folder.mkdir(mode=0o700, exist_ok=True)
    aside = folder / f".new-{os.urandom(8).hex()}"
    # Created here first with mode 0600: SQLite would apply the umask.
    os.close(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    try:
        with closing(sqlite3.connect(database, isolation_level=None)) as connection:
            connection.execute("VACUUM INTO ?", (str(aside),))
        sync_file(aside)
        target = folder / f"state-{time.strftime(_FORMAT, time.gmtime(now_s))}Z.db"
        aside.replace(target)
    finally:
        aside.unlink(missing_ok=True)
    # Those in the future, from before the wall clock was set back, go first: they must not displace the new one.
    for old in sorted(list_copies(database), key=lambda copy: copy.time_s > now_s)[COPIES_MAX:]:
        old.path.unlink(missing_ok=True)
    return target


def is_copy_due(database: Path, *, now_s: float) -> bool:
    """Return whether no copy was made in the last day; one in the future is from before the wall clock was set back."""
    return not any(0.0 <= now_s - copy.time_s < COPY_EVERY_S for copy in list_copies(database))


def sync_file(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
