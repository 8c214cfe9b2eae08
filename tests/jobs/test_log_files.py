"""A job's log in one file over all attempts: no gaps and no repetition, even if processes die in between."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from broker.errors import TransientError
from broker.jobs import log_files as logs
from broker.jobs.log_files import copy_left_log, copy_log, forget_logs, get_log_path, read_last_lines, rotate_log
from broker.state.jobs import LogOffset
from broker.state.store import Store
from broker.types import Attempt, JobStatus, Placement, Task
from tests.simulation.world import make_offer
from tests.state.samples import START_S, Hands

PLACEMENT = Placement(offer=make_offer("east1a"), is_spot=True, node_count=1)


class Head:
    """A gang whose head returns three bytes per answer."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.failing_at = -1

    async def read_log(self, cluster: Any, run_id: int, *, offset: int) -> tuple[bytes, int]:
        assert run_id == 1
        if offset == self.failing_at:
            raise TransientError("no answer")
        chunk = self.content[offset : offset + 3]
        return chunk, offset + len(chunk)


class Stage:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = Store(folder / "state.db", clock=Hands())
        self.job_id = self.store.jobs.add("j", Task()).id

    def copy(self, head: Head, number: int = 1) -> None:
        cluster: Any = None
        asyncio.run(
            copy_log(self.store, head, self.folder, attempt=self.attempt(number), cluster=cluster, run_id=1)  # type: ignore[arg-type]
        )

    def copy_left(self, content: bytes, number: int = 1) -> None:
        copy_left_log(self.store, self.folder, attempt=self.attempt(number), content=content)

    def attempt(self, number: int) -> Attempt:
        return Attempt(job_id=self.job_id, number=number, cluster="c", placement=PLACEMENT, started_s=0.0)

    def read(self) -> bytes:
        return get_log_path(self.folder, self.job_id).read_bytes()


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


def test_a_log_is_copied_as_it_grows_and_the_next_attempt_follows_it(stage: Stage) -> None:
    head = Head(b"12345678")
    stage.copy(head)
    assert stage.read() == b"12345678"
    head.content += b"90"
    stage.copy(head)
    stage.copy(head)
    assert stage.read() == b"1234567890"
    stage.copy(Head(b"abcd"), number=2)
    assert stage.read() == b"1234567890abcd"
    assert stage.store.jobs.get_log_offset(stage.job_id) == LogOffset(attempt=2, source_bytes=4, file_bytes=14)


def test_log_is_readable_by_its_owner_only(stage: Stage) -> None:
    before = os.umask(0)
    try:
        stage.copy(Head(b"1"))
    finally:
        os.umask(before)
    path = get_log_path(stage.folder, stage.job_id)
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700


def test_the_log_of_a_silent_head_is_reread_from_the_same_offset(stage: Stage) -> None:
    head = Head(b"12345678")
    head.failing_at = 3
    stage.copy(head)
    assert stage.read() == b"123"
    head.failing_at = -1
    stage.copy(head)
    assert stage.read() == b"12345678"


def test_lines_not_committed_before_a_crash_are_written_once(stage: Stage) -> None:
    stage.copy(Head(b"123"))
    with get_log_path(stage.folder, stage.job_id).open("ab") as file:
        file.write(b"45 of a life that died")
    stage.copy(Head(b"12345"))
    assert stage.read() == b"12345"


def test_one_poll_copies_a_bounded_part_of_the_log(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "CHUNKS_MAX", 2)
    head = Head(b"1234567890")
    stage.copy(head)
    assert stage.read() == b"123456"
    stage.copy(head)
    assert stage.read() == b"1234567890"


def test_the_log_in_the_bucket_completes_the_copied_part(stage: Stage) -> None:
    stage.copy(Head(b"123"))
    stage.copy_left(b"12345")
    assert stage.read() == b"12345"
    stage.copy_left(b"12345")
    assert stage.read() == b"12345"
    stage.copy_left(b"ab", number=2)
    assert stage.read() == b"12345ab"
    assert stage.store.jobs.get_log_offset(stage.job_id) == LogOffset(attempt=2, source_bytes=2, file_bytes=7)


def test_a_daemons_log_is_rotated_past_its_limit_and_stays_the_same_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "DAEMON_LOG_BYTES_MAX", 5)
    path = tmp_path / "daemon.log"
    rotate_log(path)
    with path.open("ab", buffering=0) as writer:
        writer.write(b"12345")
        rotate_log(path)
        assert path.read_bytes() == b"12345"
        writer.write(b"6")
        rotate_log(path)
        writer.write(b"7")
    assert path.read_bytes() == b"7" and (tmp_path / "daemon.log.1").read_bytes() == b"123456"


def test_logs_of_jobs_that_ended_long_ago_are_forgotten(stage: Stage) -> None:
    ended = stage.store.jobs.add("k", Task()).id
    stage.store.jobs.set_status(ended, JobStatus.SUCCEEDED)
    for name in (f"{stage.job_id}.log", f"{ended}.log", "99.log", "words.log", "99.txt"):
        path = stage.folder / "jobs" / name
        path.parent.mkdir(exist_ok=True)
        path.touch()
        os.utime(path, (START_S, START_S))
    forget_logs(stage.store, stage.folder, older_than_s=START_S)
    assert len(list((stage.folder / "jobs").iterdir())) == 5, "none is older than that"
    forget_logs(stage.store, stage.folder, older_than_s=START_S + 1.0)
    left = sorted(path.name for path in (stage.folder / "jobs").iterdir())
    assert left == [f"{stage.job_id}.log", "99.txt", "words.log"]


def test_last_lines_are_those_of_the_rank_that_died_in_this_attempt(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    stage.copy(Head(b"of attempt 1\n"))
    own = [f"(rank1) step {number}" for number in range(30)]
    mixed = "\n".join(f"{line}\nstep of the head\n(rank10) other" for line in own) + "\n"
    for _ in range(3):  # a visit copies this many bytes only
        stage.copy(Head(mixed.encode()), 2)
    assert read_last_lines(stage.store, tmp_path, attempt=stage.attempt(2), rank=1) == own[-20:]
    assert read_last_lines(stage.store, tmp_path, attempt=stage.attempt(2), rank=0) == ["step of the head"] * 20
    whole = read_last_lines(stage.store, tmp_path, attempt=stage.attempt(2), rank=None)
    assert whole[-2:] == ["step of the head", "(rank10) other"]
    assert read_last_lines(stage.store, tmp_path, attempt=stage.attempt(1), rank=0) == [], "a later attempt follows"


def test_last_lines_of_a_short_attempt_leave_out_the_one_before(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    stage.copy(Head(b"of attempt 1\n"))
    stage.copy(Head(b"Killed\n"), 2)
    assert read_last_lines(stage.store, tmp_path, attempt=stage.attempt(2), rank=3) == ["Killed"]


@pytest.mark.parametrize("step", ["stat", "unlink"])
def test_a_log_deleted_concurrently_does_not_stop_the_cleanup(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    folder = stage.folder / "jobs"
    folder.mkdir()
    for number in range(91, 95):
        path = folder / f"{number}.log"
        path.touch()
        os.utime(path, (START_S, START_S))
    act, unlink = getattr(Path, step), Path.unlink

    def lose(path: Path, **options: Any) -> Any:
        if path.name == "92.log":
            unlink(path)
        return act(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, step, lose)
        forget_logs(stage.store, stage.folder, older_than_s=START_S + 1.0)
    assert list(folder.iterdir()) == []
