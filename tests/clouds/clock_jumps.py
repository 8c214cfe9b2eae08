"""A clock that jumps instead of waiting, and stands still while a call to a cloud runs in a thread."""

from __future__ import annotations

import asyncio
import itertools
from asyncio.base_events import BaseEventLoop
from typing import Any

import pytest

START_S = 1_790_000_000.0
QUIET_MIN = 25  # rounds of the event loop in which all tasks only wait for the clock
POLL_S = 0.0005


class Calls:
    """Counts calls running in threads."""

    count = 0


def count_calls(patch: pytest.MonkeyPatch) -> None:
    """Patch the thread calls, for a fixture: without it a time limit would jump past the call itself."""
    run = BaseEventLoop.run_in_executor

    def counted(self: BaseEventLoop, executor: Any, function: Any, *arguments: Any) -> Any:
        Calls.count += 1
        future = run(self, executor, function, *arguments)
        future.add_done_callback(_note_end)
        return future

    patch.setattr(BaseEventLoop, "run_in_executor", counted)
    patch.setattr(Calls, "count", 0)


def _note_end(future: asyncio.Future[Any]) -> None:
    Calls.count -= 1


class JumpingClock:
    """Wakes the sleeper that is due first, as soon as nothing else can happen."""

    def __init__(self) -> None:
        self._now_s = START_S
        self._sleepers: set[tuple[float, int]] = set()
        self._serials = itertools.count()

    def now_s(self) -> float:
        return self._now_s

    async def sleep(self, duration_s: float) -> None:
        mine = (self._now_s + duration_s, next(self._serials))
        self._sleepers.add(mine)
        try:
            quiet, seen_s = 0, self._now_s
            while quiet < QUIET_MIN or min(self._sleepers) != mine:
                is_quiet = Calls.count == 0 and self._now_s == seen_s
                quiet, seen_s = quiet + 1 if is_quiet else 0, self._now_s
                await asyncio.sleep(POLL_S if Calls.count else 0)
        finally:
            self._sleepers.discard(mine)
        self._now_s = max(self._now_s, mine[0])
