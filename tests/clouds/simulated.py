"""A cloud in memory for tests: it behaves towards its callers like a real cloud, on a clock that may be virtual.

Lists lag, zones fill up, responses are lost after the effect, and usage is billed. Faults are counted.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from broker.clock import Clock
from broker.errors import (
    AuthError,
    CapacityError,
    CloudError,
    InvalidRequestError,
    QuotaError,
    ThrottledError,
    TransientError,
    UnknownOutcomeError,
)
from broker.frozen import frozen
from broker.types import Node, NodeList, NodeRequest, NodeState


@frozen
class FaultRates:
    """Probability of each fault per call, 0 to 1."""

    transient: float = 0.0
    throttled: float = 0.0
    unknown_before: float = 0.0  # the response is lost and nothing was done
    unknown_after: float = 0.0  # the response is lost after the effect
    late: float = 0.0  # the response is lost, and the effect comes up to `CloudTimings.late_s` later
    full: float = 0.0
    quota: float = 0.0
    auth: float = 0.0  # the login expires: every call is refused for `CloudTimings.auth_s`
    partial: float = 0.0  # a create makes only a part of the gang
    # a create hangs for up to `CloudTimings.hang_s` before the effect; one cancelled meanwhile does nothing
    stuck: float = 0.0
    mute: float = 0.0  # a create responds up to `CloudTimings.hang_s` after the effect, or never if that is infinite
    never_boots: float = 0.0  # per node
    forgotten: float = 0.0  # some nodes are missing from a list
    blank: float = 0.0  # a list is empty
    blackout: float = 0.0  # every list is empty for `CloudTimings.blackout_s`
    stale: float = 0.0  # a list shows the state of `CloudTimings.stale_s` ago
    behind: float = 0.0  # the same for one region of a list, which then disagrees with the others
    repeated: float = 0.0  # an earlier list is returned again, at most `CloudTimings.repeated_s` old
    silent: float = 0.0  # one region does not respond for `CloudTimings.silent_s`: the list names it as unseen
    ignored: float = 0.0  # a terminate is accepted and has no effect
    refused: float = 0.0  # a node cannot be terminated for `CloudTimings.refused_s`


@frozen
class CloudTimings:
    """Latencies of the cloud, in seconds."""

    boot_s: float = 20.0
    boot_s_max: float = 40.0
    list_s: float = 0.01  # duration of a list call
    list_lag_s: float = 5.0  # a new node may be missing from lists for this long; below `settle_s`
    terminate_s: float = 3.0
    late_s: float = 4.0  # together with the lag of lists, below `settle_s`
    auth_s: float = 60.0
    blackout_s: float = 20.0
    stale_s: float = 8.0
    repeated_s: float = 25.0
    silent_s: float = 30.0
    refused_s: float = 180.0
    hang_s: float = 60.0
    vanish_s: float = math.inf  # a terminated node is no longer listed after this


@dataclass(kw_only=True)
class _SimulatedMachine:
    """The true state of one node; lists may lag behind it."""

    node: Node  # as last observed
    running_s: float
    visible_s: float
    ending_s: float | None = None  # when it is gone
    reason: str = ""
    refuses_until_s: float = 0.0


@dataclass(kw_only=True)
class SimulatedCloud:
    """Cloud, HasAccounts and CanPreempt.

    `on_effect` is called before and after each effect; an exception raised in it simulates a crash. `on_fault` is
    called for each injected fault with the affected cluster ("" for all).
    """

    name: ClassVar[str] = "simulated"
    settle_s: ClassVar[float] = 10.0
    extends_gangs: ClassVar[bool] = True

    clock: Clock
    timings: CloudTimings = field(default_factory=CloudTimings)
    faults: FaultRates = field(default_factory=FaultRates)
    seed: int = 0
    on_effect: Callable[[str], None] | None = None
    on_fault: Callable[[str, str], None] | None = None
    full_zones: dict[str, float] = field(default_factory=dict)  # zone -> full until
    account: str = "account-1"  # that the login reaches now; nodes of other accounts are neither listed nor terminated
    silent_regions: dict[str, CloudError] = field(default_factory=dict)  # region -> error that its list reports instead
    fault_counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._machines: dict[str, _SimulatedMachine] = {}
        self._ids_by_token: dict[str, list[str]] = {}
        self.asked_s: dict[str, float] = {}  # token -> when a call for it was last sent, however late it takes effect
        self._late: list[tuple[float, NodeRequest]] = []
        self._locked_until_s = self._blank_until_s = 0.0
        self._silent_until_s: dict[str, float] = {}  # by region
        self._recent_lists: deque[tuple[float, Sequence[Node]]] = deque()  # while they may be repeated

    async def check(self) -> None:
        return

    async def find_account(self) -> str:
        return self._find_login()

    def _find_login(self) -> str:
        return self.account

    async def create_nodes(self, request: NodeRequest) -> Sequence[Node]:
        request = replace(request, account=self._find_login())  # also for an effect that comes late
        await self.clock.sleep(0.05)
        self._maybe_fail("create", request.cluster)
        ids = self._ids_by_token.get(request.token)
        if ids is None:
            self.asked_s[request.token] = self.clock.now_s()
            self._refuse_if_full(request)
            if self._draw("create:late", self.faults.late, request.cluster):
                self._late.append((self.clock.now_s() + self._random.uniform(0.0, self.timings.late_s), request))
                raise UnknownOutcomeError("create: no answer")
            await self._maybe_hang("create:stuck", self.faults.stuck, request.cluster)
            self._report("create:before")
            ids = self._ids_by_token.get(request.token) or self._make_gang(request, self.clock.now_s())
            self._report("create:after")
        elif any(self._machines[node_id].node.cluster != request.cluster for node_id in ids):
            raise InvalidRequestError(f"token {request.token} was used for another request")
        self._maybe_lose_answer("create", request.cluster)
        await self._maybe_hang("create:mute", self.faults.mute, request.cluster)
        return [self._look(self._machines[node_id]) for node_id in ids]

    async def list_nodes(self, owner: str) -> NodeList:
        await self.clock.sleep(self.timings.list_s)
        self._maybe_fail("list", "")
        now_s = self.clock.now_s()
        if now_s < self._blank_until_s or self._draw("list:blank", self.faults.blank):
            return self._list([])
        if self._draw("list:blackout", self.faults.blackout):
            self.black_out(self.timings.blackout_s)
            return self._list([])
        if self._draw("list:stale", self.faults.stale):
            now_s -= self.timings.stale_s
        listed = self._list_machines(owner, now_s)
        if listed and self._draw("list:forgotten", self.faults.forgotten):
            keep = self._random.randrange(len(listed))
            listed = sorted(self._random.sample(listed, keep), key=lambda node: node.id)
        return self._list(self._maybe_repeat(listed) if self.faults.repeated else listed)

    def _list_machines(self, owner: str, now_s: float) -> list[Node]:
        """List the state at that time; one region, drawn for each list, may be further behind."""
        seen_s: dict[str, float] = {}
        if self.faults.behind:
            regions = sorted({machine.node.region for machine in self._machines.values()})
            if regions and self._draw("list:behind", self.faults.behind):
                seen_s[self._random.choice(regions)] = now_s - self.timings.stale_s
        nodes = []
        for machine in self._machines.values():
            at_s = seen_s.get(machine.node.region, now_s)
            is_there = machine.visible_s <= at_s and not self._has_vanished(machine, at_s)
            if is_there and machine.node.owner == owner:
                nodes.append(self._look(machine, at_s))
        return nodes

    def _maybe_repeat(self, listed: Sequence[Node]) -> Sequence[Node]:
        now_s = self.clock.now_s()
        self._recent_lists.append((now_s, listed))
        while now_s - self._recent_lists[0][0] > self.timings.repeated_s:
            self._recent_lists.popleft()
        if len(self._recent_lists) > 1 and self._draw("list:repeated", self.faults.repeated):
            return self._recent_lists[0][1]
        return listed

    def _list(self, nodes: Sequence[Node]) -> NodeList:
        """Return the nodes that this login may see, and the regions that do not respond."""
        login, unseen = self._find_login(), dict(self.silent_regions)
        if self.faults.silent or self._silent_until_s:
            unseen |= self._draw_silence(nodes)
        seen = (node for node in nodes if node.account in ("", login) and node.region not in unseen)
        return NodeList(nodes=tuple(seen), account=login, unseen=unseen)

    def _draw_silence(self, nodes: Sequence[Node]) -> dict[str, CloudError]:
        now_s = self.clock.now_s()
        regions = sorted({node.region for node in nodes})
        if regions and self._draw("list:silent", self.faults.silent):
            self.silence(self._random.choice(regions), self.timings.silent_s)
        self._silent_until_s = {region: s for region, s in self._silent_until_s.items() if now_s < s}
        return {region: TransientError(f"{region} does not respond") for region in self._silent_until_s}

    def silence(self, region: str, duration_s: float) -> None:
        """Leave this region out of every list for `duration_s`."""
        self._silent_until_s[region] = self.clock.now_s() + duration_s

    def recover(self) -> None:
        """Answer every call from now on, immediately and completely."""
        self.faults = FaultRates()
        self.full_zones.clear()
        self.silent_regions.clear()
        self._silent_until_s.clear()
        self._recent_lists.clear()

    async def terminate_nodes(self, nodes: Sequence[Node]) -> None:
        """Terminate nodes. An id that lists do not show yet counts as already gone, as on EC2: no effect, no error."""
        await self.clock.sleep(0.02)
        cluster = self._machines[nodes[0].id].node.cluster if nodes and nodes[0].id in self._machines else ""
        self._maybe_fail("terminate", cluster)
        now_s = self.clock.now_s()
        found = [self._machines[node.id] for node in nodes if node.id in self._machines]
        machines = [each for each in found if each.visible_s <= now_s and each.node.account in ("", self._find_login())]
        for machine in machines:
            if self._draw("terminate:refused", self.faults.refused, cluster):
                machine.refuses_until_s = now_s + self.timings.refused_s
        if any(machine.refuses_until_s > now_s for machine in machines):
            raise TransientError("terminate: refused for now, retry later")
        self._report("terminate:before")
        if not self._draw("terminate:ignored", self.faults.ignored, cluster):
            for machine in machines:
                self._end(machine, after_s=self.timings.terminate_s, reason="terminated")
        self._report("terminate:after")
        self._maybe_lose_answer("terminate", cluster)

    async def preempt_nodes(self, ids: Sequence[str], *, notice_s: float) -> None:
        self.preempt(ids, notice_s=notice_s)

    def preempt(self, ids: Sequence[str], *, notice_s: float = 0.0) -> None:
        for node_id in ids:
            self._end(self._machines[node_id], after_s=notice_s, reason="preempted")
        self.fault_counts["preempted"] += 1

    def black_out(self, duration_s: float) -> None:
        """Return only empty lists for `duration_s`."""
        self._blank_until_s = self.clock.now_s() + duration_s

    def lock_out(self, duration_s: float) -> None:
        """Refuse every call for `duration_s`, as with an expired login."""
        self._locked_until_s = self.clock.now_s() + duration_s

    def end_by_itself(self, node_id: str, *, reason: str) -> None:
        """Shut the machine down from inside, as when its lease expires."""
        self._end(self._machines[node_id], after_s=0.0, reason=reason)

    def add_foreign_node(self, node: Node) -> None:
        """Add a running node that another owner created."""
        now_s = self.clock.now_s()
        self._machines[node.id] = _SimulatedMachine(node=node, running_s=now_s, visible_s=now_s)

    def observe(self) -> Sequence[Node]:
        """Return the true state without lag: for checkers and the simulated runtime only."""
        self._apply_late_effects()
        return [self._look(machine) for machine in self._machines.values()]

    def find(self, ids: Sequence[str]) -> Sequence[Node]:
        """Like `observe`, for these nodes only."""
        return [self._look(self._machines[node_id]) for node_id in ids]

    def bill_usd(self) -> float:
        now_s = self.clock.now_s()
        return sum(
            node.usd_hour * ((now_s if node.ended_s is None else node.ended_s) - node.created_s) / 3600
            for node in self.observe()
        )

    def _make_gang(self, request: NodeRequest, now_s: float) -> list[str]:
        count = request.placement.node_count
        if count > 1 and self._draw("create:partial", self.faults.partial, request.cluster):
            count = self._random.randrange(1, count)
        ids = self._ids_by_token[request.token] = [self._make(request, rank, now_s) for rank in range(count)]
        return ids

    def _make(self, request: NodeRequest, rank: int, now_s: float) -> str:
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
            account=request.account,
        )
        boots = not self._draw("boot:never", self.faults.never_boots, request.cluster)
        boot_s = self._random.uniform(self.timings.boot_s, self.timings.boot_s_max) if boots else math.inf
        self._machines[node_id] = _SimulatedMachine(
            node=node,
            running_s=now_s + boot_s,
            visible_s=now_s + self._random.uniform(0.0, self.timings.list_lag_s),
        )
        return node_id

    def _apply_late_effects(self) -> None:
        now_s = self.clock.now_s()
        due = [(due_s, request) for due_s, request in self._late if due_s <= now_s]
        self._late = [(due_s, request) for due_s, request in self._late if due_s > now_s]
        for due_s, request in due:
            if request.token not in self._ids_by_token:
                self._make_gang(request, due_s)

    def _has_vanished(self, machine: _SimulatedMachine, now_s: float) -> bool:
        return machine.ending_s is not None and now_s >= machine.ending_s + self.timings.vanish_s

    def _look(self, machine: _SimulatedMachine, at_s: float | None = None) -> Node:
        now_s = self.clock.now_s() if at_s is None else at_s
        state = NodeState.RUNNING if now_s >= machine.running_s else NodeState.PENDING
        ended_s = None
        if machine.ending_s is not None and now_s >= machine.ending_s:
            state, ended_s = NodeState.TERMINATED, machine.ending_s
        node = machine.node
        # otherwise the state is current
        if (node.state, node.ended_s, node.reason) != (state, ended_s, machine.reason):
            node = machine.node = replace(node, state=state, ended_s=ended_s, reason=machine.reason)
        return node

    def _end(self, machine: _SimulatedMachine, *, after_s: float, reason: str) -> None:
        ending_s = self.clock.now_s() + after_s
        if machine.ending_s is None or ending_s < machine.ending_s:
            machine.ending_s, machine.reason = ending_s, machine.reason or reason

    def _refuse_if_full(self, request: NodeRequest) -> None:
        zone = request.placement.offer.zone or request.placement.offer.region
        is_full = self.full_zones.get(zone, 0.0) > self.clock.now_s()
        if is_full or self._draw("create:full", self.faults.full, request.cluster):
            raise CapacityError(f"zone {zone} is full", scope="zone")
        if self._draw("create:quota", self.faults.quota, request.cluster):
            raise QuotaError(f"the quota of {request.placement.offer.region} is used up")

    def _maybe_fail(self, call: str, cluster: str) -> None:
        self._apply_late_effects()
        if self._draw(f"{call}:auth", self.faults.auth, cluster):
            self._locked_until_s = self.clock.now_s() + self.timings.auth_s
        if self.clock.now_s() < self._locked_until_s:
            raise AuthError("the login has expired")
        if self._draw(f"{call}:transient", self.faults.transient, cluster):
            raise TransientError(f"{call}: connection reset")
        if self._draw(f"{call}:throttled", self.faults.throttled, cluster):
            raise ThrottledError(f"{call}: too many requests")
        if call != "list" and self._draw(f"{call}:unknown_before", self.faults.unknown_before, cluster):
            raise UnknownOutcomeError(f"{call}: no answer")

    def _maybe_lose_answer(self, call: str, cluster: str) -> None:
        if self._draw(f"{call}:unknown_after", self.faults.unknown_after, cluster):
            raise UnknownOutcomeError(f"{call}: no answer")

    async def _maybe_hang(self, fault: str, chance: float, cluster: str) -> None:
        if not self._draw(fault, chance, cluster):
            return
        if math.isinf(self.timings.hang_s):
            await asyncio.get_running_loop().create_future()  # until the caller gives up
        await self.clock.sleep(self._random.uniform(0.0, self.timings.hang_s))

    def _draw(self, fault: str, chance: float, cluster: str = "") -> bool:
        is_hit = chance > 0 and self._random.random() < chance
        if is_hit:
            self.fault_counts[fault] += 1
            if self.on_fault is not None:
                self.on_fault(fault, cluster)
        return is_hit

    def _report(self, effect: str) -> None:
        if self.on_effect is not None:
            self.on_effect(effect)
