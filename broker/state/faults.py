"""Explain errors of a state folder, with hints, from the error codes of SQLite and the operating system."""

from __future__ import annotations

import errno
import sqlite3
from pathlib import Path

from broker.errors import StateError
from broker.state.guard import list_ways_back

DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_FORMAT)
UNWRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM)
UNOPENED = (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM)
FULL = (errno.ENOSPC, errno.EDQUOT)


# Errors caused by damage. UnicodeDecodeError: SQLite's own message may quote damaged text that cannot be decoded.
FAULTS = (sqlite3.Error, OSError, UnicodeDecodeError)


def is_unwritable(error: Exception) -> bool:
    """Return whether the error only affects writing, so that reading may still work."""
    if isinstance(error, OSError):
        return error.errno in UNWRITABLE
    return _get_code(error) in UNOPENED


def explain_fault(path: Path, error: Exception) -> StateError:
    """Make the error for a failed use of the state file at `path`.

    `error` is an sqlite3.Error, an OSError, or a UnicodeDecodeError, which sqlite3 raises if its own message quotes a
    damaged schema.
    """
    if isinstance(error, OSError):
        return explain_os_error(error, default=path)
    code = _get_code(error)
    if code in DAMAGED or isinstance(error, sqlite3.IntegrityError | UnicodeDecodeError):
        return StateError(f"the state file {path} is damaged: {error}", hints=list_ways_back(path))
    if path.is_dir():
        return StateError(f"{path} is a folder, where the state file is expected", hints=list_ways_back(path))
    hint = {
        sqlite3.SQLITE_FULL: "free some space on the disk, then repeat the command: nothing was partially written",
        sqlite3.SQLITE_READONLY: f"make {path.parent} and its files writable; until then, only read commands work",
        sqlite3.SQLITE_BUSY: "another broker process has been writing for a minute; retry when it has finished",
        sqlite3.SQLITE_IOERR: "the disk or file system reports an error: see the system log",
    }.get(code, "check that the folder is writable and the disk not full, or set `BROKER_HOME`")
    return StateError(f"the state file {path} cannot be used: {error}", hints=(hint,))


def explain_os_error(error: OSError, *, default: Path) -> StateError:
    """Make the error for a file of the state folder that cannot be read or written."""
    path = Path(str(error.filename)) if error.filename is not None else default
    what = error.strerror or str(error)
    if error.errno in FULL:
        hint = f"free some space on the disk of {path.parent}, then repeat the command"
    elif error.errno == errno.EROFS:
        hint = f"make {path.parent} writable; until then, only read commands work"
    elif error.errno in (errno.EACCES, errno.EPERM):
        hint = f"give yourself access: `chmod u+rwX {path}`, and the same for {path.parent}"
    elif error.errno in (errno.EISDIR, errno.ENOTDIR, errno.EEXIST):
        hint = f"another file has a name that broker uses: rename it with `mv {path} {path}.old`"
    else:
        hint = "check the folder and its disk, or set `BROKER_HOME` to another folder"
    return StateError(f"{path} cannot be used: {what}", hints=(hint,))


def _get_code(error: Exception) -> int:
    """Return the primary error code; extended codes carry details in the upper bits."""
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF
