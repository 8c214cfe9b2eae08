"""Simulate a cloud for a rehearsal: machines are local process trees; market, clock and bill are simulated.

Spot machines are refused while the market is closed and preempted when its open interval ends; on-demand is always
available. The clock is held while local nodes are created or terminated; the time a real cloud takes is slept instead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

from broker.clock import ScaledClock, Stopwatch, SystemClock
from broker.clouds.local import LocalCloud
from broker.errors import CapacityError
from broker.rehearsal.market import PlaceMarket
from broker.types import Node, NodeList, NodeRequest, NodeState, Offer

BOOT_S = 45.0  # until a machine of a large cloud answers; 30 to 60 s are typical for Linux images
NOTICE_S = {"aws": 120.0, "gcp": 30.0, "azure": 30.0}  # preemption warning, from the clouds' documentation
NOTICE_S_MAX = 20.0  # real seconds that a rehearsal gives a program after the warning
NOTICE_GAP_S_MAX = 1.0  # of them that count between two looks, which are a quarter of a second apart if nothing stalls
WAIT_SPEED = 300.0
WAIT_FLOOR_S = 0.02
FULL_AFTER_S = 1800.0  # a place refuses requests for this long after a preemption


@dataclass
class Pace:
    """The speed of simulated time: real time while a program runs, faster while waiting for machines.

    A step of the rehearsed program represents more work than it does; its observer advances the clock by the rest.
    """

    clock: ScaledClock
    wait_speed: float = WAIT_SPEED

    def wait(self) -> None:
        """Run the clock fast: broker waits for machines, and no program runs."""
        self.clock.set_rate(self.wait_speed, floor_s=WAIT_FLOOR_S)

    def run(self) -> None:
        """Run the clock at real time: a program starts or works."""
        self.clock.set_rate(1.0)

    def start(self, cluster: str) -> None:
        """Run the clock at real time, because the program of a cluster starts."""
        self.run()


@dataclass(frozen=True, kw_only=True)
class PreemptedNode:
    """A node that a market preempted; nodes with the same `preemption` were preempted together.

    `ended_s`: the simulated time when it ended; None while its notice runs.
    """

    node_id: str
    preemption: int
    ended_s: float | None


@dataclass
class _Machine:
    cluster: str
    offer: Offer
    is_spot: bool
    created_s: float
    running_s: float
    ended_s: float | None = None
    notice_real_s: float | None = None  # when its notice expires, by the cloud's stopwatch
    preemption: int | None = None  # the number of its preemption


@dataclass(kw_only=True)
class RehearsedCloud:
    """Implement `Cloud` and `CanPreempt`. A rehearsal is one process, so the simulated state is kept in memory."""

    name: ClassVar[str] = "rehearsed"
    settle_s: ClassVar[float] = 0.0
    extends_gangs: ClassVar[bool] = True

    root: Path
    pace: Pace
    market: PlaceMarket
    start_s: float  # when the market begins
    on_event: Callable[[str], None]  # receives a sentence about each market event
    _machines: dict[str, _Machine] = field(default_factory=dict)
    _full_until_s: dict[tuple[str, str | None, str], float] = field(default_factory=dict)
    _unrefused: set[tuple[str, str | None, str]] = field(default_factory=set)  # full, and no request met that yet
    refusals: int = 0
    preemptions: int = 0
    ignored_notices: int = 0  # gangs whose program was still running when the notice ran out

    def __post_init__(self) -> None:
        self.clock = self.pace.clock
        self._system = SystemClock()
        self._local = LocalCloud(self.root, clock=self._system)
        self._stopwatch = Stopwatch(NOTICE_GAP_S_MAX)  # of notices: a machine that stalls does not use them up

    async def check(self) -> None:
        await self._local.check()

    async def create_nodes(self, request: NodeRequest) -> Sequence[Node]:
        self.pace.wait()
        placement = request.placement
        if placement.is_spot and not any(node.token == request.token for node in await self.list_nodes(request.owner)):
            self._refuse_if_full(placement.offer)
        with self.clock.hold():
            nodes = await self._local.create_nodes(request)
        now_s = self.clock.now_s()
        for node in nodes:
            self._machines.setdefault(
                node.id,
                _Machine(
                    cluster=request.cluster,
                    offer=placement.offer,
                    is_spot=placement.is_spot,
                    created_s=now_s,
                    running_s=now_s + BOOT_S,
                ),
            )
        return [self._translate(node) for node in nodes]

    async def list_nodes(self, owner: str) -> NodeList:
        await self.take_due()
        with self.clock.hold():
            listed = await self._local.list_nodes(owner)
        return NodeList(nodes=tuple(self._translate(node) for node in listed))

    async def terminate_nodes(self, nodes: Sequence[Node]) -> None:
        self.pace.wait()
        with self.clock.hold():
            await self._local.terminate_nodes(nodes)
        self._note_end([node.id for node in nodes], self.clock.now_s())

    async def preempt_nodes(self, ids: Sequence[str], *, notice_s: float) -> None:
        """Preempt nodes like the market. The notice is in real seconds, because the program really saves its state."""
        live = [node_id for node_id in ids if node_id in self._machines and self._machines[node_id].ended_s is None]
        if not live:
            return
        self.preemptions += 1
        self.pace.run()  # real time until the controller detects the loss
        now_s = self.clock.now_s()
        for node_id in live:
            machine = self._machines[node_id]
            machine.preemption = self.preemptions
            self._full_until_s[_name_market(machine.offer)] = now_s + FULL_AFTER_S
            self._unrefused.add(_name_market(machine.offer))
        if notice_s <= 0:
            self._note_end(live, now_s)
            with self.clock.hold():
                await self._local.preempt_nodes(live, notice_s=0)
            return
        held_s = min(notice_s, NOTICE_S_MAX)
        until_s = self._stopwatch.observe(self._system.now_s()) + held_s
        for node_id in live:
            self._machines[node_id].notice_real_s = until_s
        # The machine would power off by itself; we do it, so that the end gets its simulated time.
        await self._local.preempt_nodes(live, notice_s=held_s + 3600)

    async def take_due(self) -> None:
        """Terminate nodes whose notice has expired or was heeded, and preempt nodes whose open interval has ended."""
        await self._end_noticed()
        now_s = self.clock.now_s()
        due: dict[tuple[str, str | None, str], list[str]] = {}
        for node_id, machine in self._machines.items():
            if not machine.is_spot or machine.ended_s is not None or machine.notice_real_s is not None:
                continue
            begin = self.market.find_period(machine.offer, machine.created_s - self.start_s)
            if begin.is_open and self.start_s + begin.end_s <= now_s:
                due.setdefault(_name_market(machine.offer), []).append(node_id)
        for (region, zone, _), ids in due.items():
            self.on_event(f"the spot market of {zone or region} ({self.name}) preempts all {len(ids)} nodes")
            await self.preempt_nodes(ids, notice_s=0)

    def list_preempted(self) -> Sequence[PreemptedNode]:
        """Return all preempted nodes, including those whose notice still runs."""
        return [
            PreemptedNode(node_id=node_id, preemption=each.preemption, ended_s=each.ended_s)
            for node_id, each in self._machines.items()
            if each.preemption is not None
        ]

    async def _end_noticed(self) -> None:
        """Terminate each warned gang together, once its program has ended on any node or the time is up."""
        now_s = self._stopwatch.observe(self._system.now_s())
        gangs: dict[str, list[tuple[str, _Machine]]] = {}
        for node_id, machine in self._machines.items():
            if machine.notice_real_s is not None and machine.ended_s is None:
                gangs.setdefault(machine.cluster, []).append((node_id, machine))
        for warned in gangs.values():
            await self._end_warned(warned, now_s)

    async def _end_warned(self, warned: Sequence[tuple[str, _Machine]], now_s: float) -> None:
        is_over = now_s >= max(machine.notice_real_s or 0.0 for _, machine in warned)
        has_ended = [self._has_ended(node_id) for node_id, _ in warned]
        if not (is_over or any(has_ended)):
            return
        self.ignored_notices += not any(has_ended)
        ids = [node_id for node_id, _ in warned]
        self._note_end(ids, self.clock.now_s())
        with self.clock.hold():
            await self._local.preempt_nodes(ids, notice_s=0)

    def _has_ended(self, node_id: str) -> bool:
        """Return whether the agent has recorded the outcome of its newest run."""
        runs = self.root / node_id / "home" / ".broker" / "runs"
        newest = max(runs.glob("*/spec.json"), default=None, key=lambda path: int(path.parent.name))
        return newest is None or newest.with_name("outcome.json").exists()

    async def end_all(self, owner: str) -> None:
        """Terminate all nodes of the owner, even if this call is cancelled."""
        listed = await self._local.list_nodes(owner)
        await asyncio.shield(self._local.terminate_nodes(listed.nodes))

    def _refuse_if_full(self, offer: Offer) -> None:
        """Raise CapacityError. A place refuses once after a preemption, also after the time for which it stays full."""
        now_s = self.clock.now_s()
        is_open = self.market.find_period(offer, now_s - self.start_s).is_open
        is_full = self._full_until_s.get(_name_market(offer), 0.0) > now_s or _name_market(offer) in self._unrefused
        self._unrefused.discard(_name_market(offer))
        if is_open and not is_full:
            return
        self.refusals += 1
        raise CapacityError(f"no spot capacity for {offer.instance_type} in {offer.zone or offer.region}", scope="zone")

    def _note_end(self, ids: Sequence[str], ended_s: float) -> None:
        for node_id in ids:
            machine = self._machines.get(node_id)
            if machine is not None and machine.ended_s is None:
                machine.ended_s = ended_s

    def _translate(self, node: Node) -> Node:
        """Translate a local node to this cloud's: in simulated time, and with the boot time of a real one."""
        machine = self._machines.get(node.id)
        if machine is None:
            return replace(node, cloud=self.name)
        state = node.state
        if state is NodeState.TERMINATED:
            self._note_end([node.id], self.clock.now_s())  # it ended by itself, which is observed now
        elif state is NodeState.RUNNING and self.clock.now_s() < machine.running_s:
            state = NodeState.PENDING
        ended_s = machine.ended_s if state is NodeState.TERMINATED else None
        return replace(node, cloud=self.name, state=state, created_s=machine.created_s, ended_s=ended_s)


def _name_market(offer: Offer) -> tuple[str, str | None, str]:
    """Return the key of a market: machines of one type in one zone; other types have capacity of their own."""
    return (offer.region, offer.zone, offer.instance_type)


def make_rehearsed_cloud(
    name: str, *, root: Path, pace: Pace, market: PlaceMarket, start_s: float, on_event: Callable[[str], None]
) -> RehearsedCloud:
    """Return a cloud with this name, through a subclass because the name is a class attribute."""
    named: type[RehearsedCloud] = type("RehearsedCloud", (RehearsedCloud,), {"name": name})
    return named(root=root / name, pace=pace, market=market, start_s=start_s, on_event=on_event)
