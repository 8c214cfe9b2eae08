"""Export, import and check: a store moves between SQLite and PostgreSQL with everything that it holds."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from broker.errors import DROPPABLE_TABLES, DamagedRowError, StateError
from broker.state.restoring import DROPPABLE, drop_row
from broker.state.schema import MIGRATIONS
from broker.state.store import Store
from broker.state.transfer import LEFT_OUT, TABLES, check_store, export_store, import_store
from broker.types import EventKind, IntentEnd, JobStatus, Progress, ScheduleSpec, Secret, Task, make_event
from tests.state.conftest import OpenStore
from tests.state.samples import ATTEMPT, CLUSTER, NODE, PLACEMENT, REQUEST, START_S


def fill(store: Store) -> None:
    store.meta.put("installation", "0123456789ab")
    job = store.jobs.add("train", Task(name="train", secrets={"TOKEN": Secret(value="hunter2")}), "r1")
    ended = store.jobs.add("ended", Task(name="é"), pipeline="p", needs=[job.id])
    store.jobs.put_attempt(ATTEMPT)
    store.jobs.set_progress(job.id, Progress(step=3, total=9))
    store.jobs.set_status(ended.id, JobStatus.FAILED, "code 1")
    store.jobs.request_cancel(job.id)
    store.clusters.put(CLUSTER)
    store.clusters.next_run_id("c")
    store.intents.put(REQUEST)
    store.intents.note_nodes("t", [NODE])
    store.intents.close("t", IntentEnd.UP)
    store.bills.record(NODE)
    store.events.add(make_event(EventKind.NOTE, text="a note"), job_id=job.id)
    store.refusals.add("x", "r", None, "i", True, 600.0, "full", hints=["wait"])
    store.retries.take("x", tokens_max=5.0, refill_s=1.0)
    served = Task(name="web", secrets={"KEY": Secret(value="swordfish")})
    service = store.services.add("web", served, host="127.0.0.1", port=1, wanted=1)
    store.services.add_version("web", Task(name="web"))
    store.services.note_keys(service)


def describe(store: Store) -> object:
    """Read what users see, through the repositories."""
    jobs = [(job.name, job.status, job.progress, job.attempts, job.cancel_requested, job.pipeline, job.needs, job.uid,
             {name: each.value for name, each in job.task.secrets.items()}) for job in store.jobs.list()]  # fmt: skip
    web = store.services.list()[0]
    versions = [store.services.get_task("web", version).secrets for version in (1, 2)]
    return (
        web, store.services.has_keys(web), [{name: each.value for name, each in found.items()} for found in versions],
        jobs, store.clusters.list(), store.bills.list(), store.intents.list_tokens("c"), store.intents.list_nodes("t"),
        store.clusters.newest_run_id("c"), store.refusals.list_active(START_S), store.bills.spend_usd(now_s=START_S),
        [event.message for event in store.events.list()][:1], store.jobs.find_request("r1") is not None,
    )  # fmt: skip


@pytest.mark.parametrize("way", ["sqlite to postgres", "postgres to sqlite"])
def test_a_store_moves_between_backends(
    open_sqlite: OpenStore, open_postgres: OpenStore, tmp_path: Path, way: str
) -> None:
    source, target = (open_sqlite(), open_postgres()) if way.startswith("sqlite") else (open_postgres(), open_sqlite())
    fill(source)
    file = tmp_path / "state.jsonl"
    moved = export_store(source, file)
    assert file.stat().st_mode & 0o777 == 0o600 and not re.search("hunter2|swordfish", file.read_text())
    assert import_store(target, file).counts == moved.counts
    assert describe(target) == describe(source)
    assert target.meta.salt != source.meta.salt and target.meta.restored_s == START_S
    assert target.jobs.add("next", Task()).id == 3
    assert check_store(target) == []
    with pytest.raises(StateError, match="not empty"):
        import_store(target, file)


def test_import_into_a_state_with_only_a_schedule_is_refused_as_not_empty(store: Store, tmp_path: Path) -> None:
    """The same schedule in both would look like damage, and another one would be mixed with those of the file."""
    store.schedules.add("nightly", Task(run="true"), ScheduleSpec(cron="0 2 * * *"), next_s=START_S)
    export_store(store, tmp_path / "state.jsonl")
    with pytest.raises(StateError, match="not empty"):
        import_store(store, tmp_path / "state.jsonl")
    assert [each.name for each in store.schedules.list()] == ["nightly"]


def test_every_table_is_exported_or_left_out_for_a_reason(sqlite_store: Store) -> None:
    rows = sqlite_store.rows("SELECT name FROM sqlite_schema WHERE type = 'table' AND name NOT LIKE 'sqlite_%'")
    assert {row["name"] for row in rows} == (set(TABLES) | LEFT_OUT) - {"secrets"}


def test_postgres_has_the_same_tables_and_columns(sqlite_store: Store, open_postgres: OpenStore) -> None:
    server = open_postgres()
    rows = server.rows(
        "SELECT table_name, column_name FROM information_schema.columns WHERE table_schema = current_schema()"
    )
    found: dict[str, set[str]] = {}
    for row in rows:
        found.setdefault(row[0], set()).add(row[1])
    assert found.pop("secrets") == {"job_id", "body"}
    assert set(found) == (set(TABLES) | LEFT_OUT) - {"secrets"}
    for table, columns in found.items():
        assert columns - {"rowid"} == {row["name"] for row in sqlite_store.rows(f"PRAGMA table_info({table})")}, table


def test_a_file_that_is_incomplete_or_altered_imports_nothing(open_sqlite: OpenStore, tmp_path: Path) -> None:
    source = open_sqlite()
    fill(source)
    file = tmp_path / "state.jsonl"
    export_store(source, file)
    lines = file.read_text().splitlines()
    target = Store(tmp_path / "other" / "state.db", clock=source.clock)
    header = json.loads(lines[0])
    older = json.dumps({**header, "row": {**header["row"], "schema": len(MIGRATIONS) - 1}})
    evil = json.dumps({"table": "jobs", "row": {"id) VALUES (1); --": 1}})
    for broken in (
        lines[:-1], [*lines[:3], *lines[4:]], ["{"], [older, *lines[1:]], [lines[0], evil], ['{"table": "jobs"}'], [],
        [lines[0], '{"table": "sqlite_schema", "row": {}}'], [*lines[:2], "7"],
    ):  # fmt: skip
        file.write_text("\n".join(broken))
        with pytest.raises(StateError):
            import_store(target, file)
        assert target.jobs.count() == 0 and not target.events.list()
    target.close()


def test_a_state_of_another_installation_is_refused(open_sqlite: OpenStore, tmp_path: Path) -> None:
    source = open_sqlite()
    fill(source)
    export_store(source, tmp_path / "file")
    target = Store(tmp_path / "other" / "state.db", clock=source.clock, owner="ffffffffffff")
    with pytest.raises(StateError, match="installation 0123456789ab"):
        import_store(target, tmp_path / "file")
    target.close()


def test_cluster_without_a_job_is_intact_in_a_state_without_jobs(store: Store) -> None:
    store.clusters.put(replace(CLUSTER, job_id=None))
    assert store.jobs.list() == [] and check_store(store) == []


def test_a_check_names_damaged_rows_and_missing_references(store: Store) -> None:
    fill(store)
    assert check_store(store) == []
    store.write("UPDATE clusters SET body = ? WHERE name = 'c'", (b"{}",))
    store.write("UPDATE attempts SET job_id = 77")
    store.write("UPDATE jobs SET needs = ? WHERE id = 2", ("[",))
    store.write("UPDATE nodes SET created_s = ?", (1e300,))
    problems = " ".join(check_store(store))
    assert "nodes" in problems and "clusters" in problems and "attempts of job 77" in problems and "jobs" in problems
    damaged: list[DamagedRowError] = []
    check_store(store, on_damage=damaged.append)
    for each in damaged:
        assert f"`broker state drop {each.table} '{each.key}'`" in each.hints[0]
        assert drop_row(store, each.table, each.key)
    assert not any("damaged" in each for each in check_store(store))


def test_a_damaged_row_of_a_table_that_cannot_be_dropped_names_no_command_for_it() -> None:
    assert set(DROPPABLE_TABLES) == set(DROPPABLE)
    assert "drop" not in DamagedRowError("service_versions", "web/1", "not JSON").hints[0]
    assert PLACEMENT.node_count == 2
