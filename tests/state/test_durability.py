"""Durability: critical data is on the disk when a method returns, and related data is written in one commit."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from broker.clock import SystemClock
from broker.provision.hedge_timer import update_response_time
from broker.state.base import draw_uid
from broker.state.jobs import LogOffset
from broker.state.people import Owned, Role
from broker.state.store import Store
from broker.state.transfer import export_store, import_store
from broker.types import (
    EventKind,
    IntentEnd,
    JobStatus,
    Progress,
    Secret,
    ServiceEventKind,
    Task,
    make_event,
)
from tests.state.samples import ATTEMPT, CLUSTER, NODE, PLACEMENT, REQUEST

FULL, NORMAL = 2, 1  # SQLite's numbers of `synchronous`
Action = Callable[[Store], object]


def add_commitment(store: Store) -> int:
    return store.commitments.add(
        user="ada", project="", kind=Owned.CLUSTER, names=["c"], usd=None, usd_hour=1.0, gpus=0.0
    )


class Recording(Store):
    """A store that records the `synchronous` mode of each commit."""

    def __init__(self, path: Path) -> None:
        self.commits: list[int] = []
        super().__init__(path, clock=SystemClock())

    def _commit(self) -> None:
        self.commits.append(int(self.rows("PRAGMA synchronous")[0][0]))
        super()._commit()


@pytest.fixture
def store(tmp_path: Path) -> Recording:
    made = Recording(tmp_path / "state.db")
    made.jobs.add("j", Task())
    made.jobs.put_attempt(ATTEMPT)
    made.clusters.put(CLUSTER)
    made.intents.put(REQUEST)
    made.bills.record(NODE)
    made.refusals.add("simulated", "", None, "", True, 100.0, "full")
    made.services.add("s", Task(), host="127.0.0.1", port=30000, wanted=1)
    add_commitment(made)
    made.commits.clear()
    return made


DURABLE: dict[str, Action] = {
    "add_job": lambda store: store.jobs.add("k", Task(secrets={"A": Secret(value="1")}), "r"),
    "set_job_status": lambda store: store.jobs.set_status(1, JobStatus.SUCCEEDED),
    "request_cancel": lambda store: store.jobs.request_cancel(1),
    "put_attempt": lambda store: store.jobs.put_attempt(ATTEMPT),
    "put_cluster": lambda store: store.clusters.put(CLUSTER),
    "delete_cluster": lambda store: store.clusters.delete("c"),
    "next_run_id": lambda store: store.clusters.next_run_id("c"),
    "put_intent": lambda store: store.intents.put(REQUEST),
    "note_intent_account": lambda store: store.intents.note_account("t", "an account"),
    "note_made_nodes": lambda store: store.intents.note_nodes("t", [NODE]),
    "put_meta": lambda store: store.meta.put("key", "value"),
    "mark_adopted": lambda store: store.meta.mark_adopted("x"),
    "forget_adoptions": lambda store: store.meta.forget_adoptions(),
    "forget_half_done": lambda store: store.meta.forget_half_done(attempts_skipped=9),
    "close_intent": lambda store: store.intents.close("t", IntentEnd.UP),
    "record_node": lambda store: store.bills.record(NODE),
    "close_bill": lambda store: store.bills.close(NODE),
    "reopen_bill": lambda store: store.bills.reopen(NODE),
    "add_event": lambda store: store.events.add(make_event(EventKind.NOTE, text="words")),
    "compact": lambda store: store.retention.compact(),
    "lead": lambda store: store.leader.lead(),
    "resign": lambda store: store.leader.resign(),
    "add_refusal": lambda store: store.refusals.add("x", "", None, "", True, 1.0, "full"),
    "clear": lambda store: store.refusals.clear(PLACEMENT),
    "begin_probe": lambda store: store.refusals.begin_probe(PLACEMENT, lasts_s=1.0),
    "add_service_version": lambda store: store.services.add_version("s", Task()),
    "draw_replica_number": lambda store: store.services.draw_number("s"),
    "add_service_event": lambda store: store.services.add_event("s", ServiceEventKind.CREATED),
    "add_token": lambda store: store.tokens.add(digest=draw_uid(), user="ada", role=Role.USER, expires_s=None),
    "put_owner": lambda store: store.owners.put(Owned.CLUSTER, "dev", "ada"),
    "add_audit_event": lambda store: store.audit.add(user="ada", verb="launch", target="cluster dev", outcome="done"),
    "add_commitment": lambda store: add_commitment(store),
    "bind_commitment": lambda store: store.commitments.bind(1, ["dev"]),
    "settle_commitment": lambda store: store.commitments.settle(1),
}
# Data that will be observed again anyway: waiting for the disk would cost more than its loss.
NOT_DURABLE: dict[str, Action] = {
    "set_progress": lambda store: store.jobs.set_progress(1, Progress(step=1)),
    "set_log_offset": lambda store: store.jobs.set_log_offset(1, LogOffset(attempt=1)),
    "beat": lambda store: store.leader.beat(),
    "is_intent_open": lambda store: store.intents.is_open("t"),
    "update_response_time": lambda store: store.response_times.update(
        "x", "created", lambda pace: update_response_time(pace, 1.0)
    ),
    "take_retry": lambda store: store.retries.take("x", tokens_max=5.0, refill_s=1.0),
}


@pytest.mark.parametrize("name", DURABLE)
def test_critical_data_is_one_commit_and_on_the_disk(store: Recording, name: str) -> None:
    for _ in range(2):
        DURABLE[name](store)
        assert store.commits == [FULL]
        store.commits.clear()
        store.leader.beat()  # not durable; the next commit is durable again
        store.commits.clear()


@pytest.mark.parametrize("name", NOT_DURABLE)
def test_observable_data_is_one_commit_and_may_be_lost_in_a_power_cut(store: Recording, name: str) -> None:
    NOT_DURABLE[name](store)
    assert store.commits == [NORMAL]


def test_a_transaction_is_durable_by_default_and_its_parts_are_one_commit(store: Recording) -> None:
    with store.transaction():
        store.jobs.set_progress(1, Progress(step=2))
        store.intents.put(REQUEST)
        store.leader.beat()
    assert store.commits == [FULL]


def test_a_file_that_was_just_opened_is_durable(tmp_path: Path) -> None:
    opened = Recording(tmp_path / "new.db")
    assert opened.commits == [FULL], "its tables are made in one commit"
    assert opened.rows("PRAGMA journal_mode")[0][0] == "wal"
    assert Recording(tmp_path / "new.db").commits == [], "there is nothing to migrate"


READER = """
import sys
from pathlib import Path
from broker.clock import SystemClock
from broker.state.store import Store
store = Store(Path(sys.argv[1]), clock=SystemClock())
sys.stdout.write(store.meta.get("step") or "")
store.close()
"""


def read_in_another_process(path: Path) -> str:
    done = subprocess.run([sys.executable, "-c", READER, str(path)], capture_output=True, text=True, check=True)
    return done.stdout


def test_what_a_process_with_two_connections_writes_is_seen_by_others_and_kept(tmp_path: Path) -> None:
    """Opening the second one dropped the locks of the first: a reader then deleted the log when it left."""
    path = tmp_path / "state.db"
    first = Store(path, clock=SystemClock())
    first.meta.put("step", "1")
    second = Store(path, clock=SystemClock())
    assert read_in_another_process(path) == "1"
    first.meta.put("step", "2")
    assert read_in_another_process(path) == "2"
    second.meta.put("step", "3")
    second.close()
    first.meta.put("step", "4")
    assert read_in_another_process(path) == "4"
    first.close()
    assert read_in_another_process(path) == "4"


def test_an_import_is_one_commit_and_on_the_disk(store: Recording, tmp_path: Path) -> None:
    export_store(store, tmp_path / "state.jsonl")
    target = Recording(tmp_path / "new" / "state.db")
    target.commits.clear()
    import_store(target, tmp_path / "state.jsonl")
    assert target.commits == [FULL]


def test_reading_writes_nothing(store: Recording) -> None:
    store.jobs.get(1), store.jobs.list(), store.jobs.list_lines(), store.clusters.list(), store.intents.list_open()
    store.bills.list(), store.bills.spend_usd(now_s=1.0), store.refusals.list_active(0.0), store.events.list()
    assert store.commits == []


@pytest.mark.parametrize("name", [name for name in DURABLE if name not in ("clear",)])
def test_a_failed_commit_leaves_nothing(store: Recording, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def dump() -> list[str]:
        return list(store._connection.iterdump())

    def fail() -> None:
        raise ValueError("power")

    before = dump()
    monkeypatch.setattr(store, "_commit", fail)
    with pytest.raises(ValueError, match="power"):
        DURABLE[name](store)
    assert dump() == before
