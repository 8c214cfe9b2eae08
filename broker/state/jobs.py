"""Rows of managed jobs, their attempts, progress and log offsets. A terminal job never changes again."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial

import msgspec

from broker.errors import DamagedRowError
from broker.frozen import frozen
from broker.state.base import Database, Row, keep_readable, read_row, read_s, read_text
from broker.state.history import StepRange
from broker.state.secret_files import SecretStore
from broker.task.codec import decode_task, encode_task
from broker.types import Attempt, Job, JobStatus, Outcome, OutcomeKind, Progress, Task

OnDamage = Callable[[DamagedRowError], None] | None


@frozen
class JobLine:
    """The fields of a job that are shown in lists; cheap to read for ten thousand jobs."""

    id: int
    name: str
    status: JobStatus
    step: int | None
    total: int | None
    starts: int  # attempts whose program was started
    submitted_s: float
    ended_s: float | None
    pipeline: str = ""
    loss: float | None = None


@frozen
class LogOffset:
    """The copied part of a job's log: `source_bytes` of the attempt's log, and `file_bytes` of our file."""

    attempt: int = 0
    source_bytes: int = 0
    file_bytes: int = 0


# Columns are named, so that SQLite itself reports a column that is missing from a damaged schema.
COLUMNS = (
    "id, name, status, task, secret_names, submitted_s, ended_s, failure, cancel_requested, progress, needs, pipeline, "
    "resumes, first_attempt, hedge, uid, outcome_kind, displaced_by"
)
# The jobs that need a controller: those that are live, and ended ones with a cluster or an attempt to close.
UNFINISHED = (
    "SELECT id FROM jobs WHERE NOT is_terminal",
    "SELECT job_id FROM clusters WHERE job_id IS NOT NULL",
    "SELECT job_id FROM attempts WHERE json_extract(body, '$.ended_s') IS NULL",
)
REPLICA_REQUEST = "service/"  # begins the request IDs of replicas: service/NAME/UID of the service/NUMBER
ATTEMPT_COLUMNS = "job_id, number, body, outcome_kind, outcome_detail, outcome_step, exit_code"


class JobRows:
    """The managed jobs, their attempts, reported steps and log offsets."""

    def __init__(self, database: Database, secrets: SecretStore) -> None:
        self._database = database
        self._secrets = secrets

    def add(
        self,
        name: str,
        task: Task,
        request_id: str | None = None,
        *,
        needs: Sequence[int] = (),
        pipeline: str = "",
        resumes: Job | None = None,
        hedge: int = 2,
    ) -> Job:
        """Add a job; if `request_id` was used before, return its job without adding one."""
        with self._database.transaction():
            known = (
                self._database.row("SELECT id FROM jobs WHERE request_id = ?", (request_id,)) if request_id else None
            )
            if known:
                return self._must_get(known["id"])
            uid = resumes.uid if resumes else self._database.draw_uid()
            cursor = self._database.execute(
                "INSERT INTO jobs (name, status, request_id, task, secret_names, submitted_s, needs, pipeline, "
                "resumes, first_attempt, hedge, uid) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) RETURNING id",
                (
                    name,
                    JobStatus.PENDING.value,
                    request_id,
                    encode_task(task),
                    msgspec.json.encode(sorted(task.secrets)),
                    self._database.clock.now_s(),
                    json.dumps(list(needs)),
                    pipeline,
                    (resumes.resumes or resumes.id) if resumes else None,
                    resumes.next_attempt if resumes else 1,
                    hedge,
                    uid,
                ),
            )
            job_id = int(cursor.fetchone()["id"])
            if task.secrets:
                self._secrets.write(job_id, uid, {name: secret.value for name, secret in task.secrets.items()})
            return self._must_get(job_id)

    def write_secrets(self, job_id: int, uid: str, values: Mapping[str, str]) -> None:
        """Write the secrets of an imported job."""
        self._secrets.write(job_id, uid, values)

    def has_secrets(self, job: Job) -> bool:
        """Return whether the values of a job's secrets are known. A restored copy may be older than its end."""
        return not job.task.secrets or self._secrets.has(job.id, job.uid)

    def list_request_ids(self, prefix: str) -> Sequence[int]:
        """Return the IDs of the jobs whose request ID begins with `prefix`."""
        rows = self._database.rows("SELECT id FROM jobs WHERE substr(request_id, 1, ?) = ?", (len(prefix), prefix))
        return [int(row["id"]) for row in rows]

    def find_request(self, request_id: str | None) -> Job | None:
        """Return the job that was submitted with this request ID; None if there is none."""
        row = self._database.row("SELECT id FROM jobs WHERE request_id = ?", (request_id,)) if request_id else None
        return self.get(row["id"]) if row else None

    def get(self, job_id: int) -> Job | None:
        """Return a job with its attempts; None if the ID is unknown. Raises DamagedRowError."""
        row = self._database.row(f"SELECT {COLUMNS} FROM jobs WHERE id = ?", (job_id,))
        return self._read_job(row, self.list_attempts(job_id)) if row else None

    def list(self, *, on_damage: OnDamage = None) -> Sequence[Job]:
        """Return all jobs, oldest first; damaged ones are reported to `on_damage` and omitted, or raised if None."""
        attempts: dict[int, list[Row]] = {}
        for row in self._database.rows(f"SELECT {ATTEMPT_COLUMNS} FROM attempts ORDER BY job_id, number"):
            attempts.setdefault(row["job_id"], []).append(row)

        def read(row: Row) -> Job:
            return self._read_job(row, [read_attempt(each) for each in attempts.get(row["id"], ())])

        rows = self._database.rows(f"SELECT {COLUMNS} FROM jobs ORDER BY id")
        return keep_readable([partial(read, row) for row in rows], on_damage)

    def list_pipeline(self, pipeline: str) -> Sequence[Job]:
        """Return the jobs of a pipeline or job group, oldest first. Raises DamagedRowError."""
        rows = self._database.rows(f"SELECT {COLUMNS} FROM jobs WHERE pipeline = ? ORDER BY id", (pipeline,))
        return [self._read_job(row, self.list_attempts(row["id"])) for row in rows]

    def list_lines(
        self, newest: int | None = None, *, limit: int | None = None, on_damage: OnDamage = None
    ) -> Sequence[JobLine]:
        """Return the `newest` jobs and every live one, newest first; all jobs if `newest` is None.

        With `limit`, return at most that many rows: live jobs come first, and the oldest ended ones are omitted.
        """
        wanted, order = "?1 IS NULL OR NOT is_terminal OR id > (SELECT max(id) FROM jobs) - ?1", "id DESC"
        if limit is not None:  # do not compute the columns of omitted rows
            order = "is_terminal, id DESC"
            wanted = f"id IN (SELECT id FROM jobs WHERE {wanted} ORDER BY {order} LIMIT ?2)"
        rows = self._database.rows(
            "SELECT id, name, status, pipeline, "
            "CASE WHEN json_valid(progress) THEN json_extract(progress, '$.step') END AS step, "
            "CASE WHEN json_valid(progress) THEN json_extract(progress, '$.total') END AS total, submitted_s, ended_s, "
            "CASE WHEN json_valid(progress) THEN json_extract(progress, '$.loss') END AS loss, "
            "(SELECT count(*) FROM attempts WHERE job_id = jobs.id AND "
            "CASE WHEN json_valid(body) THEN json_extract(body, '$.running_s') END IS NOT NULL) AS starts FROM jobs "
            f"WHERE {wanted} ORDER BY {order}",
            (newest,) if limit is None else (newest, limit),
        )
        return keep_readable([partial(_read_line, row) for row in rows], on_damage)

    def list_goals(self, job_ids: Sequence[int], *, field: str = "budget_usd") -> Mapping[int, float]:
        """Return a field of the goal, such as the budget or `deadline_hours`, of each of these jobs that has it."""
        if not job_ids:
            return {}
        goal = f"CASE WHEN json_valid(task) THEN json_extract(task, '$.goal.{field}') END"
        rows = self._database.rows(
            f"SELECT id, CAST({goal} AS DOUBLE PRECISION) AS goal FROM jobs "
            f"WHERE id IN ({', '.join('?' * len(job_ids))})",
            tuple(job_ids),
        )
        return {row["id"]: float(row["goal"]) for row in rows if row["goal"] is not None}

    def count(self) -> int:
        """Return the number of jobs, including ended ones."""
        return int(self._database.rows("SELECT count(*) FROM jobs")[0][0])

    def count_by_status(self) -> Mapping[str, int]:
        """Count all recorded jobs by status, named as in `JobStatus`; unreadable statuses are omitted."""
        rows = self._database.rows("SELECT status, count(*) AS jobs FROM jobs GROUP BY status ORDER BY status")
        return {row["status"]: int(row["jobs"]) for row in rows if row["status"] in JobStatus.__members__}

    def list_live_ids(self) -> Sequence[int]:
        """Return the IDs of jobs that have not ended, in ascending order."""
        return [row["id"] for row in self._database.rows("SELECT id FROM jobs WHERE NOT is_terminal ORDER BY id")]

    def has_unfinished(self) -> bool:
        """Return whether `list_unfinished_ids` would list any job."""
        return any(self._database.rows(f"{query} LIMIT 1") for query in UNFINISHED)

    def list_unfinished_ids(self) -> Sequence[int]:
        """Return the live jobs, and the ended ones that still have a cluster or an attempt to close."""
        return [row["id"] for row in self._database.rows(f"{' UNION '.join(UNFINISHED)} ORDER BY 1")]

    def set_status(
        self, job_id: int, status: JobStatus, failure: str = "", *, outcome_kind: OutcomeKind | None = None
    ) -> bool:
        """Set the status; return False, and change nothing, if the job has already ended."""
        ended_s = self._database.clock.now_s() if status.is_terminal else None
        with self._database.transaction():
            cursor = self._database.execute(
                "UPDATE jobs SET status = ?, failure = ?, ended_s = ?, is_terminal = ?, outcome_kind = ? "
                "WHERE id = ? AND NOT is_terminal",
                (status.value, failure, ended_s, status.is_terminal, outcome_kind and outcome_kind.value, job_id),
            )
        is_written = cursor.rowcount == 1
        if is_written and status.is_terminal:
            row = self._database.row("SELECT uid FROM jobs WHERE id = ?", (job_id,))
            self._secrets.forget(job_id, str(row["uid"]) if row else "")
        return is_written

    def request_cancel(self, job_id: int) -> bool:
        """Request the cancellation of a job; return False if it has already ended."""
        cursor = self._database.write(
            "UPDATE jobs SET cancel_requested = TRUE WHERE id = ? AND NOT is_terminal", (job_id,)
        )
        return cursor.rowcount == 1

    def is_cancel_requested(self, job_id: int) -> bool:
        """Return whether a cancellation was requested; False for an unknown job."""
        row = self._database.row("SELECT cancel_requested FROM jobs WHERE id = ?", (job_id,))
        return bool(row and row["cancel_requested"])

    def list_cancel_requested_ids(self) -> Sequence[int]:
        """Return the live jobs that the user has cancelled."""
        return [
            row["id"] for row in self._database.rows("SELECT id FROM jobs WHERE NOT is_terminal AND cancel_requested")
        ]

    def set_progress(self, job_id: int, progress: Progress) -> None:
        """Record the progress, for the job and for its newest attempt, so that lost steps can be counted later."""
        with self._database.transaction(is_durable=False):
            self._database.execute("UPDATE jobs SET progress = ? WHERE id = ?", (msgspec.json.encode(progress), job_id))
            self._database.execute(
                "INSERT INTO attempt_steps (job_id, number, first_step, last_step, checkpoint_step) "
                "SELECT ?1, max(number), ?2, ?2, ?3 FROM attempts WHERE job_id = ?1 HAVING max(number) IS NOT NULL "
                "ON CONFLICT (job_id, number) DO UPDATE SET "
                "last_step = CASE WHEN excluded.last_step > attempt_steps.last_step THEN excluded.last_step "
                "ELSE attempt_steps.last_step END, "
                "checkpoint_step = coalesce(excluded.checkpoint_step, attempt_steps.checkpoint_step)",
                (job_id, progress.step, progress.checkpoint_step),
            )

    def list_steps(self, job_id: int) -> Mapping[int, StepRange]:
        """Return the range of steps that each attempt has reported, by attempt number."""
        rows = self._database.rows(
            "SELECT number, first_step, last_step, checkpoint_step FROM attempt_steps WHERE job_id = ? ORDER BY number",
            (job_id,),
        )
        return {number: StepRange(*steps) for number, *steps in rows}

    def put_attempt(self, attempt: Attempt) -> None:
        """Insert or replace the record of an attempt."""
        outcome = attempt.outcome
        self._database.write(
            f"INSERT INTO attempts ({ATTEMPT_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?) "
            "ON CONFLICT (job_id, number) DO UPDATE SET body = excluded.body, outcome_kind = excluded.outcome_kind, "
            "outcome_detail = excluded.outcome_detail, outcome_step = excluded.outcome_step, "
            "exit_code = excluded.exit_code",
            (
                attempt.job_id,
                attempt.number,
                msgspec.json.encode(replace(attempt, outcome=None)).decode(),
                outcome and outcome.kind.value,
                outcome.detail if outcome else "",
                outcome and outcome.step,
                outcome and outcome.exit_code,
            ),
        )

    def list_attempts(self, job_id: int) -> Sequence[Attempt]:
        """Return the attempts of a job in the order of their numbers. Raises DamagedRowError."""
        rows = self._database.rows(
            f"SELECT {ATTEMPT_COLUMNS} FROM attempts WHERE job_id = ? ORDER BY number", (job_id,)
        )
        return [read_attempt(row) for row in rows]

    def get_log_offset(self, job_id: int) -> LogOffset:
        """Return the copied part of the job's log; zero before the first copy."""
        row = self._database.row(
            "SELECT attempt, source_bytes, file_bytes FROM log_offsets WHERE job_id = ?", (job_id,)
        )
        return LogOffset(**dict(row)) if row else LogOffset()

    def set_log_offset(self, job_id: int, offset: LogOffset) -> None:
        """Record the copied part of an attempt's log, so that nothing is repeated or lost."""
        self._database.write(
            "INSERT INTO log_offsets (job_id, attempt, source_bytes, file_bytes) VALUES (?, ?, ?, ?) "
            "ON CONFLICT (job_id) DO UPDATE SET attempt = excluded.attempt, source_bytes = excluded.source_bytes, "
            "file_bytes = excluded.file_bytes",
            (job_id, offset.attempt, offset.source_bytes, offset.file_bytes),
            is_durable=False,
        )

    def _must_get(self, job_id: int) -> Job:
        """Return a job whose row this transaction wrote or read. Raises DamagedRowError if an index lacks it."""
        job = self.get(job_id)
        if job is None:
            raise DamagedRowError("jobs", str(job_id), "it exists, but cannot be found by its ID")
        return job

    def _read_job(self, row: Row, attempts: Sequence[Attempt]) -> Job:
        return read_row("jobs", row["id"], lambda: self._decode_job(row, attempts))

    def _decode_job(self, row: Row, attempts: Sequence[Attempt]) -> Job:
        names = msgspec.json.decode(row["secret_names"], type=list[str])
        progress = row["progress"]
        return Job(
            id=row["id"],
            name=read_text(row["name"]),
            status=JobStatus(row["status"]),
            task=decode_task(row["task"], self._secrets.read(row["id"], row["uid"], names))
            if names
            else _decode_plain(row["task"]),
            submitted_s=read_s(row["submitted_s"]),
            ended_s=None if row["ended_s"] is None else read_s(row["ended_s"]),
            attempts=tuple(attempts),
            progress=msgspec.json.decode(progress, type=Progress) if progress is not None else None,
            failure=read_text(row["failure"]),
            cancel_requested=bool(row["cancel_requested"]),
            needs=tuple(msgspec.json.decode(row["needs"], type=list[int])),
            pipeline=read_text(row["pipeline"]),
            resumes=None if row["resumes"] is None else int(row["resumes"]),
            first_attempt=int(row["first_attempt"]),
            hedge=int(row["hedge"]),
            uid=read_text(row["uid"]),
            outcome_kind=None if row["outcome_kind"] is None else OutcomeKind(row["outcome_kind"]),
            displaced_by=_read_count(row["displaced_by"]),
        )


def read_attempt(row: Row) -> Attempt:
    """Read a row of `ATTEMPT_COLUMNS`. Raises DamagedRowError."""
    key = f"{row['job_id']}/{row['number']}"

    def read() -> Attempt:
        attempt = msgspec.json.decode(row["body"], type=Attempt)
        _ = attempt.placement.usd_hour  # raises if the field is missing because its name is damaged
        if row["outcome_kind"] is None:
            return attempt
        outcome = Outcome(
            kind=OutcomeKind(row["outcome_kind"]),
            detail=read_text(row["outcome_detail"]),
            step=_read_count(row["outcome_step"]),
            exit_code=_read_count(row["exit_code"]),
        )
        return replace(attempt, outcome=outcome)

    return read_row("attempts", key, read)


def _read_count(value: object) -> int | None:
    if value is not None and not isinstance(value, int):
        raise TypeError(f"number expected, found {type(value).__name__}")
    return value


def _read_line(row: Row) -> JobLine:
    return read_row("jobs", row["id"], partial(_decode_line, row))


def _decode_line(row: Row) -> JobLine:
    job_id, name, status, pipeline, step, total, submitted_s, ended_s, loss, starts = row
    return JobLine(
        id=job_id,
        name=read_text(name),
        status=JobStatus(status),
        step=None if step is None else int(step),
        total=None if total is None else int(total),
        starts=int(starts),
        submitted_s=read_s(submitted_s),
        ended_s=None if ended_s is None else read_s(ended_s),
        pipeline=read_text(pipeline),
        loss=None if loss is None else float(loss),
    )


@lru_cache(maxsize=1024)
def _decode_plain(text: str) -> Task:
    """Decode a task without secrets. Cached: a controller reads its job at each step, and a sweep shares one text."""
    return decode_task(text, {})
