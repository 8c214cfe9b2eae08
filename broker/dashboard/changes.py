"""Look for new events for all open pages: one query at a time, however many pages are open."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator

from broker.clock import Clock
from broker.state.store import Store

POLL_S = 0.5  # between looks for new events
REFRESH_S = 5.0  # a page is loaded again after this long without an event, because steps and costs are not events


class ChangeFeed:
    """The newest events of a store, for streams of one event loop. A job's page waits for events of that job only."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._newest = 0
        self._newest_by_job: dict[int, int] = {}  # of jobs that are followed
        self._followed: Counter[int] = Counter()
        self._look: asyncio.Task[None] | None = None

    async def follow(self, job_id: int | None, *, after: int) -> AsyncGenerator[int, None]:
        """Yield the id of the newest event of a job, or of all, whenever it grows, and at least every `REFRESH_S`.

        `after` is the event that the page knows. Raises StateError.
        """
        if job_id is not None:
            self._followed[job_id] += 1
        try:
            newest = self._find_newest(job_id)
            sent, sent_s = after, self._clock.now_s()
            while True:
                if newest > sent or self._clock.now_s() - sent_s >= REFRESH_S:
                    sent, sent_s = newest, self._clock.now_s()
                    yield newest
                await self._wait()
                newest = self._newest if job_id is None else self._newest_by_job[job_id]
        finally:
            if job_id is not None:
                self._leave(job_id)

    def _find_newest(self, job_id: int | None) -> int:
        """Read the id of the newest event of a job, or of all."""
        newest = self._store.events.get_newest_id(job_id)
        if job_id is not None:
            self._newest_by_job[job_id] = newest
        return newest

    def _leave(self, job_id: int) -> None:
        self._followed[job_id] -= 1
        if not self._followed[job_id]:
            del self._followed[job_id], self._newest_by_job[job_id]

    async def _wait(self) -> None:
        """Wait for the next look, which all streams share. Raises StateError in each of them."""
        if self._look is None or self._look.done():
            self._look = asyncio.ensure_future(self._poll_again())
        await asyncio.shield(self._look)

    async def _poll_again(self) -> None:
        await self._clock.sleep(POLL_S)
        known, self._newest = self._newest, self._store.events.get_newest_id()
        if self._newest != known and self._followed:
            self._newest_by_job.update(self._store.events.list_newest_ids(list(self._followed), after=known))
