"""Renewal of ssh access to nodes that run and cannot be reached; its faults do not affect the caller."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from broker.errors import AuthError
from broker.provision.access import RENEW_EVERY_S, WAIT_S_MAX, AccessRenewer
from broker.types import Node, NodeState
from tests.clouds.simulated import SimulatedCloud
from tests.simulation.virtual import VirtualClock

NODE = Node(id="i-1", cloud="cloud", owner="me", cluster="c", attempt=1, rank=0, state=NodeState.RUNNING, token="t")


class Fortress(SimulatedCloud):
    """Return the next of these answers to each call of `renew_access`, after `takes_s`."""

    def __init__(self, clock: VirtualClock, *answers: bool | Exception, takes_s: float = 0.5) -> None:
        super().__init__(clock=clock)
        self.clock, self.answers, self.takes_s = clock, list(answers), takes_s
        self.asked: list[str] = []

    async def renew_access(self, nodes: Sequence[Node]) -> bool:
        self.asked += [node.id for node in nodes]
        await self.clock.sleep(self.takes_s)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_nodes_of_a_gang_that_fail_together_share_one_renewal(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    clock = VirtualClock()
    cloud = Fortress(clock, True, False, False)
    renewer = AccessRenewer({"cloud": cloud}, clock=clock)

    async def act() -> None:
        assert await asyncio.gather(*(renewer.renew(NODE) for _ in range(8))) == [True] * 8
        assert await renewer.renew(NODE) is False and len(cloud.asked) == 1
        await clock.sleep(RENEW_EVERY_S)
        assert await renewer.renew(NODE) is False and len(cloud.asked) == 2
        await clock.sleep(RENEW_EVERY_S)
        assert await renewer.renew(NODE) is False and len(cloud.asked) == 3

    clock.run(act)
    messages = [record.message for record in caplog.records if "is now allowed from this machine" in record.message]
    assert messages == ["ssh to c is now allowed from this machine's current address"], (
        "one message, as one rule changed"
    )


def test_refusal_is_raised_for_every_caller_until_the_next_renewal() -> None:
    clock = VirtualClock()
    renewer = AccessRenewer({"cloud": (refusing := Fortress(clock, AuthError("no"), False))}, clock=clock)

    async def act() -> None:
        refusals = await asyncio.gather(*(renewer.renew(NODE) for _ in range(3)), return_exceptions=True)
        assert [str(refusal) for refusal in refusals] == ["no"] * 3
        with pytest.raises(AuthError, match="no"):
            await renewer.renew(NODE)
        assert len(refusing.asked) == 1
        await clock.sleep(RENEW_EVERY_S)
        assert await renewer.renew(NODE) is False and len(refusing.asked) == 2

    clock.run(act)


def test_renewal_survives_a_hanging_cloud_and_a_cloud_without_firewall() -> None:
    clock = VirtualClock()
    hanging = Fortress(clock, True, takes_s=1000.0)

    async def act() -> None:
        begun_s = clock.now_s()
        assert await AccessRenewer({"cloud": hanging}, clock=clock).renew(NODE) is False
        assert clock.now_s() - begun_s == WAIT_S_MAX
        assert await AccessRenewer({"cloud": SimulatedCloud(clock=clock)}, clock=clock).renew(NODE) is False
        assert await AccessRenewer({}, clock=clock).renew(NODE) is False

    clock.run(act)
