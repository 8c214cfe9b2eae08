"""The supervisor of a server ends on SIGTERM, also between two starts; the command on its machine uses its state."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import broker
from broker.hosting import host_supervisor


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
