"""Files of secrets, also for the rows that damage has left."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from broker.state.secret_files import SecretFiles


@pytest.mark.parametrize("uid", ["k7wq2", "", "\0", "a\0b", "../../x", "a/b", "\udcff", "\n"])
def test_a_damaged_uid_neither_fails_nor_leads_out_of_the_folder(tmp_path: Path, uid: str) -> None:
    folder = tmp_path / "a" / "secrets"
    folder.parent.mkdir()
    files = SecretFiles(folder)
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

    monkeypatch.setattr(os, "fsync", record)
    SecretFiles(folder).write(3, "k7wq2", {"TOKEN": "t"})
    (file,) = folder.iterdir()
    assert seen == [(file, True), (folder, True), (tmp_path, True)]
