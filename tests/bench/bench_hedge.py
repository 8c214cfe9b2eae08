"""Time to a whole running gang, and what the search costs: two places at once, one at a time, and a sequential loop.

    python -m tests.bench.bench_hedge [--launches 500] [--traces FOLDER]

All on virtual time, by the same seeds: which zones have room when (drawn, or read from a folder of traces, one file a
zone: {"metadata": {"gap_seconds": s}, "data": [instances at each tick], "prices": [USD/h at each tick]}), how long
each zone takes to answer, to refuse and to boot. All three go by one order, and look for running nodes at one pace:
what is compared is the search. The sequential loop is that of SkyPilot's failover, as a policy:
region after region by price, zone after zone, the whole gang or nothing, what came in part is ended first; when all
have refused, from the start again after 30 s and later.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random, getstate, seed, setstate

from broker.errors import CapacityError
from broker.provision.listing import Lister
from broker.provision.nodes import WAIT_POLL_S_MAX, wait_running
from broker.types import Estimate, Node, NodeRequest, Offer, Placement, Plan
from tests.bench.bench_jobs import MEMORY, report
from tests.clouds.simulated import CloudTimings, SimulatedCloud
from tests.simulation.world import OWNER, World, make_plan

NODES = 4
HANG_SHARE = 0.5  # of the zones without room: some clouds say so at once, others look for minutes
HANG_S = (45.0, 300.0)
QUICK_S = (1.0, 5.0)
POLL_EVERY_S = 5.0  # a cloud that looks for minutes
SLOW_GIFT_SHARE = 0.2  # of the slow zones that have room: they take a third of that time, and give
ANSWER_S = (1.0, 8.0)
BOOT_S = (35.0, 75.0)
GAP_S, GAP_S_MAX, GAP_GROWTH = 30.0, 150.0, 1.6  # between two rounds of the sequential loop
SEARCH_S_MAX = 6 * 3600.0


@dataclass(frozen=True, kw_only=True)
class Zone:
    name: str
    gap_s: float
    room: tuple[int, ...]
    usd_hour: float

    def has_room(self, at_s: float) -> bool:
        return self.room[int(at_s / self.gap_s) % len(self.room)] >= 1

    @property
    def region(self) -> str:
        return self.name[:-1].rstrip("-")


def draw_zones(random: Random) -> list[Zone]:
    """Draw zones with and without room for hours at a time, as in published traces: some mostly full, some never."""
    zones = []
    prices = [random.uniform(1.0, 1.6) for _ in range(4)]  # of regions
    for index in range(random.randrange(5, 9)):
        share = random.choice((0.1, 0.2, 0.4, 0.5, 0.7, 0.85, 0.95))
        mean_ticks = random.uniform(6.0, 60.0)  # of a stretch with room and one without, together
        room: list[int] = []
        is_open = random.random() < share
        while len(room) < 600:
            ticks = 1 + int(random.expovariate(1 / (mean_ticks * (share if is_open else 1 - share))))
            room += [int(is_open)] * ticks
            is_open = not is_open
        name = f"region{index // 2 + 1}{'ab'[index % 2]}"
        zones.append(Zone(name=name, gap_s=300.0, room=tuple(room), usd_hour=prices[index // 2]))
    return zones


def read_zones(folder: Path) -> list[list[Zone]]:
    """Read each folder with files as one market of aligned zones."""
    markets = []
    for each in sorted({path.parent for path in folder.rglob("*.json")}):
        market = []
        for path in sorted(each.glob("*.json")):
            trace = json.loads(path.read_text())
            gap_s, gang = trace["metadata"]["gap_seconds"], trace["metadata"].get("gang", 1)
            price = trace.get("prices", [1.0])[0]
            room = tuple(int(count >= gang) for count in trace["data"])
            market.append(Zone(name=path.stem, gap_s=gap_s, room=room, usd_hour=price))
        if len(market) > 1:
            markets.append(market)
    return markets


class TraceCloud(SimulatedCloud):
    """A zone gives when its trace has room, now or while it looks; how long it looks is its own, not the caller's."""

    zones: dict[str, Zone]
    offset_s: float
    salt: str

    def is_slow(self, zone: str) -> bool:
        return Random(f"{self.salt}/{zone}/slow").random() < HANG_SHARE

    async def create_nodes(self, request: NodeRequest) -> Sequence[Node]:
        zone = str(request.placement.offer.zone)
        random = Random(f"{self.salt}/{zone}")
        is_slow, slow_s, quick_s = self.is_slow(zone), random.uniform(*HANG_S), random.uniform(*QUICK_S)
        until_s = self.clock.now_s() + (slow_s if is_slow else quick_s)
        while not self.zones[zone].has_room(self.clock.now_s() - START_S + self.offset_s):
            await self.clock.sleep(min(POLL_EVERY_S, until_s - self.clock.now_s()))
            if self.clock.now_s() >= until_s - 0.01:
                raise CapacityError(f"zone {zone} is full", scope="zone")
        gives_slowly = is_slow and random.random() < SLOW_GIFT_SHARE
        common = Random(self.salt)
        await self.clock.sleep(slow_s / 3 if gives_slowly else common.uniform(*ANSWER_S))
        boot_s = common.uniform(*BOOT_S)  # that of the image
        self.timings = CloudTimings(boot_s=boot_s, boot_s_max=boot_s)
        return await super().create_nodes(request)


START_S = 1_700_000_000.0


@dataclass(frozen=True, kw_only=True)
class Outcome:
    up_s: float
    search_usd: float  # all bills until the gang ran and what was not needed was gone, beyond the gang's own
    usd_hour: float  # of the gang that was kept


@dataclass(frozen=True, kw_only=True)
class Row:
    is_out: bool  # the first place has no room when it is asked first
    hangs: bool  # ... and takes minutes to say so
    outcomes: tuple[Outcome, Outcome, Outcome]

    @property
    def is_slower(self) -> bool:
        """Return whether it is slower by more than one look at the nodes."""
        return self.outcomes[0].up_s > self.outcomes[2].up_s + WAIT_POLL_S_MAX


def launch(zones: Sequence[Zone], offset_s: float, salt: str, *, hedge: int | None) -> Outcome:
    """Launch; `hedge` None: with the sequential loop."""
    state = getstate()
    seed(salt)  # the product's jitter
    try:
        with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder:
            world = World(Path(folder))
            cloud = world.cloud
            cloud.__class__ = TraceCloud
            assert isinstance(cloud, TraceCloud)
            cloud.zones, cloud.offset_s, cloud.salt = {zone.name: zone for zone in zones}, offset_s, salt
            plan = make_market_plan(world, zones)
            search = search_in_turn(world, plan) if hedge is None else search_with_broker(world, plan, hedge)
            return world.clock.run(lambda: measure(world, search))  # type: ignore[no-any-return]
    finally:
        setstate(state)


def make_market_plan(world: World, zones: Sequence[Zone]) -> Plan:
    plan = make_plan(world.task, zones[0].name)
    estimates = [
        Estimate(placement=Placement(offer=make_zone_offer(zone), is_spot=True, node_count=NODES))
        for zone in sorted(zones, key=lambda zone: (zone.usd_hour, zone.name))
    ]
    return replace(plan, estimates=tuple(estimates))


def make_zone_offer(zone: Zone) -> Offer:
    return Offer(
        cloud="simulated", region=zone.region, zone=zone.name, instance_type="big", vcpus=8, memory_gib=32,
        ondemand_usd_hour=3 * zone.usd_hour, spot_usd_hour=zone.usd_hour,
    )  # fmt: skip


Search = Callable[[], Awaitable[tuple[float, float]]]


async def measure(world: World, search: Search) -> Outcome:
    start_s = world.clock.now_s()
    up_at_s, usd_hour = await asyncio.wait_for(search(), SEARCH_S_MAX)
    made_s = min(node.created_s for node in world.list_live_nodes())
    kept_usd = usd_hour * (world.clock.now_s() - made_s) / 3600
    return Outcome(up_s=up_at_s - start_s, search_usd=max(0.0, world.cloud.bill_usd() - kept_usd), usd_hour=usd_hour)


def search_with_broker(world: World, plan: Plan, hedge: int) -> Search:
    async def search() -> tuple[float, float]:
        provisioner = world.make_provisioner()
        cluster = await provisioner.up("c", plan, hedge=hedge, retry_until_up=True)
        up_s = world.clock.now_s()
        await provisioner.finish()
        return up_s, cluster.placement.usd_hour

    return search


def search_in_turn(world: World, plan: Plan) -> Search:
    """Search without memory from one launch to the next, one call at a time."""

    async def search() -> tuple[float, float]:
        gap_s, serial = GAP_S, 0
        regions = list(dict.fromkeys(each.placement.offer.region for each in plan.estimates))
        while True:
            for region in regions:
                for estimate in plan.estimates:
                    if estimate.placement.offer.region != region:
                        continue
                    serial += 1
                    if await try_place(world, estimate.placement, f"turn-{serial}"):
                        return world.clock.now_s(), estimate.placement.usd_hour
            await world.clock.sleep(gap_s)
            gap_s = min(GAP_S_MAX, gap_s * GAP_GROWTH)

    return search


async def try_place(world: World, placement: Placement, token: str) -> bool:
    request = NodeRequest(owner=OWNER, cluster="c", attempt=1, token=token, placement=placement)
    try:
        made = await world.cloud.create_nodes(request)
    except CapacityError:
        return False
    nodes = await wait_running(
        world.cloud, Lister(OWNER, clock=world.clock), token=token, created=made, node_count=placement.node_count,
        timeout_s=600.0, clock=world.clock, on_look=lambda nodes: None,
    )  # fmt: skip
    if nodes is None:
        await world.cloud.terminate_nodes(made)
    return nodes is not None


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--launches", type=int, default=500)
    parser.add_argument("--traces", type=Path, help="a folder of traces instead of drawn ones")
    options = parser.parse_args()
    markets = read_zones(options.traces) if options.traces else []
    rows: list[Row] = []
    for number in range(options.launches):
        random = Random(f"launch-{number}")
        zones, offset_s = draw_launch(random, markets)
        salt = f"market-{number}"
        first = min(zones, key=lambda zone: (zone.usd_hour, zone.name))
        runs = [launch(zones, offset_s, salt, hedge=hedge) for hedge in (2, 1, None)]
        is_out = not first.has_room(offset_s)
        is_slow = Random(f"{salt}/{first.name}/slow").random() < HANG_SHARE
        rows.append(Row(is_out=is_out, hangs=is_out and is_slow, outcomes=(runs[0], runs[1], runs[2])))
        if rows[-1].is_slower:
            print(f"  launch {number}: {runs[0].up_s:.0f} s, sequential {runs[2].up_s:.0f} s", file=sys.stderr)
    return summarize(rows)


def draw_launch(random: Random, markets: Sequence[list[Zone]]) -> tuple[list[Zone], float]:
    """Draw a market and a moment at which some zone has room; without any, no search could succeed."""
    zones = list(random.choice(markets)) if markets else draw_zones(random)
    for _ in range(1000):
        offset_s = random.uniform(0.0, 0.8 * min(zone.gap_s * len(zone.room) for zone in zones))
        if any(zone.has_room(offset_s) for zone in zones):
            return zones, offset_s
    raise ValueError("no zone ever has room")


def summarize(rows: Sequence[Row]) -> int:
    hanging = [row for row in rows if row.hangs]
    groups = {
        "all launches": rows,
        "first place out of stock": [row for row in rows if row.is_out],
        "first place hangs before it refuses": hanging,
    }
    for title, chosen in groups.items():
        print(f"{title}: {len(chosen)}")
        for index, name in enumerate(("two at once", "one by one", "sequential loop")):
            outcomes = [row.outcomes[index] for row in chosen]
            times = sorted(outcome.up_s for outcome in outcomes)
            print(
                f"  {name:<16}median {statistics.median(times):5.0f} s  90 % {times[int(0.9 * len(times))]:5.0f} s"
                f"  worst {times[-1]:6.0f} s  kept at {statistics.mean(o.usd_hour for o in outcomes):6.2f} USD/h"
                f"  search {statistics.mean(o.search_usd for o in outcomes):6.4f} USD"
            )
    slower = sum(row.is_slower for row in rows)
    report(f"two at once slower, of {len(rows)}", slower, "", bar=0)
    gain = statistics.median(row.outcomes[2].up_s for row in hanging) / statistics.median(
        row.outcomes[0].up_s for row in hanging
    )
    print(f"{'first place hangs: times faster':<42}{gain:>10.2f} x   bar 2: {'met' if gain >= 2 else 'MISSED'}")
    return int(slower > 0 or gain < 2)


if __name__ == "__main__":
    sys.exit(main())
