"""The files of a task on their way to a server: equal files give equal archives, and each is sent under its digest."""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
from pathlib import Path
from typing import IO

import pytest

from broker.client.files import UPLOADED, upload_files, write_archive
from broker.errors import UsageError
from broker.types import StorageMount, Task


def pack(path: Path) -> bytes:
    target = io.BytesIO()
    write_archive(path, target)
    return target.getvalue()


NAMES = {"b.py": 0o640, "a.sh": 0o700, "sub/c.txt": 0o600, **{f"f{number:02}": 0o600 for number in range(20)}}


def make_folder(root: Path, *, is_reversed: bool = False) -> Path:
    folder = root / "work"
    (folder / "sub").mkdir(parents=True)
    for name in sorted(NAMES, reverse=is_reversed):
        path = folder / name
        path.write_text(name)
        path.chmod(NAMES[name])
        if os.getuid() == 0:
            os.chown(path, 1234, 1234)
        os.utime(path, (1_700_000_000.5, 1_700_000_000.5))
    return folder


def test_archive_has_names_modes_and_times_but_no_owners_and_no_times_of_folders(tmp_path: Path) -> None:
    with tarfile.open(fileobj=io.BytesIO(pack(make_folder(tmp_path)))) as archive:
        entries = {each.name: each for each in archive.getmembers()}
    assert list(entries) == sorted({"work", "work/sub", *(f"work/{name}" for name in NAMES)})
    assert {name: entries[name].mode for name in ("work/a.sh", "work/b.py")} == {"work/a.sh": 0o755, "work/b.py": 0o644}
    assert {each.mtime for each in entries.values() if each.isfile()} == {1_700_000_000}, "nodes compare file times"
    assert {each.mtime for each in entries.values() if each.isdir()} == {0}
    assert {(each.uid, each.gid, each.uname, each.gname) for each in entries.values()} == {(0, 0, "", "")}


def test_equal_folders_give_equal_archives_wherever_they_are(tmp_path: Path) -> None:
    one, other = make_folder(tmp_path / "one"), make_folder(tmp_path / "other", is_reversed=True)
    os.utime(other, (5, 5))
    assert pack(one) == pack(other)
    (other / "b.py").write_text("B")
    assert pack(one) != pack(other)


def test_second_name_of_a_file_is_sent_with_its_content_and_a_pipe_is_not_sent(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    (folder / "z.py").hardlink_to(folder / "b.py")
    os.mkfifo(folder / "pipe")
    (folder / "link").symlink_to("b.py")
    with tarfile.open(fileobj=io.BytesIO(pack(folder))) as archive:
        second = archive.extractfile("work/z.py")
        assert second is not None and second.read() == b"b.py" and archive.getmember("work/z.py").isreg()
        assert archive.getmember("work/link").linkname == "b.py"
        assert "work/pipe" not in archive.getnames()


def test_each_local_path_of_a_task_is_sent_under_its_digest_and_urls_are_kept(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    sent: dict[str, bytes] = {}

    def send(digest: str, archive: IO[bytes]) -> None:
        sent[digest] = archive.read()

    mount = StorageMount(target="/m", source=(str(folder / "sub"), "s3://b/c"), mode="COPY")
    task = Task(
        workdir=str(folder), file_mounts={"/f": str(folder / "b.py"), "/g": "s3://b/data"}, storage_mounts=(mount,)
    )
    moved = upload_files(task, send)
    assert all(hashlib.sha256(content).hexdigest() == digest for digest, content in sent.items()) and len(sent) == 3
    assert moved.file_mounts["/g"] == "s3://b/data" and moved.storage_mounts[0].source[1] == "s3://b/c"
    named = [moved.workdir, moved.file_mounts["/f"], moved.storage_mounts[0].source[0]]
    assert [str(each).rpartition("/")[2] for each in named] == ["work", "b.py", "sub"]
    assert {str(each).removeprefix(UPLOADED).partition("/")[0] for each in named} == set(sent)


def test_missing_path_is_named_before_anything_is_sent(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        upload_files(Task(workdir=str(tmp_path / "none")), lambda digest, archive: pytest.fail("sent"))
