"""Copy a job's log from its gang's head to one file, across attempts, without gaps or duplicates.

The file is truncated to the last committed length before each append, so a crash in between duplicates nothing.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

from broker.agent.agent_bucket import find_rest
from broker.errors import CloudError
from broker.jobs.gang import Gang
from broker.state.faults import explain_os_error
from broker.state.jobs import LogOffset
from broker.state.store import Store
from broker.types import Attempt, Cluster

log = logging.getLogger(__name__)

DAEMON_LOG_BYTES_MAX = 10 << 20  # the previous file is kept
CHUNKS_MAX = 256  # per call; the rest follows in the next
ENDED_CHUNKS_MAX = 4096  # of a run that has ended, whose nodes are terminated next: at least 1 GiB
LAST_LINES = 20
LINE_CHARS_MAX = 400
TAIL_BYTES_MAX = 1 << 20  # maximum read from a log to find one rank's last lines
RANK_MARK = re.compile(r"\(rank(\d+)\) ")


def get_log_path(logs: Path, job_id: int) -> Path:
    """Return the path of a job's log, which collects the output of all its attempts."""
    return logs / "jobs" / f"{job_id}.log"


async def copy_log(
    store: Store, gang: Gang, logs: Path, *, attempt: Attempt, cluster: Cluster, run_id: int, is_ended: bool = False
) -> None:
    """Copy new log output. An unreachable head is not an error: the rest is copied when it responds again.

    `is_ended`: the run has ended, and no later call may copy the rest. A daemon that was not running for a night may
    have missed more than it copies in one call, and the last lines are the most important ones.
    """
    offset = _find_offset(store, attempt)
    for _ in range(ENDED_CHUNKS_MAX if is_ended else CHUNKS_MAX):
        try:
            chunk, next_bytes = await gang.read_log(cluster, run_id, offset=offset.source_bytes)
        except CloudError:
            return
        if not chunk:
            return
        path = get_log_path(logs, attempt.job_id)
        try:
            file_bytes = _append(path, chunk, at_bytes=offset.file_bytes)
        except OSError as error:  # the job continues; the rest of the log is copied once the disk has space
            log.warning("%s", explain_os_error(error, default=path).message)
            return
        offset = LogOffset(attempt=attempt.number, source_bytes=next_bytes, file_bytes=file_bytes)
        store.jobs.set_log_offset(attempt.job_id, offset)


def copy_left_log(store: Store, logs: Path, *, attempt: Attempt, content: bytes) -> None:
    """Copy the rest of a log that the head uploaded to the bucket before its node ended."""
    offset = _find_offset(store, attempt)
    chunk, next_bytes = find_rest(content, offset.source_bytes)
    if chunk:
        file_bytes = _append(get_log_path(logs, attempt.job_id), chunk, at_bytes=offset.file_bytes)
        offset = LogOffset(attempt=attempt.number, source_bytes=next_bytes, file_bytes=file_bytes)
        store.jobs.set_log_offset(attempt.job_id, offset)


def read_last_lines(store: Store, logs: Path, *, attempt: Attempt, rank: int | None) -> list[str]:
    """Return the last copied lines of `rank` in this attempt, or of all ranks if it is None or has not printed any.

    An unreadable log counts as empty.
    """
    offset = store.jobs.get_log_offset(attempt.job_id)
    if offset.attempt != attempt.number:
        return []
    begin = max(0, offset.file_bytes - offset.source_bytes, offset.file_bytes - TAIL_BYTES_MAX)
    try:
        with get_log_path(logs, attempt.job_id).open("rb") as file:
            file.seek(begin)
            lines = file.read(offset.file_bytes - begin).decode("utf-8", "replace").splitlines()
    except OSError:
        return []
    own = [line for line in lines if rank is not None and _read_rank(line) == rank]
    return [line[:LINE_CHARS_MAX] for line in (own or lines)[-LAST_LINES:]]


def _read_rank(line: str) -> int:
    """Return the rank that printed the line; lines of the first rank have no mark (`agent/agent_gang.py`)."""
    mark = RANK_MARK.match(line)
    return int(mark[1]) if mark else 0


def _find_offset(store: Store, attempt: Attempt) -> LogOffset:
    offset = store.jobs.get_log_offset(attempt.job_id)
    if offset.attempt != attempt.number:
        return LogOffset(attempt=attempt.number, source_bytes=0, file_bytes=offset.file_bytes)
    return offset


def rotate_log(path: Path) -> None:
    """Copy a large log to `.1` and truncate it in place, because its writer keeps it open for appending."""
    if path.exists() and path.stat().st_size > DAEMON_LOG_BYTES_MAX:
        shutil.copyfile(path, path.with_name(f"{path.name}.1"))
        os.truncate(path, 0)


def forget_logs(store: Store, logs: Path, *, older_than_s: float) -> None:
    """Delete the logs of jobs that ended before `older_than_s`; their events are pruned at the same age."""
    live = set(store.jobs.list_unfinished_ids())
    for path in (logs / "jobs").glob("*.log"):
        with suppress(FileNotFoundError):  # a user may delete one concurrently
            number = path.name.partition(".")[0]  # of `3.log` and `3.callback.log`
            if number.isdigit() and int(number) not in live and path.stat().st_mtime < older_than_s:
                path.unlink()


def _append(path: Path, chunk: bytes, *, at_bytes: int) -> int:
    if not at_bytes:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.truncate(at_bytes)
        file.seek(at_bytes)
        file.write(chunk)
    return at_bytes + len(chunk)
