"""Displacements of jobs: migrated from schema 16 on both backends, requested once, and ended."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from broker.clock import SystemClock
from broker.state.postgres import PostgresDatabase
from broker.state.postgres_store import PostgresStore
from broker.state.queue import RunningJob
from broker.state.schema import MIGRATIONS
from broker.state.store import Store
from broker.types import JobStatus, Progress, Task
from tests.state.conftest import clock, open_postgres, open_sqlite, open_store, postgres, store
from tests.state.postgres_server import Server
from tests.state.samples import Hands

__all__ = ["clock", "open_postgres", "open_sqlite", "open_store", "postgres", "store"]
HERE = Path(__file__).parent
BEFORE = 16


def test_state_file_of_schema_16_is_migrated(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript((HERE / "schema_16.sql").read_text())
        assert connection.execute("PRAGMA user_version").fetchone() == (BEFORE,)
    store = Store(path, clock=SystemClock())
    assert [(job.name, job.task.priority, job.displaced_by) for job in store.jobs.list()] == [
        ("waiting", 100, None), ("running", -100, None), ("ended", 0, None),
    ]  # fmt: skip
    assert [(each.id, each.has_checkpoint) for each in store.queue.list_running()] == [(2, True)]
    store.queue.displace(2, 1)
    job = store.jobs.get(2)
    assert job is not None and job.displaced_by == 1
    store.close()


def test_database_of_schema_16_is_migrated(
    postgres: Server, tmp_path: Path, clock: Hands, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = postgres.make_url()
    with monkeypatch.context() as patch:
        for name in ("broker.state.postgres.MIGRATIONS", "broker.state.postgres_schema.MIGRATIONS"):
            patch.setattr(name, MIGRATIONS[:BEFORE])
        old = PostgresDatabase(url, home=tmp_path, clock=clock)
        old.write(
            "INSERT INTO jobs (name, status, task, secret_names, submitted_s) VALUES ('j', 'RUNNING', '{}', '[]', 1.0)"
        )
        old.close()
    store = PostgresStore(url, home=tmp_path, clock=clock)
    (job,) = store.queue.list_running()
    assert (job.displaced_by, job.displaced_s) == (None, None)
    store.close()


def test_displacement_is_requested_and_ended(store: Store, clock: Hands) -> None:
    job_id = store.jobs.add("j", Task()).id
    store.jobs.set_status(job_id, JobStatus.RUNNING)
    store.jobs.set_progress(job_id, Progress(step=3))
    running = RunningJob(
        id=job_id, status=JobStatus.RUNNING, has_checkpoint=False, is_cancelled=False, displaced_by=None,
        displaced_s=None,
    )  # fmt: skip
    assert store.queue.list_running() == [running]
    store.queue.displace(job_id, 7)
    (found,) = store.queue.list_running()
    assert (found.displaced_by, found.displaced_s) == (7, clock.now_s())
    store.queue.end_displacement(job_id)
    (found,) = store.queue.list_running()
    assert (found.displaced_by, found.displaced_s) == (None, clock.now_s()), "when it happened stays known"
    store.jobs.set_status(job_id, JobStatus.SUCCEEDED)
    store.queue.displace(job_id, 7)
    job = store.jobs.get(job_id)
    assert job is not None and job.displaced_by is None
