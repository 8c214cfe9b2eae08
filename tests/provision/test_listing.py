"""Many askers, few calls; and nobody is told what was true before they asked."""

from __future__ import annotations

import asyncio

import pytest

from broker.errors import TransientError
from broker.provision.listing import Lister
from broker.types import Node, NodeList, NodeState
from tests.simulation.virtual import VirtualClock
from tests.state.samples import Hands


class SlowCloud:
    """Takes a second to answer with what was true when it was asked."""

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


def test_a_thousand_askers_at_once_make_two_calls_and_none_gets_an_old_answer(clock: VirtualClock) -> None:
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


def test_a_steady_stream_of_askers_makes_a_call_after_the_other(clock: VirtualClock) -> None:
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


def test_a_list_of_lately_will_do_for_those_who_say_so(clock: VirtualClock) -> None:
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


def test_a_list_of_the_same_instant_is_too_old_for_those_who_want_one_from_now_on() -> None:
    """It may not show what its asker has just done."""
    hands = Hands()
    cloud, lister = Instant(VirtualClock()), Lister("me", clock=hands)
    for calls, age_s_max in ((1, 0.0), (2, 0.0), (2, 5.0), (3, 0.0)):
        asyncio.run(lister.list(cloud, age_s_max=age_s_max))  # type: ignore[arg-type]
        assert cloud.calls == calls


def test_a_list_from_the_future_of_a_clock_that_was_set_back_will_do_for_nobody() -> None:
    """For an hour it would hide every loss."""
    hands = Hands()
    cloud, lister = Instant(VirtualClock()), Lister("me", clock=hands)
    asyncio.run(lister.list(cloud, age_s_max=5.0))  # type: ignore[arg-type]
    hands.time_s -= 3600.0
    asyncio.run(lister.list(cloud, age_s_max=5.0))  # type: ignore[arg-type]
    assert cloud.calls == 2


def test_a_call_that_fails_is_made_again_and_given_up_at_its_limit(clock: VirtualClock) -> None:
    cloud, lister = SlowCloud(clock), Lister("me", clock=clock)
    cloud.failures = 3
    clock.run(lambda: lister.list(cloud))  # type: ignore[arg-type]
    assert cloud.calls == 4
    cloud.failures = 3
    with pytest.raises(TransientError):
        clock.run(lambda: lister.list(cloud, tries_max=3))  # type: ignore[arg-type]


def test_an_asker_who_leaves_takes_the_answer_from_nobody(clock: VirtualClock) -> None:
    cloud, lister = SlowCloud(clock), Lister("me", clock=clock)

    async def work() -> None:
        leaver = asyncio.ensure_future(lister.list(cloud))  # type: ignore[arg-type]
        stayer = asyncio.ensure_future(lister.list(cloud))  # type: ignore[arg-type]
        await clock.sleep(0.5)
        leaver.cancel()
        assert (await stayer).nodes

    clock.run(work)
