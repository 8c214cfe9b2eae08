"""Cloud, lists and provisioner as the product uses them, each reporting its actions to the universe."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from broker.provision.lifecycle import Provisioner
from broker.provision.listing import Lister, Listing
from broker.types import Cluster, Node, NodeRequest
from tests.clouds.simulated import SimulatedCloud
from tests.simulation.processes import get_process
from tests.simulation.records import IS_COLLECTOR
from tests.simulation.shuffled import ShuffledLoop

if TYPE_CHECKING:
    from tests.simulation.universe import Universe


class TrueClock:
    """The cloud's clock: it never jumps."""

    def __init__(self, loop: ShuffledLoop) -> None:
        self._loop = loop

    def now_s(self) -> float:
        return self._loop.time()

    async def sleep(self, duration_s: float) -> None:
        await asyncio.sleep(duration_s)


class WatchedCloud(SimulatedCloud):
    """A cloud that reports each effect to the universe at the moment it happens, late ones too."""

    universe: Universe

    def create_nodes(self, request: NodeRequest) -> Coroutine[Any, Any, Sequence[Node]]:
        self.universe.emit("ask", request=request)
        return super().create_nodes(request)

    def _make_gang(self, request: NodeRequest, now_s: float) -> list[str]:
        self.universe.emit("create", request=request)
        made = super()._make_gang(request, now_s)
        self.universe.note_made(made)
        self.universe.emit("created", request=request)
        return made

    def _end(self, machine: Any, *, after_s: float, reason: str) -> None:
        if reason == "terminated" and machine.ending_s is None:
            self.universe.emit("terminate", node=self._look(machine))
        super()._end(machine, after_s=after_s, reason=reason)

    def _find_login(self) -> str:
        process = get_process()
        return process.account if process is not None else self.account

    def get_ending_s(self, node_id: str) -> float:
        ending_s = self._machines[node_id].ending_s
        return math.inf if ending_s is None else ending_s


class WatchedLister(Lister):
    """Lists that report their age to the universe where none was allowed."""

    universe: Universe

    async def list(self, cloud: Any, *, age_s_max: float = 0.0, **named: Any) -> Listing:
        jumps, asked_s = self.universe.jumps, self._clock.now_s()
        listing = await super().list(cloud, age_s_max=age_s_max, **named)
        if not age_s_max and jumps == self.universe.jumps:
            self.universe.check_list(asked_s - listing.asked_s)
        return listing


class WatchedProvisioner(Provisioner):
    """A provisioner that reports searches, replacements under way and the collector's work to the universe."""

    universe: Universe

    def watch(self, universe: Universe) -> None:
        self.universe = universe
        self._lister.__class__ = WatchedLister
        self._lister.universe = universe  # type: ignore[attr-defined]

    async def up(self, name: str, *arguments: Any, **named: Any) -> Cluster:
        self.universe.emit("search", name=name)
        return await super().up(name, *arguments, **named)

    async def replace_node(self, cluster: Cluster, *arguments: Any, **named: Any) -> Cluster:
        replacing = self.universe.memory.setdefault("replacing", {})
        replacing[cluster.name] = get_process()
        try:
            return await super().replace_node(cluster, *arguments, **named)
        finally:
            replacing.pop(cluster.name, None)

    async def collect(self) -> int:
        token = IS_COLLECTOR.set(True)
        try:
            return await super().collect()
        finally:
            IS_COLLECTOR.reset(token)
