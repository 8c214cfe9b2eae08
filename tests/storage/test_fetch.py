"""Single objects on their way to a node, and a bucket whose login is refused."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest

from broker.errors import AuthError, TransientError
from broker.storage import node_mount, node_objects, upload
from broker.storage.base import StoredKey
from broker.storage.mounts import read_program
from broker.storage.node_mount import ATTEMPTS_MAX, MountError, copy_by_tool, fetch, find_inside, find_rclone_version
from broker.storage.upload import ensure_bucket, is_changed


class BrokenConnection(Exception):
    """The library's error for a response that ended early."""


class Library:
    """A stand-in for obstore: an object in two parts; the connection breaks a number of times after the first part."""

    exceptions = SimpleNamespace(GenericError=BrokenConnection)

    def __init__(self, breaks: int = 0) -> None:
        self.asked, self._breaks = 0, breaks

    def get(self, store: object, path: str) -> Library:
        self.asked += 1
        return self

    def stream(self, part_bytes: int) -> Iterator[bytes]:
        yield b"new"
        if self.asked <= self._breaks:
            raise BrokenConnection
        yield b"er"


META = {"path": "k", "size": 5, "last_modified": datetime.fromtimestamp(1e9, UTC)}


@pytest.mark.parametrize(
    ("content", "age_s", "is_asked"),
    [("older", 0, False), ("older", 1, False), ("older", -1, True), ("old", 1, True), (None, 0, True)],
)
def test_a_file_of_the_same_size_that_is_as_new_is_not_fetched_again(
    tmp_path: Path, content: str | None, age_s: float, is_asked: bool
) -> None:
    file, library = tmp_path / "deep" / "f", Library()
    if content is not None:
        file.parent.mkdir()
        file.write_text(content)
        os.utime(file, (1e9 + age_s, 1e9 + age_s))
    fetch(library, None, META, file)
    assert (library.asked == 1) is is_asked
    assert file.read_text() == ("newer" if is_asked else content)


def test_a_fetched_file_has_the_time_of_its_object_whatever_the_clock_of_the_node(tmp_path: Path) -> None:
    fetch(Library(), None, META, tmp_path / "f")
    replaced = {**META, "last_modified": datetime.fromtimestamp(1e9 + 1, UTC)}
    for meta, asked in ((META, 0), (replaced, 1), (replaced, 0)):
        library = Library()
        fetch(library, None, meta, tmp_path / "f")
        assert library.asked == asked


PIP = """import pathlib, sys
folder = pathlib.Path(sys.argv[sys.argv.index("--target") + 1], "obstore")
folder.mkdir(parents=True)
(folder / "store.py").write_text("def from_url(url, **options): pass\\n")
(folder / "__init__.py").write_text(
    "import datetime\\n"
    "def head(store, path): return {'path': path, 'size': 3, 'last_modified': datetime.datetime.now()}\\n"
    "class get:\\n"
    "    def __init__(self, store, path): pass\\n"
    "    def stream(self, size): yield b'one'\\n"
)
"""


def test_a_bare_node_copies_with_a_library_that_it_installs(tmp_path: Path) -> None:
    (tmp_path / "lib/pip").mkdir(parents=True)
    (tmp_path / "lib/pip/__init__.py").touch()
    (tmp_path / "lib/pip/__main__.py").write_text(PIP)
    (tmp_path / "bin").mkdir()
    environment = {"HOME": str(tmp_path), "PATH": str(tmp_path / "bin"), "PYTHONPATH": str(tmp_path / "lib")}
    program = tmp_path / "node_mount.py"
    program.write_text(read_program())
    argv = [sys.executable, "-S", str(program), "COPY", "s3://b/a", "~/a"]  # without installed packages
    done = subprocess.run(
        argv, env={**environment, "AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "a").read_text() == "one"


# Each tool knows the object `b/data/a` and the folder `b/data`; to its command for folders, `b/data/a` is an empty one.
LAST = "for last; do before=$this; this=$last; done\n"
FOLDER = 'case $before in *data) mkdir -p "$last" && echo one > "$last/a";; esac\n'
FILE = 'echo one > "$last"\n'
TOOLS = {
    "aws": 'case "$*" in *head-object*) [ "$last" = data/a ] || exit 254;;',
    "gcloud": 'case "$*" in *describe*) [ "$last" = gs://b/data/a ] || exit 1;;',
    "rclone": 'case "$*" in *lsjson*) is=true; [ "${last#*:b/}" = data/a ] && is=false; echo "{\\"IsDir\\":$is}";;',
}  # fmt: skip


@pytest.mark.parametrize(("tool", "scheme"), [("aws", "s3"), ("gcloud", "gs"), ("rclone", "az"), ("rclone", "s3")])
def test_a_tool_copies_an_object_to_a_file_and_reports_a_path_without_content(
    tool: str, scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    script = f"#!/bin/sh\n{LAST}{TOOLS[tool]}\n*' cp '*|*copyto*) {FILE};;\n*) {FOLDER};;\nesac\n"
    (tmp_path / "bin" / tool).write_text(script)
    (tmp_path / "bin" / tool).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    monkeypatch.setattr(node_mount.shutil, "which", lambda name: name if name == tool else None)
    copy_by_tool(f"{scheme}://b/data/a", tmp_path / "file")
    assert (tmp_path / "file").read_text() == "one\n"
    copy_by_tool(f"{scheme}://b/data", tmp_path / "folder")
    copy_by_tool(f"{scheme}://b/data/a", tmp_path / "folder")  # into the folder, as obstore does
    assert [each.name for each in (tmp_path / "folder").iterdir()] == ["a"]
    with pytest.raises(MountError, match="does not exist or is empty"):
        copy_by_tool(f"{scheme}://b/other", tmp_path / "none")


def test_a_granted_login_is_read_again_before_it_ends_and_own_keys_come_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broker replaces the file during a copy that takes longer than a session."""
    granted = {"AccessKeyId": "a", "SecretAccessKey": "b", "SessionToken": "c"}
    (tmp_path / "aws.json").write_text(json.dumps(granted))
    for name, value in {"BROKER_ACCESS_DIR": str(tmp_path), "AWS_REGION": "x", "AWS_ACCESS_KEY_ID": "own"}.items():
        monkeypatch.setenv(name, value)
    assert "credential_provider" not in node_objects.find_s3_options("b")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    login = node_objects.find_s3_options("b")["credential_provider"]()
    assert [login[name] for name in ("access_key_id", "secret_access_key", "token")] == ["a", "b", "c"]
    assert 0 < (login["expires_at"] - datetime.now(UTC)).total_seconds() <= 600


def test_a_broken_connection_is_retried_and_leaves_no_part_of_the_file(tmp_path: Path) -> None:
    patient = Library(ATTEMPTS_MAX - 1)
    fetch(patient, None, META, tmp_path / "f")
    assert (patient.asked, (tmp_path / "f").read_text()) == (ATTEMPTS_MAX, "newer")
    broken = Library(ATTEMPTS_MAX)
    with pytest.raises(BrokenConnection):
        fetch(broken, None, META, tmp_path / "g")
    assert broken.asked == ATTEMPTS_MAX
    assert [each.name for each in tmp_path.iterdir()] == ["f"]


def test_a_key_does_not_leave_its_folder(tmp_path: Path) -> None:
    assert find_inside(tmp_path, "a/b..c/d") == tmp_path / "a/b..c/d"
    for key in ("../x", "a/../../x", "a/.."):
        with pytest.raises(MountError, match="leads outside"):
            find_inside(tmp_path, key)


@pytest.mark.parametrize(
    ("said", "version"), [("rclone v1.69.2\n- os", (1, 69)), ("rclone v1.60-DEV", (1, 60)), ("what?", (0, 0))]
)
def test_the_version_of_rclone_is_read(said: str, version: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    done = subprocess.CompletedProcess([], 0, stdout=said)
    monkeypatch.setattr(node_mount.subprocess, "run", lambda *arguments, **options: done)
    assert find_rclone_version() == version


@pytest.mark.parametrize("error", [AuthError("no login"), TransientError("try again")])
def test_a_bucket_whose_lookup_fails_is_not_created(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(url: str) -> object:
        raise error

    monkeypatch.setattr(upload, "open_bucket", refuse)
    monkeypatch.setitem(upload.CREATORS, "s3", "broker.storage.upload:would_create")
    with pytest.raises(type(error)):
        ensure_bucket("s3://b/x")


def test_a_file_is_sent_where_its_key_is_missing_older_or_of_another_size(tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_text("12345")
    os.utime(file, (1e9, 1e9))
    changed_s = file.stat().st_ctime

    def find(size: int, modified_s: float) -> bool:
        return is_changed(file, StoredKey(key="k", size_bytes=size, modified_s=modified_s))

    assert is_changed(file, None)
    assert [find(5, changed_s), find(5, changed_s + 1), find(4, changed_s + 1)] == [False, False, True]
    assert find(5, changed_s - 1), "content with an older time was put there since, as by `cp -p` or `mv`"
    os.utime(file, (changed_s + 100, changed_s + 100))
    assert find(5, changed_s + 50)


def test_program_of_the_nodes_evaluates_no_annotation_that_python_3_8_lacks() -> None:
    """Nodes with Ubuntu 20.04 have it: `tuple[int, ...]` in a signature ended the program before its first step."""
    tree = ast.parse(read_program(), feature_version=(3, 8))
    imported = [each.module for each in tree.body if isinstance(each, ast.ImportFrom)]
    assert imported[:1] == ["__future__"], "without it, annotations are evaluated"
