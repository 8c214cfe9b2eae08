"""Gangs on their way back: what a search began and does not need is ended beside the work, and told when it is gone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from broker.clock import Clock
from broker.errors import BrokerError
from broker.provision.launch import Launch, Launcher, describe
from broker.types import Event, EventKind, make_event
from broker.wording import make_place

log = logging.getLogger(__name__)


class SurplusReleaser:
    """Their intents stay open until the cloud confirms; a process that dies leaves them to the collector."""

    def __init__(self, launcher: Launcher, *, clock: Clock) -> None:
        self._launcher = launcher
        self._clock = clock
        self._tasks: dict[str, asyncio.Task[None]] = {}

    @property
    def tokens(self) -> frozenset[str]:
        """Of intents that this process is about to close."""
        return frozenset(self._tasks)

    def begin(self, tries: Sequence[Launch], on_event: Callable[[Event], None]) -> None:
        for one in tries:
            task = asyncio.ensure_future(self._give_back(one, on_event))
            self._tasks[one.request.token] = task
            task.add_done_callback(lambda _, token=one.request.token: self._tasks.pop(token, None))  # type: ignore[misc]

    async def finish(self) -> None:
        """Wait for all that are under way."""
        while self._tasks:
            await asyncio.wait(self._tasks.values())

    async def _give_back(self, one: Launch, on_event: Callable[[Event], None]) -> None:
        place, begun_s = make_place(one.placement), self._clock.now_s()
        try:
            on_event(make_event(EventKind.PLACE_UNNEEDED, place=place))
            gone = await self._launcher.give_back(one)
            usd = sum(node.usd_hour * ((node.ended_s or begun_s) - node.created_s) / 3600 for node in gone)
            took_s = self._clock.now_s() - begun_s
            on_event(make_event(EventKind.PLACE_RETURNED, place=place, took_s=took_s, usd=usd))
        except BrokerError as error:  # the outermost edge of this task; the intent is open, the collector goes on
            log.warning("%s cannot be given back now: %s", describe(one.placement), error.message)
