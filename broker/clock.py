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
