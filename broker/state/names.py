"""Names for shell completion, read without the store, whose imports would take longer than a key press."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

JOBS_MAX = 100  # the newest
GROUPED_JOBS_MAX = 1000  # the newest, whose groups are named
WAIT_S = 0.1  # wait for a writer; after that, nothing is suggested
_SAFE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")  # a shell may evaluate a suggestion


def list_cluster_names(database: Path) -> Sequence[str]:
    """Return the names of all clusters; empty if the file cannot be read. The file is never created."""
    return [row[0] for row in _read(database, "SELECT name FROM clusters ORDER BY name") if _SAFE.fullmatch(row[0])]


def list_schedule_names(database: Path) -> Sequence[str]:
    """Return the names of all schedules, as `list_cluster_names` does."""
    return [row[0] for row in _read(database, "SELECT name FROM schedules ORDER BY name") if _SAFE.fullmatch(row[0])]


def list_job_names(database: Path, *, is_live: bool | None = None) -> Sequence[str]:
    """Return the newest jobs' names, then their IDs; `is_live` limits them to live (True) or ended (False) jobs."""
    rows = _read(
        database,
        f"SELECT id, name FROM jobs WHERE ?1 IS NULL OR is_terminal != ?1 ORDER BY id DESC LIMIT {JOBS_MAX}",
        None if is_live is None else int(is_live),
    )
    names = dict.fromkeys(name for _, name in rows if _SAFE.fullmatch(name))
    return [*names, *(str(number) for number, _ in rows)]


def list_group_names(database: Path, *, is_live: bool | None = None) -> Sequence[str]:
    """Return the names of the newest pipelines and job groups.

    `is_live` limits them to those with a live job (True), or to ended job groups (False), because a pipeline's jobs are
    retried individually.
    """
    rows = _read(
        database,
        "SELECT pipeline FROM jobs WHERE pipeline != '' AND id > (SELECT max(id) FROM jobs) - ?1 GROUP BY pipeline "
        "HAVING ?2 IS NULL OR (?2 AND NOT min(is_terminal)) OR (NOT ?2 AND min(is_terminal) AND "
        "max(CASE WHEN json_valid(task) THEN json_extract(task, '$.group') IS NOT NULL END)) ORDER BY max(id) DESC",
        GROUPED_JOBS_MAX,
        None if is_live is None else int(is_live),
    )
    return [name for (name,) in rows if _SAFE.fullmatch(name)]


def _read(database: Path, query: str, *values: object) -> list[tuple[Any, ...]]:
    try:
        with closing(
            sqlite3.connect(f"{database.absolute().as_uri()}?mode=ro", uri=True, timeout=WAIT_S)
        ) as connection:
            return connection.execute(query, values).fetchall()
    except sqlite3.Error:
        return []  # the state folder is missing, damaged or from another version: suggest nothing
