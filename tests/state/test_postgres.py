"""What only PostgreSQL has: a server that restarts, sessions that the server ends, rows that are locked, encryption."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pytest

from broker.config import Config, find_state_url
from broker.errors import StateError, UsageError
from broker.state import postgres as module
from broker.state import transfer
from broker.state.base import draw_uid
from broker.state.claims import hold_claim
from broker.state.opening import open_store
from broker.state.postgres import PostgresDatabase, translate_parameters
from broker.state.postgres_errors import hide_password
from broker.state.postgres_schema import translate_types
from broker.state.postgres_store import PostgresStore
from broker.state.schema import MIGRATIONS, SQLITE_ONLY
from broker.state.store import Store
from broker.types import EventKind, JobStatus, Secret, Task, make_event
from tests.state.conftest import OpenStore
from tests.state.postgres_server import Server
from tests.state.samples import Hands

KEY = "BROKER_SECRET_KEY"


def test_a_restart_of_the_server_costs_the_open_transaction_and_nothing_else(
    open_postgres: OpenStore, postgres: Server
) -> None:
    store = open_postgres()
    job = store.jobs.add("a", Task())
    with pytest.raises(StateError, match="cannot be used"), store.transaction():
        store.jobs.request_cancel(job.id)
        postgres.stop()
        postgres.start()
        store.events.add(make_event(EventKind.NOTE, text="lost"))
    found = store.jobs.get(job.id)
    assert found is not None and not found.cancel_requested and not store.events.list()
    assert store.jobs.request_cancel(job.id)
    postgres.stop()
    with pytest.raises(StateError, match="cannot be used"):
        store.jobs.count()
    postgres.start()
    assert store.jobs.count() == 1 and store.jobs.is_cancel_requested(job.id)


def test_an_export_neither_holds_up_controllers_nor_is_ended_by_the_server(
    open_postgres: OpenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large one takes minutes, with seconds between two statements, in which its rows are written to the file."""
    store, controller = open_postgres(), open_postgres()
    job = store.jobs.add("a", Task(secrets={"TOKEN": Secret(value="t")}))
    limits: list[str] = []
    convert = transfer._to_json

    def convert_slowly(value: object) -> object:
        if not limits:
            limits.append(str(store.rows("SHOW idle_in_transaction_session_timeout")[0][0]))
            controller.jobs.set_status(job.id, JobStatus.SUCCEEDED)
        return convert(value)

    monkeypatch.setattr(module, "SESSION", module.SESSION.replace("'60s'", "'2s'"))  # the lock of writers
    controller.close()
    controller = open_postgres()
    monkeypatch.setattr(transfer, "_to_json", convert_slowly)
    transfer.export_store(store, tmp_path / "file")
    assert limits == ["0"]
    assert controller.jobs.list_live_ids() == []
    text = (tmp_path / "file").read_text()
    assert '"status": "PENDING"' in text and '{"table": "secrets"' in text, "as of one moment"


def test_a_server_that_has_vanished_is_noticed_within_half_a_minute(open_postgres: OpenStore) -> None:
    """A host that lost its power closes no connection; the kernel's own limits are hours."""
    store = open_postgres()
    with store.transaction():
        cursor: Any = store.execute("SELECT 1")
    limits = cursor.connection.info.get_parameters()
    idle_s, every_s, count = (int(limits[f"keepalives_{name}"]) for name in ("idle", "interval", "count"))
    assert idle_s + every_s * count <= 30 and int(limits["tcp_user_timeout"]) <= 30_000


def test_transactions_are_serialized(open_postgres: OpenStore) -> None:
    """A transaction reads, decides and writes; another process waits for its end."""
    one, two = open_postgres(), open_postgres()
    two.rows("SELECT set_config('lock_timeout', '50ms', false)")
    with one.transaction():
        with pytest.raises(StateError, match="lock timeout") as caught:
            two.events.add(make_event(EventKind.NOTE, text="x"))
        assert "has been writing" in caught.value.hints[0]
        two.claims.renew("y")  # a lease waits for no transaction
    two.events.add(make_event(EventKind.NOTE, text="x"))


@pytest.mark.parametrize("default", ["isolation = 'repeatable read'", "isolation = 'serializable'", "read_only = on"])
def test_transactions_see_what_the_previous_one_wrote_whatever_the_defaults_of_the_role(
    open_postgres: OpenStore, default: str
) -> None:
    """With a snapshot from before the lock, two launches would both fit into a limit that one of them uses up."""
    one = open_postgres()
    one.write(f"ALTER ROLE broker SET default_transaction_{default}")
    try:
        two = open_postgres()
    finally:
        one.write("ALTER ROLE broker RESET ALL")
    (session,) = two.rows("SELECT pg_backend_pid() AS pid")
    waits = "SELECT 1 FROM pg_locks WHERE pid = ? AND locktype = 'advisory' AND NOT granted"

    def add_if_alone() -> None:
        with two.transaction():
            if not two.events.list():
                two.events.add(make_event(EventKind.NOTE, text="second"))

    with ThreadPoolExecutor(1) as pool:
        with one.transaction():
            waiting = pool.submit(add_if_alone)
            while not one.rows(waits, (session["pid"],)) and not waiting.done():
                pass
            one.events.add(make_event(EventKind.NOTE, text="first"))
        waiting.result(timeout=60)
    two.events.add(make_event(EventKind.NOTE, text="third"))
    assert [each.data["text"] for each in one.events.list()] == ["first", "third"]


def test_commit_that_the_server_turns_into_a_rollback_is_an_error(open_postgres: OpenStore) -> None:
    """PostgreSQL rolls back a transaction in which a statement has failed, and reports success."""
    store = open_postgres()
    with pytest.raises(StateError, match="was not changed"), store.transaction():
        store.events.add(make_event(EventKind.NOTE, text="lost"))
        with contextlib.suppress(StateError):
            store.execute("INSERT INTO meta (key, value) VALUES ('lineage', 'twice')")
    assert not store.events.list()
    store.events.add(make_event(EventKind.NOTE, text="kept"))
    assert len(store.events.list()) == 1


def test_a_claim_skips_a_job_that_its_controller_is_writing_for(open_postgres: OpenStore) -> None:
    one, two = open_postgres(), open_postgres()
    job = one.jobs.add("a", Task()).id
    one.claims.claim("x", [job])  # without a lease
    with hold_claim(job, 1):
        with one.transaction():
            assert two.claims.claim("y", [job]) == {}, "the takeover comes after the write"
        assert two.claims.claim("y", [job]) == {job: 2}


STOPPED = """
import os, signal, sys
from pathlib import Path
from typing import Any
from broker.clock import SystemClock
from broker.state.postgres_store import PostgresStore
store = PostgresStore(sys.argv[1], home=Path(sys.argv[2]), clock=SystemClock())
try:
    with store.transaction():
        os.kill(os.getpid(), signal.SIGSTOP)
        store.meta.put("by", "the stopped one")
except Exception as error:
    print(type(error).__name__)
"""


def test_a_process_stopped_in_a_transaction_blocks_others_only_briefly(
    open_postgres: OpenStore,
) -> None:
    session = module.SESSION.replace("'5s'", "'200ms'")
    source = f"from broker.state import postgres\npostgres.SESSION = {session!r}\n{STOPPED}"
    store = open_postgres()
    assert isinstance(store, PostgresStore)
    command = [sys.executable, "-c", source, store.url, str(store.path.parent)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        store.meta.put("by", "another")  # waits until the server has ended the session
        os.kill(process.pid, signal.SIGCONT)
        assert process.communicate()[0] == "StateError\n"
    assert store.meta.get("by") == "another"


def test_a_database_of_schema_11_is_migrated(
    postgres: Server, tmp_path: Path, clock: Hands, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = postgres.make_url()
    with monkeypatch.context() as patch:
        for name in ("broker.state.postgres.MIGRATIONS", "broker.state.postgres_schema.MIGRATIONS"):
            patch.setattr(name, MIGRATIONS[:SQLITE_ONLY])
        old = PostgresDatabase(url, home=tmp_path, clock=clock)
        assert old.rows("SELECT to_regclass('claims')")[0][0] is None
        old.write("INSERT INTO meta (key, value) VALUES ('kept', 'yes')")
        old.close()
    store = PostgresStore(url, home=tmp_path, clock=clock)
    assert store.meta.get("kept") == "yes" and store.meta.get("schema") == str(len(MIGRATIONS))
    assert store.claims.renew("x") == {}
    store.write("UPDATE meta SET value = '99' WHERE key = 'schema'")
    store.close()
    with pytest.raises(StateError, match="newer broker"):
        PostgresStore(url, home=tmp_path, clock=clock)


def test_two_processes_may_create_the_tables_at_once(postgres: Server, tmp_path: Path) -> None:
    source = (
        "import sys; from pathlib import Path; from broker.clock import SystemClock\n"
        "from broker.state.postgres_store import PostgresStore\n"
        "print(PostgresStore(sys.argv[1], home=Path(sys.argv[2]), clock=SystemClock()).meta.lineage)"
    )
    command = [sys.executable, "-c", source, postgres.make_url(), str(tmp_path)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    lineages = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0] and lineages[0] == lineages[1] != ""


def test_another_database_and_another_owner_are_refused(postgres: Server, tmp_path: Path, clock: Hands) -> None:
    url = postgres.make_url()
    PostgresStore(url, home=tmp_path, clock=clock, owner="a").close()
    with pytest.raises(StateError, match="belongs to installation a"):
        PostgresStore(url, home=tmp_path, clock=clock, owner="b")
    with pytest.raises(StateError, match="is not the database that this folder has used"):
        PostgresStore(postgres.make_url(), home=tmp_path, clock=clock, owner="a")


# -- secrets --------------------------------------------------------------------------------------------------------


def read_all(store: Store) -> str:
    tables = store.rows("SELECT table_name FROM information_schema.tables WHERE table_schema = current_schema()")
    return "\n".join(str(tuple(row)) for each in tables for row in store.rows(f"SELECT * FROM {each[0]}"))  # type: ignore[arg-type]


def test_secrets_are_encrypted_with_a_key_beside_the_database(open_postgres: OpenStore) -> None:
    store = open_postgres()
    job = store.jobs.add("a", Task(secrets={"TOKEN": Secret(value="canary-4711")}))
    assert "canary" not in read_all(store)
    key = store.path.parent / "secret.key"
    assert key.stat().st_mode & 0o777 == 0o600
    found = open_postgres().jobs.get(job.id)
    assert found is not None and found.task.secrets["TOKEN"].value == "canary-4711"
    store.write("UPDATE secrets SET job_id = 7")
    moved = store.jobs.add("b", Task(secrets={"TOKEN": Secret(value="x")}))
    store.write("UPDATE secrets SET body = (SELECT body FROM secrets WHERE job_id = 7) WHERE job_id = ?", (moved.id,))
    with pytest.raises(StateError, match="its secrets"):
        store.jobs.get(moved.id)


def test_secrets_are_deleted_with_the_end_of_their_job(open_postgres: OpenStore) -> None:
    from broker.types import JobStatus

    store = open_postgres()
    job = store.jobs.add("a", Task(secrets={"TOKEN": Secret(value="canary")}))
    store.jobs.set_status(job.id, JobStatus.SUCCEEDED)
    assert not store.rows("SELECT 1 FROM secrets")
    found = store.jobs.get(job.id)
    assert found is not None and found.task.secrets["TOKEN"].value == ""


def test_another_key_reads_and_writes_no_secret(open_postgres: OpenStore, monkeypatch: pytest.MonkeyPatch) -> None:
    open_postgres().jobs.add("a", Task(secrets={"TOKEN": Secret(value="canary")}))
    monkeypatch.setenv(KEY, "A" * 43 + "=")
    other = open_postgres()
    with pytest.raises(StateError, match="another key"):
        other.jobs.get(1)
    with pytest.raises(StateError, match="another key"):
        other.jobs.add("b", Task(secrets={"TOKEN": Secret(value="canary")}))
    assert other.jobs.count() == 1, "the job is not added either"
    monkeypatch.setenv(KEY, "short")
    with pytest.raises(StateError, match="is not a valid key"):
        open_postgres().jobs.get(1)


# -- settings and messages ------------------------------------------------------------------------------------------


def test_the_url_comes_from_the_environment_or_the_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_state_url(tmp_path) is None
    settings = tmp_path / "config.toml"
    settings.write_text("keep_days = 3\n")
    assert find_state_url(tmp_path) is None
    settings.write_text('state = "postgresql://h/d"\n')
    assert find_state_url(tmp_path) == "postgresql://h/d"
    monkeypatch.setenv("BROKER_STATE", "postgres://h/e")
    assert find_state_url(tmp_path) == "postgres://h/e"
    monkeypatch.setenv("BROKER_STATE", "mysql://h/e")
    with pytest.raises(UsageError, match="postgresql://"):
        find_state_url(tmp_path)


def test_a_server_that_does_not_answer_is_explained_without_the_password(
    tmp_path: Path, clock: Hands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BROKER_STATE", f"postgresql://me:hunter2@/db?host={tmp_path}")
    with pytest.raises(StateError) as caught:
        open_store(Config(home=tmp_path, owner="a"), clock=clock)
    text = " ".join((caught.value.message, *caught.value.hints))
    assert "hunter2" not in text and "postgresql://me@/db" in text and "BROKER_STATE" in text
    assert hide_password("postgresql://u:p@h:5432/d?password=p") == "postgresql://u@h:5432/d"
    assert hide_password("postgresql://[") == "postgresql://"


def test_statements_are_translated() -> None:
    assert translate_parameters("a = ? AND b LIKE 'x%' AND c = ?") == "a = %(1)s AND b LIKE 'x%%' AND c = %(2)s"
    assert translate_parameters("?1 IS NULL OR x > ?1") == "%(1)s IS NULL OR x > %(1)s"
    assert translate_types("id INTEGER, at_s REAL, x TEXT") == ('id BIGINT, at_s DOUBLE PRECISION, x TEXT COLLATE "C"')
    assert len(draw_uid()) == 5


def test_text_that_postgres_cannot_hold_does_not_stop_a_job(open_postgres: OpenStore) -> None:
    store = open_postgres()
    store.events.add(make_event(EventKind.NOTE, text="a\0b ? % é"))
    job = store.jobs.add("a\0%?", Task())
    assert job.name == "a\ufffd%?" and store.events.list()[0].message == "a\0b ? % é"


def test_the_error_of_the_server_is_psycopgs(open_postgres: OpenStore) -> None:
    with pytest.raises(StateError) as caught:
        open_postgres().rows("SELECT nothing")
    assert isinstance(caught.value.__cause__, psycopg.Error)
