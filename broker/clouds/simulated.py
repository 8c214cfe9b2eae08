"""A cloud in memory, for tests and rehearsal: whatever a real one does to its callers, on a clock that may be virtual.

Its lists lag, its zones fill up, its answers get lost after the deed, and it sends a bill. Faults are counted.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from broker.clock import Clock
from broker.errors import CapacityError, InvalidRequestError, ThrottledError, TransientError, UnknownOutcomeError
from broker.types import Node, NodeRequest, NodeState


@dataclass(frozen=True, kw_only=True)
class FaultRates:
    """Chance of each fault per call, 0 to 1."""

    transient: float = 0.0
    throttled: float = 0.0
    unknown_before: float = 0.0  # the answer is lost and nothing was done
    unknown_after: float = 0.0  # the answer is lost after the deed
    full: float = 0.0
    forgotten: float = 0.0  # one node is missing from a list


@dataclass(frozen=True, kw_only=True)
class Market:
    """How slow this cloud is, in seconds."""

    boot_s: float = 20.0
    boot_s_max: float = 40.0
    list_lag_s: float = 5.0  # a new node may be missing from lists for so long; below `settle_s`
    terminate_s: float = 3.0


@dataclass(kw_only=True)
class _Machine:
    """The truth about one node; what a list tells may lag behind it."""

    node: Node
    running_s: float
    visible_s: float
    ending_s: float | None = None  # when it is gone
    reason: str = ""


@dataclass(kw_only=True)
class SimulatedCloud:
    """Cloud and CanPreempt. `on_effect` is called before and after each deed: raise in it to play a crash."""

    name: ClassVar[str] = "simulated"
    settle_s: ClassVar[float] = 10.0

    clock: Clock
    market: Market = Market()
    faults: FaultRates = FaultRates()
    seed: int = 0
    on_effect: Callable[[str], None] | None = None
    full_zones: dict[str, float] = field(default_factory=dict)  # zone -> full until
    fault_counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._machines: dict[str, _Machine] = {}
        self._ids_by_token: dict[str, list[str]] = {}

    async def check(self) -> None:
        return

    async def create_nodes(self, request: NodeRequest) -> Sequence[Node]:
        await self.clock.sleep(0.05)
        self._maybe_fail("create")
        known = self._ids_by_token.get(request.token)
        if known is None:
            self._refuse_if_full(request)
            self._report("create:before")
            known = self._ids_by_token[request.token] = [self._make(request, rank) for rank in range(_count(request))]
            self._report("create:after")
        elif any(self._machines[node_id].node.cluster != request.cluster for node_id in known):
            raise InvalidRequestError(f"token {request.token} was used for another request")
        self._maybe_lose_answer("create")
        return [self._look(self._machines[node_id]) for node_id in known]

    async def list_nodes(self, owner: str) -> Sequence[Node]:
        await self.clock.sleep(0.01)
        self._maybe_fail("list")
        now_s = self.clock.now_s()
        listed = [
            self._look(machine)
            for machine in self._machines.values()
            if machine.node.owner == owner and machine.visible_s <= now_s
        ]
        if listed and self._draw("forgotten", self.faults.forgotten):
            listed.pop(self._random.randrange(len(listed)))
        return listed

    async def terminate_nodes(self, ids: Sequence[str]) -> None:
        await self.clock.sleep(0.02)
        self._maybe_fail("terminate")
        self._report("terminate:before")
        for node_id in ids:
            if node_id in self._machines:
                self._end(node_id, after_s=self.market.terminate_s, reason="terminated")
        self._report("terminate:after")
        self._maybe_lose_answer("terminate")

    async def preempt_nodes(self, ids: Sequence[str], *, notice_s: float) -> None:
        self.preempt(ids, notice_s=notice_s)

    def preempt(self, ids: Sequence[str], *, notice_s: float = 0.0) -> None:
        for node_id in ids:
            self._end(node_id, after_s=notice_s, reason="preempted")
        self.fault_counts["preempted"] += 1

    def add_foreign_node(self, node: Node) -> None:
        """A node somebody else owns, running from now on."""
        now_s = self.clock.now_s()
        self._machines[node.id] = _Machine(node=node, running_s=now_s, visible_s=now_s)

    def observe(self) -> Sequence[Node]:
        """The truth, with no lag: for checkers and the pretend runtime only."""
        return [self._look(machine) for machine in self._machines.values()]

    def find(self, ids: Sequence[str]) -> Sequence[Node]:
        """As `observe`, of these nodes."""
        return [self._look(self._machines[node_id]) for node_id in ids]

    def bill_usd(self) -> float:
        now_s = self.clock.now_s()
        return sum(
            node.usd_hour * ((now_s if node.ended_s is None else node.ended_s) - node.created_s) / 3600
            for node in self.observe()
        )

    def _make(self, request: NodeRequest, rank: int) -> str:
        now_s = self.clock.now_s()
        offer = request.placement.offer
        node_id = f"sim-{len(self._machines):04d}"
        node = Node(
            id=node_id,
            cloud=self.name,
            owner=request.owner,
            cluster=request.cluster,
            attempt=request.attempt,
            rank=rank,
            state=NodeState.PENDING,
            address=f"10.0.{len(self._machines) // 250}.{len(self._machines) % 250 + 1}",
            region=offer.region,
            zone=offer.zone,
            token=request.token,
            is_spot=request.placement.is_spot,
            usd_hour=request.placement.usd_hour / request.placement.node_count,
            created_s=now_s,
        )
        self._machines[node_id] = _Machine(
            node=node,
            running_s=now_s + self._random.uniform(self.market.boot_s, self.market.boot_s_max),
            visible_s=now_s + self._random.uniform(0.0, self.market.list_lag_s),
        )
        return node_id

    def _look(self, machine: _Machine) -> Node:
        now_s = self.clock.now_s()
        if machine.ending_s is not None and now_s >= machine.ending_s:
            return replace(machine.node, state=NodeState.TERMINATED, ended_s=machine.ending_s, reason=machine.reason)
        state = NodeState.RUNNING if now_s >= machine.running_s else NodeState.PENDING
        return replace(machine.node, state=state, reason=machine.reason)

    def _end(self, node_id: str, *, after_s: float, reason: str) -> None:
        machine = self._machines[node_id]
        ending_s = self.clock.now_s() + after_s
        if machine.ending_s is None or ending_s < machine.ending_s:
            machine.ending_s, machine.reason = ending_s, machine.reason or reason

    def _refuse_if_full(self, request: NodeRequest) -> None:
        zone = request.placement.offer.zone or request.placement.offer.region
        is_full = self.full_zones.get(zone, 0.0) > self.clock.now_s()
        if is_full or self._draw("full", self.faults.full):
            raise CapacityError(f"zone {zone} is full", scope="zone")

    def _maybe_fail(self, call: str) -> None:
        if self._draw(f"{call}:transient", self.faults.transient):
            raise TransientError(f"{call}: connection reset")
        if self._draw(f"{call}:throttled", self.faults.throttled):
            raise ThrottledError(f"{call}: too many requests")
        if call != "list" and self._draw(f"{call}:unknown_before", self.faults.unknown_before):
            raise UnknownOutcomeError(f"{call}: no answer")

    def _maybe_lose_answer(self, call: str) -> None:
        if self._draw(f"{call}:unknown_after", self.faults.unknown_after):
            raise UnknownOutcomeError(f"{call}: no answer")

    def _draw(self, fault: str, chance: float) -> bool:
        is_hit = chance > 0 and self._random.random() < chance
        if is_hit:
            self.fault_counts[fault] += 1
        return is_hit

    def _report(self, effect: str) -> None:
        if self.on_effect is not None:
            self.on_effect(effect)


def _count(request: NodeRequest) -> int:
    return request.placement.node_count
