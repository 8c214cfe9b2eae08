"""Virtual time: an event loop that jumps to the next timer instead of waiting for it."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any

START_S = 1_700_000_000.0


class _Selector(selectors.DefaultSelector):
    skipped_s = 0.0

    def select(self, timeout: float | None = None) -> Any:
        assert timeout is None or timeout < 10_000_000
        if timeout is None:
            raise RuntimeError("nothing will ever happen: every task waits for another")
        self.skipped_s += max(0.0, timeout)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self, start_s: float = START_S) -> None:
        self._virtual = _Selector()
        self._start_s = start_s
        super().__init__(self._virtual)
        self._clock_resolution = 1e-5  # coarser than a float near 1.7e9 can be

    def time(self) -> float:
        return self._start_s + self._virtual.skipped_s


class VirtualClock:
    """A Clock; `start_s` continues where an earlier loop stopped."""

    def __init__(self) -> None:
        self.loop: VirtualLoop | None = None
        self._idle_s = START_S

    def now_s(self) -> float:
        return self.loop.time() if self.loop else self._idle_s

    async def sleep(self, duration_s: float) -> None:
        await asyncio.sleep(duration_s)

    def run(self, work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """Run to the end, or to the crash; time continues from the last run."""
        loop = self.loop = VirtualLoop(self._idle_s)
        loop.set_exception_handler(lambda loop, context: None)
        try:
            return loop.run_until_complete(work())
        finally:
            tasks = asyncio.all_tasks(loop)
            for task in tasks:
                task.cancel()
            if tasks:
                loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            self._idle_s = loop.time()
            loop.close()
            self.loop = None
