"""Rows for the queue of managed jobs: live jobs, displacements, recent attempts. It has no table of its own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial

import msgspec

from broker.errors import DamagedRowError
from broker.frozen import frozen
from broker.state.base import Database, Row, keep_readable, read_row, read_s, read_text
from broker.state.jobs import ATTEMPT_COLUMNS, read_attempt
from broker.task.codec import decode_task
from broker.types import Attempt, JobStatus, Progress, Task


@frozen
class LiveJob:
    """A job that has not ended."""

    id: int
    status: JobStatus
    needs: tuple[int, ...]
    is_cancelled: bool
    submitted_s: float


@frozen
class RunningJob:
    """A live job that is not PENDING. `has_checkpoint`: its program has reported one."""

    id: int
    status: JobStatus
    has_checkpoint: bool
    is_cancelled: bool
    displaced_by: int | None
    displaced_s: float | None


@frozen
class LiveTask:
    """The task of a job that has not ended, without the values of its secrets."""

    id: int
    task: Task
    pipeline: str
    request_id: str | None


class QueueRows:
    """Views of the tables of jobs and attempts, and displacements. Damaged rows are omitted."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def list_live(self, *, has_started: bool = False) -> Sequence[LiveJob]:
        """Return the jobs that have not ended, in ascending order; with `has_started`, not those that are PENDING."""
        rows = self._database.rows(
            "SELECT id, status, needs, cancel_requested, submitted_s FROM jobs WHERE NOT is_terminal"
            f"{' AND status <> ?' if has_started else ''} ORDER BY id",
            (JobStatus.PENDING.value,) if has_started else (),
        )
        return keep_readable([partial(_read_live, row) for row in rows], _leave_out)

    def list_tasks(self, first_id: int) -> Sequence[LiveTask]:
        """Return the tasks of the live jobs, starting at this ID."""
        rows = self._database.rows(
            "SELECT id, task, pipeline, request_id FROM jobs WHERE NOT is_terminal AND id >= ? ORDER BY id", (first_id,)
        )
        return keep_readable([partial(_read_task, row) for row in rows], _leave_out)

    def list_running(self) -> Sequence[RunningJob]:
        """Return the live jobs that are not PENDING, with the facts that decide whether they can return their slot."""
        rows = self._database.rows(
            "SELECT id, status, progress, displaced_by, displaced_s, cancel_requested FROM jobs "
            "WHERE NOT is_terminal AND status <> ? ORDER BY id",
            (JobStatus.PENDING.value,),
        )
        return keep_readable([partial(_read_running, row) for row in rows], _leave_out)

    def displace(self, job_id: int, by: int) -> None:
        """Request that a job return its slot to a waiting job."""
        self._database.write(
            "UPDATE jobs SET displaced_by = ?, displaced_s = ? WHERE id = ? AND NOT is_terminal",
            (by, self._database.clock.now_s(), job_id),
        )

    def end_displacement(self, job_id: int) -> None:
        """Record that a job has returned its slot, or does not have to."""
        self._database.write("UPDATE jobs SET displaced_by = NULL WHERE id = ? AND NOT is_terminal", (job_id,))

    def list_recent_attempts(self, since_s: float) -> Sequence[Attempt]:
        """Return the attempts that may have had machines since `since_s`."""
        rows = self._database.rows(
            f"SELECT {ATTEMPT_COLUMNS} FROM attempts WHERE job_id IN "
            "(SELECT id FROM jobs WHERE NOT is_terminal OR ended_s > ?)",
            (since_s,),
        )
        return keep_readable([partial(read_attempt, row) for row in rows], _leave_out)


def _leave_out(error: DamagedRowError) -> None:
    pass  # reported by the commands that list jobs


def _read_task(row: Row) -> LiveTask:
    return read_row(
        "jobs",
        row["id"],
        lambda: LiveTask(
            id=row["id"],
            task=decode_task(row["task"], {}),
            pipeline=read_text(row["pipeline"]),
            request_id=row["request_id"],
        ),
    )


def _read_live(row: Row) -> LiveJob:
    return read_row(
        "jobs",
        row["id"],
        lambda: LiveJob(
            id=row["id"],
            status=JobStatus(row["status"]),
            needs=tuple(json.loads(row["needs"])),
            is_cancelled=bool(row["cancel_requested"]),
            submitted_s=read_s(row["submitted_s"]),
        ),
    )


def _read_running(row: Row) -> RunningJob:
    progress = row["progress"]
    return read_row(
        "jobs",
        row["id"],
        lambda: RunningJob(
            id=row["id"],
            status=JobStatus(row["status"]),
            has_checkpoint=bool(progress) and bool(msgspec.json.decode(progress, type=Progress).checkpoint_step),
            is_cancelled=bool(row["cancel_requested"]),
            displaced_by=row["displaced_by"],
            displaced_s=row["displaced_s"],
        ),
    )
