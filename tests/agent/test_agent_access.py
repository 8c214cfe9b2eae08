"""The files of a grant on a node: their owner, the receivers of newer ones, and their removal."""

from __future__ import annotations

import importlib
import json
import stat
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from broker.agent import FOLDER


@pytest.fixture
def access(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    module = importlib.import_module("agent_access")
    monkeypatch.setattr(module.files, "STATE", tmp_path)
    monkeypatch.setattr(module.files, "RUNS", tmp_path / "runs")
    return module


def ask(key: str, scope: str = "a", **fields: Any) -> dict[str, Any]:
    envs = {"AWS_CONFIG_FILE": "{access}/config"}
    return {"files": {"key": key, "config": 'cat "{access}/key"'}, "envs": envs, "scope": scope, **fields}


def begin(access: ModuleType, run_id: int, *, status: str = "") -> Path:
    """Begin a run with its spec; `status` is its outcome; without one, its runner holds the lock."""
    folder = access.files.make_private(access.files.run_folder(run_id))
    (folder / "spec.json").write_text(json.dumps({"rank": 0, "envs": {}}))
    if status:
        (folder / "outcome.json").write_text(json.dumps({"status": status, "returncode": 0, "reason": ""}))
    else:
        access.files.try_lock(folder / "runner.lock")
    return Path(folder)


def read(access: ModuleType, run_id: int) -> str:
    return str((access.find_folder(run_id) / "key").read_text())


def test_programs_are_pointed_to_files_of_their_own_run(access: ModuleType) -> None:
    access.receive(ask("one", run_id=1))
    folder = access.find_folder(1)
    assert access.read_envs(1) == {"AWS_CONFIG_FILE": f"{folder}/config", "BROKER_ACCESS_DIR": str(folder)}
    assert (folder / "config").read_text() == f'cat "{folder}/key"'
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    assert access.read_envs(2) == {}


def test_newer_grant_reaches_older_runs_of_its_scope_only(access: ModuleType) -> None:
    for run_id, scope in ((1, "a"), (2, "b")):
        access.receive(ask(f"key-{run_id}", scope, run_id=run_id))
        begin(access, run_id, status="SUCCEEDED")
    assert access.receive(ask("newer", "a", run_id=3)) == {"runs": [1, 3]}
    assert (read(access, 1), read(access, 2), read(access, 3)) == ("newer", "key-2", "newer")


def test_renewal_reaches_runs_that_have_not_ended(access: ModuleType) -> None:
    for run_id, status in ((1, "SUCCEEDED"), (2, ""), (3, "")):
        begin(access, run_id, status=status)
    for run_id in (1, 2):
        access.receive(ask("old", run_id=run_id, scope=str(run_id)))
    assert access.receive(ask("new")) == {"runs": [2]}, "the third was given none"
    assert (read(access, 1), read(access, 2)) == ("old", "new")


def test_files_are_removed_once_all_runs_of_a_job_have_ended_and_are_delivered(
    access: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    due = {1}
    monkeypatch.setattr(access.delivery, "is_due", lambda run_id: run_id in due)
    begin(access, 1, status="SUCCEEDED")
    access.receive(ask("key", run_id=1))
    access.forget_used()
    assert access.find_folder(1).exists(), "a cluster's mounts outlive its runs"
    (access.files.STATE / "lease.json").write_text("{}")
    access.forget_used()
    assert access.find_folder(1).exists(), "the outcome is still to be sent"
    due.clear()
    pending = ["a file of a mount"]
    monkeypatch.setattr(access.flush, "list_pending", lambda: pending)
    access.forget_used()
    assert access.find_folder(1).exists(), "rclone still uploads with it"
    pending.clear()
    access.forget_used()
    assert not access.find_folder(1).exists()


def test_files_of_a_running_program_stay(access: ModuleType) -> None:
    begin(access, 1, status="SUCCEEDED")
    begin(access, 2)
    access.receive(ask("key", run_id=2))
    (access.files.STATE / "lease.json").write_text("{}")
    access.forget_used()
    assert read(access, 2) == "key"


@pytest.mark.parametrize("name", ["../spec.json", "/etc/passwd", "a/b"])
def test_name_that_leads_out_of_the_folder_is_refused(access: ModuleType, name: str) -> None:
    with pytest.raises(AssertionError):
        access.receive({**ask("x", run_id=1), "files": {name: "x"}})
