"""Forecasts kept with jobs: one each, through a migration, an export, and the end of a job's records."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from broker.clock import SystemClock
from broker.state.schema import MIGRATIONS
from broker.state.store import Store
from broker.state.transfer import export_store, import_store
from broker.types import EventKind, JobStatus, Task, make_event
from broker.types.forecasts import ForecastRecord
from tests.state.samples import Hands

FORECAST = ForecastRecord(
    usd=(1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0), hours=(1.5,) * 7, usd_mean=4.0, hours_mean=1.5, deadline_hours=2.0
)
BEFORE = 14  # the last schema without forecasts


def test_the_first_forecast_of_a_job_stays_and_is_exported(tmp_path: Path) -> None:
    store = Store(tmp_path / "a/state.db", clock=SystemClock())
    job = store.jobs.add("train", Task())
    store.forecasts.add(job.id, FORECAST)
    store.forecasts.add(job.id, ForecastRecord(usd=(9.0,) * 7, hours=(9.0,) * 7, usd_mean=9.0, hours_mean=9.0))
    assert store.forecasts.list() == {job.id: FORECAST}
    export_store(store, tmp_path / "out.jsonl")
    other = Store(tmp_path / "b/state.db", clock=SystemClock())
    import_store(other, tmp_path / "out.jsonl")
    assert other.forecasts.list() == {job.id: FORECAST}
    store.close()
    other.close()


def test_a_state_file_without_forecasts_is_migrated(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    store = Store(path, clock=SystemClock())
    job = store.jobs.add("train", Task())
    store.close()
    with sqlite3.connect(path) as connection:
        for table in ("forecasts", "limits", "commitments", "schedules", "due_times"):
            connection.execute(f"DROP TABLE {table}")
        connection.execute("ALTER TABLE tokens DROP COLUMN project")
        for column in ("displaced_by", "displaced_s"):
            connection.execute(f"ALTER TABLE jobs DROP COLUMN {column}")
        connection.execute("ALTER TABLE refusals DROP COLUMN refused_s")
        connection.execute("ALTER TABLE services DROP COLUMN claim")
        for table in ("leader", "controllers"):
            connection.execute(f"ALTER TABLE {table} DROP COLUMN stats")
        for index in ("jobs_status", "jobs_live_first"):
            connection.execute(f"DROP INDEX {index}")
        connection.execute(f"PRAGMA user_version={BEFORE}")
    assert any("CREATE TABLE forecasts" in str(step) for step in MIGRATIONS[BEFORE])
    connection.close()
    again = Store(path, clock=SystemClock())
    again.forecasts.add(job.id, FORECAST)
    assert again.forecasts.list() == {job.id: FORECAST} and again.jobs.get(job.id) is not None
    again.close()


def test_a_damaged_forecast_hides_no_other(tmp_path: Path) -> None:
    store = Store(tmp_path / "state.db", clock=SystemClock())
    store.forecasts.add(1, FORECAST)
    for job_id, body in ((2, "{"), (3, "{}"), (4, '{"usd": [1], "hours": [1]}'), (5, "[]")):
        store.write("INSERT INTO forecasts (job_id, body) VALUES (?, ?)", (job_id, body))
    assert store.forecasts.list() == {1: FORECAST}
    store.close()


def test_time_for_which_other_jobs_kept_a_job_from_starting_is_counted(store: Store, clock: Hands) -> None:
    """A pipeline of two tasks: the second waits 300 s for a slot, and once more after it was displaced."""

    def record(kind: EventKind, after_s: float) -> None:
        clock.time_s += after_s
        store.events.add(make_event(kind), job_id=second.id)

    first = store.jobs.add("prepare", Task())
    second = store.jobs.add("train", Task(), needs=[first.id])
    alone = store.jobs.add("alone", Task())
    for job in (first, second, alone):
        store.forecasts.add(job.id, FORECAST)
    clock.time_s += 1000.0
    store.jobs.set_status(first.id, JobStatus.SUCCEEDED)
    assert store.forecasts.list_waits() == {second.id: 1000.0}
    record(EventKind.QUEUED, 2.0)
    record(EventKind.DISPLACING, 100.0)
    assert store.forecasts.list_waits() == {second.id: 1000.0}  # the wait for a slot has not ended
    record(EventKind.DECISION, 200.0)
    record(EventKind.WAITING, 50.0)  # for capacity
    record(EventKind.SLOT_RETURNED, 5000.0)
    record(EventKind.QUEUED, 2.0)
    record(EventKind.DECISION, 38.0)
    record(EventKind.ENDED, 900.0)
    assert store.forecasts.list_waits() == {second.id: 1000.0 + 300.0 + 40.0}


def test_waits_of_jobs_without_a_forecast_are_not_read(store: Store, clock: Hands) -> None:
    first = store.jobs.add("prepare", Task())
    second = store.jobs.add("train", Task(), needs=[first.id])
    clock.time_s += 1000.0
    store.jobs.set_status(first.id, JobStatus.SUCCEEDED)
    for kind in (EventKind.QUEUED, EventKind.DECISION):
        store.events.add(make_event(kind), job_id=second.id)
        clock.time_s += 10.0
    assert store.forecasts.list_waits() == {}
