"""Workers of an elastic run that get SIGTERM while they start, or start again; and how a process ends."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

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


# The signal arrives when the first of two workers has been started, or when one that was killed is started again.
INTERRUPTED = """
import os, signal, sys
from trainers.launch import run_workers
spawn, count = os.posix_spawn, 0
def spawn_interrupted(*arguments):
    global count
    pid, count = spawn(*arguments), count + 1
    if count == int(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGTERM)
    return pid
os.posix_spawn = spawn_interrupted
def command(code):
    return [sys.executable, "-S", "-c", code], dict(os.environ)
work = command("import time; time.sleep(60); open('not-ended', 'x')")
first = command("import os; os.kill(os.getpid(), 9)") if sys.argv[1] == "3" else work
sys.exit(run_workers([first, work], prepare_again=lambda place: work))
"""


@pytest.mark.parametrize("count", [1, 3])
def test_workers_that_are_started_while_the_signal_arrives_are_ended_too(count: int, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, str(count)], cwd=tmp_path, env=environment, timeout=300
    )  # fmt: skip
    assert done.returncode == 143 and not list(tmp_path.iterdir())


# A launcher that is the first process of a container inherits the children of its workers, such as a compiler's.
INHERITING = """
import ctypes, os, sys
from trainers.launch import run_workers
ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
parent = "import os; pid = os.fork() or os.execlp('sleep', 'sleep', '0'); open('child.new', 'w').write(str(pid))"
parent += "; os.rename('child.new', 'child')"
wait = "import os, time\\nwhile not os.path.exists('child') or os.path.exists('/proc/' + open('child').read()):"
wait += " time.sleep(0.01)"
sys.exit(run_workers([([sys.executable, "-S", "-c", code], dict(os.environ)) for code in (parent, wait)]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_launcher_survives_the_end_of_processes_that_it_has_inherited(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [sys.executable, "-c", INHERITING], cwd=tmp_path, env=environment, timeout=300, capture_output=True, text=True
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


# Ranks that leave one after the other, and a launcher that is in a hurry after a failure.
LEAVING = """
import os, sys
from trainers import launch
launch.GRACE_S = 0.05
code = "import os, sys, time; time.sleep({0}); open('left-{0}', 'x'); os._exit(143)"
sys.exit(launch.run_workers([([sys.executable, "-S", "-c", code.format(s)], dict(os.environ)) for s in (0, 1)]))
"""


def test_rank_that_commits_the_checkpoint_is_not_cut_off_when_another_has_left(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run([sys.executable, "-c", LEAVING], cwd=tmp_path, env=environment, timeout=300)
    assert done.returncode == 143
    assert {each.name for each in tmp_path.iterdir()} == {"left-0", "left-1"}


def test_signal_before_a_program_executes_itself_again_counts_in_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing: Any = lambda *_, **__: None  # noqa: E731
    environment: dict[str, str] = {}
    signals = SimpleNamespace(SIGTERM=15, signal=nothing, set_wakeup_fd=nothing)
    system = SimpleNamespace(
        environ=environment, register_at_fork=nothing, pipe=lambda: (0, 0), set_blocking=nothing, read=lambda *_: b""
    )
    monkeypatch.setattr("trainers.preemption.signal", signals)
    monkeypatch.setattr("trainers.preemption.os", system)
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


# A main thread that is blocked, as in a collective with a lost peer, while another one restarts the program.
BLOCKED = """
import hashlib, os, signal, sys, threading, time
from trainers.preemption import PreemptionNotice
def block():
    hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)
def restart():
    while sys._current_frames()[threading.main_thread().ident].f_code.co_name != "block":
        pass
    if not (child := os.fork()):
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(0 if notice.is_given() else 3)  # by the handler: this is the child's main thread
    status = os.waitpid(child, 0)[1]
    notice.hand_on()
    if status or "BROKER_ELASTIC_SIGNALLED" in os.environ:
        os._exit(2)
    os.kill(os.getpid(), signal.SIGTERM)
    end_s = time.monotonic() + 30
    while "BROKER_ELASTIC_SIGNALLED" not in os.environ and time.monotonic() < end_s:
        notice.hand_on()
    os._exit(0 if notice.is_given() else 1)
notice = PreemptionNotice()
notice.listen()
threading.Thread(target=restart).start()
block()
"""


def test_signal_counts_while_the_main_thread_is_blocked_and_that_of_a_child_does_not() -> None:
    """The program that a thread executes after the loss of a peer did not know of the notice."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run([sys.executable, "-c", BLOCKED], env=environment, timeout=300)
    assert done.returncode == 0


# As after a mistake of one rank alone, while the checkpoint before is still being written.
ENDING = """
import sys, threading
from trainers import train, training
def run_training(*arguments, **options):
    threading.Thread(target=threading.Event().wait).start()
    {how}
training.run_training = run_training
train(model=None, samples=None, loss=None)
"""


@pytest.mark.parametrize(
    ("how", "code", "words"),
    [
        ("len(3)", 1, "TypeError: object of type 'int' has no len()"),
        ("raise KeyboardInterrupt", 130, "KeyboardInterrupt"),
        ("sys.exit('no such file')", 1, "no such file"),
        ("sys.exit()", 0, ""),
        ("sys.exit(75)", 75, ""),
        ("return 143", 143, ""),
    ],
)
def test_process_ends_with_its_error_though_a_thread_waits_for_other_ranks(how: str, code: int, words: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ENDING.format(how=how)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == code
    assert (words in done.stderr) if words else not done.stderr
