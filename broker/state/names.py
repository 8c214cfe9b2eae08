"""Names for shell completion, read without the store, whose imports would take longer than a key press."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

JOBS_MAX = 100  # the newest
WAIT_S = 0.1  # for a writer; after that, nothing is suggested
_SAFE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")  # a shell may evaluate a suggestion


def list_cluster_names(database: Path) -> Sequence[str]:
    """Return the names of all clusters; none if the file cannot be read. The file is never created."""
    return [row[0] for row in _read(database, "SELECT name FROM clusters ORDER BY name") if _SAFE.fullmatch(row[0])]


def list_job_names(database: Path, *, is_live: bool | None = None) -> Sequence[str]:
    """Return the newest jobs' names, then their ids; `is_live` limits them to live (True) or ended (False) jobs."""
    rows = _read(
        database,
        f"SELECT id, name FROM jobs WHERE ?1 IS NULL OR is_terminal != ?1 ORDER BY id DESC LIMIT {JOBS_MAX}",
        None if is_live is None else int(is_live),
    )
    names = dict.fromkeys(name for _, name in rows if _SAFE.fullmatch(name))
    return [*names, *(str(number) for number, _ in rows)]


def _read(database: Path, query: str, *values: object) -> list[tuple[Any, ...]]:
    try:
        with closing(
            sqlite3.connect(f"{database.absolute().as_uri()}?mode=ro", uri=True, timeout=WAIT_S)
        ) as connection:
            return connection.execute(query, values).fetchall()
    except sqlite3.Error:
        return []  # the state folder is missing, damaged or of another version: suggest nothing
