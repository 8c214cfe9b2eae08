"""Lookups that every request waits for, such as its token, in a thread with a connection of its own.

A database that does not answer would hold up the event loop, and with it health checks and all open connections.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from broker.app.container import Context
from broker.errors import StateError

T = TypeVar("T")


class StoreThread:
    """Runs functions one at a time. The store of `context` belongs to the thread."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="lookup")
        self._asked = 0
        self._failure: tuple[int, StateError] | None = None  # the newest one that was asked before it, and the error

    async def run(self, work: Callable[[], T]) -> T:
        """Return the result of `work`.

        Raises its errors. A StateError also fails all that was asked before it: each would wait as long for a database
        that cannot be reached.
        """
        self._asked += 1
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._run, work, self._asked)

    def _run(self, work: Callable[[], T], number: int) -> T:
        if self._failure is not None and number <= self._failure[0]:
            error = self._failure[1]
            raise StateError(error.message, hints=error.hints, details=error.details)
        try:
            return work()
        except StateError as error:
            self._failure = self._asked, error
            raise

    def close(self) -> None:
        """Wait for the running function, then close the context."""
        self._thread.submit(self.context.close)
        self._thread.shutdown()
