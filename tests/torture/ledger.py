"""Checks of a running broker's store, read from outside without its code: each reading must hold against the last."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.torture.history import History

LIVE = ("PENDING", "STARTING", "RUNNING", "RECOVERING", "CANCELLING")


@dataclass(frozen=True, kw_only=True)
class JobRow:
    """One job as recorded in the file."""

    id: int
    name: str
    status: str
    failure: str
    request_id: str | None
    resumes: int | None
    attempts: tuple[dict[str, Any], ...]
    progress: str
    uid: str = ""

    @property
    def folder(self) -> str:
        """Return the name of the folder of its checkpoints."""
        number = self.resumes or self.id
        return f"job-{number}-{self.uid}" if self.uid else f"job-{number}"

    @property
    def is_live(self) -> bool:
        return self.status in LIVE


@dataclass(frozen=True, kw_only=True)
class View:
    """One reading of the whole file."""

    jobs: dict[int, JobRow]
    clusters: dict[str, int | None]  # the job of each
    open_intents: int
    open_bills: int
    epoch: int
    event_count: int

    @property
    def stamp(self) -> str:
        """Return a value that changes whenever anything has moved."""
        jobs = [(job.id, job.status, job.attempts, job.progress) for job in self.jobs.values()]
        return repr((jobs, self.clusters, self.open_intents, self.open_bills, self.event_count))

    def list_named(self, name: str) -> list[JobRow]:
        return [job for job in self.jobs.values() if job.name == name]


def read_store(path: Path) -> View | None:
    """Read the store; return None while there is none, or it cannot be read just now."""
    try:
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=30)) as connection:
            connection.row_factory = sqlite3.Row
            connection.execute("BEGIN")
            return _read(connection)
    except sqlite3.Error:
        return None


def _read(connection: sqlite3.Connection) -> View:
    def count(sql: str) -> int:
        return int(connection.execute(f"SELECT count(*) FROM {sql}").fetchone()[0])

    attempts: dict[int, list[dict[str, Any]]] = {}
    sql = "SELECT job_id, number, body, outcome_kind FROM attempts ORDER BY job_id, number"
    for row in connection.execute(sql):
        kind = row["outcome_kind"]
        attempts.setdefault(row["job_id"], []).append(
            {**json.loads(row["body"]), "number": row["number"], "outcome": kind}
        )
    jobs = {
        row["id"]: JobRow(
            id=row["id"],
            name=row["name"],
            status=row["status"],
            failure=row["failure"],
            request_id=row["request_id"],
            resumes=row["resumes"],
            attempts=tuple(attempts.get(row["id"], ())),
            progress=str(row["progress"]),
            uid=row["uid"],
        )
        for row in connection.execute("SELECT * FROM jobs ORDER BY id")
    }
    return View(
        jobs=jobs,
        clusters={row["name"]: row["job_id"] for row in connection.execute("SELECT name, job_id FROM clusters")},
        open_intents=count("intents WHERE outcome IS NULL"),
        open_bills=count("nodes WHERE ended_s IS NULL"),
        epoch=int(connection.execute("SELECT epoch FROM leader").fetchone()[0]),
        event_count=count("events"),
    )


class Monitor:
    """A comparison of each reading with the one before."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._last: View | None = None

    def look(self, view: View) -> None:
        last, self._last = self._last, view
        for job in view.jobs.values():
            self._check_attempts(job)
        if last is None:
            return
        if view.epoch < last.epoch:
            self._violate(f"the epoch went back from {last.epoch} to {view.epoch}")
        for old in last.jobs.values():
            self._compare(old, view.jobs.get(old.id))

    def _check_attempts(self, job: JobRow) -> None:
        numbers = [attempt["number"] for attempt in job.attempts]
        if numbers and numbers != list(range(numbers[0], numbers[0] + len(numbers))):
            self._violate(f"job {job.id} ({job.name}): its attempts are {numbers}")
        unfinished = [attempt["number"] for attempt in job.attempts if attempt.get("ended_s") is None]
        if len(unfinished) > 1:
            self._violate(f"job {job.id} ({job.name}): attempts {unfinished} live at once")
        succeeded = [attempt["number"] for attempt in job.attempts if attempt.get("outcome") == "succeeded"]
        if succeeded and succeeded != numbers[-1:]:
            self._violate(f"job {job.id} ({job.name}): attempt {succeeded[0]} succeeded, and {numbers[-1]} was started")

    def _compare(self, old: JobRow, new: JobRow | None) -> None:
        if new is None:
            self._violate(f"job {old.id} ({old.name}) is gone from the store")
            return
        if not old.is_live and new.status != old.status:
            self._violate(f"job {old.id} ({old.name}) was {old.status} and is {new.status}")
        if not old.is_live and len(new.attempts) > len(old.attempts):
            self._violate(f"job {old.id} ({old.name}) got an attempt after it was {old.status}")
        for before, after in zip(old.attempts, new.attempts, strict=False):
            if before.get("outcome") and before["outcome"] != after.get("outcome"):
                self._violate(
                    f"job {old.id} ({old.name}): the outcome of attempt {before['number']} changed",
                    before=before,
                    after=after,
                )

    def _violate(self, claim: str, **evidence: Any) -> None:
        self._history.violate(claim, **evidence)
