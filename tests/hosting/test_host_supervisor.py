"""The supervisor of a server ends on SIGTERM, also between two starts."""

from __future__ import annotations

import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

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
