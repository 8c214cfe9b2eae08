"""A runner whose program has ended waits for the programs of the other ranks."""

from __future__ import annotations

import importlib
import os
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
        runner._gang = SimpleNamespace(is_away=False)

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
