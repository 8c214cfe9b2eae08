"""The cloud in memory fulfils the contract too, on virtual time."""

from __future__ import annotations

import math
from collections.abc import Coroutine
from typing import Any

import pytest

from broker.clouds.base import Cloud
from broker.types import Node, Offer
from tests.clouds.contract import Bed, CloudContract
from tests.clouds.simulated import FaultRates, SimulatedCloud
from tests.simulation.virtual import VirtualClock


class SimulatedBed(Bed):
    look_s = 1.0
    has_machines = False

    def __init__(self) -> None:
        self.clock = self.virtual = VirtualClock()
        self.cloud = self.simulated = SimulatedCloud(clock=self.clock)
        self.offer = Offer(
            cloud="simulated", region="here", zone="here-a", instance_type="sim-1x", vcpus=1, memory_gib=1,
            ondemand_usd_hour=0.1, spot_usd_hour=0.03,
        )  # fmt: skip

    def reopen(self) -> Cloud:
        return self.cloud  # it has no state but its machines

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        self.virtual.run(lambda: work)

    def fill(self) -> None:
        self.simulated.full_zones["here-a"] = math.inf

    def lose_next_answer(self) -> None:
        self.simulated.faults = FaultRates(unknown_after=1.0)
        self.simulated.on_fault = lambda fault, cluster: setattr(self.simulated, "faults", FaultRates())

    def throttle_next_create(self) -> None:
        self.simulated.faults = FaultRates(throttled=1.0)
        self.simulated.on_fault = lambda fault, cluster: setattr(self.simulated, "faults", FaultRates())

    async def kill_newborn(self, node: Node) -> str:
        self.simulated.end_by_itself(node.id, reason="no disk")
        return "no disk"

    async def preempt(self, node: Node) -> None:
        self.simulated.preempt([node.id])

    async def end_from_inside(self, node: Node) -> None:
        self.simulated.end_by_itself(node.id, reason="lease")


@pytest.fixture
def bed() -> Bed:
    return SimulatedBed()


class TestSimulated(CloudContract):
    pass
