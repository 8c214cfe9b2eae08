"""Rows of schedules, and of the outcomes of due times.

The secrets of a schedule are in its row, encrypted with the key in `secret.key`, because they are needed while it
exists.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import msgspec

from broker.errors import DamagedRowError, UsageError
from broker.state.base import Database, Row, keep_readable, read_row, read_s, read_text
from broker.state.jobs import OnDamage
from broker.state.secret_rows import SecretBox, check_key, load_key
from broker.task.codec import decode_task, encode_task
from broker.types import DueOutcome, DueTime, JobSchedule, Payee, ScheduleSpec, Task

COLUMNS = "name, uid, spec, hedge, person, project, created_s, next_s, is_paused"
DUE_COLUMNS = "schedule_uid, due_s, outcome, job_id, detail, count, last_s"
_LIVE_JOB = "SELECT 1 FROM due_times JOIN jobs ON jobs.id = due_times.job_id WHERE schedule_uid = ? AND NOT is_terminal"


class ScheduleRows:
    """The schedules and their due times."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(
        self,
        name: str,
        task: Task,
        spec: ScheduleSpec,
        *,
        next_s: float,
        request_id: str | None = None,
        hedge: int = 2,
        payee: Payee | None = None,
    ) -> JobSchedule:
        """Add a schedule; if `request_id` was used before, return its schedule without adding one.

        Raises UsageError if a schedule with this name exists.
        """
        payee = payee or Payee()
        with self._database.transaction():
            if (known := self.find_request(request_id)) is not None:
                return known
            if self.get(name) is not None:
                raise UsageError(
                    f"schedule `{name}` already exists",
                    hints=[
                        f"remove it first: `broker jobs schedules remove {name}`", "or choose another name: `--name`"
                    ],
                )  # fmt: skip
            uid = self._database.draw_uid()
            self._database.execute(
                "INSERT INTO schedules (name, uid, spec, task, secret_names, secrets, hedge, request_id, person, "
                "project, created_s, next_s, is_paused) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 0)",
                (
                    name, uid, msgspec.json.encode(spec).decode(), encode_task(task),
                    msgspec.json.encode(sorted(task.secrets)).decode(), self._seal(name, uid, task), hedge, request_id,
                    payee.user, payee.project, self._database.clock.now_s(), next_s,
                ),
            )  # fmt: skip
            return self._must_get(name)

    def _seal(self, name: str, uid: str, task: Task) -> str | None:
        if not task.secrets:
            return None
        box = self._load_box()
        check_key(self._database, box)
        return box.seal(name_secrets(name, uid), {key: secret.value for key, secret in task.secrets.items()})

    def find_request(self, request_id: str | None) -> JobSchedule | None:
        """Return the schedule that was stored with this request ID; None if there is none."""
        if not request_id:
            return None
        row = self._database.row(f"SELECT {COLUMNS} FROM schedules WHERE request_id = ?", (request_id,))
        return _read_schedule(row) if row else None

    def get(self, name: str) -> JobSchedule | None:
        """Return a schedule; None if the name is unknown. Raises DamagedRowError."""
        row = self._database.row(f"SELECT {COLUMNS} FROM schedules WHERE name = ?", (name,))
        return _read_schedule(row) if row else None

    def list(self, *, on_damage: OnDamage = None) -> Sequence[JobSchedule]:
        """List all schedules by name; damaged ones are reported to `on_damage` and omitted, or raised if it is None."""
        rows = self._database.rows(f"SELECT {COLUMNS} FROM schedules ORDER BY name")
        return keep_readable([partial(_read_schedule, row) for row in rows], on_damage)

    def list_due(self, now_s: float) -> Sequence[str]:
        """Return the names of the schedules that are not paused and have a due time up to `now_s` or a waiting one."""
        rows = self._database.rows(
            "SELECT name FROM schedules WHERE is_paused = 0 AND (next_s <= ? OR uid IN "
            "(SELECT schedule_uid FROM due_times WHERE outcome = ?)) ORDER BY next_s, name",
            (now_s, DueOutcome.WAITING.value),
        )
        return [str(row["name"]) for row in rows]

    def has_active(self) -> bool:
        """Return whether any schedule may start a job later."""
        return bool(
            self._database.rows(
                "SELECT 1 FROM schedules WHERE is_paused = 0 AND (next_s IS NOT NULL OR uid IN "
                "(SELECT schedule_uid FROM due_times WHERE outcome = ?)) LIMIT 1",
                (DueOutcome.WAITING.value,),
            )
        )

    def get_task(self, schedule: JobSchedule) -> Task:
        """Return the task of a schedule with its secrets. Raises DamagedRowError."""
        row = self._database.row(
            "SELECT task, secret_names, secrets FROM schedules WHERE uid = ? AND name = ?",
            (schedule.uid, schedule.name),
        )
        if row is None:
            raise DamagedRowError("schedules", schedule.name, "it was removed, or cannot be found by its name")
        return read_row("schedules", schedule.name, lambda: decode_task(row["task"], self._open(schedule, row)))

    def _open(self, schedule: JobSchedule, row: Row) -> Mapping[str, str]:
        names = msgspec.json.decode(row["secret_names"], type=list[str])
        if not names:
            return {}
        values = self._load_box().open(name_secrets(schedule.name, schedule.uid), read_text(row["secrets"]))
        return {name: values[name] for name in names}

    def set_next(self, schedule: JobSchedule, next_s: float | None) -> None:
        """Record the next due time; None ends the schedule."""
        self._database.write("UPDATE schedules SET next_s = ? WHERE uid = ?", (next_s, schedule.uid))

    def pause(self, schedule: JobSchedule) -> None:
        """Pause a schedule: it starts no jobs until `resume`."""
        self._database.write("UPDATE schedules SET is_paused = 1 WHERE uid = ?", (schedule.uid,))

    def resume(self, schedule: JobSchedule, next_s: float | None) -> None:
        """Resume a schedule, starting at the due time `next_s`."""
        self._database.write("UPDATE schedules SET is_paused = 0, next_s = ? WHERE uid = ?", (next_s, schedule.uid))

    def remove(self, schedule: JobSchedule) -> None:
        """Delete a schedule with its due times; its jobs are kept. No effect if already removed."""
        with self._database.transaction():
            self._database.execute("DELETE FROM due_times WHERE schedule_uid = ?", (schedule.uid,))
            self._database.execute("DELETE FROM schedules WHERE uid = ?", (schedule.uid,))

    def record(self, schedule: JobSchedule, due: DueTime) -> None:
        """Record the outcome of a due time, once: a second record fails, unless the due time was waiting."""
        with self._database.transaction():
            self._database.execute(
                "DELETE FROM due_times WHERE schedule_uid = ? AND due_s = ? AND outcome = ?",
                (schedule.uid, due.due_s, DueOutcome.WAITING.value),
            )
            self._database.execute(
                f"INSERT INTO due_times ({DUE_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?)",
                (schedule.uid, due.due_s, due.outcome.value, due.job_id, due.detail, due.count, due.last_s),
            )

    def has_outcome(self, schedule: JobSchedule, due_s: float) -> bool:
        """Return whether a due time is recorded and not waiting."""
        rows = self._database.rows(
            "SELECT 1 FROM due_times WHERE schedule_uid = ? AND due_s = ? AND outcome <> ?",
            (schedule.uid, due_s, DueOutcome.WAITING.value),
        )
        return bool(rows)

    def list_due_times(self, schedule: JobSchedule, *, newest: int | None = None) -> Sequence[DueTime]:
        """Return the `newest` due times with their outcomes, oldest first. Raises DamagedRowError."""
        rows = self._database.rows(
            f"SELECT {DUE_COLUMNS} FROM due_times WHERE schedule_uid = ? ORDER BY due_s DESC"
            f"{'' if newest is None else f' LIMIT {int(newest)}'}",
            (schedule.uid,),
        )
        return [_read_due(row) for row in rows[::-1]]

    def find_waiting(self, schedule: JobSchedule) -> DueTime | None:
        """Return the due time that waits for the end of the previous job; None if there is none."""
        row = self._database.row(
            f"SELECT {DUE_COLUMNS} FROM due_times WHERE schedule_uid = ? AND outcome = ?",
            (schedule.uid, DueOutcome.WAITING.value),
        )
        return _read_due(row) if row else None

    def has_live_job(self, schedule: JobSchedule) -> bool:
        """Return whether a job started by the schedule is live."""
        return bool(self._database.rows(f"{_LIVE_JOB} LIMIT 1", (schedule.uid,)))

    def list_orphans(self) -> Sequence[str]:
        """Describe due times without a schedule; empty for an intact store."""
        rows = self._database.rows(
            "SELECT DISTINCT schedule_uid FROM due_times WHERE schedule_uid NOT IN (SELECT uid FROM schedules)"
        )
        return [f"due times of schedule {row['schedule_uid']}, which is missing" for row in rows]

    def _must_get(self, name: str) -> JobSchedule:
        found = self.get(name)
        if found is None:
            raise DamagedRowError("schedules", name, "it exists, but cannot be found by its name")
        return found

    def _load_box(self) -> SecretBox:
        return SecretBox(load_key(self._database.path.parent))


def name_secrets(name: str, uid: str) -> str:
    """Return the name that is authenticated together with the secrets of a schedule."""
    return f"schedule-{name}-{uid}"


def _read_schedule(row: Row) -> JobSchedule:
    return read_row(
        "schedules",
        row["name"],
        lambda: JobSchedule(
            name=read_text(row["name"]), uid=read_text(row["uid"]),
            spec=msgspec.json.decode(row["spec"], type=ScheduleSpec),
            next_s=None if row["next_s"] is None else read_s(row["next_s"]), is_paused=bool(row["is_paused"]),
            created_s=read_s(row["created_s"]), hedge=int(row["hedge"]), user=read_text(row["person"]),
            project=read_text(row["project"]),
        ),
    )  # fmt: skip


def _read_due(row: Row) -> DueTime:
    return read_row(
        "due_times",
        f"{row['schedule_uid']}/{row['due_s']}",
        lambda: DueTime(
            due_s=read_s(row["due_s"]), outcome=DueOutcome(row["outcome"]),
            job_id=None if row["job_id"] is None else int(row["job_id"]), detail=read_text(row["detail"]),
            count=int(row["count"]), last_s=None if row["last_s"] is None else read_s(row["last_s"]),
        ),
    )  # fmt: skip
