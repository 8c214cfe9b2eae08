"""Convert rows from schema 10. Used only by that migration.

Recovery and autostop move from the alternatives of a task to the task, and each placement gets the index of the
alternative that it was planned for.

An unreadable row is not changed; the code that reads it later reports the damage.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from typing import Any

import msgspec

from broker.optimizer.filters import find_alternative
from broker.types import Placement, Task


def convert(connection: sqlite3.Connection) -> None:
    """Convert schema 10 in place: recovery moves to the task, and placements refer to their alternative."""
    tasks = _convert_tasks(connection)
    # Tasks of clusters without a job are not stored; only placements of jobs are requested again.
    for job_id, number, body in connection.execute("SELECT job_id, number, body FROM attempts").fetchall():
        if changed := _set_alternative(body, tasks.get(job_id)):
            connection.execute(
                "UPDATE attempts SET body = ? WHERE job_id = ? AND number = ?", (changed, job_id, number)
            )
    for name, job_id, body in connection.execute("SELECT name, job_id, body FROM clusters").fetchall():
        if changed := _set_alternative(body, tasks.get(job_id)):
            connection.execute("UPDATE clusters SET body = ? WHERE name = ?", (changed.encode(), name))
    opened = "SELECT token, job_id, intents.body FROM intents JOIN clusters ON cluster = name WHERE outcome IS NULL"
    for token, job_id, body in connection.execute(opened).fetchall():
        if changed := _set_alternative(body, tasks.get(job_id)):
            connection.execute("UPDATE intents SET body = ? WHERE token = ?", (changed.encode(), token))


def _convert_tasks(connection: sqlite3.Connection) -> Mapping[int, Task]:
    """Convert the tasks of all jobs to the new form; return them by job ID."""
    found = {}
    for job_id, text in connection.execute("SELECT id, task FROM jobs").fetchall():
        try:
            lifted = json.dumps(_lift(json.loads(text)), ensure_ascii=False)
            found[job_id] = msgspec.json.decode(lifted, type=Task)
        except (ValueError, TypeError, KeyError, AttributeError, IndexError):
            continue
        connection.execute("UPDATE jobs SET task = ? WHERE id = ?", (lifted, job_id))
    return found


def _lift(task: dict[str, Any]) -> dict[str, Any]:
    """Move recovery and autostop to the task.

    Recovery comes from the first alternative that sets any of it, autostop from the first alternative.
    """
    resources = task["resources"]
    recoveries = [each.pop("job_recovery", None) or {} for each in resources]
    autostops = [each.pop("autostop", None) for each in resources]
    asked = (each for each in recoveries if any(value not in (None, []) for value in each.values()))
    return {**task, "recovery": next(asked, {}), "autostop": autostops[0]}


def _set_alternative(body: str | bytes, task: Task | None) -> str | None:
    """Return the row with its placement's alternative set; None if nothing changes."""
    if task is None:
        return None
    try:
        row = json.loads(body)
        alternative = find_alternative(task, msgspec.convert(row["placement"], type=Placement))
        row["placement"]["alternative"] = alternative
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    return json.dumps(row, ensure_ascii=False) if alternative else None
