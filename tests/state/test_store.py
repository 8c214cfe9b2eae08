"""The store keeps what it was told, refuses what may not change, and is nobody else's to read."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from broker.clock import SystemClock
from broker.errors import StateError
from broker.state.store import Store
from broker.types import Attempt, JobStatus, Node, NodeRequest, NodeState, Placement, Progress, Secret, Task
from tests.simulation.world import make_offer

PLACEMENT = Placement(offer=make_offer("east1a"), is_spot=True, node_count=2)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "home" / "state.db", clock=SystemClock())


def test_a_terminal_job_never_changes(store: Store) -> None:
    job = store.add_job("train", Task())
    assert store.set_job_status(job.id, JobStatus.SUCCEEDED)
    assert not store.set_job_status(job.id, JobStatus.FAILED, "late")
    assert not store.request_cancel(job.id)
    found = store.get_job(job.id)
    assert found is not None and found.status is JobStatus.SUCCEEDED and not found.failure


def test_even_raw_sql_cannot_change_a_terminal_job_or_an_event(store: Store) -> None:
    job = store.add_job("train", Task())
    store.set_job_status(job.id, JobStatus.FAILED, "code 1")
    store.add_event("ended", "FAILED", job_id=job.id)
    connection = sqlite3.connect(store.path)
    for sql in ("UPDATE jobs SET status = 'RUNNING'", "UPDATE events SET kind = 'x'", "DELETE FROM events"):
        with pytest.raises(sqlite3.IntegrityError):
            connection.execute(sql)


def test_the_same_request_id_is_one_job(store: Store) -> None:
    assert store.add_job("a", Task(), "r1").id == store.add_job("a", Task(), "r1").id
    assert len(store.list_jobs()) == 1


def test_files_are_for_their_owner_alone_and_secrets_leave_with_the_job(store: Store) -> None:
    job = store.add_job("train", Task(secrets={"TOKEN": Secret(value="hunter2")}))
    secrets = store.path.parent / "secrets" / f"job-{job.id}.json"
    assert job.task.secrets["TOKEN"].value == "hunter2"
    assert store.path.stat().st_mode & 0o777 == secrets.stat().st_mode & 0o777 == 0o600
    assert store.path.parent.stat().st_mode & 0o777 == 0o700
    assert not any(b"hunter2" in path.read_bytes() for path in store.path.parent.glob("state.db*"))
    store.set_job_status(job.id, JobStatus.SUCCEEDED)
    assert not secrets.exists()
    assert store.get_job(job.id) is not None


def test_a_newer_schema_is_refused_with_a_hint(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    Store(path, clock=SystemClock()).close()
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version=99")
    with pytest.raises(StateError) as caught:
        Store(path, clock=SystemClock())
    assert caught.value.hints


def test_a_file_that_is_no_database_is_a_state_error(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    path.write_text("not a database, whatever its name says" * 100)
    with pytest.raises(StateError):
        Store(path, clock=SystemClock())


def test_a_failed_transaction_leaves_nothing(store: Store) -> None:
    with pytest.raises(ValueError), store.transaction():
        store.add_event("a", "first")
        raise ValueError
    assert not store.list_events()


def test_an_intent_stays_open_until_closed_and_its_first_outcome_stands(store: Store) -> None:
    request = NodeRequest(owner="me", cluster="c", attempt=1, token="t", placement=PLACEMENT)
    store.put_intent(request)
    store.put_intent(request)
    assert [intent.request for intent in store.list_open_intents()] == [request]
    store.close_intent("t", "up")
    assert not store.list_open_intents("c")
    assert store.list_tokens("c") == {"t"}


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
        store.record_node(node(ended_s))
    assert store.spend_usd(cluster="c", now_s=99_999.0) == pytest.approx(1.0)


def test_steps_are_remembered_for_each_attempt(store: Store) -> None:
    job = store.add_job("train", Task())
    for number, steps in ((1, (3, 9)), (2, (6, 12))):
        store.put_attempt(Attempt(job_id=job.id, number=number, cluster="c", placement=PLACEMENT, started_s=0.0))
        for step in steps:
            store.set_progress(job.id, Progress(step=step))
    assert [(r.first_step, r.last_step) for r in store.list_steps(job.id).values()] == [(3, 9), (6, 12)]


def test_run_ids_count_from_one_and_again_after_the_cluster_is_gone(store: Store) -> None:
    assert [store.next_run_id("c"), store.next_run_id("c")] == [1, 2]
    store.delete_cluster("c")
    assert store.next_run_id("c") == 1


def test_a_refusal_ends_when_it_expires(store: Store) -> None:
    store.add_refusal("simulated", "east1", "east1a", "big", True, 100.0, "full")
    assert store.active_refusals(99.0)[0].covers(PLACEMENT)
    assert not store.active_refusals(100.0)
