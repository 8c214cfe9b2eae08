"""The agent's writes are whole, private and on the disk; files that it reads may be half written by another process."""

from __future__ import annotations

import importlib
import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from broker.agent import agent_files as files


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(files, "RUNS", tmp_path / "runs")
    return tmp_path / "runs"


def make_run(runs: Path, run_id: int, **parts: Any) -> Path:
    folder = runs / str(run_id)
    folder.mkdir(parents=True)
    for name, value in {"spec": {}, **parts}.items():
        files.write_json(folder / f"{name}.json", value)
    return folder


def test_a_file_is_private_replaced_as_a_whole_and_leaves_no_temporary_file(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    before = os.umask(0)
    try:
        files.write_json(path, {"é": 1})
        files.write_json(path, {"é": 2})
        folder = files.make_private(tmp_path / "a" / "b")
    finally:
        os.umask(before)
    assert files.read_json(path) == {"é": 2}
    assert path.stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700 and files.make_private(folder) == folder
    assert [entry.name for entry in tmp_path.iterdir() if entry.is_file()] == ["state.json"]


def test_a_file_is_synced_before_it_is_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "state.json"
    seen: list[tuple[bool, bool]] = []
    monkeypatch.setattr(os, "fsync", lambda fd: seen.append((stat.S_ISDIR(os.fstat(fd).st_mode), path.exists())))
    files.write_text(path, "12345")
    assert seen == [(False, False), (True, True)], "the file, then the folder with its new name"
    files.write_text(path, "12345", is_durable=False)
    assert len(seen) == 2


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", "\x00"])
def test_file_without_a_json_object_reads_as_empty(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    assert files.read_json(path) is None
    assert files.read_json(tmp_path / "missing.json") is None


def test_runs_are_listed_by_number_once_their_spec_is_written(runs: Path) -> None:
    assert files.list_run_ids() == []
    for number in (10, 9):
        make_run(runs, number)
    (runs / "11").mkdir()
    (runs / "words").mkdir()
    assert files.list_run_ids() == [9, 10]
    assert files.run_folder(9) == runs / "9"


def test_a_lock_has_one_holder_and_is_visible_to_all(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert not files.is_locked(path)
    held = files.try_lock(path)
    assert held is not None and files.try_lock(path) is None
    assert files.is_locked(path) and path.stat().st_mode & 0o777 == 0o600
    os.close(held)
    assert not files.is_locked(path)
    again = files.wait_lock(path)
    assert files.is_locked(path)
    os.close(again)


def count_descriptors() -> int:
    """Count open descriptors; return 0 where the system does not show them."""
    folder = Path("/proc/self/fd")
    return len(list(folder.iterdir())) if folder.exists() else 0


def test_checking_a_lock_neither_takes_it_nor_leaks(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.touch()
    before = count_descriptors()
    held = files.try_lock(path)
    for _ in range(3):
        assert files.is_locked(path) and files.try_lock(path) is None
    assert held is not None
    os.close(held)
    assert not files.is_locked(path)
    assert count_descriptors() == before


def test_locks_do_not_pass_to_programs_that_are_started(tmp_path: Path) -> None:
    held = [files.try_lock(tmp_path / "a"), files.wait_lock(tmp_path / "b")]
    assert not any(os.get_inheritable(fd) for fd in held if fd is not None)
    for fd in held:
        assert fd is not None
        os.close(fd)


def test_newest_file_decides_the_state_of_a_run(runs: Path) -> None:
    folder = make_run(runs, 1)
    lock = files.try_lock(folder / "runner.lock")
    first = files.describe_run(1)
    assert (first["id"], first["status"], first["returncode"], first["ended_s"]) == (1, "PENDING", None, None)
    assert (first["started_s"], first["reason"], first["progress"]) == (0.0, "", None)
    files.write_json(folder / "state.json", {"status": "RUNNING", "started_s": 5.0})
    assert (files.describe_run(1)["status"], files.describe_run(1)["started_s"]) == ("RUNNING", 5.0)
    files.write_json(folder / "outcome.json", {"status": "SUCCEEDED", "returncode": 0, "ended_s": 9.0})
    for _ in range(2):
        ended = files.describe_run(1)
        assert (ended["status"], ended["returncode"], ended["ended_s"]) == ("SUCCEEDED", 0, 9.0)
        if lock is not None:
            os.close(lock)
            lock = None


def test_a_runner_that_vanished_without_an_outcome_is_a_failure_with_an_end(runs: Path) -> None:
    folder = make_run(runs, 1, state={"status": "RUNNING"})
    found = files.describe_run(1)
    assert (found["status"], found["reason"]) == ("FAILED", "the runner died")
    assert found["ended_s"] == (folder / "spec.json").stat().st_mtime


def test_a_run_whose_runner_was_killed_is_over_once_its_programs_have_ended(runs: Path) -> None:
    folder = make_run(runs, 1, state={"status": "RUNNING"})
    assert not files.is_over(1), "the watcher ends them, and then writes the outcome"
    files.write_json(folder / "outcome.json", {"status": "FAILED", "returncode": None, "ended_s": 9.0})
    assert files.is_over(1)
    other = make_run(runs, 2)
    assert files.is_over(2), "it never began"
    lock = files.try_lock(other / "runner.lock")
    assert lock is not None and not files.is_over(2)
    os.close(lock)


def test_a_run_that_died_before_its_spec_was_whole_gets_its_outcome(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(files.__file__).parent))
    agent_dead_runs = importlib.import_module("agent_dead_runs")
    monkeypatch.setattr(agent_dead_runs.agent_files, "RUNS", runs)
    monkeypatch.setattr(agent_dead_runs.agent_files, "STATE", tmp_path)
    folder = make_run(runs, 1, state={"status": "RUNNING"})
    (folder / "spec.json").write_text("{")
    agent_dead_runs.end_dead_run(1)
    outcome = json.loads((folder / "outcome.json").read_text())
    assert (outcome["status"], outcome["reason"]) == ("FAILED", "the runner died")


def test_progress_is_the_newest_whole_line_that_is_an_object(tmp_path: Path) -> None:
    path = tmp_path / "progress.jsonl"
    assert files.read_progress(path) is None
    path.write_text('{"step": 1}\n{"step": 2}\n[3]\nwords\n{"step": 4}')
    assert files.read_progress(path) == {"step": 2}
    path.write_text('{"step": 1}\n' + "x" * 7000 + '\n{"step": 5}\n')
    assert files.read_progress(path) == {"step": 5}
    path.write_text('{"step": 1}\n' + "x" * 9000 + "\n")
    assert files.read_progress(path) is None, "no more than the end of a long file is read"
    path.write_bytes(b'{"step": "\xff"}\n')
    assert files.read_progress(path) == {"step": "\ufffd"}


@pytest.mark.skipif(not Path("/proc").exists(), reason="needs Linux's /proc")
def test_processes_are_found_by_exactly_their_mark() -> None:
    code = "import sys; print(1, flush=True); sys.stdin.read()"

    def start(mark: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-c", code], env={"MARK": mark}, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert process.stdout is not None and process.stdout.readline()
        return process

    ours, other = start("agent-1"), start("agent-12")
    try:
        assert list(files.find_marked("MARK=agent-1")) == [ours.pid]
        assert list(files.find_marked("MARK=agent")) == []
    finally:
        for process in (ours, other):
            process.communicate()


def test_processes_that_cannot_be_read_hide_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They end meanwhile, or are another user's."""
    for pid in range(1, 41):
        (tmp_path / str(pid)).mkdir()
        if pid % 2:
            (tmp_path / str(pid) / "environ").write_bytes(b"A=b\0MARK=x\0")
    monkeypatch.setattr(files, "Path", lambda path: tmp_path if path == "/proc" else Path(path))
    assert set(files.find_marked("MARK=x")) == set(range(1, 41, 2)) - {os.getpid()}


def test_a_process_does_not_find_itself() -> None:
    code = (
        "import os, sys; sys.path.insert(0, sys.argv[1]); import agent_files;"
        "print(list(agent_files.find_marked('MARK=' + os.environ['MARK'])) == [])"
    )
    folder = str(Path(files.__file__).parent)
    env = {"MARK": os.urandom(8).hex(), "HOME": "/"}  # other runs of the tests have marks of their own
    done = subprocess.run([sys.executable, "-c", code, folder], env=env, capture_output=True)
    assert done.stdout.strip() == b"True", done.stderr


def test_boot_id_is_constant_until_the_next_boot() -> None:
    assert files.read_boot() == files.read_boot()
    if Path("/proc/sys/kernel/random/boot_id").exists():
        assert len(files.read_boot()) == 36 and json.dumps(files.read_boot()) == f'"{files.read_boot()}"'
