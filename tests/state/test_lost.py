"""A lost, emptied or replaced state file is an error with hints to recover it, from a copy."""

from __future__ import annotations

import json
import sqlite3
import subprocess
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import pytest

from broker.clock import SystemClock
from broker.config import load_config
from broker.errors import StateError
from broker.state import restoring
from broker.state.copies import COPIES_MAX, is_copy_due, list_copies, write_copy
from broker.state.restoring import find_copy, reset, restore
from broker.state.schema import MIGRATIONS
from broker.state.store import Store
from broker.types import EventKind, JobStatus, Secret, Task
from tests.state.samples import Hands

CLOCK = SystemClock()
OWNER = "0123456789ab"
IDENTITY = 8  # the last schema without a lineage and random parts of names


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The path of a closed store with one job."""
    path = tmp_path / "home" / "state.db"
    with closing(Store(path, clock=CLOCK, owner=OWNER)) as store:
        store.jobs.add("train", Task())
    return path


def open_store(path: Path, owner: str | None = OWNER) -> Store:
    return Store(path, clock=CLOCK, owner=owner)


def remove(path: Path) -> None:
    for each in path.parent.glob("state.db*"):
        each.unlink()


@pytest.mark.parametrize("damage", ["missing", "empty"])
def test_a_lost_state_file_is_not_a_fresh_start(path: Path, damage: str) -> None:
    remove(path)
    if damage == "empty":
        path.touch()
    with pytest.raises(StateError, match=f"is {damage}") as caught:
        open_store(path)
    assert caught.value.exit_code == 4
    assert any("broker state restore" in hint for hint in caught.value.hints)
    assert any("broker state reset" in hint for hint in caught.value.hints)
    assert path.exists() is (damage == "empty"), "a failed open creates nothing"


def test_the_error_names_the_newest_copy_and_its_date(path: Path) -> None:
    store = open_store(path)
    copy = list_copies(store.copy().parent.parent / "state.db")[0]
    store.close()
    remove(path)
    with pytest.raises(StateError) as caught:
        open_store(path)
    import time

    assert time.strftime("%Y-%m-%d", time.localtime(copy.time_s)) in caught.value.hints[0]


def test_commits_in_the_log_of_a_copy_are_restored(path: Path, tmp_path: Path) -> None:
    """Someone copied the folder with `cp` while a daemon had the file open: the newest commits are only in the log."""
    aside = tmp_path / "own"
    aside.mkdir()
    with closing(open_store(path)) as store:
        store.jobs.add("newest", Task())
        # In another process: reading the file here would end the locks of the open store.
        subprocess.run(["cp", str(path), f"{path}-wal", str(aside)], check=True)
    assert (aside / "state.db-wal").stat().st_size
    restore(path, aside / "state.db", clock=CLOCK, owner=OWNER)
    with closing(open_store(path)) as store:
        assert [line.name for line in store.jobs.list_lines()] == ["newest", "train"]


def test_copy_of_a_clock_that_was_ahead_is_neither_taken_for_the_newest_nor_a_reason_for_more(path: Path) -> None:
    now_s = 1_800_000_000.0
    ahead, old, newest = (write_copy(path, now_s=now_s + days * 86400) for days in (5000, -3, -0.5))
    assert find_copy(path, None, now_s=now_s) == newest != ahead
    assert not is_copy_due(path, now_s=now_s), "one copy a day, not one at each look"
    newest.unlink()
    assert is_copy_due(path, now_s=now_s)
    old.unlink()
    assert find_copy(path, None, now_s=now_s) == ahead, "better than none"
    for days in range(COPIES_MAX):
        write_copy(path, now_s=now_s + (6000 + days) * 86400)
    write_copy(path, now_s=now_s)
    assert not is_copy_due(path, now_s=now_s), "the new one is kept"


def test_a_damaged_copy_is_refused_with_the_reason(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(open_store(path)) as store:
        copy = store.copy()
    monkeypatch.setattr(restoring, "check_integrity", lambda database: ["row 7 missing from index"])
    with pytest.raises(StateError, match="cannot be used: row 7 missing from index"):
        restore(path, copy, clock=CLOCK, owner=OWNER)
    open_store(path).close()  # the present file stays in its place


def test_another_database_in_its_place_is_refused(path: Path, tmp_path: Path) -> None:
    Store(tmp_path / "other.db", clock=CLOCK).close()
    remove(path)
    (tmp_path / "other.db").rename(path)
    with pytest.raises(StateError, match="another file has replaced it"):
        open_store(path)


def test_an_older_store_gets_its_guard_and_columns(tmp_path: Path) -> None:
    """The file is written as by the last schema without a guard and those columns."""
    path = tmp_path / "state.db"
    with closing(sqlite3.connect(path)) as connection:
        for statement in (each for group in MIGRATIONS[:IDENTITY] for each in group):
            assert isinstance(statement, str)
            connection.execute(statement)
        connection.execute(f"PRAGMA user_version={IDENTITY}")
        connection.execute(
            "INSERT INTO jobs (name, status, task, secret_names, submitted_s) "
            "VALUES ('old', 'PENDING', '{}', '[]', 1.0)"
        )
        connection.commit()
    store = open_store(path)
    (job,) = store.jobs.list()
    assert (job.uid, job.stem, job.folder, job.name_cluster(2)) == ("", "job-1", "job-1", "job-1-2")
    assert len(store.meta.lineage) == 16 and store.meta.salt == ""
    guard = json.loads((tmp_path / "state.guard").read_text())
    assert guard["lineage"] == store.meta.lineage and guard["owner"] == OWNER
    assert len(list_copies(path)) == 1, "one was written before the migration"
    new = store.jobs.add("new", Task())
    assert len(new.uid) == 5 and new.name_cluster(1) == f"job-2-{new.uid}-1"


def test_a_new_store_has_nothing_to_copy_before_its_tables_are_made(path: Path) -> None:
    open_store(path)
    assert list_copies(path) == []


def test_guard_and_copies_are_for_their_owner_alone(path: Path) -> None:
    store = open_store(path)
    copy = store.copy()
    assert copy.stat().st_mode & 0o777 == 0o600 and copy.parent.stat().st_mode & 0o777 == 0o700
    assert path.with_name("state.guard").stat().st_mode & 0o777 == 0o600
    assert not list(copy.parent.glob(".new-*"))


def test_one_backup_per_day_and_the_newest_seven_are_kept(tmp_path: Path) -> None:
    clock = Hands()
    store = Store(tmp_path / "state.db", clock=clock)
    for _ in range(20):
        clock.time_s += 43200.0
        store.copy_if_due()
    copies = list_copies(store.path)
    assert len(copies) == COPIES_MAX
    assert {a.time_s - b.time_s for a, b in pairwise(copies)} == {86400.0}


def test_a_copy_that_fails_leaves_the_older_ones(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(path)
    store.copy()
    monkeypatch.setattr("broker.state.copies.sync_file", fail_for_lack_of_space)
    with pytest.raises(StateError, match="No space left"):
        store.copy()
    assert len(list_copies(path)) == 1 and not list((path.parent / "backups").glob(".new-*"))


def fail_for_lack_of_space(path: Path) -> None:
    raise OSError(28, "No space left on device", str(path))


def test_restore_recovers_the_old_state_and_keeps_the_present_file(path: Path) -> None:
    with closing(open_store(path)) as store:
        store.copy()
        store.jobs.add("later", Task())
        store.jobs.set_status(1, JobStatus.SUCCEEDED)
    aside = restore(path, find_copy(path, None), clock=CLOCK, owner=OWNER)
    with closing(open_store(path)) as store:
        (job,) = store.jobs.list()
        assert job.status is JobStatus.PENDING and store.meta.restored_s > 0 and store.meta.salt
        assert [event.kind for event in store.events.list()] == [EventKind.RESTORED]
    assert aside is not None and sqlite3.connect(aside).execute("SELECT count(*) FROM jobs").fetchone()[0] == 2
    assert not list(path.parent.glob(".restoring-*"))


def test_each_restore_skips_more_attempt_numbers_also_over_a_reset(path: Path) -> None:
    with closing(open_store(path)) as store:
        copy = store.copy()
    firsts = []
    for turn in range(3):
        if turn == 2:
            reset(path, clock=CLOCK, owner=OWNER)
        restore(path, copy, clock=CLOCK, owner=OWNER)
        with closing(open_store(path)) as store:
            (job,) = store.jobs.list()
            firsts.append(job.first_attempt)
    assert firsts == [1001, 2001, 3001]


@pytest.mark.parametrize("content", [b"", b"garbage" * 1000], ids=["empty", "garbage"])
def test_a_file_that_is_not_a_database_is_not_restored(path: Path, tmp_path: Path, content: bytes) -> None:
    bad = tmp_path / "bad.db"
    bad.write_bytes(content)
    before = path.read_bytes()
    with pytest.raises(StateError, match="copy"):
        restore(path, bad, clock=CLOCK, owner=OWNER)
    assert path.read_bytes() == before


def test_restore_is_refused_while_another_command_has_the_store_open(path: Path) -> None:
    store = open_store(path)
    copy = store.copy()
    with pytest.raises(StateError, match="another broker command"):
        restore(path, copy, clock=CLOCK, owner=OWNER)
    assert store.jobs.count() == 1


def test_names_after_a_reset_are_new_though_ids_begin_again(path: Path) -> None:
    with closing(open_store(path)) as store:
        old, old_lineage = store.jobs.list()[0], store.meta.lineage
    aside = reset(path, clock=CLOCK, owner=OWNER)
    with closing(open_store(path)) as store:
        new = store.jobs.add("train", Task(secrets={"KEY": Secret(value="v")}))
        assert (new.id, store.meta.lineage != old_lineage) == (old.id, True)
        assert new.folder != old.folder and new.name_cluster(1) != old.name_cluster(1)
    assert aside is not None and aside.exists()


def test_a_retry_keeps_the_first_folder_under_a_name_of_its_own(path: Path) -> None:
    store = open_store(path)
    store.jobs.set_status(1, JobStatus.FAILED)
    first = store.jobs.get(1)
    again = store.jobs.add("train", Task(), resumes=first)
    assert first is not None and again.folder == first.folder and again.name_cluster(2) != first.name_cluster(2)


# -- the owner file ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [None, b"", b"  \n", b"\x00\x01", b"two words", b"\xff\xfe"])
def test_a_lost_or_damaged_owner_is_an_error_beside_a_store_that_has_one(path: Path, content: bytes | None) -> None:
    if content is not None:
        (path.parent / "owner").write_bytes(content)
    with pytest.raises(StateError) as caught:
        load_config(path.parent)
    assert any("broker state restore --owner" in hint for hint in caught.value.hints)
    assert content is not None or not (path.parent / "owner").exists(), "none is drawn"


def test_another_owner_than_the_stores_is_an_error(path: Path) -> None:
    (path.parent / "owner").write_text("ba9876543210")
    with pytest.raises(StateError, match="belongs to"):
        load_config(path.parent)
    with pytest.raises(StateError, match="belongs to"):
        open_store(path, owner="ba9876543210")


def test_the_first_start_draws_an_owner_once(tmp_path: Path) -> None:
    first = load_config(tmp_path / "home")
    assert load_config(tmp_path / "home") == first and len(first.owner) == 12


def test_a_damaged_guard_is_written_again_from_the_store(path: Path) -> None:
    guard = path.with_name("state.guard")
    whole = guard.read_text()
    guard.write_text(whole[:20])
    open_store(path).close()
    assert json.loads(guard.read_text())["lineage"] == json.loads(whole)["lineage"]
    guard.write_text("garbage")
    remove(path)
    with pytest.raises(StateError, match="missing"):
        open_store(path)
