"""Failover: gangs come up whole or not at all, and every node remains on record until its termination is confirmed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from broker.errors import AuthError, CapacityError, DeniedError, QuotaError, ThrottledError, UsageError
from broker.provision.creation import CREATE_TRIES_MAX
from broker.provision.hedge_timer import HedgeTimer
from broker.provision.launch import make_token
from broker.provision.nodes import RESUMED_S_MIN
from broker.provision.refusals import CAPACITY_REFUSAL_S, FAILURES_MAX, UnavailableOffers
from broker.types import Cluster, Event, EventKind, Node, NodeList, NodeRequest, NodeState, Task
from broker.wording import describe_event
from tests.clouds.simulated import CloudTimings, FaultRates
from tests.simulation.world import FOREIGN, OWNER, World, make_plan


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def up(world: World, name: str = "c", *zones: str) -> Cluster:
    cluster = world.clock.run(lambda: world.make_provisioner().up(name, make_plan(world.task, *zones)))
    assert isinstance(cluster, Cluster)
    return cluster


def test_a_full_zone_is_not_requested_before_its_refusal_expires(world: World) -> None:
    world.cloud.full_zones["east1a"] = world.clock.now_s() + 5.0
    assert up(world, "one").placement.offer.zone == "east1b"
    assert up(world, "two").placement.offer.zone == "east1b"
    world.clock.run(lambda: world.clock.sleep(CAPACITY_REFUSAL_S))
    assert up(world, "three").placement.offer.zone == "east1a"


def test_a_refusal_counts_towards_the_budget_of_failed_calls(world: World) -> None:
    """Otherwise, jobs that search in full regions call the cloud as fast as it answers."""
    memory = UnavailableOffers(world.store)
    for _ in range(int(FAILURES_MAX) - 1):
        memory.note_failed_call("simulated")
    create, zones = world.cloud.create_nodes, list[str | None]()

    async def note(request: NodeRequest) -> Sequence[Node]:
        zones.append(request.placement.offer.zone)
        return await create(request)

    world.cloud.create_nodes = note  # type: ignore[method-assign]
    world.cloud.full_zones["east1a"] = world.clock.now_s() + 600.0
    with pytest.raises(CapacityError):
        up(world, "c", "east1a", "east1b")
    assert zones == ["east1a"]
    world.clock.run(lambda: world.clock.sleep(60.0))
    assert up(world, "c", "east1a", "east1b").placement.offer.zone == "east1b"


def test_the_token_is_equal_for_the_same_launch_only() -> None:
    plan = make_plan(Task(num_nodes=2))
    first, second = (estimate.placement for estimate in plan.estimates[:2])
    assert make_token("o", "c", 1, first, 0) == make_token("o", "c", 1, first, 0)
    tokens = {make_token("o", "c", a, p, s) for a in (1, 2) for p in (first, second) for s in (0, 1)}
    assert len(tokens) == 8


def test_a_lost_answer_creates_no_second_gang(world: World) -> None:
    world.cloud.faults = FaultRates(unknown_after=0.7)
    cluster = up(world)
    assert world.cloud.fault_counts["create:unknown_after"]
    assert sorted(node.id for node in cluster.nodes) == sorted(node.id for node in world.list_live_nodes())


def test_a_gang_that_loses_a_node_while_booting_is_terminated_and_launched_elsewhere(world: World) -> None:
    provisioner = world.make_provisioner()
    messages: list[str] = []

    async def scenario() -> Cluster:
        plan = make_plan(world.task)
        coming = asyncio.ensure_future(
            provisioner.up("c", plan, on_event=lambda event: messages.append(describe_event(event)))
        )
        while not world.list_live_nodes():
            await world.clock.sleep(0.1)
        world.cloud.preempt([world.list_live_nodes()[0].id])
        return await coming

    cluster = world.clock.run(scenario)
    assert cluster.placement.offer.zone == "east1b"
    assert world.count_live(lambda node: node.zone == "east1a") == 0
    assert any("did not come up completely: a node terminated by itself (preempted)" in line for line in messages), (
        messages
    )


def test_a_gang_that_does_not_boot_in_time_is_reported_with_the_time(world: World) -> None:
    world.cloud.faults = FaultRates(never_boots=1.0)
    messages: list[str] = []
    provisioner = world.make_provisioner()
    with pytest.raises(CapacityError) as caught:
        world.clock.run(
            lambda: provisioner.up(
                "c", make_plan(world.task, "east1a"), on_event=lambda event: messages.append(describe_event(event))
            )
        )
    assert "not all nodes were running within" in str(caught.value.details) and "terminated by itself" not in "".join(
        messages
    )


def test_a_cluster_can_come_up_again_under_its_old_name(world: World) -> None:
    first = up(world)
    world.clock.run(lambda: world.make_provisioner().down("c"))
    assert not world.list_live_nodes() and world.store.clusters.get("c") is None
    second = up(world)
    assert not {node.id for node in first.nodes} & {node.id for node in second.nodes}


def test_refresh_shows_the_lost_nodes_of_a_gang(world: World) -> None:
    cluster = up(world)
    world.cloud.preempt([cluster.nodes[1].id])
    world.clock.run(lambda: world.clock.sleep(1.0))
    refreshed = world.clock.run(lambda: world.make_provisioner().refresh(cluster))
    assert [node.state for node in refreshed.nodes] == [NodeState.RUNNING, NodeState.TERMINATED]


def test_a_node_missing_from_a_few_lists_is_not_believed_gone(world: World) -> None:
    cluster = up(world)
    provisioner = world.make_provisioner()
    world.cloud.list_nodes = list_nothing  # type: ignore[method-assign]
    for _ in range(10):
        refreshed = world.clock.run(lambda: provisioner.refresh(cluster))
        assert all(node.state is NodeState.RUNNING for node in refreshed.nodes)
        world.clock.run(lambda: world.clock.sleep(5.0))


async def list_nothing(owner: str) -> NodeList:
    return NodeList()


@pytest.mark.parametrize("error", [QuotaError("vCPU limit reached"), CapacityError("full", scope="region")])
def test_a_region_wide_refusal_covers_the_other_zones(world: World, error: QuotaError | CapacityError) -> None:
    asked: list[str] = []
    create = world.cloud.create_nodes

    async def refuse_east(request: NodeRequest) -> Sequence[Node]:
        asked.append(str(request.placement.offer.zone))
        if request.placement.offer.region == "east1":
            raise error
        return await create(request)

    world.cloud.create_nodes = refuse_east  # type: ignore[method-assign]
    assert up(world).placement.offer.zone == "west1a"
    assert asked == ["east1a", "west1a"]


def test_a_throttling_region_is_skipped_as_a_whole(world: World) -> None:
    """Its zones share one call rate: calls in each would be throttled like those in the first."""
    asked: dict[str, int] = {}
    create = world.cloud.create_nodes

    async def throttle_east(request: NodeRequest) -> Sequence[Node]:
        zone = str(request.placement.offer.zone)
        asked[zone] = asked.get(zone, 0) + 1
        if request.placement.offer.region == "east1":
            raise ThrottledError("slow down")
        return await create(request)

    world.cloud.create_nodes = throttle_east  # type: ignore[method-assign]
    provisioner, heard = world.make_provisioner(), list[str]()
    world.clock.run(
        lambda: provisioner.up(
            "c", make_plan(world.task), on_event=lambda event: heard.append(describe_event(event)), hedge=1
        )
    )
    assert asked == {"east1a": CREATE_TRIES_MAX, "west1a": 1}
    waits = [line for line in heard if "slow down; retrying in" in line]
    assert len(waits) == CREATE_TRIES_MAX - 1


def test_each_reason_and_each_hint_is_reported_once(world: World) -> None:
    async def refuse(request: NodeRequest) -> Sequence[Node]:
        if request.placement.offer.region == "east1":
            raise CapacityError("no machine left", scope="zone")
        raise QuotaError("quota of 8 vCPUs", hints=("Ask for more with `ask`.",))

    world.cloud.create_nodes = refuse  # type: ignore[method-assign]
    with pytest.raises(CapacityError) as caught:
        up(world)
    error = caught.value
    zones = {each.placement.offer.region: [] for each in make_plan(world.task).estimates}
    for each in make_plan(world.task).estimates:
        zones[each.placement.offer.region].append(str(each.placement.offer.zone))
    assert len(error.details) == len(zones)
    detail = next(line for line in error.details if line.endswith("no machine left"))
    assert all(zone in detail for zone in zones["east1"])
    assert error.hints[0] == "Ask for more with `ask`." and error.hints.count("Ask for more with `ask`.") == 1
    assert "broker launch -r" in error.hints[-1]


def test_a_missing_login_excludes_the_cloud_and_is_the_error_if_no_other_cloud_is_left(world: World) -> None:
    asked = 0

    async def refuse(request: NodeRequest) -> Sequence[Node]:
        nonlocal asked
        asked += 1
        raise AuthError("not logged in", hints=("Run `aws configure`.",))

    world.cloud.create_nodes = refuse  # type: ignore[method-assign]
    with pytest.raises(AuthError, match="not logged in"):
        up(world)
    assert asked == 1 and not world.store.intents.list_open() and not world.store.clusters.list()


def refuse_regions(world: World, *regions: str) -> list[str]:
    """Deny these regions like an organisation's policy; return the list of requested zones."""
    create_nodes, asked = world.cloud.create_nodes, []

    async def create(request: NodeRequest) -> Sequence[Node]:
        asked.append(request.placement.offer.zone or "")
        if request.placement.offer.region in regions:
            raise DeniedError(f"explicit deny in {request.placement.offer.region}", hints=("Ask the administrator.",))
        return await create_nodes(request)

    world.cloud.create_nodes = create  # type: ignore[method-assign]
    return asked


def test_a_region_forbidden_by_policy_is_called_once_and_the_next_region_is_used(world: World) -> None:
    asked = refuse_regions(world, "east1")
    assert up(world).placement.offer.zone == "west1a"
    assert asked == ["east1a", "west1a"]


def test_if_every_region_is_forbidden_the_refusal_itself_is_raised(world: World) -> None:
    asked = refuse_regions(world, "east1", "west1")
    with pytest.raises(DeniedError, match="explicit deny in east1") as caught:
        up(world)
    assert caught.value.hints == ("Ask the administrator.",)
    assert asked == ["east1a", "west1a"] and not world.store.intents.list_open()


def test_a_full_region_and_a_forbidden_one_are_a_capacity_error(world: World) -> None:
    asked = refuse_regions(world, "east1")
    world.cloud.full_zones["west1a"] = world.clock.now_s() + 1e6
    with pytest.raises(CapacityError) as caught:
        up(world)
    assert asked == ["east1a", "west1a"]
    assert "explicit deny in east1" in str(caught.value.details) and "west1a" in str(caught.value.details)


def test_the_launch_time_of_the_gang_is_reported(world: World) -> None:
    events: list[Event] = []
    start_s = world.clock.now_s()
    world.clock.run(lambda: world.make_provisioner().up("c", make_plan(world.task), on_event=events.append))
    [took_s] = [event.data["took_s"] for event in events if event.kind is EventKind.PLACE_WHOLE]
    assert isinstance(took_s, float) and 0.0 < took_s <= world.clock.now_s() - start_s


@pytest.mark.parametrize("after_s", [0.0, 0.3, 5.0])
def test_a_cluster_taken_down_during_failover_does_not_come_up_later(world: World, after_s: float) -> None:
    """`down` reports that all nodes are gone: the `up` of that name must not launch elsewhere."""
    world.cloud.full_zones["east1a"] = world.clock.now_s() + 1e6
    world.cloud.faults = FaultRates(never_boots=1.0)
    placements = make_plan(world.task, "east1a", "east1b", "west1a", "north1a")

    async def scenario() -> None:
        coming = asyncio.ensure_future(world.make_provisioner().up("c", placements, timeout_s=5.0))
        while not world.list_live_nodes():
            await world.clock.sleep(0.1)
        await world.clock.sleep(after_s)
        await world.make_provisioner().down("c")
        assert world.store.clusters.get("c") is None
        world.cloud.faults = FaultRates()
        with pytest.raises(UsageError, match="was terminated while it was starting"):
            await coming

    world.clock.run(scenario)
    assert not world.list_live_nodes() and not world.store.intents.list_open() and not world.store.clusters.list()


def test_the_collector_terminates_our_lost_nodes_and_no_foreign_ones(world: World) -> None:
    kept = up(world, "kept")
    world.cloud.add_foreign_node(replace(FOREIGN, id="lost-1", owner=OWNER, cluster="forgotten"))
    world.store.meta.mark_adopted("simulated")
    assert world.clock.run(lambda: world.make_provisioner().collect()) == 1
    world.clock.run(lambda: world.clock.sleep(10.0))
    assert {node.id for node in world.list_live_nodes()} == {node.id for node in kept.nodes}
    assert any(node.id == FOREIGN.id and node.state is NodeState.RUNNING for node in world.cloud.observe())


@pytest.mark.parametrize("after_s", [400.0, 5000.0])
def test_the_boot_timeout_counts_from_creation_across_processes(world: World, after_s: float) -> None:
    """Otherwise a daemon that is restarted every few minutes would pay for them indefinitely."""
    world.cloud.faults = FaultRates(never_boots=1.0)

    async def act() -> float:
        first = asyncio.ensure_future(world.make_provisioner().up("c", make_plan(world.task, "east1a")))
        await world.clock.sleep(30.0)
        first.cancel()
        await asyncio.wait([first])
        made_s = max(node.created_s for node in world.list_live_nodes())
        await world.clock.sleep(after_s)
        with pytest.raises(CapacityError, match="no placement has capacity"):
            await world.make_provisioner().up("c", make_plan(world.task, "east1a"))
        return world.clock.now_s() - made_s

    took_s = world.clock.run(act)
    assert max(600.0, after_s) <= took_s <= max(600.0, after_s) + 30.0 + RESUMED_S_MIN + 30.0
    assert not world.list_live_nodes()


def test_nodes_that_booted_while_no_process_ran_are_kept(world: World) -> None:
    async def act() -> Cluster:
        first = asyncio.ensure_future(world.make_provisioner().up("c", make_plan(world.task, "east1a")))
        await world.clock.sleep(10.0)
        first.cancel()
        await asyncio.wait([first])
        await world.clock.sleep(5000.0)
        return await world.make_provisioner().up("c", make_plan(world.task, "east1a"))

    assert len(world.clock.run(act).nodes) == 2
    assert len(world.cloud.observe()) == 3, "ours, and the foreign one"


def test_of_two_gangs_that_come_up_at_the_same_time_the_better_placement_is_kept(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both answers arrive between two looks of the search."""
    monkeypatch.setattr(HedgeTimer, "measure_s", lambda self, cloud, answer: 1.0)
    world.cloud.timings = CloudTimings(boot_s=0.0, boot_s_max=0.0, list_lag_s=0.0)
    create, both, zones = world.cloud.create_nodes, asyncio.Event(), list[str]()

    async def answer_together(request: NodeRequest) -> Sequence[Node]:
        nodes = await create(request)
        zones.append(str(request.placement.offer.zone))
        if len(zones) == 2:
            both.set()
        await both.wait()
        return nodes

    world.cloud.create_nodes = answer_together  # type: ignore[method-assign]
    provisioner = world.make_provisioner()

    async def scenario() -> Cluster:
        cluster = await provisioner.up("c", make_plan(world.task, "east1a", "west1a"))
        await provisioner.finish()
        return cluster

    assert world.clock.run(scenario).placement.offer.zone == "east1a"
    assert sorted(zones) == ["east1a", "west1a"]
    assert {node.zone for node in world.list_live_nodes()} == {"east1a"}


def test_other_zones_of_a_joined_placement_are_requested_again_after_one_of_them_failed(world: World) -> None:
    """The cloud chose the first zone, whose nodes did not boot; it never refused the second."""
    plan = make_plan(world.task, "east1a", "west1a")
    first = replace(plan.estimates[0].placement, other_zones=("east1b",))
    plan = replace(plan, estimates=(replace(plan.estimates[0], placement=first), plan.estimates[1]))
    create, asked = world.cloud.create_nodes, list[tuple[str | None, tuple[str, ...]]]()

    async def lose_first(request: NodeRequest) -> Sequence[Node]:
        asked.append((request.placement.offer.zone, tuple(request.placement.other_zones)))
        nodes = await create(request)
        if len(asked) == 1:
            world.cloud.preempt([nodes[0].id])
        return nodes

    world.cloud.create_nodes = lose_first  # type: ignore[method-assign]
    cluster = world.clock.run(lambda: world.make_provisioner().up("c", plan, hedge=1))
    assert cluster.placement.offer.zone == "east1b"
    assert asked == [("east1a", ("east1b",)), ("east1b", ())]
