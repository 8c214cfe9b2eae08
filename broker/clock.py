"""Read time and sleep. No other module does, so that a virtual clock can replace this one."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    import asyncio

Result = TypeVar("Result")
STALL_S_MAX = 0.1  # real; see `ScaledClock`


class Clock(Protocol):
    """Seconds since the epoch, and a sleep that a simulation may skip."""

    def now_s(self) -> float:
        """Return the time in seconds since the epoch. It may jump if the wall clock is set."""

    async def sleep(self, duration_s: float) -> None:
        """Wait for at least `duration_s` seconds of this clock."""


async def within(awaited: Awaitable[Result], limit_s: float | None) -> Result:
    """Await a result for at most `limit_s` seconds; None means no limit. Raises TimeoutError.

    Before Python 3.12, `asyncio.wait_for` swallows a cancellation that arrives together with the result
    (https://github.com/python/cpython/issues/86296), so the cancelled task would continue.
    """
    import asyncio  # imported late, as below

    async with asyncio.timeout(limit_s):
        return await awaited


def pause(duration_s: float) -> None:
    """Wait in real time, for a view in the foreground. Ctrl-C raises KeyboardInterrupt at once.

    It uses no event loop: asyncio prints its own traceback if Ctrl-C arrives while a loop is being created or closed.
    """
    time.sleep(duration_s)


class SystemClock:
    """The machine's clock."""

    def now_s(self) -> float:
        """Return the wall-clock time."""
        return time.time()

    async def sleep(self, duration_s: float) -> None:
        """Wait in real time, through asyncio."""
        import asyncio  # imported late: it takes 40 ms, and `broker plan` does not need it

        await asyncio.sleep(duration_s)


class ScaledClock:
    """Simulated time that runs `rate` times as fast as real time. The rate may change, and the clock may be held.

    It starts at the real time and never runs backwards. `floor_s` is the minimum real duration of a sleep: otherwise,
    at a high rate, a controller that polls every half second would poll continuously.

    At a rate above 1, at most `STALL_S_MAX` counts between two observations. Otherwise, a process that is suspended or
    gets no processor for seconds would find that hours have passed, and that all its time limits have expired.
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
        """Simulated seconds per real second while the clock is not held."""
        return self._rate

    def now_s(self) -> float:
        """Return the simulated time in seconds since the epoch; it stands still while the clock is held."""
        real_s = time.monotonic()
        if not self._holders:
            passed_s = real_s - self._real_s
            self._now_s += (passed_s if self._rate <= 1 else min(passed_s, STALL_S_MAX)) * self._rate
        self._real_s = real_s
        return self._now_s

    def set_rate(self, rate: float, *, floor_s: float = 0.0) -> None:
        """Change the rate from now on; current sleepers still wake at the same simulated time."""
        assert rate > 0 and floor_s >= 0
        self.now_s()
        self._rate, self._floor_s = rate, floor_s
        self._wake_all()

    def advance(self, duration_s: float) -> None:
        """Advance simulated time at once, even while the clock is held."""
        assert duration_s >= 0
        self.now_s()
        self._now_s += duration_s
        self._wake_all()

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Stop simulated time for the duration of the block."""
        self.now_s()
        self._holders += 1
        try:
            yield
        finally:
            self.now_s()
            self._holders -= 1
            self._wake_all()

    async def sleep(self, duration_s: float) -> None:
        """Wait for `duration_s` simulated seconds, and for at least the real `floor_s`."""
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
                if wait_s is not None and self._rate > 1:
                    wait_s = min(wait_s, STALL_S_MAX / 2)  # to observe the time
                try:
                    await within(changed.wait(), wait_s)
                except TimeoutError:
                    pass
        finally:
            self._sleepers.discard(changed)

    def _wake_all(self) -> None:
        for sleeper in self._sleepers:
            sleeper.set()


class Stopwatch:
    """Elapsed time that ignores gaps between observations.

    A wall clock that jumps, a machine that slept, or a process that was stopped adds at most `gap_s_max`: time without
    observations is not evidence of anything.
    """

    def __init__(self, gap_s_max: float) -> None:
        self._gap_s_max = gap_s_max
        self._observed_s: float | None = None
        self._elapsed_s = 0.0

    def observe(self, now_s: float) -> float:
        """Return the elapsed seconds since the first observation, without gaps."""
        if self._observed_s is not None:
            self._elapsed_s += min(self._gap_s_max, max(0.0, now_s - self._observed_s))
        self._observed_s = now_s
        return self._elapsed_s
