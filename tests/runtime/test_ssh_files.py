"""The comparison before files are sent, on a shell of this machine in place of a node's."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import IO

import pytest

from broker.runtime.transports import ssh_files
from broker.runtime.transports.local import copy
from broker.runtime.transports.ssh_files import RSYNC_BYTES_MIN, RemoteFiles, list_remote, put_files
from broker.sites.openssh import Completed
from broker.types import Node, NodeState

NODE = Node(id="n", cloud="aws", owner="o", cluster="c", attempt=1, rank=0, state=NodeState.RUNNING)


class Here:
    """A transport that runs a node's commands on this machine."""

    async def stream(self, node: Node, command: str, *, stdin: bytes | IO[bytes], timeout_s: float) -> Completed:
        done = subprocess.run(["sh", "-c", command], capture_output=True, check=True)
        return Completed(returncode=0, stdout=done.stdout, stderr=done.stderr)


def look(path: Path, *, is_folder: bool) -> RemoteFiles:
    return asyncio.run(list_remote(Here(), NODE, str(path), is_folder=is_folder))


def test_a_folder_is_listed_by_what_lies_below_it(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a\tname\nof two lines").write_text("abc")
    (tmp_path / "link").symlink_to("sub")
    found = look(tmp_path, is_folder=True)
    assert found.is_folder and set(found.files) == {"sub", "sub/a\tname\nof two lines", "link"}
    assert found.files["sub/a\tname\nof two lines"][0] == 3
    assert found.files["link"][2] == "sub"
    assert found.has_rsync is (shutil.which("rsync") is not None)


def test_listing_a_file_returns_the_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("abc")
    found = look(tmp_path / "file", is_folder=False)
    assert not found.is_folder and {name: size for name, (size, *_) in found.files.items()} == {"": 3}


@pytest.mark.parametrize("is_folder", [True, False])
def test_missing_folder_has_no_files(tmp_path: Path, *, is_folder: bool) -> None:
    found = look(tmp_path / "missing", is_folder=is_folder)
    assert (found.is_folder, found.files) == (False, {})


def test_a_link_to_nothing_is_sent_as_a_link_though_the_node_has_a_file_there(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    (source / "link").symlink_to("nothing")
    (target / "link").write_text("a file")
    asyncio.run(put_files(There(), NODE, source, str(target), remote_shell="ssh", destination="host"))
    assert (target / "link").is_symlink()


class There(Here):
    """A transport that takes sent files, too."""

    async def stream(self, node: Node, command: str, *, stdin: bytes | IO[bytes], timeout_s: float) -> Completed:
        data = stdin if isinstance(stdin, bytes) else stdin.read()
        done = subprocess.run(["sh", "-c", command], input=data, capture_output=True, check=True)
        return Completed(returncode=0, stdout=done.stdout, stderr=done.stderr)


def send(source: Path, target: Path) -> None:
    asyncio.run(put_files(There(), NODE, source, str(target)))


@pytest.mark.parametrize("put", [send, copy])
def test_program_that_became_executable_is_sent_again(tmp_path: Path, *, put: Callable[[Path, Path], None]) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    (source / "run.sh").write_text("#!/bin/sh\n")
    put(source, target)
    assert not os.access(target / "run.sh", os.X_OK)
    (source / "run.sh").chmod(0o755)
    put(source, target)
    assert os.access(target / "run.sh", os.X_OK)
    sent_ns = (target / "run.sh").stat().st_ctime_ns
    put(source, target)
    assert (target / "run.sh").stat().st_ctime_ns == sent_ns, "it is not sent without a change"


@pytest.mark.parametrize("has_rsync", [False, True])
def test_changes_of_a_large_file_are_sent_by_tar_where_this_machine_has_no_rsync_or_one_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, has_rsync: bool
) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    for folder, text in ((source, b"new"), (target, b"old")):
        folder.mkdir()
        (folder / "large").write_bytes(text + bytes(RSYNC_BYTES_MIN))
    (target / "large").touch()
    os.utime(target / "large", (1, 1))
    monkeypatch.setattr(ssh_files.shutil, "which", lambda name: "/bin/false" if has_rsync else None)
    monkeypatch.setattr(ssh_files, "LIST", ssh_files.LIST.replace("command -v rsync >/dev/null", "true"))
    asyncio.run(put_files(There(), NODE, source, str(target), remote_shell="ssh", destination="host"))
    assert (target / "large").read_bytes()[:3] == b"new"
