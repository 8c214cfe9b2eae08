"""The store keeps its rows, rejects forbidden changes, and is readable only by its owner."""

from __future__ import annotations

import errno
import os
import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest

from broker.clock import SystemClock
from broker.errors import StateError
from broker.state.store import Store
from broker.types import (
    Attempt,
    EventKind,
    IntentEnd,
    JobStatus,
    Node,
    NodeRequest,
    NodeState,
    Progress,
    Secret,
    Task,
    make_event,
)
from tests.state.samples import PLACEMENT


def test_secrets_of_a_job_are_known_until_it_ends(store: Store) -> None:
    job = store.jobs.add("train", Task(secrets={"TOKEN": Secret(value="t")}))
    assert store.jobs.has_secrets(job) and store.jobs.has_secrets(store.jobs.add("plain", Task()))
    store.jobs.set_status(job.id, JobStatus.SUCCEEDED)
    assert not store.jobs.has_secrets(job)


def test_a_terminal_job_never_changes(store: Store) -> None:
    job = store.jobs.add("train", Task())
    assert store.jobs.set_status(job.id, JobStatus.SUCCEEDED)
    assert not store.jobs.set_status(job.id, JobStatus.FAILED, "late")
    assert not store.jobs.request_cancel(job.id)
    found = store.jobs.get(job.id)
    assert found is not None and found.status is JobStatus.SUCCEEDED and not found.failure


def test_even_raw_sql_cannot_change_a_terminal_job_or_an_event(store: Store) -> None:
    job = store.jobs.add("train", Task())
    store.jobs.set_status(job.id, JobStatus.FAILED, "code 1")
    store.events.add(make_event(EventKind.NOTE, text="FAILED"), job_id=job.id)
    for sql in ("UPDATE jobs SET status = 'RUNNING'", "UPDATE events SET kind = 'x'", "DELETE FROM events"):
        with pytest.raises(StateError, match=r"never changes|append-only"):
            store.write(sql)


def test_the_same_request_id_is_one_job(store: Store) -> None:
    assert store.jobs.add("a", Task(), "r1").id == store.jobs.add("a", Task(), "r1").id
    assert len(store.jobs.list()) == 1


def test_files_are_for_their_owner_alone_and_secrets_leave_with_the_job(sqlite_store: Store) -> None:
    store = sqlite_store
    job = store.jobs.add("train", Task(secrets={"TOKEN": Secret(value="hunter2")}))
    secrets = store.path.parent / "secrets" / f"{job.stem}.json"
    assert job.task.secrets["TOKEN"].value == "hunter2"
    assert store.path.stat().st_mode & 0o777 == secrets.stat().st_mode & 0o777 == 0o600
    assert store.path.parent.stat().st_mode & 0o777 == 0o700
    assert not any(b"hunter2" in path.read_bytes() for path in store.path.parent.glob("state.db*"))
    store.jobs.set_status(job.id, JobStatus.SUCCEEDED)
    assert not secrets.exists()
    assert store.jobs.get(job.id) is not None


@pytest.mark.parametrize(("version", "way_out"), [(99, "upgrade broker"), (-1, "broker state restore")])
def test_a_schema_that_is_not_known_is_refused_with_a_hint(tmp_path: Path, version: int, way_out: str) -> None:
    path = tmp_path / "state.db"
    Store(path, clock=SystemClock()).close()
    with sqlite3.connect(path) as connection:
        connection.execute(f"PRAGMA user_version={version}")
    with pytest.raises(StateError, match=f"schema {version}") as caught:
        Store(path, clock=SystemClock())
    assert way_out in " ".join(caught.value.hints)


def test_an_older_schema_in_a_folder_that_cannot_be_written_is_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system's error is simulated, as root may write everywhere."""
    path, real = tmp_path / "state.db", os.open
    Store(path, clock=SystemClock()).close()
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version=15")

    def refuse(name: Any, flags: int, *given: Any, **named: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(name))
        return real(name, flags, *given, **named)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(StateError, match="has schema 15, and cannot be migrated to schema") as caught:
        Store(path, clock=SystemClock())
    assert caught.value.hints == ("make the folder writable",)


def test_a_file_that_is_not_a_database_is_a_state_error(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    path.write_text("not a database, whatever its name says" * 100)
    with pytest.raises(StateError):
        Store(path, clock=SystemClock())


def test_a_failed_transaction_leaves_nothing(store: Store) -> None:
    with pytest.raises(ValueError, match="second"), store.transaction():
        store.events.add(make_event(EventKind.NOTE, text="first"))
        raise ValueError("second")
    assert not store.events.list()


def test_an_intent_stays_open_until_closed_and_its_token_remains(store: Store) -> None:
    request = NodeRequest(owner="me", cluster="c", attempt=1, token="t", placement=PLACEMENT)
    store.intents.put(request)
    store.intents.put(request)
    assert [intent.request for intent in store.intents.list_open()] == [request]
    store.intents.close("t", IntentEnd.UP)
    assert not store.intents.list_open("c")
    assert store.intents.list_tokens("c") == {"t"}


def test_a_bill_once_ended_is_not_reopened_by_a_lagging_list(store: Store) -> None:
    def node(ended_s: float | None) -> Node:
        return Node(
            id="n",
            cloud="x",
            owner="me",
            cluster="c",
            attempt=1,
            rank=0,
            state=NodeState.RUNNING,
            usd_hour=2.0,
            created_s=0.0,
            ended_s=ended_s,
        )

    for ended_s in (None, 1800.0, None):
        store.bills.record(node(ended_s))
    assert store.bills.spend_usd(cluster="c", now_s=99_999.0) == pytest.approx(1.0)


def test_steps_are_remembered_for_each_attempt(store: Store) -> None:
    job = store.jobs.add("train", Task())
    for number, steps in ((1, (3, 9)), (2, (6, 12))):
        store.jobs.put_attempt(Attempt(job_id=job.id, number=number, cluster="c", placement=PLACEMENT, started_s=0.0))
        for step in steps:
            store.jobs.set_progress(job.id, Progress(step=step))
    assert [(r.first_step, r.last_step) for r in store.jobs.list_steps(job.id).values()] == [(3, 9), (6, 12)]


def test_run_ids_count_from_one_and_again_after_the_cluster_is_gone(store: Store) -> None:
    assert [store.clusters.next_run_id("c"), store.clusters.next_run_id("c")] == [1, 2]
    store.clusters.delete("c")
    assert store.clusters.next_run_id("c") == 1


class Hands:
    """A clock that moves only when it is set or slept on."""

    time_s = 1_800_000_000.0

    def now_s(self) -> float:
        return self.time_s

    async def sleep(self, duration_s: float) -> None:
        self.time_s += duration_s


def test_a_refusal_ends_when_it_expires_and_comes_back_twice_as_long(tmp_path: Path) -> None:
    clock = Hands()
    store = Store(tmp_path / "state.db", clock=clock)

    def refuse() -> float:
        store.refusals.add("simulated", "east1", "east1a", "big", True, 100.0, "full", lasts_s_max=300.0)
        (refusal,) = store.refusals.list_active(clock.now_s())
        assert refusal.covers(PLACEMENT)
        return refusal.expires_s - clock.now_s()

    lasting = []
    for _ in range(4):
        lasting.append(refuse())
        clock.time_s += lasting[-1]
        assert not store.refusals.list_active(clock.now_s()), "one attempt is allowed"
    assert lasting == [100.0, 200.0, 300.0, 300.0]
    store.refusals.clear(PLACEMENT)
    assert refuse() == 100.0
    clock.time_s += 100.0 + 3600.0
    assert refuse() == 100.0, "an old refusal is forgotten"


def test_a_clock_that_is_set_back_does_not_prolong_refusals_or_probes(tmp_path: Path) -> None:
    clock = Hands()
    clock.time_s = 100_000.0
    store = Store(tmp_path / "state.db", clock=clock)

    def refuse() -> None:
        store.refusals.add("simulated", "east1", "east1a", "big", True, 7200.0, "full")

    refuse()
    clock.time_s -= 3600.0
    assert not store.refusals.list_active(clock.now_s()), "it would last for three hours"
    refuse()
    assert len(store.refusals.list_active(clock.now_s())) == 1
    clock.time_s += 7200.0
    store.refusals.begin_probe(PLACEMENT, lasts_s=120.0)
    assert len(store.refusals.list_active(clock.now_s())) == 1, "probed"
    clock.time_s -= 3600.0
    (refusal,) = store.refusals.list_active(clock.now_s())
    assert refusal.probed_until_s == 0.0, "the probe would last for an hour"


def test_compaction_drops_old_details_and_keeps_bills_and_live_jobs(tmp_path: Path) -> None:
    clock = Hands()
    clock.time_s = time.time() - 100 * 86400
    store = Store(tmp_path / "state.db", clock=clock)
    ended, live = store.jobs.add("ended", Task()), store.jobs.add("live", Task())
    for job in (ended, live):
        store.events.add(make_event(EventKind.NOTE, text="long ago"), job_id=job.id)
    store.jobs.set_status(ended.id, JobStatus.SUCCEEDED)
    store.bills.record(
        Node(id="n", cloud="x", owner="me", cluster="c", attempt=1, rank=0, state=NodeState.RUNNING, usd_hour=1.0)
    )
    clock.time_s += 100 * 86400
    store.events.add(make_event(EventKind.NOTE, text="today"), job_id=ended.id)
    store.retention.compact()
    assert [event.message for event in store.events.list(job_id=ended.id)] == ["today"]
    assert [event.message for event in store.events.list(job_id=live.id)] == ["long ago"]
    assert len(store.bills.list()) == 1


def test_a_command_waits_a_minute_for_the_transaction_of_another(tmp_path: Path) -> None:
    store = Store(tmp_path / "state.db", clock=SystemClock())
    assert [tuple(row) for row in store.rows("PRAGMA busy_timeout")] == [(60_000,)]
