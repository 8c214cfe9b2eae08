"""Shared lists: many callers, few calls, and no list from before a caller asked."""

from __future__ import annotations

import asyncio

import pytest

from broker.errors import TransientError
from broker.provision.listing import Lister
from broker.types import Node, NodeList, NodeState
from tests.simulation.virtual import VirtualClock
from tests.state.samples import Hands


class SlowCloud:
    """A cloud whose lists take 1 s and show the state at the time of the call."""

    name, settle_s = "slow", 0.0

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self.calls = 0
        self.failures = 0

    async def list_nodes(self, owner: str) -> NodeList:
        self.calls += 1
        asked_s = self._clock.now_s()
        await self._clock.sleep(1.0)
        if self.failures:
            self.failures -= 1
            raise TransientError("reset")
        node = Node(id=f"n{self.calls}", cloud="slow", owner=owner, cluster="c", attempt=1, rank=0,
                    state=NodeState.RUNNING, token="t", created_s=asked_s)  # fmt: skip
        return NodeList(nodes=(node,))


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


def test_a_thousand_concurrent_callers_make_two_calls_and_none_gets_an_old_list(clock: VirtualClock) -> None:
    cloud, lister = SlowCloud(clock), Lister("me", clock=clock)

    async def ask(delay_s: float) -> None:
        await clock.sleep(delay_s)
        asked_s = clock.now_s()
        listing = await lister.list(cloud)  # type: ignore[arg-type]
        assert listing.nodes[0].created_s >= asked_s

    async def work() -> None:
        await asyncio.gather(*(ask(n / 2000) for n in range(1000)))

    clock.run(work)
    assert cloud.calls == 2


def test_a_steady_stream_of_callers_makes_one_call_at_a_time(clock: VirtualClock) -> None:
    cloud, lister = SlowCloud(clock), Lister("me", clock=clock)

    async def ask(delay_s: float) -> None:
        await clock.sleep(delay_s)
        asked_s = clock.now_s()
        listing = await lister.list(cloud)  # type: ignore[arg-type]
        assert asked_s <= listing.asked_s <= asked_s + 1.0

    async def work() -> None:
        await asyncio.gather(*(ask(n / 10) for n in range(100)))

    clock.run(work)
    assert cloud.calls <= 12


def test_a_recent_list_is_shared_within_age_s_max(clock: VirtualClock) -> None:
    cloud, lister = SlowCloud(clock), Lister("me", clock=clock)

    async def work() -> None:
        first = await lister.list(cloud)  # type: ignore[arg-type]
        assert await lister.list(cloud, age_s_max=5.0) is first  # type: ignore[arg-type]
        await clock.sleep(10.0)
        assert await lister.list(cloud, age_s_max=5.0) is not first  # type: ignore[arg-type]
        assert first.by_id["n1"] in first.by_token["t"]

    clock.run(work)


class Instant(SlowCloud):
    async def list_nodes(self, owner: str) -> NodeList:
        self.calls += 1
        return NodeList(nodes=())


def test_a_list_of_the_same_instant_is_too_old_without_age_s_max() -> None:
    """It may not show the last action of its caller."""
    hands = Hands()
    cloud, lister = Instant(VirtualClock()), Lister("me", clock=hands)
    for calls, age_s_max in ((1, 0.0), (2, 0.0), (2, 5.0), (3, 0.0)):
        asyncio.run(lister.list(cloud, age_s_max=age_s_max))  # type: ignore[arg-type]
        assert cloud.calls == calls


def test_a_list_from_before_the_clock_was_set_back_is_not_shared() -> None:
    """It would hide losses for an hour."""
    hands = Hands()
    cloud, lister = Instant(VirtualClock()), Lister("me", clock=hands)
    asyncio.run(lister.list(cloud, age_s_max=5.0))  # type: ignore[arg-type]
    hands.time_s -= 3600.0
    asyncio.run(lister.list(cloud, age_s_max=5.0))  # type: ignore[arg-type]
    assert cloud.calls == 2


def test_a_failed_list_is_retried_up_to_a_limit(clock: VirtualClock) -> None:
    cloud, lister = SlowCloud(clock), Lister("me", clock=clock)
    cloud.failures = 3
    clock.run(lambda: lister.list(cloud))  # type: ignore[arg-type]
    assert cloud.calls == 4
    cloud.failures = 3
    with pytest.raises(TransientError):
        clock.run(lambda: lister.list(cloud, tries_max=3))  # type: ignore[arg-type]


def test_a_cancelled_caller_does_not_cancel_the_list_for_others(clock: VirtualClock) -> None:
    cloud, lister = SlowCloud(clock), Lister("me", clock=clock)

    async def work() -> None:
        leaver = asyncio.ensure_future(lister.list(cloud))  # type: ignore[arg-type]
        stayer = asyncio.ensure_future(lister.list(cloud))  # type: ignore[arg-type]
        await clock.sleep(0.5)
        leaver.cancel()
        assert (await stayer).nodes

    clock.run(work)
