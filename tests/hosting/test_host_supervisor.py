"""The supervisor of a server ends on SIGTERM, also between two starts; the command on its machine uses its state."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import broker
from broker.hosting import host_supervisor
from broker.hosting.machines import PROGRAMS


def test_signal_during_the_pause_before_a_restart_starts_no_other_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts: list[object] = []

    def fail(argv: object, **options: object) -> object:
        starts.append(argv)
        return SimpleNamespace(wait=lambda: 1, terminate=lambda: None)

    time = SimpleNamespace(monotonic=lambda: 0.0, sleep=lambda pause_s: signal.raise_signal(signal.SIGTERM))
    monkeypatch.setattr(host_supervisor, "subprocess", SimpleNamespace(Popen=fail, DEVNULL=None))
    monkeypatch.setattr(host_supervisor, "time", time)
    (tmp_path / "start.json").write_text("[]")
    before = signal.getsignal(signal.SIGTERM)
    try:
        host_supervisor.supervise(str(tmp_path))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert len(starts) == 1
    assert (tmp_path / "given-up").read_text() == "1"


def test_server_whose_supervisor_was_killed_is_started_again_with_one(tmp_path: Path) -> None:
    """Without systemd, nothing else would restart it when it fails."""
    names: dict[str, Any] = {"__name__": "host_program"}
    for path in PROGRAMS:
        exec(compile(path.read_text(), path.name, "exec"), names)  # noqa: S102 - as the machine does
    done: list[str] = []
    names["read_status"] = lambda folder: {"is_running": True}
    names["stop"] = lambda folder: done.append("stop")
    names["run"] = lambda folder: done.append("run")
    (tmp_path / "releases" / "r1").mkdir(parents=True)
    names["switch"](str(tmp_path), "r1")
    request = {"digest": "r1", "arguments": []}
    program = [sys.executable, "-c", "print(flush=True); input()", str(tmp_path)]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as supervisor:
        assert supervisor.stdout is not None and supervisor.stdout.readline()  # /proc has its arguments by now
        (tmp_path / "supervisor.pid").write_text(str(supervisor.pid))
        names["start"](str(tmp_path), request)
        assert done == [], "a supervised server is left alone"
        supervisor.kill()
        supervisor.wait()
        names["start"](str(tmp_path), request)
    assert done == ["stop", "run"]


def test_log_is_rotated_under_its_writers_and_two_files_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    write = (
        "import sys\nfor line in sys.stdin: print(line, end='', flush=True); print('done', file=sys.stderr, flush=True)"
    )
    with path.open("ab") as log, subprocess.Popen(
        [sys.executable, "-c", write], stdin=subprocess.PIPE, stdout=log, stderr=subprocess.PIPE, text=True
    ) as server:  # fmt: skip
        assert server.stdin is not None and server.stderr is not None
        for number in range(3):
            print(f"{number} " + "x" * 100, file=server.stdin, flush=True)
            assert server.stderr.readline() == "done\n"
            assert host_supervisor.rotate_log(str(tmp_path), log.fileno(), bytes_max=100)
            assert not host_supervisor.rotate_log(str(tmp_path), log.fileno(), bytes_max=100), "it is small now"
        print("last", file=server.stdin, flush=True)
        assert server.stderr.readline() == "done\n"
    assert path.read_bytes() == b"last\n", "without a hole before it"
    assert (tmp_path / "server.log.1").read_text().startswith("2 ")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["server.log", "server.log.1"]


def test_log_that_is_not_the_output_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "server.log").write_text("x" * 1000)
    with (tmp_path / "other").open("ab") as other:
        assert not host_supervisor.rotate_log(str(tmp_path), other.fileno(), bytes_max=100)
    assert (tmp_path / "server.log").stat().st_size == 1000


def test_supervisor_rotates_the_log_while_the_server_runs(tmp_path: Path) -> None:
    """In a process of its own, whose output is the log; the server ends once its log was rotated."""
    release = tmp_path / "release"
    release.mkdir()
    (tmp_path / "current").symlink_to(release)
    (tmp_path / "start.json").write_text("[]")
    (release / "python.path").write_text("/bin/sh")
    rotated = tmp_path / "server.log.1"
    program = (
        "import subprocess, sys\n"
        "from broker.hosting import host_supervisor\n"
        "host_supervisor.LOG_CHECK_S = 0.01\n"
        "host_supervisor.rotate_log.__defaults__ = (100,)\n"
        "start = subprocess.Popen\n"
        f"script = 'until [ -e {rotated} ]; do echo a line of the server; done'\n"
        "subprocess.Popen = lambda argv, **options: start(['/bin/sh', '-c', script], **options)\n"
        "host_supervisor.supervise(sys.argv[1])\n"
    )
    with (tmp_path / "server.log").open("ab") as log:
        subprocess.run([sys.executable, "-c", program, str(tmp_path)], stdout=log, stderr=log, check=True, timeout=120)
    assert rotated.read_text().startswith("a line of the server")


def test_command_on_the_servers_machine_uses_the_servers_state(tmp_path: Path) -> None:
    folder = tmp_path / "the server's"
    release = folder / "current"
    release.mkdir(parents=True)
    (release / "python.path").write_text(sys.executable)
    (release / "broker").symlink_to(Path(broker.__file__).parent)
    (tmp_path / "broker").mkdir()  # in the working directory: not the package
    (tmp_path / "broker" / "__main__.py").write_text("raise SystemExit(9)")
    host_supervisor.write_command(str(folder))
    command = [str(folder / "broker"), "server", "token", "create", "ada"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "ada (user)" in done.stderr and (folder / "state" / "state.db").exists()
