"""Files of this machine that cannot be read, or vanish, while a task sends them. Root may read every file."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from broker.app.programs import digest_files
from broker.app.sources import check_sources
from broker.client.files import write_archive
from broker.errors import InvalidRequestError, TransientError, UsageError
from broker.runtime.sending import send_source
from broker.runtime.skyignore import walk
from broker.types import Node, NodeState, Task

NODE = Node(id="n", cloud="x", owner="me", cluster="c", attempt=1, rank=0, state=NodeState.RUNNING)


@pytest.fixture
def work(tmp_path: Path) -> Path:
    (work := tmp_path / "work").mkdir()
    (work / "train.py").write_text("pass")
    (work / "data").mkdir()
    (work / "data" / "notes").write_text("x")
    return work


@pytest.fixture
def forbid(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Make files unreadable, as the kernel does for users other than root."""
    forbidden: set[Path] = set()
    access, read, scan = os.access, Path.read_bytes, os.scandir

    def refuse(path: Any) -> None:
        if Path(path) in forbidden:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))

    def check(path: Any, mode: int, **options: Any) -> bool:
        return Path(path) not in forbidden and access(path, mode, **options)

    def read_bytes(path: Path) -> bytes:
        refuse(path)
        return read(path)

    def scandir(path: Any = ".") -> Iterator[os.DirEntry[str]]:
        refuse(path)
        return scan(path)

    monkeypatch.setattr(os, "access", check)
    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    monkeypatch.setattr(os, "scandir", scandir)
    return forbidden.add


def test_program_that_cannot_be_read_is_named(work: Path, forbid: Callable[[Path], None]) -> None:
    forbid(work / "train.py")
    with pytest.raises(UsageError, match=r"`workdir`: cannot read .*/work/train\.py: Permission denied") as caught:
        digest_files(Task(workdir=str(work), run="python train.py"))
    assert ".skyignore" in caught.value.hints[0] and caught.value.exit_code == 2


@pytest.mark.parametrize("name", ["train.py", "data/notes", "data"])
def test_launch_is_refused_before_it_is_paid_for(work: Path, forbid: Callable[[Path], None], name: str) -> None:
    task = Task(workdir=str(work), file_mounts={"~/f": str(work / "train.py"), "~/b": "s3://b/x"})
    check_sources([task])
    forbid(work / name)
    with pytest.raises(UsageError, match=rf"`workdir`: cannot read .*/work/{name}: Permission denied"):
        check_sources([task])
    (work / ".skyignore").write_text(f"{name}\n")
    check_sources([Task(workdir=str(work))])


def test_unreadable_folder_is_not_left_out_of_what_is_sent(work: Path, forbid: Callable[[Path], None]) -> None:
    forbid(work / "data")
    with pytest.raises(PermissionError):
        list(walk(work))
    with pytest.raises(PermissionError), (work.parent / "archive").open("wb") as target:
        write_archive(work, target)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (PermissionError(errno.EACCES, "Permission denied", "train.py"), InvalidRequestError),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", ".train.py.swp"), TransientError),
    ],
)
def test_daemon_ends_a_job_for_unreadable_files_and_retries_those_that_vanish(
    work: Path, error: OSError, kind: type[Exception]
) -> None:
    error.filename = str(work / error.filename)

    class Broken:
        async def put(self, node: Node, source: Path, target: str) -> None:
            raise error

    with pytest.raises(kind, match=str(error.filename)):
        asyncio.run(send_source(Broken(), NODE, field="workdir", source=work, target="w"))  # type: ignore[arg-type]
    error.filename = "/usr/bin/ssh"
    with pytest.raises(type(error)):
        asyncio.run(send_source(Broken(), NODE, field="workdir", source=work, target="w"))  # type: ignore[arg-type]
