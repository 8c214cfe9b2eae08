"""Backups of a server, restores, and the fence between the old server and the new one."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import json
import os
import shutil
import sqlite3
import tarfile
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from broker.app.backup_files import (
    ASIDE_S,
    BLOCK_BYTES,
    HEADER,
    KEPT_S,
    NONCE_BYTES,
    forget_asides,
    seal_folder,
    unseal_folder,
)
from broker.app.backups import CONFIRM_S, LEASE_S, Backups, keep_record, pack_state, read_epoch_number
from broker.app.container import Context
from broker.errors import FencedError, StateError, TransientError, UsageError
from broker.provision.adoption import SETTLED_S_MIN
from broker.serve.credentials import ensure_credentials
from broker.serve.keys import create_key, read_keys
from broker.serve.replicas import find_folder
from broker.server.backup import _step, keep_backup
from broker.storage.base import StoredKey
from broker.storage.folder import FolderBucket
from broker.types import JobStatus, Resources, ScheduleSpec, Secret, Task

TASK = Task(run="true", resources=(Resources(cloud="local"),), secrets={"TOKEN": Secret(value="swordfish")})


class FrozenClock:
    def __init__(self, now_s: float) -> None:
        self.value_s = now_s

    def now_s(self) -> float:
        return self.value_s

    async def sleep(self, duration_s: float) -> None:
        raise AssertionError("nothing here waits")


class Place(FolderBucket):
    """A folder that does not answer while it is away."""

    is_away = False

    def list_keys(self, prefix: str = "") -> list[StoredKey]:
        if self.is_away:
            raise TransientError("no answer")
        return list(super().list_keys(prefix))


def open_server(home: Path, place: Path, clock: FrozenClock) -> tuple[Context, Backups, Place]:
    bucket = Place(place)
    backups = Backups(home, place.as_uri(), clock=clock, bucket=bucket)
    context = Context(home)
    if (home / "state.db").exists():
        context.store.confirm = backups.confirm
    return context, backups, bucket


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "place"


@pytest.fixture
def clock() -> FrozenClock:
    return FrozenClock(1_800_000_000.0)


@pytest.fixture
def old(tmp_path: Path, place: Path, clock: FrozenClock) -> tuple[Context, Backups, Place]:
    home = tmp_path / "old"
    Context(home).store.close()
    return open_server(home, place, clock)


def restore(tmp_path: Path, place: Path, clock: FrozenClock, name: str = "new") -> Context:
    home = tmp_path / name
    home.mkdir(exist_ok=True)
    shutil.copy(tmp_path / "old" / "secret.key", home / "secret.key")
    Backups(home, place.as_uri(), clock=clock).restore()
    return open_server(home, place, clock)[0]


def test_restored_server_has_the_jobs_secrets_and_keys(
    tmp_path: Path, place: Path, clock: FrozenClock, old: tuple[Context, Backups, Place]
) -> None:
    context, backups, _ = old
    job = context.store.jobs.add("train", TASK)
    (tmp_path / "old" / "keys" / "dev-1").mkdir(parents=True)
    (tmp_path / "old" / "keys" / "dev-1" / "login").write_text("private")
    assert backups.write_if_changed()
    new = restore(tmp_path, place, clock)
    found = new.store.jobs.get(job.id)
    assert found is not None and found.stem == job.stem and found.task.secrets["TOKEN"].value == "swordfish"
    assert found.first_attempt == job.first_attempt + 1000, "numbers that the old server may have used are skipped"
    assert (tmp_path / "new" / "keys" / "dev-1" / "login").read_text() == "private"
    assert new.config.owner == context.config.owner
    assert b"swordfish" not in b"".join(path.read_bytes() for path in place.rglob("*") if path.is_file())


def test_restored_server_has_the_keys_certificates_and_secrets_of_its_services(
    tmp_path: Path, place: Path, clock: FrozenClock, old: tuple[Context, Backups, Place]
) -> None:
    context, backups, _ = old
    service = context.store.services.add("web", TASK, host="127.0.0.1", port=1, wanted=1)
    folder = find_folder(context.config, service)
    create_key(folder, "ann", now_s=clock.now_s())
    ensure_credentials(folder, "web")
    folder.log.write_text("not worth a copy")
    assert backups.write_if_changed()
    new = restore(tmp_path, place, clock)
    task = new.store.services.get_task("web", 1)
    assert task.secrets["TOKEN"].value == "swordfish"
    found = find_folder(new.config, service)
    assert read_keys(found) == read_keys(folder) and read_keys(found).keys
    assert found.replica_pem.read_bytes() == folder.replica_pem.read_bytes()
    assert sorted(path.name for path in found.path.iterdir()) == ["balancer.pem", "keys.json", "replica.pem"]


def upload(home: Path, text: str) -> Path:
    """Put a folder into the uploads of a state folder, as the server does; return its path."""
    digest = hashlib.sha256(text.encode()).hexdigest()
    folder = home / "uploads" / digest / "code"
    (folder / "empty").mkdir(parents=True)
    (folder / "train.py").write_text(text)
    (folder / "train.py").chmod(0o755)
    (folder / "link").symlink_to("train.py")
    os.utime(folder / "train.py", (1e9, 1e9))
    return folder


def test_restored_server_has_the_files_of_live_work_below_its_own_folder(
    tmp_path: Path, place: Path, clock: FrozenClock, old: tuple[Context, Backups, Place]
) -> None:
    context, backups, _ = old
    home = tmp_path / "old"
    code, weights, ended = upload(home, "print(1)"), upload(home, "x" * (BLOCK_BYTES + 1)), upload(home, "over")
    store = context.store
    job = store.jobs.add("train", Task(run="cat code", workdir=str(code), file_mounts={"/w": f"{weights}/train.py"}))
    over = store.jobs.add("over", Task(run="true", workdir=str(ended)))
    store.jobs.set_status(over.id, JobStatus.SUCCEEDED)
    service = store.services.add("web", Task(run="true", workdir=str(code)), host="127.0.0.1", port=1, wanted=1)
    assert backups.write_if_changed()
    sent = {path.name for path in (place / "files").iterdir()}
    assert sent == {code.parent.name, weights.parent.name}
    assert b"print(1)" not in (place / "files" / code.parent.name).read_bytes()
    shutil.rmtree(home / "uploads")

    new = restore(tmp_path, place, clock)
    found = new.store.jobs.get(job.id)
    assert found is not None and found.task.workdir is not None
    there = Path(found.task.workdir)
    assert there == tmp_path / "new" / "uploads" / code.parent.name / "code"
    program = there / "train.py"
    assert program.read_text() == "print(1)" and os.access(program, os.X_OK) and program.stat().st_mtime == 1e9
    assert (there / "link").readlink() == Path("train.py") and (there / "empty").is_dir()
    assert Path(found.task.file_mounts["/w"]).read_text() == "x" * (BLOCK_BYTES + 1)
    assert new.store.services.get_task(service.name, 1).workdir == str(there)
    assert context.store.jobs.get(job.id) == replace(found, task=job.task, first_attempt=job.first_attempt)


def test_uploads_are_written_once_and_deleted_an_hour_after_their_last_use(
    tmp_path: Path, place: Path, clock: FrozenClock, old: tuple[Context, Backups, Place]
) -> None:
    context, backups, _ = old
    code = upload(tmp_path / "old", "print(1)")
    job = context.store.jobs.add("train", Task(run="true", workdir=str(code)))
    assert backups.write_if_changed()
    first = (place / "files" / code.parent.name).read_bytes()
    context.store.jobs.add("again", Task(run="true", workdir=str(code)))
    again = open_server(tmp_path / "old", place, clock)[1]
    assert again.write_if_changed()
    assert (place / "files" / code.parent.name).read_bytes() == first, "another process finds it in the bucket"
    for each in context.store.jobs.list():
        context.store.jobs.set_status(each.id, JobStatus.SUCCEEDED)
    assert backups.write_if_changed()
    clock.value_s += KEPT_S / 2
    assert not backups.write_if_changed() and (place / "files" / code.parent.name).exists()
    clock.value_s += KEPT_S / 2
    assert not backups.write_if_changed() and not (place / "files" / code.parent.name).exists()
    assert job.task.workdir == str(code)


@pytest.mark.parametrize("damage", ["cut", "changed", "other", "swapped"])
def test_damaged_uploads_are_refused_before_the_state_is_in_place(
    tmp_path: Path, place: Path, clock: FrozenClock, old: tuple[Context, Backups, Place], damage: str
) -> None:
    context, backups, _ = old
    codes = [upload(tmp_path / "old", text) for text in ("x" * 3 * BLOCK_BYTES, "y")]
    for code in codes:
        context.store.jobs.add("train", Task(run="true", workdir=str(code)))
    assert backups.write_if_changed()
    stored = [place / "files" / code.parent.name for code in codes]
    content = stored[0].read_bytes()
    if damage == "other":
        stored[0].write_bytes(stored[1].read_bytes())
    elif damage == "swapped":
        size = HEADER.size + NONCE_BYTES + HEADER.unpack_from(content)[1]
        stored[0].write_bytes(content[size : 2 * size] + content[:size] + content[2 * size :])
    elif damage == "cut":
        stored[0].write_bytes(content[: HEADER.size + HEADER.unpack_from(content)[1] + NONCE_BYTES])  # one whole block
    else:
        stored[0].write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(StateError, match="damaged"):
        restore(tmp_path, place, clock)
    assert not (tmp_path / "new" / "state.db").exists()
    stored[0].write_bytes(content)
    assert restore(tmp_path, place, clock).store.jobs.count() == 2


def test_upload_without_its_last_block_is_incomplete_even_if_all_files_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("broker.app.backup_files.BLOCK_BYTES", tarfile.RECORDSIZE)
    folder, sealed, key = tmp_path / "folder", tmp_path / "sealed", bytes(32)
    folder.mkdir()
    (folder / "a").write_text("x")
    seal_folder(folder, sealed, digest="d", key=key)
    content = sealed.read_bytes()
    first = HEADER.size + NONCE_BYTES + HEADER.unpack_from(content)[1]
    assert len(content) > first, "the archive fills the first block, and the last one is empty"
    unseal_folder(sealed, tmp_path / "whole", digest="d", key=key)
    assert (tmp_path / "whole" / "a").read_text() == "x"
    sealed.write_bytes(content[:first])
    with pytest.raises(StateError, match="damaged"):
        unseal_folder(sealed, tmp_path / "cut", digest="d", key=key)
    assert not (tmp_path / "cut").exists()


def test_files_of_a_schedule_are_kept_for_its_later_jobs(
    tmp_path: Path, place: Path, clock: FrozenClock, old: tuple[Context, Backups, Place]
) -> None:
    context, backups, _ = old
    code = upload(tmp_path / "old", "print(1)")
    spec = ScheduleSpec(cron="0 2 * * *")
    task = Task(run="true", workdir=str(code))
    context.store.schedules.add("nightly", task, spec, next_s=2e9)
    assert backups.write_if_changed()
    assert (place / "files" / code.parent.name).exists()
    store = restore(tmp_path, place, clock).store
    (schedule,) = store.schedules.list()
    workdir = Path(str(store.schedules.get_task(schedule).workdir))
    assert workdir.is_relative_to(tmp_path / "new") and (workdir / "train.py").exists()


def test_missing_upload_is_reported_and_the_rest_is_restored(
    tmp_path: Path, place: Path, clock: FrozenClock, old: tuple[Context, Backups, Place]
) -> None:
    context, backups, _ = old
    code = upload(tmp_path / "old", "print(1)")
    context.store.jobs.add("train", Task(run="true", workdir=str(code)))
    assert backups.write_if_changed()
    (place / "files" / code.parent.name).unlink()
    (tmp_path / "new").mkdir()
    shutil.copy(tmp_path / "old" / "secret.key", tmp_path / "new" / "secret.key")
    restored = Backups(tmp_path / "new", place.as_uri(), clock=clock).restore()
    assert restored.missing == (code.parent.name,)
    assert Context(tmp_path / "new").store.jobs.count() == 1


def test_restored_server_has_the_files_that_describe_its_clouds(
    tmp_path: Path, place: Path, clock: FrozenClock, old: tuple[Context, Backups, Place]
) -> None:
    for name in ("ssh_pools.yaml", "slurm.yaml", "kubernetes.yaml", "aws.toml", "gcp.toml"):
        (tmp_path / "old" / name).write_text(f"# {name}")
    assert old[1].write_if_changed()
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "aws.toml").write_text("# of this machine")
    restore(tmp_path, place, clock)
    assert (tmp_path / "new" / "ssh_pools.yaml").read_text() == "# ssh_pools.yaml"
    assert (tmp_path / "new" / "gcp.toml").read_text() == "# gcp.toml"
    assert (tmp_path / "new" / "aws.toml").read_text() == "# of this machine", "files that are there stay"


def test_unchanged_state_is_not_written_again(old: tuple[Context, Backups, Place]) -> None:
    context, backups, _ = old
    assert backups.write_if_changed()
    context.store.leader.lead()
    assert backups.write_if_changed(), "an epoch is a change"
    context.store.leader.beat()
    assert not backups.write_if_changed(), "a heartbeat is not"
    context.store.jobs.add("train", TASK)
    assert backups.write_if_changed()


def test_replaced_server_writes_nothing_after_a_restore(
    tmp_path: Path, place: Path, clock: FrozenClock, old: tuple[Context, Backups, Place]
) -> None:
    context, backups, _ = old
    context.store.jobs.add("before", TASK)
    backups.write_if_changed()
    new = restore(tmp_path, place, clock)
    new.store.jobs.add("new", TASK)
    clock.value_s += CONFIRM_S
    with pytest.raises(FencedError, match="was replaced by one that was restored"):
        context.store.jobs.add("late", TASK)
    again, _, _ = open_server(tmp_path / "old", place, clock)  # its machine comes back
    with pytest.raises(FencedError):
        again.store.jobs.add("later", TASK)
    assert [job.name for job in again.store.jobs.list()] == ["before"]
    assert [job.name for job in new.store.jobs.list()] == ["before", "new"]


def test_second_restore_fences_the_first(
    tmp_path: Path, place: Path, clock: FrozenClock, old: tuple[Context, Backups, Place]
) -> None:
    old[1].write_if_changed()
    first = restore(tmp_path, place, clock, "first")
    second = restore(tmp_path, place, clock, "second")
    second.store.jobs.add("train", TASK)
    with pytest.raises(FencedError):
        clock.value_s += CONFIRM_S
        first.store.jobs.add("train", TASK)


def test_server_without_its_bucket_writes_within_its_lease_only(
    clock: FrozenClock, old: tuple[Context, Backups, Place]
) -> None:
    context, backups, bucket = old
    context.store.confirm = backups.confirm
    context.store.jobs.add("one", TASK)
    bucket.is_away = True
    clock.value_s += LEASE_S - 1
    context.store.jobs.add("two", TASK)
    clock.value_s += 1
    with pytest.raises(StateError, match="does not respond"):
        context.store.jobs.add("three", TASK)
    bucket.is_away = False
    context.store.jobs.add("four", TASK)


def test_lease_ends_before_a_restored_server_acts() -> None:
    assert CONFIRM_S < LEASE_S <= SETTLED_S_MIN


def test_lease_begins_before_the_question_and_not_with_its_answer(
    clock: FrozenClock, old: tuple[Context, Backups, Place], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another server may have taken the place while the answer was on its way."""
    _, backups, bucket = old
    list_keys = bucket.list_keys

    def answer_late(prefix: str = "") -> list[StoredKey]:
        found = list_keys(prefix)
        clock.value_s += 30.0
        return found

    monkeypatch.setattr(bucket, "list_keys", answer_late)
    backups.confirm()
    monkeypatch.undo()
    bucket.is_away = True
    clock.value_s += LEASE_S - 31.0
    backups.refresh()
    clock.value_s += 1.0
    with pytest.raises(StateError, match="does not respond"):
        backups.refresh()


def test_confirmation_from_the_future_counts_for_nothing(
    tmp_path: Path, clock: FrozenClock, old: tuple[Context, Backups, Place]
) -> None:
    """The clock was set back since: an old confirmation must not hold until the clock gets there again."""
    _, backups, bucket = old
    backups.confirm()
    bucket.is_away = True
    clock.value_s -= 3600.0
    with pytest.raises(StateError, match="does not respond"):
        backups.confirm()


def test_each_restore_continues_from_the_newest_copy(
    tmp_path: Path, place: Path, clock: FrozenClock, old: tuple[Context, Backups, Place]
) -> None:
    old[1].write_if_changed()
    first = restore(tmp_path, place, clock, "first")
    first.store.jobs.add("later", TASK)
    Backups(tmp_path / "first", place.as_uri(), clock=clock).write_if_changed()
    assert [job.name for job in restore(tmp_path, place, clock, "second").store.jobs.list()] == ["later"]


def test_record_keeps_the_time_of_the_last_backup_while_later_ones_fail(tmp_path: Path) -> None:
    path = tmp_path / "server" / "backup.json"
    keep_record(tmp_path, "s3://b", now_s=5.0, error=None)
    keep_record(tmp_path, "s3://b", now_s=9.0, error=TransientError("no answer"))
    assert json.loads(path.read_text()) == {"url": "s3://b", "error": "no answer", "time_s": 5.0}
    keep_record(tmp_path, "s3://b", now_s=12.0, error=None)
    assert json.loads(path.read_text()) == {"url": "s3://b", "error": None, "time_s": 12.0}


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), sqlite3.OperationalError("full")])
def test_backup_without_room_on_the_disk_is_reported_and_the_server_continues(
    tmp_path: Path, old: tuple[Context, Backups, Place], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """A copy of the state takes as much room as the state; the server would restart again and again."""
    home, backups = tmp_path / "old", old[1]

    def fail(*arguments: object, **named: object) -> None:
        raise error

    def refuse(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("broker.app.backups.pack_state", fail)
        _step(backups, home, is_due=True)
        told = json.loads((home / "server/backup.json").read_text())
        assert "cannot be used" in told["error"]
        patch.setattr(Path, "replace", refuse)  # not even the report can be written
        _step(backups, home, is_due=True)
    _step(backups, home, is_due=True)
    assert json.loads((home / "server/backup.json").read_text())["error"] is None
    assert not list((home / "server").glob(".*")), "failures leave no files"


def test_last_backup_of_a_server_that_stops_waits_for_the_one_under_way(
    tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The older copy would replace the last one if its upload ended later."""
    (tmp_path / "config.toml").write_text(f'backup = "{place.as_uri()}"\n')
    has_begun, may_end = threading.Event(), threading.Event()
    seen: list[str] = []

    def write(backups: Backups, home: Path, *, is_due: bool) -> None:
        number = sum(each.startswith("begin") for each in seen)
        seen.append(f"begin {number}")
        has_begun.set()
        if number == 0:
            may_end.wait()
        seen.append(f"end {number}")

    async def stop() -> None:
        keeping = asyncio.create_task(keep_backup(tmp_path))
        await asyncio.to_thread(has_begun.wait)
        keeping.cancel()
        await asyncio.wait([keeping], timeout=0.1)
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await keeping

    monkeypatch.setattr("broker.server.backup._step", write)
    asyncio.run(stop())
    assert seen == ["begin 0", "end 0", "begin 1", "end 1"]


def test_copies_that_a_killed_backup_left_behind_are_deleted(
    tmp_path: Path, clock: FrozenClock, old: tuple[Context, Backups, Place]
) -> None:
    """A server that is killed in the middle again and again must not fill its disk."""
    home = tmp_path / "old"

    def die(connection: sqlite3.Connection) -> None:
        (aside,) = (path for path in home.iterdir() if (path / "state.db").exists())
        shutil.copytree(aside, aside.with_name(f"{aside.name}-killed"))

    pack_state(home, edit=die)
    (left,) = home.glob("*-killed")
    for age_s, is_kept in ((ASIDE_S - 60.0, True), (ASIDE_S + 60.0, False)):
        os.utime(left, (clock.value_s - age_s, clock.value_s - age_s))
        forget_asides(home, now_s=clock.value_s)
        assert left.exists() is is_kept


def test_place_of_another_server_is_refused(
    tmp_path: Path, place: Path, clock: FrozenClock, old: tuple[Context, Backups, Place]
) -> None:
    old[1].write_if_changed()
    with pytest.raises(UsageError, match="holds the backups of another state folder"):
        Backups(tmp_path / "other", place.as_uri(), clock=clock).ensure_epoch()
    assert read_epoch_number(tmp_path / "other") == 0, "its nodes obey a server without backups"


def test_restore_that_was_interrupted_is_repeated_under_the_same_epoch(
    tmp_path: Path, place: Path, clock: FrozenClock, old: tuple[Context, Backups, Place],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    old[1].write_if_changed()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Backups, "_put_in_place", lambda self, folder: (_ for _ in ()).throw(KeyboardInterrupt))
        restore(tmp_path, place, clock)
    restore(tmp_path, place, clock)
    assert [path.name for path in sorted((place / "epochs").iterdir())] == ["000001", "000002"]


def test_restored_state_is_on_the_disk_before_its_database_is_in_place(
    tmp_path: Path,
    place: Path,
    clock: FrozenClock,
    old: tuple[Context, Backups, Place],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After a power cut, a rename may survive without the bytes: with a torn epoch, the server could never write."""
    home = tmp_path / "new"
    context, backups, _ = old
    context.store.jobs.add("train", TASK)
    assert backups.write_if_changed()
    flushed: set[tuple[int, int]] = set()
    unflushed: list[str] = []
    fsync, replace_path = os.fsync, Path.replace

    def record(descriptor: int) -> None:
        found = os.fstat(descriptor)
        flushed.add((found.st_dev, found.st_ino))
        fsync(descriptor)

    def check(source: Path, target: Path) -> Path:
        if Path(target) == home / "state.db":
            wanted = [home, *home.glob("server/*"), *home.glob("secrets/*"), home / "server", home / "secrets"]
            found = [each for each in wanted if each.name != "confirmed"]
            assert {"epoch.json", "secrets"} <= {each.name for each in found}
            stats = [(each, each.stat()) for each in found]
            unflushed.extend(str(each) for each, stat in stats if (stat.st_dev, stat.st_ino) not in flushed)
        return replace_path(source, target)

    monkeypatch.setattr(os, "fsync", record)
    monkeypatch.setattr(Path, "replace", check)
    restore(tmp_path, place, clock)
    assert unflushed == []


def test_backup_encrypted_with_another_key_is_refused(
    tmp_path: Path, place: Path, clock: FrozenClock, old: tuple[Context, Backups, Place]
) -> None:
    old[1].write_if_changed()
    (tmp_path / "thief").mkdir()
    with pytest.raises(StateError, match="encrypted with another key"):
        Backups(tmp_path / "thief", place.as_uri(), clock=clock).restore()
    old[0].store.confirm = old[1].confirm
    clock.value_s += CONFIRM_S
    old[0].store.jobs.add("train", TASK)  # a restore that cannot be read fences no one
