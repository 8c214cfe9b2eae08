"""Three or more zones at one price are one search: fewer calls if all are full, in the plan's order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from broker.errors import CapacityError
from broker.provision.lifecycle import Provisioner
from broker.types import Cluster, Estimate, Placement, Plan, Resources, Task
from broker.wording import describe_event
from tests.clouds.aws.bed import OFFER, AwsBed, open_session
from tests.clouds.aws.test_provision import Dying, KilledError, World
from tests.clouds.contract import count_living

ZONES = ("us-east-1a", "us-east-1b", "us-east-1c")
ELSEWHERE = "us-west-2a"
KIND = OFFER.instance_type
WISH = Resources(instance_type=KIND)


def make_place(zone: str, *, is_spot: bool = True, usd_hour: float = 11.5) -> Placement:
    offer = replace(OFFER, zone=zone, region=zone[:-1], spot_usd_hour=usd_hour, ondemand_usd_hour=usd_hour)
    return Placement(offer=offer, is_spot=is_spot, node_count=2)


def make_plan(places: Iterable[Placement], *wishes: Resources) -> Plan:
    task = Task(num_nodes=2, resources=wishes or (WISH,))
    estimates = tuple(Estimate(placement=each) for each in places)
    return Plan(task=task, estimates=estimates, rejections=(), prices_as_of="2026-01-01", reason="")


@pytest.fixture
def world(bed: AwsBed, tmp_path: Path) -> Iterator[World]:
    world = World(bed, tmp_path)
    bed.settings = replace(bed.settings, regions=("us-east-1", "us-west-2"))
    yield world
    world.store.close()


async def up(world: World, plan: Plan, *, provisioner: Provisioner | None = None, **options: Any) -> Cluster:
    return await (provisioner or world.provisioner()).up("train", plan, hedge=1, **options)


def list_creates(bed: AwsBed) -> list[tuple[str, int]]:
    """List the creates, with the number of zones of each."""
    return [
        (action, len(asked["LaunchTemplateConfigs"][0]["Overrides"]) if action == "ec2:CreateFleet" else 1)
        for action, _, asked in bed.account.calls
        if action in ("ec2:CreateFleet", "ec2:RunInstances")
    ]


@pytest.mark.parametrize("is_spot", [True, False], ids=["spot", "on-demand"])
def test_full_region_costs_one_search_and_each_of_its_zones_is_remembered(
    world: World, bed: AwsBed, is_spot: bool
) -> None:
    bed.account.full = {(zone, KIND) for zone in ZONES}
    places = [make_place(zone, is_spot=is_spot) for zone in (*ZONES, ELSEWHERE)]
    heard: list[str] = []

    async def act() -> None:
        cluster = await up(world, make_plan(places), on_event=lambda event: heard.append(describe_event(event)))
        assert cluster.placement == places[3]
        assert list_creates(bed) == [("ec2:CreateFleet", 3), ("ec2:RunInstances", 1)]
        assert any("in us-east-1a,b,c (aws) refused" in line for line in heard)
        refused = world.store.refusals.list_active(bed.clock.now_s())
        assert {each.zone for each in refused} == set(ZONES), "and not the region, where another price may hold"
        bed.account.calls.clear()
        with pytest.raises(CapacityError) as caught:
            await world.provisioner().up("other", make_plan(places[:3]), hedge=1)
        assert list_creates(bed) == []
        assert f"2 x {KIND} {'spot' if is_spot else 'on-demand'} in us-east-1a" in str(caught.value.details)
        await world.provisioner().down("train")
        assert await count_living(bed) == 0

    bed.run(act())


def test_gang_is_recorded_with_its_actual_location(world: World, bed: AwsBed) -> None:
    bed.account.full = {(zone, KIND) for zone in ZONES[:2]}
    places = [make_place(zone) for zone in ZONES]

    async def act() -> None:
        cluster = await up(world, make_plan(places))
        assert cluster.placement == places[2]
        assert {node.zone for node in cluster.nodes} == {ZONES[2]}
        assert [node.rank for node in cluster.nodes] == [0, 1]
        known = world.store.clusters.get("train")
        assert known and known.placement == places[2]

    bed.run(act())


def test_spot_gang_is_placed_in_the_zone_with_the_best_score(world: World, bed: AwsBed) -> None:
    bed.account.scores = {ZONES[0]: 3, ZONES[1]: 9, ZONES[2]: 5}

    async def act() -> None:
        cluster = await up(world, make_plan(make_place(zone) for zone in ZONES))
        assert cluster.placement.offer.zone == ZONES[1]

    bed.run(act())


def test_more_expensive_zone_of_the_region_is_excluded_from_the_search(world: World, bed: AwsBed) -> None:
    """A cheaper place elsewhere precedes it in the plan, and is tried first."""
    bed.account.full = {(zone, KIND) for zone in (*ZONES[:2], "us-east-1c", ELSEWHERE)}
    places = [make_place(zone) for zone in ZONES] + [make_place(ELSEWHERE, usd_hour=12.0)]
    places.append(make_place("us-west-2b", usd_hour=12.5))

    async def act() -> None:
        cluster = await up(world, make_plan(places))
        assert cluster.placement == places[4]
        assert list_creates(bed) == [("ec2:CreateFleet", 3), ("ec2:RunInstances", 1), ("ec2:RunInstances", 1)]

    bed.run(act())


@pytest.mark.parametrize("zones", [ZONES[:2], ZONES[:1]])
def test_few_zones_are_tried_sequentially(world: World, bed: AwsBed, zones: tuple[str, ...]) -> None:
    async def act() -> None:
        cluster = await up(world, make_plan(make_place(zone) for zone in zones))
        assert cluster.placement == make_place(zones[0])
        assert list_creates(bed) == [("ec2:RunInstances", 1)]

    bed.run(act())


def test_zones_are_tried_in_the_order_of_the_user(world: World, bed: AwsBed) -> None:
    wishes = [Resources(instance_type=KIND, zone=zone) for zone in reversed(ZONES)]

    async def act() -> None:
        places = [replace(make_place(zone), alternative=number) for number, zone in enumerate(reversed(ZONES))]
        cluster = await up(world, make_plan(places, *wishes))
        assert cluster.placement.offer.zone == ZONES[2]
        assert list_creates(bed) == [("ec2:RunInstances", 1)]

    bed.run(act())


def test_gang_with_the_best_network_names_its_zone(world: World, bed: AwsBed) -> None:
    """A fleet gives machines one card only."""

    async def act() -> None:
        await up(world, make_plan((make_place(zone) for zone in ZONES), replace(WISH, network_tier="best")))
        assert list_creates(bed) == [("ec2:RunInstances", 1)]

    bed.run(act())


def test_zone_that_refused_recently_is_left_out(world: World, bed: AwsBed) -> None:
    places = [make_place(zone) for zone in ZONES]
    bed.account.full = {(ZONES[0], KIND)}

    async def act() -> None:
        with pytest.raises(CapacityError):
            await world.provisioner().up("first", make_plan(places[:1]), hedge=1)
        bed.account.calls.clear()
        cluster = await up(world, make_plan(places))
        assert cluster.placement == places[1]
        assert list_creates(bed) == [("ec2:CreateFleet", 2)]

    bed.run(act())


def test_other_zones_are_tried_after_machines_died_in_one(world: World, bed: AwsBed) -> None:
    """The fleet chose one zone, and the gang did not live there: nothing is known about the others yet."""
    places = [make_place(zone) for zone in ZONES]
    bed.account.on_started = lambda each: (
        bed.account.preempt(each.id) if each.zone == ZONES[0] and each.index == 0 else None
    )

    async def act() -> None:
        cluster = await up(world, make_plan(places))
        assert cluster.placement == places[1]
        assert {each.zone for each in world.store.refusals.list_active(bed.clock.now_s())} == {ZONES[0]}
        assert list_creates(bed) == [("ec2:CreateFleet", 3), ("ec2:CreateFleet", 2)]
        assert await count_living(bed) == 2

    bed.run(act())


def test_a_search_interrupted_by_a_crash_is_continued(world: World, bed: AwsBed) -> None:
    """Its intent names all zones that may have machines now: none of them is tried a second time."""
    bed.account.full = {(ZONES[0], KIND)}
    places = [make_place(zone) for zone in ZONES]

    async def act() -> None:
        dying = Dying(bed.settings, clock=bed.clock, open_session=open_session)
        with pytest.raises(KilledError):
            await up(world, make_plan(places), provisioner=world.provisioner(dying))
        (intent,) = world.store.intents.list_open("train")
        assert intent.request.placement == replace(places[0], other_zones=ZONES[1:])
        bed.account.calls.clear()
        cluster = await up(world, make_plan(places))
        assert cluster.placement == places[1]
        assert {node.id for node in cluster.nodes} == set(bed.account.instances)
        assert len(list_creates(bed)) == 1, "the same token"
        assert not world.store.intents.list_open("train")

    bed.run(act())


def test_nodes_of_an_interrupted_search_are_found_by_tag(world: World, bed: AwsBed) -> None:
    async def act() -> None:
        dying = Dying(bed.settings, clock=bed.clock, open_session=open_session)
        with pytest.raises(KilledError):
            await up(world, make_plan(make_place(zone) for zone in ZONES), provisioner=world.provisioner(dying))
        await world.provisioner().down("train")
        assert await count_living(bed) == 0 and not world.store.intents.list_open("train")
        await world.provisioner().sweep()
        assert bed.list_orphans() == []

    bed.run(act())
