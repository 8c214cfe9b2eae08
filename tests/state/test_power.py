"""A power cut leaves a prefix of the commits in a real file, for any last byte of its log that reached the disk."""

from __future__ import annotations

import random
import shutil
import sqlite3
from pathlib import Path

import pytest

from broker.state.store import Store
from broker.types import EventKind, Progress, Task, make_event
from tests.simulation.virtual import VirtualClock
from tests.tiers import spread

HEADER_BYTES, FRAME_HEADER_BYTES = 32, 24  # of SQLite's log, and before each page in it
COMMITS = 6


class Recorder:
    """A store that records its content after each commit, as a fully synced disk would hold it."""

    def __init__(self, folder: Path) -> None:
        self.store = Store(folder / "live" / "state.db", clock=VirtualClock())
        self.job_id = self.store.jobs.add("train", Task(name="train", run="true")).id
        self.sizes = [self.measure_log()]  # bytes of the log after each commit
        self.states = [self.read(self.store.path)]

    def commit(self, step: int, *, is_durable: bool) -> None:
        with self.store.transaction(is_durable=is_durable):
            self.store.jobs.set_progress(self.job_id, Progress(step=step, total=99))
            self.store.events.add(make_event(EventKind.NOTE, text=f"{step}"), job_id=self.job_id)
        self.sizes.append(self.measure_log())
        self.states.append(self.read(self.store.path))

    def measure_log(self) -> int:
        return self.store.path.with_name("state.db-wal").stat().st_size

    def read(self, path: Path) -> tuple[object, ...]:
        connection = sqlite3.connect(path)
        try:
            assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
            rows = connection.execute("SELECT id, progress FROM jobs").fetchall()
            return (*rows, *connection.execute("SELECT id, data FROM events ORDER BY id").fetchall())
        finally:
            connection.close()

    def cut(self, target: Path, length: int, *, garbage: bytes = b"") -> tuple[object, ...]:
        """Return what another process reads if the log is cut to `length` bytes, followed by `garbage`."""
        target.mkdir()
        shutil.copy(self.store.path, target / "state.db")
        log = self.store.path.with_name("state.db-wal").read_bytes()
        (target / "state.db-wal").write_bytes(log[:length] + garbage)
        store = Store(target / "state.db", clock=VirtualClock())
        store.close()
        return self.read(target / "state.db")


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    recorder = Recorder(tmp_path)
    for number in range(COMMITS):
        recorder.commit(10 * number, is_durable=number % 3 == 0)
    assert len(set(recorder.states)) == COMMITS + 1
    return recorder


def list_cuts(recorder: Recorder) -> list[int]:
    """Return lengths around the edges of each frame, and random ones."""
    page_bytes = sqlite3.connect(recorder.store.path).execute("PRAGMA page_size").fetchone()[0]
    frame_bytes = FRAME_HEADER_BYTES + page_bytes
    edges = range(HEADER_BYTES, recorder.sizes[-1] + 1, frame_bytes)
    near = {edge + offset for edge in edges for offset in (-1, 0, 1, FRAME_HEADER_BYTES)}
    drawn = random.Random(13).sample(range(recorder.sizes[0], recorder.sizes[-1]), 25)
    return sorted(cut for cut in {*near, *drawn} if recorder.sizes[0] <= cut <= recorder.sizes[-1])


@pytest.mark.parametrize(
    "garbage", spread([b"", b"\0" * 5000, b"\xa5" * 5000], every=3), ids=["cut", "zeros", "garbage"]
)
def test_a_log_that_ends_at_any_byte_opens_to_a_prefix_of_the_commits(
    recorder: Recorder, tmp_path: Path, garbage: bytes
) -> None:
    for cut in list_cuts(recorder):
        kept = sum(size <= cut for size in recorder.sizes) - 1
        assert recorder.cut(tmp_path / f"cut-{cut}", cut, garbage=garbage) == recorder.states[kept], cut


def test_a_durable_commit_waits_for_the_disk_and_a_light_one_does_not(tmp_path: Path) -> None:
    """SQLite syncs the log at each commit with synchronous=FULL (2), but only at checkpoints with NORMAL (1)."""
    store = Store(tmp_path / "state.db", clock=VirtualClock())
    seen = []
    for is_durable in (True, False, False, True, False, True, True):
        with store.transaction(is_durable=is_durable):
            seen.append((is_durable, store.rows("PRAGMA synchronous")[0][0]))
    assert seen == [(is_durable, 2 if is_durable else 1) for is_durable, _ in seen]
    assert store.rows("PRAGMA journal_mode")[0][0] == "wal"


def test_a_synced_commit_survives_damage_behind_it(recorder: Recorder, tmp_path: Path) -> None:
    """The commit's frames and all frames before them were on the disk when it returned."""
    for number, size in enumerate(recorder.sizes):
        state = recorder.cut(tmp_path / f"kept-{number}", size, garbage=b"\xff" * 100)
        assert state == recorder.states[number]
