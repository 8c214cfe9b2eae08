"""A runner whose program has ended waits for the programs of the other ranks."""

from __future__ import annotations

import contextlib
import importlib
import os
import resource
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from broker.agent import FOLDER

FULL = Path("/dev/full")
SUCCEEDED = {"status": "SUCCEEDED", "returncode": 0, "reason": ""}


@pytest.fixture
def wait(monkeypatch: pytest.MonkeyPatch) -> Callable[..., float]:
    """Wait for the end of a gang, where each tick takes a second; return how long that took."""
    monkeypatch.syspath_prepend(str(FOLDER))
    module = importlib.import_module("agent_run")

    def play(*, ends_at_s: float = 1e9, verdict: Any = None, notice_s: float | None = None) -> float:
        now_s = 0.0
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now_s))
        runner = module.Runner.__new__(module.Runner)
        runner._is_ended, runner._verdict, runner._notice_s = False, verdict, notice_s
        runner._gang = SimpleNamespace(is_headless=False)

        def pause() -> None:
            nonlocal now_s
            now_s += 1.0
            runner._is_ended = now_s >= ends_at_s

        runner._pause = pause
        runner._await_end()
        return now_s

    return play


def test_rank_that_succeeds_waits_for_the_others_however_long_they_run(wait: Callable[..., float]) -> None:
    assert wait(ends_at_s=7200.0) == 7200.0


def test_wait_after_a_result_or_a_notice_has_a_limit(wait: Callable[..., float]) -> None:
    """The processes of another rank may not end at all, or its machine may be gone."""
    assert 10 < wait(verdict=SUCCEEDED) < 30
    assert 120 < wait(notice_s=120.0) < 150


@pytest.mark.skipif(not FULL.exists(), reason="Linux has a device that is always full")
def test_output_is_read_and_sent_to_the_head_though_the_disk_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program whose output is not read blocks, so its run would never end."""
    monkeypatch.syspath_prepend(str(FOLDER))
    runner_type, gang = (importlib.import_module(name) for name in ("agent_run", "agent_gang"))
    runner = runner_type.Runner.__new__(runner_type.Runner)
    coordinator = gang.Coordinator.__new__(gang.Coordinator)
    sent = list[str]()
    runner._send = lambda kind, text: sent.append(text)
    reader, writer = os.pipe()
    os.write(writer, b"step 1\nstep 2")
    os.close(writer)
    with FULL.open("ab", buffering=0) as full, os.fdopen(reader, "rb") as output:
        runner._log = coordinator._log = full
        runner._copy_output(output)
        coordinator._write_log(1, "step 1\n")  # an error here would count as the loss of rank 1
    assert sent == ["step 1\n", "step 2\n"]


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("is_over", [False, True])
def test_processes_of_another_user_end_with_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_over: bool
) -> None:
    """As in `sudo python train.py`: the run never ended, or left the program behind on the node of its next attempt."""
    monkeypatch.syspath_prepend(str(FOLDER))
    dead_runs = importlib.import_module("agent_dead_runs")
    (tmp_path / "sudo").write_text('#!/bin/sh\n[ "$1" = -n ] && shift && exec "$@"\n')
    (tmp_path / "sudo").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def refuse(pid: int, number: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    script = "trap '' TERM; sleep 1000 & echo started; " + ("" if is_over else "wait")
    process = subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None and process.stdout.readline() == b"started\n"
    if is_over:
        process.wait()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(os, "kill", refuse)
            patch.setattr(os, "killpg", refuse)
            if is_over:
                dead_runs.kill_marked("NO=mark", process.pid)
            else:
                dead_runs.signal_group(process.pid, "NO=mark", signal.SIGKILL)
        assert select.select([process.stdout], [], [], 60.0)[0], "a process is left"
        assert process.stdout.read() == b""
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_programs_may_open_more_files_than_a_session_of_sshd(tmp_path: Path) -> None:
    """The workers of PyTorch's data loaders ran out of the 1,024, on nodes where SkyPilot raises the limit."""
    code = (
        "import resource, sys; sys.path.insert(0, sys.argv[1]); import agent_run, os\n"
        "hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))\n"
        "class Runner:\n"
        "    def __init__(self, *arguments): pass\n"
        "    def run(self): os.system('ulimit -Sn')\n"
        "agent_run.Runner = Runner\n"
        "os.makedirs(agent_run.agent_files.run_folder(1))\n"
        "agent_run.run(1, None)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(FOLDER)], env={**os.environ, "HOME": str(tmp_path)}, capture_output=True,
    )  # fmt: skip
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert int(done.stdout) == (65536 if hard == resource.RLIM_INFINITY else min(65536, hard)), done.stderr
