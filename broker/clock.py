"""The one place that reads time or sleeps, so that a virtual clock can stand in for it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import asyncio


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


class ScaledClock:
    """Simulated time that passes `rate` times as fast as real time; the rate may change, and the clock may be held.

    It starts at the real time and never runs backwards. `floor_s` is the least real time that a sleep takes: at a high
    rate a controller that looks every half second would otherwise look all the time.
    """

    def __init__(self, *, rate: float = 1.0, floor_s: float = 0.0) -> None:
        self._rate = rate
        self._floor_s = floor_s
        self._holders = 0
        self._real_s = time.monotonic()
        self._now_s = time.time()
        self._sleepers: set[asyncio.Event] = set()

    @property
    def rate(self) -> float:
        """Simulated seconds in a real one, while nobody holds the clock."""
        return self._rate

    def now_s(self) -> float:
        real_s = time.monotonic()
        if not self._holders:
            self._now_s += (real_s - self._real_s) * self._rate
        self._real_s = real_s
        return self._now_s

    def set_rate(self, rate: float, *, floor_s: float = 0.0) -> None:
        """From now on; whoever sleeps now wakes at the same simulated time as before."""
        assert rate > 0 and floor_s >= 0
        self.now_s()
        self._rate, self._floor_s = rate, floor_s
        self._wake_all()

    def advance(self, duration_s: float) -> None:
        """So much simulated time passes at once, even while somebody holds the clock."""
        assert duration_s >= 0
        self.now_s()
        self._now_s += duration_s
        self._wake_all()

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Stop simulated time while the context lasts: work done inside takes none of it."""
        self.now_s()
        self._holders += 1
        try:
            yield
        finally:
            self.now_s()
            self._holders -= 1
            self._wake_all()

    async def sleep(self, duration_s: float) -> None:
        import asyncio

        until_s, changed = self.now_s() + duration_s, asyncio.Event()
        rest_until_s = time.monotonic() + self._floor_s
        self._sleepers.add(changed)
        try:
            while True:
                left_s = until_s - self.now_s()
                rest_s = rest_until_s - time.monotonic()
                if left_s <= 0 and rest_s <= 0:
                    await asyncio.sleep(0)
                    return
                changed.clear()
                if left_s <= 0:
                    await asyncio.sleep(rest_s)
                    continue
                wait_s = None if self._holders else max(left_s / self._rate, rest_s, 1e-4)
                try:
                    await asyncio.wait_for(changed.wait(), wait_s)
                except TimeoutError:
                    pass
        finally:
            self._sleepers.discard(changed)

    def _wake_all(self) -> None:
        for each in self._sleepers:
            each.set()


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
