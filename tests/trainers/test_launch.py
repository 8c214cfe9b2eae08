"""Workers of an elastic run that get SIGTERM while they start, or start again."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from trainers.preemption import PreemptionNotice

REPOSITORY = Path(__file__).parents[2]
LAUNCHER = """
import os, sys
from trainers.launch import run_workers
command = [sys.executable, "-S", "-c", sys.argv[1]], dict(os.environ)
sys.exit(run_workers([command], prepare_again=lambda place: command))
"""
# It does not listen to signals yet, as a worker that has just been started, or has re-executed itself.
WORKER = """
import os, signal, time
with open("starts", "a") as file:
    file.write("x")
os.kill(os.getppid(), signal.SIGTERM)
time.sleep(600)
"""


def test_worker_that_is_ended_while_it_starts_is_preempted_and_not_started_again(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LAUNCHER, WORKER],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(REPOSITORY)}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 143, done.stderr
    assert (tmp_path / "starts").read_text() == "x"


def test_signal_before_a_program_executes_itself_again_counts_in_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainers.preemption.signal", SimpleNamespace(SIGTERM=15, signal=lambda *_: None))
    monkeypatch.setattr("trainers.preemption.os", SimpleNamespace(environ=(environment := {})))
    first, second, third = PreemptionNotice(), PreemptionNotice(), PreemptionNotice()
    first.listen()
    first.hand_on()
    assert not first.is_given() and not environment
    first._remember(15, None)
    first.hand_on()
    second.listen()
    assert second.is_given()
    third.listen()
    assert not third.is_given(), "it is not passed on to programs that the second one starts"
