"""Each check of a torture run reports the fault that it must not miss."""

from __future__ import annotations

import json
import os
import random
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from broker.task.loader import load_tasks
from tests.torture.bed import LocalBed
from tests.torture.checks import check_count, find_problems, read_log
from tests.torture.history import History
from tests.torture.ledger import JobRow, Monitor, View
from tests.torture.processes import Process, read_process, send_signal
from tests.torture.references import compare_numbers
from tests.torture.workloads import HERE, STEPS, Setting, Workload, draw_workload

pytestmark = pytest.mark.skipif(not Path("/proc").exists(), reason="needs Linux's /proc")
WAIT_S_MAX = 900.0


def start_witness(evidence: Path, attempt: int, *program: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "BROKER_ATTEMPT": str(attempt), "SKYPILOT_NODE_RANK": "0"}
    command = [sys.executable, str(HERE / "witness.py"), str(evidence), "--", *program]
    return subprocess.Popen(command, env=environment, start_new_session=True)


def wait_until(is_so: Callable[[], object]) -> None:
    end_s = time.monotonic() + WAIT_S_MAX
    while not is_so():
        assert time.monotonic() < end_s, "the condition was never met"
        time.sleep(0.02)


def list_events(evidence: Path) -> list[str]:
    return [line["event"] for line in read_log(evidence)]


@pytest.mark.parametrize("is_witness_killed", [False, True])
def test_overlapping_attempts_are_reported(tmp_path: Path, is_witness_killed: bool) -> None:
    """The program of the other attempt counts even when it is all that is left of it."""
    started = tmp_path / "started"
    first = start_witness(tmp_path / "job", 1, "sh", "-c", f"echo > {started}; exec sleep 1000")
    try:
        wait_until(started.exists)
        if is_witness_killed:
            first.kill()
            first.wait()
        assert start_witness(tmp_path / "job", 2, "true").wait(WAIT_S_MAX) == 0
    finally:
        os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    overlaps = [line for line in read_log(tmp_path / "job") if line["event"] == "overlap"]
    assert [(line["attempt"], line["other"]) for line in overlaps] == [(2, 1)]
    assert "attempt 2 met attempt 1 alive" in find_problems(make_work(), "job", [make_job()], tmp_path / "job")


def test_sequential_attempts_have_their_effect_once(tmp_path: Path) -> None:
    for attempt in (1, 2):
        assert start_witness(tmp_path, attempt, "true").wait(WAIT_S_MAX) == 0
    assert list_events(tmp_path) == ["begin", "finish", "end", "begin", "redone", "end"]
    attempts = ({"number": 1, "ended_s": 1.0}, {"number": 2, "ended_s": 2.0})
    assert list(find_problems(make_work(), "job", [make_job(attempts=attempts)], tmp_path)) == []


def make_work() -> Workload:
    return Workload(kind="plain", name="job", text="", ends={"job": "SUCCEEDED"})


def make_job(status: str = "SUCCEEDED", attempts: tuple[dict[str, Any], ...] = ()) -> JobRow:
    attempts = attempts or ({"number": 1, "ended_s": 1.0}, {"number": 2, "ended_s": None})
    return JobRow(
        id=1, name="job", status=status, failure="", request_id=None, resumes=None, attempts=attempts, progress=""
    )


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        (["1 1", "1 2", "1 2"], "attempt 1 counted 2 after"),
        (["1 1", "1 3"], "attempt 1 counted 3 after"),
        (["1 1", "2 2", "1 3"], "attempt 1 counted after attempt 2"),
        (["1 1", "2 3"], "attempt 2 counted 3 after"),
        (["1 1"], f"it counted to 1, not to {STEPS}"),
    ],
)
def test_missing_repeated_or_mixed_steps_are_reported(lines: list[str], problem: str) -> None:
    assert any(problem in each for each in check_count(lines))


def test_count_that_continues_after_its_last_saved_step_is_valid() -> None:
    lines = [f"1 {step}" for step in range(1, 8)] + [f"2 {step}" for step in range(7, STEPS + 1)]
    assert list(check_count(lines)) == []


def test_loss_that_differs_in_its_last_bit_is_reported() -> None:
    wanted = [(1, "loss", 3.5), (2, "loss", 3.25)]
    assert compare_numbers(wanted, wanted[1:], is_exact=True) == []
    off = [(1, "loss", 3.5000000000000004), (2, "loss", 3.25)]
    assert len(compare_numbers(wanted, off, is_exact=True)) == 1
    assert compare_numbers(wanted, off, is_exact=False) == []
    assert len(compare_numbers(wanted, wanted[:1], is_exact=True)) == 1, "the last step is missing"


def make_view(*jobs: JobRow, epoch: int = 1) -> View:
    return View(
        jobs={job.id: job for job in jobs}, clusters={}, open_intents=0, open_bills=0, epoch=epoch, event_count=0
    )


OPEN, CLOSED = {"number": 1, "ended_s": None}, {"number": 1, "ended_s": 1.0, "outcome": "preempted"}
SUCCEEDED = {"number": 1, "ended_s": 1.0, "outcome": "succeeded"}
NEXT = {"number": 2, "ended_s": None}


@pytest.mark.parametrize(
    ("views", "claim"),
    [
        ([make_view(make_job("RUNNING", (OPEN, NEXT)))], "attempts [1, 2] live at once"),
        ([make_view(make_job("RUNNING", (SUCCEEDED, NEXT)))], "attempt 1 succeeded, and 2 was started"),
        ([make_view(make_job("RUNNING", (CLOSED, {**NEXT, "number": 3})))], "its attempts are [1, 3]"),
        ([make_view(make_job("FAILED", (CLOSED,))), make_view(make_job("RUNNING", (CLOSED,)))], "was FAILED and is"),
        (
            [make_view(make_job("FAILED", (CLOSED,))), make_view(make_job("FAILED", (CLOSED, NEXT)))],
            "got an attempt after",
        ),
        (
            [make_view(make_job("RUNNING", (CLOSED,))), make_view(make_job("RUNNING", (SUCCEEDED,)))],
            "the outcome of attempt 1 changed",
        ),
        ([make_view(make_job("RUNNING", (OPEN,))), make_view()], "is gone from the store"),
        ([make_view(epoch=3), make_view(epoch=2)], "the epoch went back"),
    ],
)
def test_contradictory_records_are_reported(tmp_path: Path, views: list[View], claim: str) -> None:
    history = History(tmp_path / "history.jsonl", seed=0, bed="none")
    monitor = Monitor(history)
    for view in views:
        monitor.look(view)
    assert any(claim in each for each in history.violations), history.violations
    entries = [json.loads(line) for line in history.path.read_text().splitlines()]
    assert any(line["what"] == "violation" for line in entries), "with its evidence in the history"


def test_signal_reaches_no_process_of_another_bed(tmp_path: Path) -> None:
    environment = {**os.environ, "BROKER_NODE_DIR": str(tmp_path / "node")}
    process = subprocess.Popen(["sleep", "100"], env=environment)
    try:
        ours = Process(pid=process.pid, kind="program", node="node", command="sleep 100")
        wait_until(lambda: read_process(process.pid, str(tmp_path)) == ours)
        assert read_process(process.pid, str(tmp_path / "other")) is None
        assert not send_signal(ours, signal.SIGKILL, lambda pid: read_process(pid, str(tmp_path / "other")))
        assert process.poll() is None
        assert send_signal(ours, signal.SIGKILL, lambda pid: read_process(pid, str(tmp_path)))
        assert process.wait(WAIT_S_MAX) == -signal.SIGKILL
    finally:
        process.kill()
        process.wait()


def test_clock_of_the_bed_jumps_for_its_commands_alone(tmp_path: Path) -> None:
    history = History(tmp_path / "history.jsonl", seed=0, bed="local")
    folder = tmp_path / "bed"
    folder.mkdir()
    bed = LocalBed(folder, history)
    bed.load_clock()
    if not bed.can_jump:
        pytest.skip(bed.skipped[-1])
    program = "import time, sys\nfor line in sys.stdin: print(time.time(), time.monotonic(), flush=True)\n"
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        [sys.executable, "-c", program], env=bed.environment, stdin=pipe, stdout=pipe, text=True, bufsize=1
    )
    assert process.stdin and process.stdout

    def ask() -> list[float]:
        assert process.stdin and process.stdout
        process.stdin.write("\n")
        process.stdin.flush()
        return [float(word) for word in process.stdout.readline().split()]

    wall_s, steady_s = ask()
    bed.set_clock(-86400)
    jumped_s, later_s = ask()
    process.stdin.close()
    process.wait()
    # The process may stall between two readings.
    assert jumped_s - wall_s == pytest.approx(later_s - steady_s - 86400, abs=600)
    assert struct.unpack("q", bed.clock.read_bytes()) == (-86400,)


@pytest.mark.parametrize("kind", [kind for kind, _ in Setting(evidence=Path("x")).kinds])
def test_every_kind_of_job_is_a_task_that_broker_takes(tmp_path: Path, kind: str) -> None:
    work = draw_workload(random.Random(1), 1, Setting(evidence=tmp_path), kind)
    path = tmp_path / "task.yaml"
    path.write_text(work.text)
    assert [task.name for task in load_tasks(path)] == (list(work.ends) or [work.name])
