"""Schedules on both backends: kept with their secrets, moved between stores, migrated from schema 17."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from broker.clock import SystemClock
from broker.errors import StateError, UsageError
from broker.state.postgres import PostgresDatabase
from broker.state.postgres_store import PostgresStore
from broker.state.restoring import drop_row
from broker.state.schema import MIGRATIONS
from broker.state.store import Store
from broker.state.transfer import check_store, export_store, import_store
from broker.types import DueOutcome, DueTime, JobSchedule, JobStatus, Overlap, Payee, ScheduleSpec, Secret, Task
from tests.state.conftest import OpenStore
from tests.state.postgres_server import Server
from tests.state.samples import START_S, Hands

HERE = Path(__file__).parent
BEFORE = 17
SPEC = ScheduleSpec(cron="0 2 * * *", timezone="Europe/Paris", overlap=Overlap.QUEUE, until="2030-01-01")
TASK = Task(name="nightly", run="true", secrets={"TOKEN": Secret(value="hunter2")})


def add(store: Store, name: str = "nightly", *, request_id: str | None = None) -> JobSchedule:
    payee = Payee(user="ada", project="vision")
    return store.schedules.add(
        name, TASK, SPEC, next_s=START_S + 60.0, request_id=request_id, hedge=3, payee=payee
    )  # fmt: skip


def test_schedule_is_kept_with_its_task_and_secrets(store: Store, open_store: OpenStore) -> None:
    made = add(store)
    found = open_store().schedules.get("nightly")
    assert found == made and found is not None
    assert (found.spec, found.next_s, found.is_paused, found.hedge) == (SPEC, START_S + 60.0, False, 3)
    assert (found.user, found.project) == ("ada", "vision")
    assert open_store().schedules.get_task(made) == TASK
    assert store.schedules.list() == [made]


def test_no_secret_of_a_schedule_is_stored_in_clear(sqlite_store: Store) -> None:
    add(sqlite_store)
    for path in sqlite_store.path.parent.rglob("*"):
        assert not path.is_file() or b"hunter2" not in path.read_bytes(), path


def test_same_request_stores_one_schedule_and_a_taken_name_is_refused(store: Store) -> None:
    made = add(store, request_id="r1")
    assert add(store, "another", request_id="r1") == made
    with pytest.raises(UsageError, match="`nightly` already exists"):
        add(store)
    assert [each.name for each in store.schedules.list()] == ["nightly"]


def test_due_schedules_are_those_that_are_not_paused(store: Store) -> None:
    made = add(store)
    assert store.schedules.list_due(START_S) == [] and store.schedules.has_active()
    assert store.schedules.list_due(START_S + 60.0) == ["nightly"]
    store.schedules.pause(made)
    assert store.schedules.list_due(START_S + 60.0) == [] and not store.schedules.has_active()
    store.schedules.resume(made, START_S + 120.0)
    assert store.schedules.list_due(START_S + 120.0) == ["nightly"]
    store.schedules.set_next(made, None)
    assert store.schedules.list_due(1e10) == [] and not store.schedules.has_active()
    store.schedules.record(made, DueTime(due_s=START_S, outcome=DueOutcome.WAITING))
    assert store.schedules.list_due(START_S) == ["nightly"] and store.schedules.has_active()


def test_the_schedule_that_is_due_first_comes_first(store: Store) -> None:
    late, early = add(store, "a"), add(store, "b")
    store.schedules.set_next(late, START_S + 50.0)
    store.schedules.set_next(early, START_S + 40.0)
    assert store.schedules.list_due(START_S + 60.0) == ["b", "a"]
    for number in (2, 0, 1):
        store.schedules.record(late, DueTime(due_s=START_S + number, outcome=DueOutcome.SKIPPED))
    assert [each.due_s for each in store.schedules.list_due_times(late)] == [START_S, START_S + 1, START_S + 2]
    assert [each.due_s for each in store.schedules.list_due_times(late, newest=2)] == [START_S + 1, START_S + 2]


def test_due_time_is_recorded_once_unless_it_waited(store: Store) -> None:
    made = add(store)
    waiting = DueTime(due_s=START_S, outcome=DueOutcome.WAITING)
    started = DueTime(due_s=START_S, outcome=DueOutcome.STARTED, job_id=store.jobs.add("nightly", Task()).id)
    store.schedules.record(made, waiting)
    assert store.schedules.find_waiting(made) == waiting and not store.schedules.has_live_job(made)
    store.schedules.record(made, started)
    assert store.schedules.list_due_times(made) == [started] and store.schedules.find_waiting(made) is None
    assert store.schedules.has_live_job(made)
    with pytest.raises(StateError):
        store.schedules.record(made, started)
    missed = DueTime(due_s=START_S + 60, outcome=DueOutcome.MISSED, count=3, last_s=START_S + 180, detail="away")
    store.schedules.record(made, missed)
    assert store.schedules.list_due_times(made, newest=1) == [missed]
    assert started.job_id is not None
    store.jobs.set_status(started.job_id, JobStatus.FAILED)
    assert not store.schedules.has_live_job(made)


def test_removed_schedule_leaves_its_jobs(store: Store) -> None:
    made = add(store)
    job = store.jobs.add("nightly", Task())
    store.schedules.record(made, DueTime(due_s=START_S, outcome=DueOutcome.STARTED, job_id=job.id))
    store.schedules.remove(made)
    store.schedules.remove(made)
    assert store.schedules.get("nightly") is None and store.jobs.get(job.id) is not None
    assert check_store(store) == []
    again = add(store)
    assert again.uid != made.uid and store.schedules.list_due_times(again) == []


def test_old_due_times_are_pruned_but_the_newest_stays(store: Store, clock: Hands) -> None:
    made = add(store)
    for number in range(3):
        store.schedules.record(made, DueTime(due_s=START_S + number, outcome=DueOutcome.SKIPPED))
    clock.time_s += 100 * 86400
    store.retention.compact()
    assert [each.due_s for each in store.schedules.list_due_times(made)] == [START_S + 2]


@pytest.mark.parametrize("way", ["sqlite to postgres", "postgres to sqlite"])
def test_schedules_move_between_backends(
    open_sqlite: OpenStore, open_postgres: OpenStore, tmp_path: Path, way: str
) -> None:
    source, target = (open_sqlite(), open_postgres()) if way.startswith("sqlite") else (open_postgres(), open_sqlite())
    made = add(source)
    due = DueTime(due_s=START_S, outcome=DueOutcome.REFUSED, detail="over the budget")
    source.schedules.record(made, due)
    file = tmp_path / "state.jsonl"
    export_store(source, file)
    assert "hunter2" not in file.read_text()
    import_store(target, file)
    assert target.schedules.list() == [made] and target.schedules.get_task(made) == TASK
    assert target.schedules.list_due_times(made) == [due]
    assert check_store(target) == []


def test_check_names_a_damaged_schedule_which_can_be_dropped(store: Store) -> None:
    made = add(store)
    store.write("UPDATE schedules SET spec = '{'")
    assert any("`schedules`" in each for each in check_store(store))
    assert drop_row(store, "schedules", "nightly")
    assert check_store(store) == []
    again = add(store)
    store.write("UPDATE schedules SET secrets = 'AAAA'")
    assert any("`schedules`" in each for each in check_store(store))
    store.schedules.record(again, DueTime(due_s=START_S, outcome=DueOutcome.SKIPPED))
    store.write("DELETE FROM schedules")
    assert any(f"due times of schedule {again.uid}" in each for each in check_store(store))
    assert made.uid != again.uid


def test_secrets_under_another_key_are_refused_when_they_are_written(store: Store) -> None:
    add(store)
    (store.path.parent / "secret.key").unlink()
    with pytest.raises(StateError, match="encrypted with another key"):
        add(store, "other")


def test_state_file_of_schema_17_is_migrated(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript((HERE / "schema_17.sql").read_text())
        assert connection.execute("PRAGMA user_version").fetchone() == (BEFORE,)
    store = Store(path, clock=SystemClock())
    assert [(job.name, job.status, job.task.schedule) for job in store.jobs.list()] == [
        ("nightly", JobStatus.RUNNING, None), ("ended", JobStatus.SUCCEEDED, None),
    ]  # fmt: skip
    assert store.schedules.list() == [] and not store.schedules.has_active()
    assert store.schedules.get_task(add(store)) == TASK
    store.close()


def test_database_of_schema_17_is_migrated(
    postgres: Server, tmp_path: Path, clock: Hands, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = postgres.make_url()
    with monkeypatch.context() as patch:
        for name in ("broker.state.postgres.MIGRATIONS", "broker.state.postgres_schema.MIGRATIONS"):
            patch.setattr(name, MIGRATIONS[:BEFORE])
        PostgresDatabase(url, home=tmp_path, clock=clock).close()
    store = PostgresStore(url, home=tmp_path, clock=clock)
    assert store.schedules.get_task(add(store)) == TASK
    store.close()
