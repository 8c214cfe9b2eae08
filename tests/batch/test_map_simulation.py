"""Workers that are killed and frozen at random on virtual time: every result once, at little above the minimum cost.

The workers are the product's `Leases`; bucket, machines and time are simulated.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from tests.batch.memory_place import MemoryPlace
from trainers.map_leases import Lease, Leases, MapPlan, Shard

WORK_S = 60.0  # of a shard, give or take a half
BOOT_S = 60.0  # paid before a machine's first shard
AWAY_S = 120.0  # from a loss to the next machine, not paid
LEASE_S = 60.0


@dataclass
class Machine:
    worker: int
    attempt: int
    since_s: float
    leases: Leases
    lease: Lease | None = None
    is_over: bool = False
    thaws_s: float = 0.0


@dataclass
class Market:
    shards: int
    workers: int
    kills: int
    freezes: int
    seed: int
    place: MemoryPlace = field(default_factory=MemoryPlace)
    paid_s: float = 0.0
    least_s: float = 0.0
    commits: list[int] = field(default_factory=list)
    repeats: int = 0
    killed: int = 0
    frozen: int = 0

    def run(self) -> None:
        self.chance = random.Random(self.seed)
        self.plan = MapPlan("input", LEASE_S, tuple(Shard("x", 0, 1, 1) for _ in range(self.shards)))
        self.work_s = [WORK_S * self.chance.uniform(0.5, 1.5) for _ in range(self.shards)]
        self.least_s = sum(self.work_s)
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.machines: dict[int, Machine] = {}
        span_s = self.least_s / self.workers
        for worker in range(self.workers):
            self.boot(worker, 1)
        for _ in range(self.kills):
            self.at(self.chance.uniform(0, 0.98 * span_s), self.kill)
        for _ in range(self.freezes):
            self.at(self.chance.uniform(0, 0.98 * span_s), self.freeze)
        while len(self.commits) < self.shards:
            while self.events:
                self.place.now_s, _, act = heapq.heappop(self.events)
                act()
            if len(self.commits) < self.shards:  # as the command does when all workers have ended
                self.place.now_s += LEASE_S
                self.boot(0, 1000 + len(self.commits))

    def at(self, time_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self.events, (time_s, self.chance.getrandbits(60), act))

    def boot(self, worker: int, attempt: int) -> None:
        now_s = self.place.now_s
        leases = Leases(self.place, self.plan, worker=str(worker), attempt=attempt)
        machine = self.machines[worker] = Machine(worker, attempt, now_s, leases)
        self.at(now_s + BOOT_S, lambda: self.take(machine))

    def take(self, machine: Machine) -> None:
        if self.is_held(machine, self.take):
            return
        lease = machine.lease = machine.leases.acquire()
        if lease is None:
            self.end(machine)
            return
        self.at(self.place.now_s + LEASE_S / 3, lambda: self.renew(machine, lease))
        self.at(self.place.now_s + self.work_s[lease.number], lambda: self.finish(machine, lease))

    def renew(self, machine: Machine, lease: Lease) -> None:
        if machine.lease is not lease or self.is_held(machine, lambda each: self.renew(each, lease)):
            return
        if machine.leases.renew(lease):
            self.at(self.place.now_s + LEASE_S / 3, lambda: self.renew(machine, lease))
        else:
            self.repeats += 1
            self.take(machine)

    def finish(self, machine: Machine, lease: Lease) -> None:
        if machine.lease is not lease or self.is_held(machine, lambda each: self.finish(each, lease)):
            return
        if machine.leases.commit(lease, b"result", items=1):
            self.commits.append(lease.number)
        else:
            self.repeats += 1
        self.take(machine)

    def is_held(self, machine: Machine, act: Callable[[Machine], None]) -> bool:
        """Do nothing for a machine that is gone; repeat later what a frozen one does."""
        if machine.thaws_s > self.place.now_s and not machine.is_over:
            self.at(machine.thaws_s, lambda: act(machine))
            return True
        return machine.is_over

    def end(self, machine: Machine) -> None:
        machine.is_over, machine.lease = True, None
        self.paid_s += self.place.now_s - machine.since_s

    def draw_live(self) -> Machine | None:
        live = [each for each in self.machines.values() if not each.is_over]
        return self.chance.choice(live) if live else None

    def kill(self) -> None:
        if (machine := self.draw_live()) is not None:
            self.killed += 1
            self.end(machine)
            self.at(self.place.now_s + AWAY_S, lambda: self.boot(machine.worker, machine.attempt + 1))

    def freeze(self) -> None:
        """Suspend a machine until others take its shard over, and let it continue as if nothing happened."""
        if (machine := self.draw_live()) is not None:
            self.frozen += 1
            machine.thaws_s = self.place.now_s + self.chance.uniform(0.5, 8) * LEASE_S


def check(market: Market) -> None:
    market.run()
    assert sorted(market.commits) == list(range(market.shards))  # each result once, none missing
    assert len(market.place.list_files()) == market.shards


@pytest.mark.parametrize("seed", range(30))
def test_every_result_is_written_once_whatever_is_killed_or_frozen(seed: int) -> None:
    market = Market(shards=100, workers=1 + seed % 7, kills=20, freezes=20, seed=seed)
    check(market)
    assert market.killed + market.frozen > 10


@pytest.mark.parametrize(
    ("shards", "workers", "kills"), [(2_500, 4, 50), pytest.param(10_000, 16, 200, marks=pytest.mark.exhaustive)]
)
def test_kills_of_a_fiftieth_of_the_shards_cost_five_percent_more_at_most(
    shards: int, workers: int, kills: int
) -> None:
    market = Market(shards=shards, workers=workers, kills=kills, freezes=0, seed=1)
    check(market)
    assert market.killed > 0.95 * kills
    assert market.paid_s <= 1.05 * market.least_s
    assert market.place.requests < 15 * market.shards  # at 5 USD per million requests, less than a dollar
