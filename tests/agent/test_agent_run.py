"""A runner whose program has ended waits for the programs of the other ranks."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from broker.agent import FOLDER

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
