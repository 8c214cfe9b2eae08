"""A worker's state and variables come to its standby, and the launcher follows."""

import os
import select
import signal
import socket
import sys
import threading
from pathlib import Path

import pytest

from trainers import launch
from trainers.standby import (
    COMMAND_VARIABLE,
    END,
    EXIT_CODE_HANDED_OVER,
    PATH_VARIABLE,
    Standbys,
    hand_over,
    receive,
    run_program,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")


def hand_over_in_child(path: str, variables: dict[str, str], contents: list[bytes]) -> int:
    """Hand over and end, as a worker does; its process id."""
    pid = os.fork()
    if pid:
        return pid
    kept = [os.memfd_create("test", 0) for _ in contents]
    for descriptor, content in zip(kept, contents, strict=True):
        os.write(descriptor, content)
    connection = hand_over(path, variables, kept)
    os._exit(EXIT_CODE_HANDED_OVER if connection else 1)


@pytest.mark.parametrize("contents", [[b"state" * 1000], [b"a", b"bc", b"d"], []], ids=["state", "parts", "no state"])
def test_standby_receives_variables_and_state(tmp_path: Path, contents: list[bytes]) -> None:
    path = tmp_path / "socket"
    received: list[tuple[dict[str, str], list[int]]] = []
    standby = threading.Thread(target=lambda: received.append(receive(path)))
    standby.start()
    variables = {"A": "ä\n", "LONG": "x" * 300_000}
    while True:  # until it listens
        pid = hand_over_in_child(str(path), variables, contents)
        if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == EXIT_CODE_HANDED_OVER:
            break
    standby.join(timeout=300)
    ((found, descriptors),) = received
    assert found == variables
    arrived = []
    for descriptor in descriptors:
        with os.fdopen(descriptor, "rb") as file:
            file.seek(0)
            arrived.append(file.read())
    assert arrived == contents
    assert not path.exists()


def test_standby_that_is_not_ready_takes_over_nothing(tmp_path: Path) -> None:
    assert hand_over(str(tmp_path / "missing"), {}, []) is None


def test_standby_of_a_worker_that_did_not_wait_for_it_begins_nothing(tmp_path: Path) -> None:
    """That worker restarts by itself: the standby would be a second one with the same id."""
    path = tmp_path / "socket"
    codes: list[object] = []

    def be_standby() -> None:
        try:
            receive(path)
            codes.append(0)
        except SystemExit as leave:
            codes.append(leave.code)

    standby = threading.Thread(target=be_standby)
    standby.start()
    while True:  # until it listens
        with socket.socket(socket.AF_UNIX) as worker:
            try:
                worker.connect(str(path))
            except OSError:
                continue
            worker.sendall(b"{}" + END)
            break
    standby.join(timeout=300)
    assert codes == [1]


def test_worker_that_was_killed_starts_again_in_its_standby(tmp_path: Path) -> None:
    """The launcher hands over for it and keeps running: the standby waited for the launcher's exit, forever."""
    path = tmp_path / "socket"
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        os.write(writing, receive(path)[0]["A"].encode())
        os._exit(0)
    standbys = Standbys(["/bin/true"])
    standbys._pids[pid] = 0
    command = ["/bin/true"], {PATH_VARIABLE: str(path), "A": "b"}
    while (successor := launch._start_again(0, command, standbys)) != pid:  # until it listens
        os.waitpid(successor, 0)
    has_begun = bool(select.select([reading], [], [], 60.0)[0])
    if not has_begun:
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    standbys.end()
    assert has_begun and os.read(reading, 9) == b"b"
    os.close(reading)
    os.close(writing)


def test_launcher_replaces_a_standby_that_was_taken_but_not_one_that_died() -> None:
    standbys = Standbys([sys.executable, "-m", "trainers.lm"])
    variables = standbys.find_variables(1)
    assert variables[COMMAND_VARIABLE] == f'["{sys.executable}", "-m", "trainers.lm"]'
    assert Path(variables[PATH_VARIABLE]).parent.stat().st_mode & 0o077 == 0
    standbys.start(1)
    assert standbys.take(0) is None
    worker = standbys.take(1)
    assert worker is not None
    os.kill(worker, signal.SIGKILL)
    os.waitpid(worker, 0)
    assert not standbys.forget(worker)  # it is the launcher's own by now
    (successor,) = standbys._pids
    assert standbys.forget(successor) and standbys.take(1) is None
    os.kill(successor, signal.SIGKILL)
    os.waitpid(successor, 0)
    standbys.end()
    assert not Path(variables[PATH_VARIABLE]).parent.exists()


def test_program_runs_as_it_would_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    script = tmp_path / "script.py"
    script.write_text(f"import sys, pathlib\npathlib.Path({str(tmp_path / 'seen')!r}).write_text(' '.join(sys.argv))\n")
    run_program([str(script), "--flag"])
    assert (tmp_path / "seen").read_text() == f"{script} --flag" and sys.path[0] == str(tmp_path)
