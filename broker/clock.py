"""The one place that reads time or sleeps, so that a virtual clock can stand in for it."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds since the epoch, and a sleep that a simulation may skip."""

    def now_s(self) -> float: ...

    async def sleep(self, duration_s: float) -> None: ...


class SystemClock:
    def now_s(self) -> float:
        return time.time()

    async def sleep(self, duration_s: float) -> None:
        import asyncio  # 40 ms that `broker plan` need not pay

        await asyncio.sleep(duration_s)


class Stopwatch:
    """Time as somebody saw it pass who looked again and again.

    A wall clock that jumps, a machine that slept, or a process that was stopped add one `gap_s_max` at most: what
    happened while nobody looked is no evidence of anything.
    """

    def __init__(self, gap_s_max: float) -> None:
        self._gap_s_max = gap_s_max
        self._looked_s: float | None = None
        self._seen_s = 0.0

    def look(self, now_s: float) -> float:
        """Seconds since the first look."""
        if self._looked_s is not None:
            self._seen_s += min(self._gap_s_max, max(0.0, now_s - self._looked_s))
        self._looked_s = now_s
        return self._seen_s
