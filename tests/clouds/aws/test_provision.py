"""The provisioner over EC2: failover between zones, one gang whatever fails, and nothing left after termination."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from broker.clouds.aws.cloud import AwsCloud
from broker.clouds.base import Cloud
from broker.provision.lifecycle import Provisioner
from broker.state.store import Store
from broker.types import Estimate, Node, NodeRequest, NodeState, Placement, Plan, Resources, Task
from broker.wording import describe_event
from tests.clouds.aws.bed import OFFER, AwsBed, open_session
from tests.clouds.contract import OWNER, count_living
from tests.testbed.ec2_account import Instance
from tests.tiers import spread

ZONES = ("us-east-1a", "us-east-1b", "us-east-1c")


def make_plan(*zones: str | None, node_count: int = 2, is_spot: bool = True) -> Plan:
    task = Task(num_nodes=node_count, resources=(Resources(ports=("8080",), labels={"team": "vision"}),))
    placements = [Placement(offer=replace(OFFER, zone=zone), is_spot=is_spot, node_count=node_count) for zone in zones]
    estimates = tuple(Estimate(placement=placement) for placement in placements)
    return Plan(task=task, estimates=estimates, rejections=(), prices_as_of="2026-01-01", reason="")


class World:
    def __init__(self, bed: AwsBed, folder: Path) -> None:
        self.bed = bed
        bed.settings = replace(bed.settings, regions=("us-east-1",))  # a look is one call, and there are many
        self.store = Store(folder / "state.db", clock=bed.clock)

    def provisioner(self, cloud: Cloud | None = None) -> Provisioner:
        """Make a provisioner, as each process does."""
        clouds = {"aws": cloud or self.bed.reopen()}
        boot = "#!/bin/sh\n# {0.token}\n"
        return Provisioner(clouds, self.store, clock=self.bed.clock, owner=OWNER, write_boot=boot.format)


class KilledError(BaseException):
    """Simulates the death of the process."""


class Dying(AwsCloud):
    """A cloud whose process dies as soon as the machines are created."""

    async def create_nodes(self, request: NodeRequest) -> Sequence[Node]:
        try:
            return await super().create_nodes(request)
        finally:
            raise KilledError


@pytest.fixture
def world(bed: AwsBed, tmp_path: Path) -> Iterator[World]:
    world = World(bed, tmp_path)
    yield world
    world.store.close()


def test_full_zone_is_skipped_and_down_leaves_nothing(world: World, bed: AwsBed) -> None:
    bed.account.full = {(ZONES[0], OFFER.instance_type)}

    async def act() -> None:
        heard: list[str] = []
        cluster = await world.provisioner().up(
            "train", make_plan(*ZONES[:2]), on_event=lambda event: heard.append(describe_event(event)), hedge=1
        )
        assert cluster.placement.offer.zone == ZONES[1]
        assert any("InsufficientInstanceCapacity" in line for line in heard)
        assert [node.rank for node in cluster.nodes] == [0, 1]
        assert all(node.handle.startswith("ssh://ubuntu@198.51.") for node in cluster.nodes)
        assert {each.user_data.decode().split()[2] for each in bed.account.instances.values()} == {
            node.token for node in cluster.nodes
        }
        await world.provisioner().down("train")
        assert await count_living(bed) == 0
        assert await world.provisioner().collect() == 3  # the security group, and a placement group per requested zone
        assert (bed.account.groups, bed.account.placement_groups) == ({}, {})

    bed.run(act())


@pytest.mark.parametrize("zones", [ZONES[:2], (ZONES[0], None)], ids=["zones", "zone and fleet"])
def test_gang_that_boots_late_does_not_keep_others_out_of_another_zone(
    world: World, bed: AwsBed, zones: tuple[str | None, ...]
) -> None:
    """EC2 keeps a placement group in the zone of its first machine until all of them have ended."""

    def delay(instance: Instance) -> None:
        if instance.zone == ZONES[0]:
            instance.due = (bed.clock.now_s() + 500.0, "running")

    bed.account.on_started = delay
    bed.account.scores = {ZONES[0]: 5, ZONES[1]: 9}

    async def act() -> None:
        provisioner = world.provisioner()
        cluster = await provisioner.up("train", make_plan(*zones))
        assert {node.zone for node in cluster.nodes} == {ZONES[1]}
        await provisioner.finish()
        await provisioner.down("train")
        await provisioner.sweep()
        assert bed.account.placement_groups == {}

    bed.run(act())


@pytest.mark.parametrize("zone", [ZONES[0], None], ids=["zone", "fleet"])
def test_after_a_lost_answer_and_a_crash_the_same_gang_is_found(world: World, bed: AwsBed, zone: str | None) -> None:
    async def act() -> None:
        bed.account.lose_answer("RunInstances" if zone else "CreateFleet")
        dying = Dying(bed.settings, clock=bed.clock, open_session=open_session)
        with pytest.raises(KilledError):
            await world.provisioner(dying).up("train", make_plan(zone))
        assert len(bed.account.instances) == 2
        cluster = await world.provisioner().up("train", make_plan(zone))
        assert {node.id for node in cluster.nodes} == set(bed.account.instances)
        assert len(bed.account.instances) == 2

    bed.run(act())


@pytest.mark.parametrize(
    ("action", "code", "status"),
    spread(
        [
            ("RunInstances", "RequestLimitExceeded", 503),
            ("RunInstances", "InternalError", 500),
            ("RunInstances", "InvalidGroup.NotFound", 400),
            ("CreateSecurityGroup", "Unavailable", 503),
            ("DescribeInstances", "RequestLimitExceeded", 503),
            ("TerminateInstances", "InternalError", 500),
            ("TerminateInstances", "InvalidInstanceID.NotFound", 400),
        ],
        every=2,
    ),
)
def test_passing_fault_costs_no_second_gang_and_leaks_nothing(
    world: World, bed: AwsBed, action: str, code: str, status: int
) -> None:
    bed.account.fail(action, code, status=status, times=2)

    async def act() -> None:
        cluster = await world.provisioner().up("train", make_plan(ZONES[0]))
        assert len([each for each in bed.account.instances.values() if each.state == "running"]) == 2
        assert {node.state for node in cluster.nodes} == {NodeState.RUNNING}
        await world.provisioner().down("train")
        assert await count_living(bed) == 0

    bed.run(act())
    assert bed.account.fault_counts[code] >= 1


@pytest.mark.long
def test_stopped_machines_cost_nothing_until_they_restart(world: World, bed: AwsBed) -> None:
    """Their disks are billed, which is little."""
    plan = make_plan(ZONES[0], is_spot=False)
    usd_hour = plan.choice.placement.usd_hour

    async def run_for(hours: float) -> None:
        await bed.clock.sleep(hours * 3600)
        cluster = world.store.clusters.get("train")
        assert cluster
        await world.provisioner().refresh(cluster)

    async def act() -> None:
        await world.provisioner().up("train", plan)
        for _ in range(2):
            await run_for(1)
            await world.provisioner().stop("train")
            await run_for(10)
            await world.provisioner().start("train")
        await run_for(1)
        assert world.store.bills.spend_usd(cluster="train", now_s=bed.clock.now_s()) == pytest.approx(
            3 * usd_hour, rel=0.02
        )
        await world.provisioner().down("train")
        await bed.clock.sleep(36000)
        assert world.store.bills.spend_usd(cluster="train", now_s=bed.clock.now_s()) == pytest.approx(
            3 * usd_hour, rel=0.02
        )

    bed.run(act())


def test_a_machine_that_is_stopped_and_started_in_the_console_is_billed_while_it_runs(
    world: World, bed: AwsBed
) -> None:
    plan = make_plan(ZONES[0], node_count=1, is_spot=False)
    usd_hour = plan.choice.placement.usd_hour

    async def measure_usd(hours: float) -> float:
        await bed.clock.sleep(hours * 3600)
        cluster = world.store.clusters.get("train")
        assert cluster
        await world.provisioner().refresh(cluster)
        return world.store.bills.spend_usd(cluster="train", now_s=bed.clock.now_s())

    async def act() -> None:
        cluster = await world.provisioner().up("train", plan)
        machine = bed.account.instances[cluster.nodes[0].id]
        await bed.clock.sleep(3600)
        bed.account.halt(machine)
        assert await measure_usd(0.01) == pytest.approx(usd_hour, rel=0.02)
        assert await measure_usd(10) == pytest.approx(usd_hour, rel=0.02)
        bed.account.boot(machine)
        assert await measure_usd(1) == pytest.approx(2 * usd_hour, rel=0.02)
        assert await measure_usd(1) == pytest.approx(3 * usd_hour, rel=0.02)

    bed.run(act())


def test_preempted_node_is_seen_with_its_reason(world: World, bed: AwsBed) -> None:
    async def act() -> None:
        provisioner = world.provisioner()
        cluster = await provisioner.up("train", make_plan(ZONES[0]))
        bed.account.preempt(cluster.nodes[1].id)
        await bed.clock.sleep(10)
        refreshed = await provisioner.refresh(cluster)
        assert [(node.state, node.reason) for node in refreshed.nodes] == [
            (NodeState.RUNNING, ""),
            (NodeState.TERMINATED, "preempted"),
        ]

    bed.run(act())


def test_node_that_no_record_knows_is_collected(world: World, bed: AwsBed) -> None:
    """As after restoring the state folder from an old copy."""

    async def act() -> None:
        await world.provisioner().up("train", make_plan(ZONES[0]))
        world.store.clusters.delete("train")
        await bed.clock.sleep(120)
        assert await world.provisioner().collect() == 3  # two nodes and their placement group
        assert await count_living(bed) == 0

    bed.run(act())


def test_sweep_is_left_out_while_no_cluster_has_gone(world: World, bed: AwsBed) -> None:
    async def act() -> None:
        provisioner = world.provisioner()
        await provisioner.up("train", make_plan(ZONES[0]))
        await provisioner.collect()
        before = len([each for each in bed.account.calls if each[0] == "ec2:DescribeSecurityGroups"])
        await provisioner.collect()
        assert len([each for each in bed.account.calls if each[0] == "ec2:DescribeSecurityGroups"]) == before
        assert len(bed.account.groups) == 1
        await provisioner.down("train")
        await provisioner.collect()
        assert bed.account.groups == {}

    bed.run(act())
