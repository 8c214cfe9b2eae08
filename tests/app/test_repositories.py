"""A git repository as `workdir`: one commit, cloned here, for all nodes and attempts."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from broker.app.container import Context
from broker.app.mapping import MapDriver, MapRequest
from broker.app.repositories import fetch_repositories, strip_credentials
from broker.app.sweeping import SweepDriver, SweepRequest
from broker.errors import InvalidRequestError, UsageError
from broker.task.loader import load_tasks_text
from broker.types import Repository, Task


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=n", "-c", "user.email=n@example.com", "-c", "commit.gpgsign=false")
    done = subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def origin(tmp_path: Path) -> Path:
    """Make a repository with the tag v1 at its first commit, and the branch `main` at its second."""
    folder = tmp_path / "origin"
    folder.mkdir()
    git(folder, "init", "--quiet", "--initial-branch", "main")
    for number in (1, 2):
        (folder / "train.py").write_text(f"print({number})\n")
        git(folder, "add", ".")
        git(folder, "commit", "--quiet", "-m", f"{number}")
        if number == 1:
            git(folder, "tag", "-a", "v1", "-m", "first")
    return folder


def fetch(origin: Path, ref: str | None, notes: list[str] | None = None) -> Task:
    task = Task(repository=Repository(url=f"file://{origin}", ref=ref), envs={"A": "b"})
    (found,) = fetch_repositories([task], origin.parent / "home", note=(notes if notes is not None else []).append)
    return found


@pytest.mark.parametrize(
    ("ref", "commit", "variable"),
    [(None, "main", None), ("main", "main", "GIT_BRANCH"), ("v1", "v1^{commit}", "GIT_TAG")],
)
def test_ref_is_resolved_to_one_commit_which_is_shown(
    origin: Path, ref: str | None, commit: str, variable: str | None
) -> None:
    notes: list[str] = []
    task = fetch(origin, ref, notes)
    full = git(origin, "rev-parse", commit)
    assert task.workdir is not None
    assert task.repository is None
    assert git(Path(task.workdir), "rev-parse", "HEAD") == full
    assert task.envs == {
        "A": "b", "GIT_URL": f"file://{origin}", "GIT_COMMIT_HASH": full, **({variable: ref} if variable else {}),
    }  # fmt: skip
    assert f"is commit {full[:12]}" in notes[0]


def test_abbreviated_commit_is_found(origin: Path) -> None:
    full = git(origin, "rev-parse", "v1^{commit}")
    task = fetch(origin, full[:9])
    assert (Path(task.workdir or "") / "train.py").read_text() == "print(1)\n"
    assert task.envs["GIT_COMMIT_HASH"] == full


def test_clone_of_a_commit_is_made_once_and_stays_when_the_branch_moves(origin: Path) -> None:
    first = Path(fetch(origin, "main").workdir or "")
    made = (first / ".git").stat().st_ino
    assert (Path(fetch(origin, "main").workdir or "") / ".git").stat().st_ino == made
    (origin / "train.py").write_text("print(3)\n")
    git(origin, "commit", "--quiet", "-am", "3")
    assert (Path(fetch(origin, "main").workdir or "") / "train.py").read_text() == "print(3)\n"
    assert (first / "train.py").read_text() == "print(2)\n"


@pytest.mark.parametrize(("ref", "hint"), [("mian", "did you mean `main`?"), ("zzz", "its branches: main")])
def test_unknown_ref_is_refused_with_those_that_exist(origin: Path, ref: str, hint: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"no branch, tag or commit `{ref}`") as caught:
        fetch(origin, ref)
    assert caught.value.hints == (hint,)


def test_missing_repository_is_reported_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"does not appear to be a git repository|does not exist"):
        fetch(tmp_path / "nothing", None)
    assert not (tmp_path / "home" / "repositories").exists()


def test_credentials_of_a_url_are_never_shown() -> None:
    task = Task(repository=Repository(url="https://oauth:hunter2@127.0.0.1:9/x.git"))
    with pytest.raises(InvalidRequestError) as caught:
        fetch_repositories([task], Path("/nonexistent"), note=print)
    assert "hunter2" not in f"{caught.value.message} {caught.value.hints}"
    assert strip_credentials("git@host:org/x.git") == "git@host:org/x.git"
    assert strip_credentials("https://host/org/x@2") == "https://host/org/x@2"


def test_missing_git_is_reported_with_a_remedy(origin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(UsageError, match="`git` is not installed") as caught:
        fetch(origin, None)
    assert "--workdir FOLDER" in caught.value.hints[0]


class Refuses(BaseHTTPRequestHandler):
    """A git host that wants a login."""

    def do_GET(self) -> None:
        self.send_response(self.server.code)  # type: ignore[attr-defined]
        self.send_header("WWW-Authenticate", 'Basic realm="git"')
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def host() -> Iterator[HTTPServer]:
    with HTTPServer(("127.0.0.1", 0), Refuses) as server:
        server.code = 401  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("login", "code", "reason"),
    [
        ("", 401, "it requires a login, and git has none for it"),
        ("me:hunter2@", 401, "it refused the login"),
        ("me:hunter2@", 403, "the login may not read it"),
    ],
)
def test_private_repository_without_a_login_is_refused_and_nothing_asks_for_a_password(
    host: HTTPServer, login: str, code: int, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A desktop sets SSH_ASKPASS, which git calls for https, too: it would wait there for a window's answer."""
    host.code = code  # type: ignore[attr-defined]
    asked = tmp_path / "asked"
    (tmp_path / "askpass").write_text(f"#!/bin/sh\ntouch {asked}\n")
    (tmp_path / "askpass").chmod(0o755)
    monkeypatch.setenv("SSH_ASKPASS", str(tmp_path / "askpass"))
    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.delenv("GIT_ASKPASS", raising=False)
    task = Task(repository=Repository(url=f"http://{login}127.0.0.1:{host.server_port}/org/x.git"))
    with pytest.raises(InvalidRequestError, match=reason) as caught:
        fetch_repositories([task], tmp_path, note=print)
    assert "GIT_TOKEN" in caught.value.hints[0] and "hunter2" not in str(caught.value)
    assert not asked.exists()


@pytest.mark.parametrize(
    ("told", "reason", "hint"),
    [
        ("Host key verification failed.", "does not know its host key", "ssh -T git@host.test"),
        ("git@host.test: Permission denied (publickey).", "none of this machine's ssh keys", "GIT_SSH_KEY_PATH"),
        ("sh: 1: ssh: not found", "requires `ssh`", "openssh-client"),
        ("ssh: connect to host host.test port 22: No route to host", "port 22: No route to host", "git ls-remote"),
    ],
)
def test_error_of_ssh_is_shown_with_a_remedy(
    told: str, reason: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Git itself says only that it could not read from the remote repository."""
    (tmp_path / "ssh").write_text(f"#!/bin/sh\necho '{told}' >&2\nexit 255\n")
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("GIT_SSH_COMMAND", str(tmp_path / "ssh"))
    with pytest.raises(InvalidRequestError) as caught:
        fetch_repositories([Task(repository=Repository(url="git@host.test:org/x.git"))], tmp_path, note=print)
    assert reason in caught.value.message and hint in caught.value.hints[0]


def test_ssh_of_git_has_no_terminal_to_ask_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ssh").write_text('#!/bin/sh\necho "session $(ps -o sid= -p $$)" >&2\nexit 255\n')
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("GIT_SSH_COMMAND", str(tmp_path / "ssh"))
    with pytest.raises(InvalidRequestError, match=r"session +\d+") as caught:
        fetch_repositories([Task(repository=Repository(url="git@host.test:org/x.git"))], tmp_path, note=print)
    assert int(caught.value.message.rpartition("session")[2]) != os.getsid(0)


def test_repository_of_a_task_file_is_read_with_its_variables() -> None:
    text = "envs: {ORG: a}\nworkdir: {url: 'https://host/$ORG/x', ref: 1.10}\nrun: x"
    (task,) = load_tasks_text(text, "task.yaml")
    assert task.repository == Repository(url="https://host/a/x", ref="1.10")
    assert task.workdir is None
    assert not task.notices


def test_maps_and_sweeps_notice_another_commit_of_their_branch(origin: Path, tmp_path: Path) -> None:
    """Workers that start later would run another program than those whose results are there."""
    task = Task(
        name="m",
        run="python -m trainers.map_worker train.py",
        repository=Repository(url=f"file://{origin}", ref="main"),
    )
    (tmp_path / "in.jsonl").write_text("1\n")
    context = Context(tmp_path / "home")

    def begin_map(task: Task = task) -> bool:
        return MapDriver(context, MapRequest(task=task, input=f"{tmp_path}/in.jsonl", output=f"{tmp_path}/out")).begin()

    def name_sweep() -> str:
        return SweepDriver(context, SweepRequest(task=task, parameters=["a=1,2"])).group

    try:
        before, commit = name_sweep(), git(origin, "rev-parse", "main")
        assert (begin_map(), begin_map(), name_sweep()) == (True, False, before)
        (origin / "train.py").write_text("print(3)\n")
        git(origin, "commit", "--quiet", "-a", "-m", "3")
        assert name_sweep() != before
        with pytest.raises(UsageError, match="another program"):
            begin_map()
        assert not begin_map(replace(task, repository=Repository(url=f"file://{origin}", ref=commit))), "continued"
    finally:
        context.close()
