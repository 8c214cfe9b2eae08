"""Read the store for the pages in a thread, so that the event loop answers other requests meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from broker.app.container import Context

T = TypeVar("T")
MakeContext = Callable[[], Context]


class PageReader:
    """Runs functions of a context, one at a time; the context belongs to the thread."""

    def __init__(self, make_context: MakeContext) -> None:
        self._make_context = make_context
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="page")
        self._context: Context | None = None

    async def read(self, work: Callable[[Context], T]) -> tuple[T, list[str]]:
        """Return the result of `work`, and the notes and warnings that it gave, each once. Raises its errors."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._run, work)

    def _run(self, work: Callable[[Context], T]) -> tuple[T, list[str]]:
        if self._context is None:
            self._context = self._make_context()
        self._context.market.renew()  # pages are read for weeks
        notes: list[str] = []
        self._context.note = notes.append
        return work(self._context), list(dict.fromkeys(notes))

    def close(self) -> None:
        """Wait for the running function, then close the context."""
        self._thread.submit(self._close)
        self._thread.shutdown(cancel_futures=False)

    def _close(self) -> None:
        if self._context is not None:
            self._context.close()
            self._context = None
