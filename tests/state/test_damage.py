"""Commands on a damaged state folder print an error message, never a traceback."""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from broker.cli.main import main
from broker.clock import SystemClock
from broker.config import find_checkpoint_url, load_config, read_keep_days
from broker.errors import BrokerError, DamagedRowError, StateError, UsageError
from broker.jobs.daemon_process import hold_lock
from broker.jobs.log_files import copy_log
from broker.provision.bring_up import lock_name
from broker.runtime.keys import Keys
from broker.state.store import Store
from broker.types import (
    Attempt,
    Cluster,
    ClusterStatus,
    EventKind,
    JobStatus,
    Node,
    NodeState,
    Outcome,
    OutcomeKind,
    Placement,
    Progress,
    Secret,
    Task,
    make_event,
)
from tests.simulation.world import make_offer
from tests.tiers import examples

PLACEMENT = Placement(offer=make_offer("east1a"), is_spot=True, node_count=2)
PREEMPTED = Outcome(kind=OutcomeKind.PREEMPTED, detail="gone")
READS = (
    ("status",),
    ("status", "--json"),
    ("jobs", "queue", "--all"),
    ("jobs", "queue", "--json"),
    ("jobs", "events", "1"),
    ("jobs", "why", "2"),
    ("jobs", "why", "1", "--json"),
    ("jobs", "logs", "1", "--no-follow"),
    ("cost",),
    ("cost", "--by", "cloud", "--json"),
    ("state", "info"),
    ("state", "info", "--json"),
)
FILES = ("state.db", "state.guard", "owner", "config.toml", "daemon.lock", "secrets/{}.json", "logs/jobs/1.log")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A state folder with rows and files of every kind."""
    home = tmp_path_factory.mktemp("whole") / "home"
    config = load_config(home)
    store = Store(config.database, clock=SystemClock(), owner=config.owner)
    for index in range(12):
        job = store.jobs.add(f"train-{index}", Task(name="train", run="python train.py", secrets=make_secrets(index)))
        for number in (1, 2):
            name = job.name_cluster(number)
            store.jobs.put_attempt(
                Attempt(
                    job_id=job.id, number=number, cluster=name, placement=PLACEMENT, started_s=1e9 + index,
                    running_s=1e9 + 50, lost_s=1e9 + 99, ended_s=1e9 + 100, outcome=PREEMPTED, usd=0.5,
                )
            )  # fmt: skip
            store.jobs.set_progress(job.id, Progress(step=7 * number, total=30, checkpoint_step=7))
            store.bills.record(make_node(f"{name}-0", name))
        store.events.add(make_event(EventKind.STARTED), job_id=job.id)
        if index:
            store.jobs.set_status(job.id, JobStatus.SUCCEEDED if index % 2 else JobStatus.FAILED, "code 1")
    for name in ("dev", "far"):
        cluster = Cluster(
            name=name, status=ClusterStatus.UP, placement=PLACEMENT, attempt=1, created_s=1e9,
            nodes=tuple(make_node(f"{name}-{rank}", name, rank) for rank in (0, 1)),
        )  # fmt: skip
        store.clusters.put(cluster)
    (config.logs / "jobs").mkdir(parents=True)
    (config.logs / "jobs" / "1.log").write_text("step 1\nstep 2\n")
    (home / "config.toml").write_text('checkpoints = "s3://bucket/runs"\nkeep_days = 30\n')
    config.daemon_lock.touch()
    store.copy()
    store.close()
    return home


def make_secrets(index: int) -> dict[str, Secret]:
    return {"TOKEN": Secret(value="hunter2")} if index == 0 else {}


def make_node(node_id: str, cluster: str, rank: int = 0) -> Node:
    return Node(
        id=node_id, cloud="simulated", owner="me", cluster=cluster, attempt=1, rank=rank, state=NodeState.RUNNING,
        region="east1", zone="east1a", is_spot=True, usd_hour=1.0, created_s=1e9, ended_s=1e9 + 3600,
    )  # fmt: skip


@pytest.fixture
def home(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "home"
    shutil.copytree(whole, home)
    monkeypatch.setenv("BROKER_HOME", str(home))
    monkeypatch.setattr("broker.jobs.daemon_process.ensure_daemon", lambda *given: None)
    return home


def find_file(home: Path, name: str) -> Path:
    return next((home / "secrets").glob("*.json")) if "{}" in name else home / name


Ask = Callable[..., tuple[int, str, str]]


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Ask:
    """Run a command; return its exit code, stdout and stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        code = 0
        try:
            main(arguments)
        except SystemExit as leave:
            code = leave.code if isinstance(leave.code, int) else 1
        said = capsys.readouterr()
        assert "fault of broker" not in said.err and "Traceback" not in said.err, (arguments, said.err)
        assert code in (0, 2, 4), (arguments, code, said.err)
        return code, said.out, said.err

    return run


def test_the_folder_is_read_whole_before_any_damage(home: Path, ask: Ask) -> None:
    for arguments in READS:
        code, out, _ = ask(*arguments)
        assert code == 0 and out


# Shrinking a failure takes minutes, and only reveals the bytes at fault.
DRAWN = (Phase.explicit, Phase.generate)


@settings(max_examples=examples(25), phases=DRAWN, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_flipped_bytes_of_the_state_file_never_show_a_traceback(whole: Path, home: Path, ask: Ask, data: Any) -> None:
    content = bytearray((whole / "state.db").read_bytes())
    written = [offset for offset, byte in enumerate(content) if byte]
    for offset in data.draw(st.lists(st.sampled_from(written), min_size=1, max_size=12)):
        content[offset] ^= data.draw(st.integers(1, 255))
    check_reads(home, "state.db", bytes(content), whole, ask)


@settings(max_examples=examples(10), phases=DRAWN, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(share=st.floats(0.0, 1.0))
def test_a_truncated_state_file_never_shows_a_traceback(whole: Path, home: Path, ask: Ask, share: float) -> None:
    content = (whole / "state.db").read_bytes()
    check_reads(home, "state.db", content[: int(len(content) * share)], whole, ask)


@settings(max_examples=examples(20), phases=DRAWN, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(FILES[1:]), data=st.data())
def test_damage_to_any_other_file_never_shows_a_traceback(
    whole: Path, home: Path, ask: Ask, name: str, data: Any
) -> None:
    content = bytearray(find_file(whole, name).read_bytes())
    if content and data.draw(st.booleans()):
        for offset in data.draw(st.lists(st.integers(0, len(content) - 1), min_size=1, max_size=4)):
            content[offset] ^= data.draw(st.integers(1, 255))
    else:
        content = bytearray(data.draw(st.binary(max_size=40)))
    check_reads(home, name, bytes(content), whole, ask)


def check_reads(home: Path, name: str, content: bytes, whole: Path, ask: Ask) -> None:
    """Run every read command on a folder in which only this file is damaged."""
    shutil.rmtree(home)
    shutil.copytree(whole, home)
    find_file(home, name).write_bytes(content)
    for arguments in READS:
        ask(*arguments)
    for read in (lambda: find_checkpoint_url(home), lambda: read_keep_days(load_config(home))):
        try:
            read()  # type: ignore[no-untyped-call]
        except BrokerError:
            pass


@pytest.mark.parametrize("name", FILES)
def test_a_folder_instead_of_a_file_is_reported_in_one_sentence(home: Path, ask: Ask, name: str) -> None:
    path = find_file(home, name)
    path.unlink()
    path.mkdir()
    for arguments in READS:
        ask(*arguments)
    if name == "daemon.lock":
        with pytest.raises(StateError, match="cannot be used"), hold_lock(load_config(home)):
            pass


def test_one_damaged_row_does_not_hide_others_and_its_error_says_how_to_drop_it(home: Path, ask: Ask) -> None:
    with closing(sqlite3.connect(home / "state.db")) as connection:
        connection.execute("UPDATE clusters SET body = 'garbage' WHERE name = 'far'")
        connection.execute("DROP INDEX attempts_open")  # its expression would reject damaged JSON on this write
        connection.execute("UPDATE attempts SET body = '{' WHERE job_id = 5 AND number = 2")
        connection.execute("DROP TRIGGER jobs_terminal")
        connection.execute("UPDATE jobs SET status = 'DANCING' WHERE id = 6")
        connection.execute("UPDATE jobs SET name = CAST(x'ff41' AS TEXT) WHERE id = 7")
        connection.commit()
    code, out, err = ask("status")
    assert code == 0 and "\ndev " in out and "\nfar " not in out
    assert "row `far` of `clusters`" in err and "broker state drop clusters 'far'" in err
    code, out, err = ask("jobs", "queue", "--all")
    assert code == 0 and "train-4" in out and "row `6` of `jobs`" in err
    code, out, err = ask("jobs", "queue", "--json")
    assert code == 0 and "train-3" in out and "row `5/2` of `attempts`" in err
    for table, key in (("clusters", "far"), ("attempts", "5/2"), ("jobs", "6")):
        assert ask("state", "drop", table, key, "--yes")[0] == 0
    _, _, err = ask("jobs", "queue", "--json")
    assert not err
    assert ask("state", "drop", "jobs", "6", "--yes")[0] == 2
    assert ask("state", "drop", "events", "6", "--yes")[0] == 2


def test_the_collector_keeps_nodes_of_a_damaged_cluster_record(home: Path) -> None:
    with closing(sqlite3.connect(home / "state.db")) as connection:
        connection.execute("UPDATE clusters SET body = 'garbage' WHERE name = 'far'")
        connection.commit()
    store = Store(home / "state.db", clock=SystemClock())
    with pytest.raises(DamagedRowError):
        store.clusters.list()


def test_a_full_disk_is_reported_and_nothing_is_partially_written(home: Path) -> None:
    store = Store(home / "state.db", clock=SystemClock())
    pages = store.rows("PRAGMA page_count")[0][0]
    store.execute(f"PRAGMA max_page_count={pages}")  # SQLite then reports a full disk
    with pytest.raises(StateError, match="full") as caught, store.transaction():
        for _ in range(2000):
            store.events.add(make_event(EventKind.NOTE, text="x" * 500))
    assert any("free some space" in hint for hint in caught.value.hints)
    assert not [event for event in store.events.list() if event.kind is EventKind.NOTE]


def test_a_full_disk_under_a_log_does_not_stop_the_job(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Head:
        async def read_log(self, cluster: Cluster, run_id: int, *, offset: int) -> tuple[bytes, int]:
            return b"step 1\n", offset + 7

    def fail(*given: object, **named: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device", str(home / "logs"))

    import asyncio

    monkeypatch.setattr("broker.jobs.log_files._append", fail)
    store = Store(home / "state.db", clock=SystemClock())
    job = store.jobs.get(2)
    assert job is not None
    cluster = store.clusters.list()[0]
    asyncio.run(copy_log(store, Head(), home / "logs", attempt=job.attempts[0], cluster=cluster, run_id=1))  # type: ignore[arg-type]
    assert store.jobs.get_log_offset(2).source_bytes == 0, "it is copied when there is room again"


def test_a_full_disk_under_keys_and_locks_is_a_state_error(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Any, *given: object, **named: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(Path, "mkdir", fail)
    with pytest.raises(StateError, match="keys"):
        Keys(home / "keys").ensure("dev", "token")
    with pytest.raises(StateError, match="No space left"), lock_name(home / "locks", "dev"):
        pass


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_a_folder_that_cannot_be_written_is_still_read(
    home: Path, ask: Ask, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """The system's error is simulated, as root may write everywhere."""
    real = os.open

    def refuse(path: Any, flags: int, *given: Any, **named: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR):
            raise OSError(number, os.strerror(number), str(path))
        return real(path, flags, *given, **named)

    monkeypatch.setattr(os, "open", refuse)
    for arguments in READS:
        code, out, err = ask(*arguments)
        assert code == 0 and out, err
    code, _, err = ask("state", "drop", "jobs", "3", "--yes")
    assert code == 4 and "hint:" in err
    store = Store(home / "state.db", clock=SystemClock())
    assert store.is_read_only
    with pytest.raises(StateError, match="readonly"):
        store.jobs.add("train", Task())


def test_secrets_that_cannot_be_read_stop_that_job_alone(home: Path, ask: Ask) -> None:
    find_file(home, "secrets/{}.json").write_text("[1, 2]")
    code, out, err = ask("jobs", "queue", "--json")
    assert code == 0 and "train-5" in out and "secrets" in err and "hunter2" not in out + err
    store = Store(home / "state.db", clock=SystemClock())
    with pytest.raises(DamagedRowError):
        store.jobs.get(1)


@pytest.mark.parametrize("text", ['keep_days = "x"', "keep_days = 0", "keep_days = true", "keep_day = 3"])
def test_keep_days_is_a_number_of_days(home: Path, text: str) -> None:
    (home / "config.toml").write_text(text)
    with pytest.raises(UsageError, match="keep_day"):
        read_keep_days(load_config(home))


@pytest.mark.parametrize(
    ("table", "column"), [("jobs", "name"), ("jobs", "hedge"), ("attempts", "body"), ("attempt_steps", "last_step"),
                      ("refusals", "hints"), ("clusters", "body")],
)  # fmt: skip
def test_a_missing_column_is_reported_in_one_sentence(home: Path, ask: Ask, table: str, column: str) -> None:
    with closing(sqlite3.connect(home / "state.db")) as connection:
        connection.execute("PRAGMA writable_schema=ON")
        changed = connection.execute(
            "UPDATE sqlite_master SET sql = replace(sql, ?, ?) WHERE name = ?", (f" {column} ", f" {column}_ ", table)
        )
        assert changed.rowcount == 1
        connection.commit()
    for arguments in READS:
        ask(*arguments)


def test_job_that_an_index_has_lost_is_a_damaged_row(tmp_path: Path) -> None:
    store = Store(tmp_path / "state.db", clock=SystemClock())
    store.close()
    with closing(sqlite3.connect(tmp_path / "state.db")) as connection:
        connection.execute(
            "CREATE TRIGGER lose AFTER INSERT ON jobs BEGIN UPDATE jobs SET id = id + 1000 WHERE id = NEW.id; END"
        )
        connection.commit()
    store = Store(tmp_path / "state.db", clock=SystemClock())
    try:
        with pytest.raises(DamagedRowError, match="cannot be found by its ID"):
            store.jobs.add("train", Task(run="x"))
        assert not store.jobs.list(), "nothing is left of it"
    finally:
        store.close()
