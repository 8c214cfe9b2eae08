"""Files of secrets, also for the rows that damage has left."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from broker.clock import SystemClock
from broker.state.secret_files import SecretFiles
from broker.state.store import Store
from broker.types import JobStatus, Secret, Task


def open_store(folder: Path) -> Store:
    return Store(folder / "state.db", clock=SystemClock())


@pytest.mark.parametrize("uid", ["k7wq2", "", "\0", "a\0b", "../../x", "a/b", "\udcff", "\n"])
def test_a_damaged_uid_neither_fails_nor_leads_out_of_the_folder(tmp_path: Path, uid: str) -> None:
    folder = tmp_path / "a" / "secrets"
    folder.parent.mkdir()
    files = SecretFiles(folder, open_store(tmp_path))
    files.forget(3, uid)
    files.write(3, uid, {"TOKEN": "t"})
    assert [path.parent for path in tmp_path.rglob("*.json")] == [folder]
    assert files.read(3, uid, ("TOKEN", "OTHER")) == {"TOKEN": "t", "OTHER": ""}
    files.forget(3, uid)
    assert not list(tmp_path.rglob("*.json"))
    assert files.read(3, uid, ("TOKEN",)) == {"TOKEN": ""}


def test_name_of_a_file_is_on_the_disk_when_its_job_may_refer_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A live job without its file would run with empty secrets after a power cut."""
    seen: list[tuple[Path, bool]] = []  # flushed paths, and whether the file of secrets existed
    folder, fsync = tmp_path / "secrets", os.fsync

    def record(descriptor: int) -> None:
        seen.append((Path(f"/proc/self/fd/{descriptor}").readlink(), any(folder.glob("*.json"))))
        fsync(descriptor)

    files = SecretFiles(folder, open_store(tmp_path / "other"))
    monkeypatch.setattr(os, "fsync", record)
    files.write(3, "k7wq2", {"TOKEN": "t"})
    (file,) = folder.iterdir()
    assert seen == [(file, True), (folder, True), (tmp_path, True)]


def test_job_whose_end_could_not_be_recorded_keeps_its_secrets(tmp_path: Path) -> None:
    """For example on a full disk: the job is live, and its next attempt would run with empty secrets."""
    store = open_store(tmp_path)
    job = store.jobs.add("train", Task(secrets={"TOKEN": Secret(value="t")}))

    def end_job(error: OSError | None) -> None:
        with store.transaction():
            assert store.jobs.set_status(job.id, JobStatus.SUCCEEDED)
            if error is not None:
                raise error

    with pytest.raises(OSError, match="full"):
        end_job(OSError("the disk is full"))
    found = store.jobs.get(job.id)
    assert found is not None and not found.status.is_terminal and found.task.secrets["TOKEN"].value == "t"
    end_job(None)
    assert not list((tmp_path / "secrets").iterdir())
