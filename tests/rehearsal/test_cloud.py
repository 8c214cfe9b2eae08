"""Rehearsed clouds: their markets decide what happens to real local nodes, in simulated time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from broker.clock import ScaledClock
from broker.errors import CapacityError
from broker.lab.traces import Trace
from broker.rehearsal.cloud import BOOT_S, FULL_AFTER_S, NOTICE_S, Pace, RehearsedCloud, make_rehearsed_cloud
from broker.rehearsal.market import MarketPeriod, PlaceMarket, ReplayedMarket, SeededMarket
from broker.spot.hazard import find_hazard_per_node_hour
from broker.types import NodeRequest, NodeState, Offer, Placement

HOUR_S = 3600.0


def make_offer(zone: str = "us-east-1a", *, cloud: str = "aws", region: str = "us-east-1") -> Offer:
    return Offer(
        cloud=cloud,
        region=region,
        zone=zone,
        instance_type="p4d.24xlarge",
        vcpus=96,
        memory_gib=1152,
        ondemand_usd_hour=20.0,
        spot_usd_hour=6.0,
        interruption_band=10.0,
    )


def make_request(
    offer: Offer, *, is_spot: bool = True, node_count: int = 1, token: str = "token", cluster: str = "c"
) -> NodeRequest:
    placement = Placement(offer=offer, is_spot=is_spot, node_count=node_count)
    return NodeRequest(owner="me", cluster=cluster, attempt=1, token=token, placement=placement)


@dataclass
class OpenFor:
    """A market that is open for a given time at each zone, then closed forever."""

    hours: dict[str, float] = field(default_factory=dict)

    def find_period(self, offer: Offer, at_s: float) -> MarketPeriod:
        end_s = self.hours.get(offer.zone or "", float("inf")) * HOUR_S
        if at_s < end_s:
            return MarketPeriod(start_s=0.0, end_s=end_s, is_open=True)
        return MarketPeriod(start_s=end_s, end_s=float("inf"), is_open=False)


@dataclass
class Rig:
    folder: Path
    messages: list[str] = field(default_factory=list)
    clouds: list[RehearsedCloud] = field(default_factory=list)

    def make(self, market: PlaceMarket) -> RehearsedCloud:
        """Make a cloud whose clock is so slow that only the time that a test skips passes."""
        pace = Pace(ScaledClock(rate=1e-9))
        cloud = make_rehearsed_cloud(
            "aws", root=self.folder, pace=pace, market=market, start_s=pace.clock.now_s(), on_event=self.messages.append
        )
        self.clouds.append(cloud)
        return cloud


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    for cloud in rig.clouds:
        asyncio.run(cloud.end_all("me"))


def skip(cloud: RehearsedCloud, duration_s: float) -> None:
    """Let this much simulated time pass at once."""
    until_s = cloud.clock.now_s() + duration_s
    cloud.clock.set_rate(1e9)
    while cloud.clock.now_s() < until_s:
        pass
    cloud.clock.set_rate(1e-9)


def test_a_place_without_machines_refuses_spot_and_sells_on_demand(rig: Rig) -> None:
    cloud = rig.make(OpenFor({"us-east-1a": 0.0}))
    with pytest.raises(CapacityError) as refused:
        asyncio.run(cloud.create_nodes(make_request(make_offer())))
    assert refused.value.scope == "zone" and cloud.refusals == 1
    (node,) = asyncio.run(cloud.create_nodes(make_request(make_offer(), is_spot=False)))
    assert (node.cloud, node.is_spot, node.usd_hour) == ("aws", False, 20.0)


def test_a_node_boots_for_as_long_as_in_the_cloud_and_is_billed_in_simulated_time(rig: Rig) -> None:
    cloud = rig.make(OpenFor())
    cloud.pace.wait = lambda: None  # type: ignore[method-assign]  # time passes only where the test lets it

    async def play() -> None:
        (node,) = await cloud.create_nodes(make_request(make_offer()))
        assert node.state is NodeState.PENDING
        skip(cloud, BOOT_S)
        (node,) = await cloud.list_nodes("me")
        assert node.state is NodeState.RUNNING
        skip(cloud, 10 * HOUR_S)
        await cloud.terminate_nodes([node])
        (node,) = await cloud.list_nodes("me")
        assert node.state is NodeState.TERMINATED and node.ended_s is not None
        assert node.ended_s - node.created_s >= 10 * HOUR_S

    asyncio.run(play())


def test_the_same_token_gives_the_same_nodes_even_after_the_market_has_closed(rig: Rig) -> None:
    cloud = rig.make(OpenFor({"us-east-1a": 1.0}))
    request = make_request(make_offer(), node_count=2)

    async def play() -> None:
        made = await cloud.create_nodes(request)
        skip(cloud, 2 * HOUR_S)
        again = await cloud.create_nodes(request)
        assert [node.id for node in made] == [node.id for node in again]

    asyncio.run(play())


def test_the_end_of_a_period_takes_the_whole_gang_and_leaves_on_demand_alone(rig: Rig) -> None:
    cloud = rig.make(OpenFor({"us-east-1a": 1.0}))

    async def play() -> None:
        await cloud.create_nodes(make_request(make_offer(), node_count=2))
        await cloud.create_nodes(make_request(make_offer(), is_spot=False, token="other"))
        skip(cloud, 0.5 * HOUR_S)
        await cloud.list_nodes("me")
        assert cloud.preemptions == 0, "the period counts from the market's start"
        skip(cloud, 1.5 * HOUR_S)
        nodes = await cloud.list_nodes("me")
        assert [node.state is NodeState.TERMINATED for node in nodes if not node.is_spot] == [False]
        spot = [node for node in nodes if node.is_spot]
        assert [(node.state, node.reason) for node in spot] == [(NodeState.TERMINATED, "preempted")] * 2

    asyncio.run(play())
    assert cloud.preemptions == 1 and "preempts all 2 nodes" in rig.messages[0]


def test_a_location_has_no_capacity_for_a_while_after_a_preemption(rig: Rig) -> None:
    cloud = rig.make(OpenFor())

    async def create(token: str, zone: str = "us-east-1a") -> str:
        (node,) = await cloud.create_nodes(make_request(make_offer(zone), token=token))
        return node.id

    async def play() -> None:
        await cloud.preempt_nodes([await create("one")], notice_s=0)
        for _ in range(2):
            with pytest.raises(CapacityError):
                await create("two")
        assert await create("three", "us-east-1b")
        other = replace(make_offer(), instance_type="g5.xlarge")
        assert await cloud.create_nodes(make_request(other, token="other")), "machines of another type are not full"
        skip(cloud, FULL_AFTER_S + 1)
        assert await create("four")

    asyncio.run(play())


def test_simulated_times_are_those_of_real_clouds() -> None:
    assert 30.0 <= BOOT_S <= 60.0 and NOTICE_S == {"aws": 120.0, "gcp": 30.0, "azure": 30.0}


def test_a_location_refuses_the_next_request_however_late_it_is(rig: Rig) -> None:
    """A machine that is busy elsewhere takes long to end the nodes, while simulated time runs."""
    cloud = rig.make(OpenFor())

    async def play() -> None:
        (node,) = await cloud.create_nodes(make_request(make_offer(), token="one"))
        await cloud.preempt_nodes([node.id], notice_s=0)
        skip(cloud, FULL_AFTER_S + 1)
        with pytest.raises(CapacityError):
            await cloud.create_nodes(make_request(make_offer(), token="two"))
        assert await cloud.create_nodes(make_request(make_offer(), token="three"))

    asyncio.run(play())


def test_a_node_with_a_notice_ends_once_its_program_has_ended(rig: Rig) -> None:
    """Then there is nothing to wait for; a list that comes after the program's end shows the node gone."""
    cloud = rig.make(OpenFor())

    async def play(end_program: Callable[[Path], Awaitable[None]]) -> None:
        (node,) = await cloud.create_nodes(make_request(make_offer()))
        run = Path(node.handle) / "home/.broker/runs/1"
        run.mkdir(parents=True)
        (run / "spec.json").write_text("{}")
        await cloud.preempt_nodes([node.id], notice_s=100)
        (node,) = await cloud.list_nodes("me")
        assert node.state is not NodeState.TERMINATED
        await end_program(run)
        (node,) = await cloud.list_nodes("me")
        assert (node.state, node.reason) == (NodeState.TERMINATED, "preempted")

    async def end(run: Path) -> None:
        (run / "outcome.json").write_text("{}")

    asyncio.run(play(end))
    assert cloud.ignored_notices == 0


def test_a_machine_that_stalls_does_not_use_up_a_notice(rig: Rig) -> None:
    cloud = rig.make(OpenFor())
    real_s = 1000.0
    cloud._system = SimpleNamespace(now_s=lambda: real_s)  # type: ignore[assignment]

    async def play() -> list[bool]:
        nonlocal real_s
        (node,) = await cloud.create_nodes(make_request(make_offer()))
        run = Path(node.handle) / "home/.broker/runs/1"
        run.mkdir(parents=True)
        (run / "spec.json").write_text("{}")
        await cloud.preempt_nodes([node.id], notice_s=3)
        found = []
        for passed_s in (60.0, 1.0, 1.0):
            real_s += passed_s
            await cloud.take_due()
            found.append(cloud.list_preempted()[0].ended_s is not None)
        return found

    assert asyncio.run(play()) == [False, False, True] and cloud.ignored_notices == 1


def test_warned_gangs_of_one_preemption_end_each_with_its_own_program(rig: Rig) -> None:
    cloud = rig.make(OpenFor())

    async def play() -> None:
        nodes = []
        for number in (1, 2):
            (node,) = await cloud.create_nodes(make_request(make_offer(), token=f"t{number}", cluster=f"c{number}"))
            run = Path(node.handle) / "home/.broker/runs/1"
            run.mkdir(parents=True)
            (run / "spec.json").write_text("{}")
            nodes.append(node)
        skip(cloud, BOOT_S)
        await cloud.preempt_nodes([node.id for node in nodes], notice_s=100)
        (Path(nodes[0].handle) / "home/.broker/runs/1/outcome.json").write_text("{}")
        listed = {node.id: node.state for node in await cloud.list_nodes("me")}
        assert listed == {nodes[0].id: NodeState.TERMINATED, nodes[1].id: NodeState.RUNNING}
        first, second = sorted(cloud.list_preempted(), key=lambda each: each.node_id != nodes[0].id)
        assert first.preemption == second.preemption == 1
        assert first.ended_s is not None and second.ended_s is None

    cloud.pace.wait = lambda: None  # type: ignore[method-assign]  # time passes only where the test lets it
    asyncio.run(play())


def test_equal_seeds_draw_equal_markets_and_others_differ() -> None:
    offers = [make_offer(f"us-east-1{letter}") for letter in "abcdefghijklmnopqrst"]

    def draw(seed: int) -> list[bool]:
        market = SeededMarket(seed=seed)
        return [market.find_period(offer, 0.0).is_open for offer in offers]

    assert draw(0) == draw(0) and draw(0) != draw(1)
    assert 0 < draw(0).count(False) < 10, "a fifth of the places start full"


def test_periods_follow_each_other_without_a_gap() -> None:
    market, offer = SeededMarket(seed=3, full_hours=2000.0), make_offer()
    at_s, last = 0.0, market.find_period(offer, 0.0)
    for _ in range(20):
        at_s = last.end_s
        period = market.find_period(offer, at_s)
        assert period.start_s == last.end_s and period.is_open is not last.is_open
        last = period


def test_places_stay_open_as_long_as_their_hazard_says_and_full_for_an_hour_on_average() -> None:
    market, offer = SeededMarket(seed=5), make_offer()
    hours: dict[bool, list[float]] = {True: [], False: []}
    period = market.find_period(offer, 0.0)
    for _ in range(600):
        hours[period.is_open].append((period.end_s - period.start_s) / 3600)
        period = market.find_period(offer, period.end_s)
    means = {is_open: sum(each) / len(each) for is_open, each in hours.items()}
    assert means[False] == pytest.approx(1.0, rel=0.25)
    assert means[True] == pytest.approx(1 / find_hazard_per_node_hour(offer.interruption_band), rel=0.25)


def make_trace(name: str, counts: list[int], gang: int = 1) -> Trace:
    return Trace(name=name, gap_hours=1.0, counts=tuple(counts), gang=gang)


def test_own_recordings_are_found_by_zone_and_machine() -> None:
    """As `broker traces record` names them: a cloud, a zone or region, and an instance type."""
    names = ("aws-us-east-1a-p3.2xlarge", "aws-us-east-1a-p4d.24xlarge", "aws-us-east-1b-p3.2xlarge", "nebius-eu-1-gpu")
    market = ReplayedMarket(traces=[make_trace(name, [1, 0]) for name in names])
    for zone, region, kind, name in (
        ("us-east-1a", "us-east-1", "p3.2xlarge", names[0]),
        ("us-east-1a", "us-east-1", "p4d.24xlarge", names[1]),
        ("us-east-1b", "us-east-1", "p4d.24xlarge", names[2]),
        (None, "eu-1", "gpu", names[3]),
    ):
        trace, begin_hours = market.find_recording(replace(make_offer(), region=region, zone=zone, instance_type=kind))
        assert (trace.name, begin_hours) == (name, 0.0)


def test_a_zone_plays_its_own_recording_from_its_start() -> None:
    market = ReplayedMarket(traces=[make_trace("us-east-1a_v100", [1, 1, 0, 1]), make_trace("us-east-1b", [0])])
    periods = [market.find_period(make_offer(), hour * HOUR_S) for hour in (0.5, 2.5, 3.5, 5.5)]
    assert [(each.start_s / HOUR_S, each.end_s / HOUR_S, each.is_open) for each in periods] == [
        (0, 2, True),
        (2, 3, False),
        (3, 6, True),  # on into the repetition, which begins open
        (4, 6, True),
    ]
    assert not market.find_period(make_offer("us-east-1b"), 10 * HOUR_S).is_open


def test_a_zone_without_a_recording_always_gets_the_same_one() -> None:
    traces = [make_trace(f"made-{number}", [1] * number + [0] * 3) for number in range(1, 6)]
    market = ReplayedMarket(traces=traces)
    for letter in "abcdef":
        offer = make_offer(f"eu-west-1{letter}")
        assert market.find_recording(offer) == ReplayedMarket(traces=traces).find_recording(offer)
        period = market.find_period(offer, 7 * HOUR_S)
        assert period.start_s <= 7 * HOUR_S < period.end_s
