"""Share reads between requests: pages that show the same content after the same event are read and rendered once.

A read receives no request, so that it cannot contain data of one visitor: names, rights and tickets are added to its
result for each request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from broker.clock import Clock
from broker.frozen import frozen

T = TypeVar("T")
Key = tuple[str, ...]
SHARED_S = 0.25  # maximum age of content that changes without an event, such as steps, at the time of a request


@frozen
class Shared(Generic[T]):
    """The result of a read, and the id of the newest event when it began."""

    found: T
    newest: int


@dataclass(slots=True)
class _Read:
    """A read that is running, or ended at `ended_s`."""

    newest: int
    task: asyncio.Task[Any]
    ended_s: float | None = None


class SharedReads:
    """The reads of one event loop by key, one per key at a time. `find_newest` returns the id of the newest event."""

    def __init__(self, clock: Clock, find_newest: Callable[[], int]) -> None:
        self._clock = clock
        self._find_newest = find_newest
        self._reads: dict[Key, _Read] = {}

    async def get(self, key: Key, read: Callable[[], Awaitable[T]], *, after: int | None = None) -> Shared[T]:
        """Return the result of a read of this key that includes the event `after`, by default the newest event.

        Join a read that is running or has just ended, else run `read`. Raises the errors of the read.
        """
        newest = self._find_newest()
        floor = newest if after is None else min(after, newest)
        while (known := self._reads.get(key)) is not None:
            if known.newest >= floor and self._is_current(known):
                return Shared(found=await asyncio.shield(known.task), newest=known.newest)
            if known.task.done():
                break
            await asyncio.wait([known.task])
        begun = self._begin(key, read)
        return Shared(found=await asyncio.shield(begun.task), newest=begun.newest)

    def forget(self) -> None:
        """Prevent later requests from joining the current reads: something has changed that may not be an event."""
        self._reads.clear()

    def _begin(self, key: Key, read: Callable[[], Awaitable[T]]) -> _Read:
        self._reads = {key: each for key, each in self._reads.items() if self._is_current(each)}
        begun = _Read(newest=self._find_newest(), task=asyncio.ensure_future(_run(read)))
        self._reads[key] = begun

        def end(task: asyncio.Task[Any]) -> None:
            begun.ended_s = self._clock.now_s()
            if task.cancelled() or task.exception() is not None:  # the next request tries again
                begun.ended_s = None

        begun.task.add_done_callback(end)
        return begun

    def _is_current(self, read: _Read) -> bool:
        if not read.task.done():
            return True
        return read.ended_s is not None and 0.0 <= self._clock.now_s() - read.ended_s < SHARED_S


async def _run(read: Callable[[], Awaitable[T]]) -> T:
    return await read()
