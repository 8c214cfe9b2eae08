"""Reads that pages share, and polls that streams share: how often, how old, and for whom."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from contextlib import aclosing

import pytest

from broker.dashboard.changes import POLL_S, REFRESH_S, ChangeFeed
from broker.dashboard.sharing import SHARED_S, Shared, SharedReads
from broker.errors import UsageError
from broker.types.outcomes import EventKind, make_event
from tests.dashboard.conftest import Story

KEY = ("/",)


class HandClock:
    """A clock that tests move; a sleep ends when it has passed."""

    def __init__(self) -> None:
        self.time_s = 1e9
        self._moved = asyncio.Event()

    def now_s(self) -> float:
        return self.time_s

    async def sleep(self, duration_s: float) -> None:
        until_s = self.time_s + duration_s
        while self.time_s < until_s:
            await self._moved.wait()

    async def move(self, duration_s: float) -> None:
        self.time_s += duration_s
        self._moved.set()
        self._moved = asyncio.Event()
        await settle()


async def settle() -> None:
    """Let every task run until it waits."""
    for _ in range(20):
        await asyncio.sleep(0)


class Pages:
    """Shared reads of a page whose newest event tests choose; each read waits until it is let go."""

    def __init__(self) -> None:
        self.clock = HandClock()
        self.newest = 1
        self.begun: list[asyncio.Event] = []
        self.shared = SharedReads(self.clock, lambda: self.newest)

    def ask(self, after: int | None = None) -> asyncio.Task[Shared[int]]:
        return asyncio.ensure_future(self.shared.get(KEY, self._read, after=after))

    async def _read(self) -> int:
        self.begun.append(let_go := asyncio.Event())
        number = len(self.begun)
        await let_go.wait()
        return number


def drive(scene: Callable[[Pages], Awaitable[None]]) -> None:
    async def run() -> None:
        await scene(Pages())

    asyncio.run(run())


def test_simultaneous_requests_are_one_read() -> None:
    async def scene(pages: Pages) -> None:
        asked = [pages.ask() for _ in range(20)]
        await settle()
        pages.begun[0].set()
        assert {(await each).found for each in asked} == {1} and len(pages.begun) == 1
        assert (await pages.ask()).found == 1  # it has just ended

    drive(scene)


def test_request_that_knows_a_newer_event_waits_for_a_read_that_knows_it_too() -> None:
    async def scene(pages: Pages) -> None:
        old = pages.ask()
        await settle()
        pages.newest = 2
        new, told_before = [pages.ask() for _ in range(5)], pages.ask(after=1)
        await settle()
        assert len(pages.begun) == 1  # one at a time
        pages.begun[0].set()
        assert (await old).newest == 1 and (await told_before).found == 1
        await settle()
        pages.begun[1].set()
        assert {((await each).found, (await each).newest) for each in new} == {(2, 2)} and len(pages.begun) == 2

    drive(scene)


def test_result_is_served_for_a_quarter_second_only() -> None:
    async def scene(pages: Pages) -> None:
        first = pages.ask()
        await settle()
        await pages.clock.move(10 * SHARED_S)  # a long read: the age of its result counts from its end
        pages.begun[0].set()
        await first
        await pages.clock.move(SHARED_S * 0.9)
        assert (await pages.ask()).found == 1
        await pages.clock.move(SHARED_S * 0.1)
        second = pages.ask()
        await settle()
        pages.begun[1].set()
        assert (await second).found == 2

    drive(scene)


def test_no_event_of_the_future_is_waited_for() -> None:
    async def scene(pages: Pages) -> None:
        asked = pages.ask(after=10**18)  # the state was restored, or the header is made up
        await settle()
        pages.begun[0].set()
        assert (await asked).newest == 1

    drive(scene)


def test_change_without_an_event_is_seen_after_an_action() -> None:
    async def scene(pages: Pages) -> None:
        old = pages.ask()
        await settle()
        pages.shared.forget()
        new = pages.ask()
        await settle()
        for each in pages.begun:
            each.set()
        assert ((await old).found, (await new).found) == (1, 2)

    drive(scene)


def test_visitor_who_leaves_does_not_cancel_the_read_of_others() -> None:
    async def scene(pages: Pages) -> None:
        first, second = pages.ask(), pages.ask()
        await settle()
        first.cancel()
        await settle()
        pages.begun[0].set()
        assert (await second).found == 1 and len(pages.begun) == 1

    drive(scene)


def test_error_reaches_everyone_who_waits_and_the_next_request_tries_again() -> None:
    async def scene() -> None:
        tries = 0

        async def fail() -> int:
            nonlocal tries
            tries += 1
            await asyncio.sleep(0)
            raise UsageError("unknown job")

        shared = SharedReads(HandClock(), lambda: 1)
        found = await asyncio.gather(*(shared.get(KEY, fail) for _ in range(3)), return_exceptions=True)
        assert [type(each) for each in found] == [UsageError] * 3 and tries == 1
        with pytest.raises(UsageError):
            await shared.get(KEY, fail)
        assert tries == 2

    asyncio.run(scene())


def test_streams_share_their_polls_and_a_job_gets_only_its_own_events(
    story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene() -> None:
        clock, looks = HandClock(), 0
        events = story.store.events
        read = events.get_newest_id

        def count(job_id: int | None = None) -> int:
            nonlocal looks
            looks += 1
            return read(job_id)

        monkeypatch.setattr(events, "get_newest_id", count)
        feed, told = ChangeFeed(story.store, clock), dict[str, list[int]]()
        begin = read()

        async def follow(name: str, job_id: int | None) -> None:
            told[name] = []
            async with aclosing(feed.follow(job_id, after=begin)) as changes:
                async for newest in changes:
                    told[name].append(newest)

        pages = {f"overview {number}": None for number in range(30)} | {"job 1": 1, "job 2": 2}
        streams = [asyncio.ensure_future(follow(name, job_id)) for name, job_id in pages.items()]
        await settle()
        opened = looks
        story.add_event(1, make_event(EventKind.NOTE, text="of job 1"))
        await clock.move(POLL_S)
        story.add_event(2, make_event(EventKind.NOTE, text="of job 2"))
        await clock.move(POLL_S)
        assert looks - opened == 2
        assert told["job 1"] == [begin + 1] and told["job 2"] == [begin + 2]
        assert all(told[name] == [begin + 1, begin + 2] for name, job_id in pages.items() if job_id is None)
        for _ in range(math.ceil(REFRESH_S / POLL_S)):
            await clock.move(POLL_S)
        assert told["job 1"] == [begin + 1, begin + 1]  # steps and costs are not events
        for each in streams:
            each.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
        assert looks - opened <= 3 + REFRESH_S / POLL_S

    asyncio.run(scene())


def test_stream_of_a_job_with_earlier_events_starts_with_the_newest(story: Story) -> None:
    async def scene() -> None:
        begin = story.store.events.get_newest_id()
        story.add_event(1, make_event(EventKind.NOTE, text="between page and stream"))
        story.add_event(2, make_event(EventKind.NOTE, text="of another job"))
        async with aclosing(ChangeFeed(story.store, HandClock()).follow(1, after=begin)) as changes:
            assert await anext(changes) == begin + 1

    asyncio.run(scene())
