"""The end of a node counts once its cloud confirms it; one list without the node proves nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from broker.clouds.base import Cloud
from broker.errors import AuthError, TransientError, UnknownOutcomeError, UsageError
from broker.provision.lifecycle import Provisioner
from broker.provision.listing import Lister
from broker.provision.nodes import Absence, confirm_gone, measure_left_s, wait_running
from broker.types import ClusterStatus, IntentEnd, Node, NodeList, NodeRequest, NodeState
from tests.clouds.simulated import CloudTimings, FaultRates
from tests.simulation.virtual import VirtualClock
from tests.simulation.world import OWNER, World, make_plan


def test_an_empty_list_does_not_confirm_the_end_of_a_node_that_refuses_to_terminate(tmp_path: Path) -> None:
    """Found by the simulator: the next attempt started while the last one still worked."""
    world = World(tmp_path)
    provisioner = world.make_provisioner()
    cluster = world.clock.run(lambda: provisioner.up("c", make_plan(world.task)))
    ids = [node.id for node in cluster.nodes]
    world.cloud.faults = FaultRates(refused=1.0, blank=0.5)
    seen: list[bool] = []

    async def scenario() -> None:
        await provisioner.down("c")
        seen.append(any(node.state is NodeState.RUNNING for node in world.cloud.find(ids)))

    async def mend() -> None:
        await world.clock.sleep(100.0)
        world.cloud.faults = FaultRates()

    async def both() -> None:

        await asyncio.gather(scenario(), mend())

    world.clock.run(both)
    assert world.cloud.fault_counts["list:blank"] > 5
    assert seen == [False]


def test_a_node_that_its_cloud_forgets_is_eventually_believed_gone(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.cloud.timings = CloudTimings(vanish_s=0.0)
    provisioner = world.make_provisioner()
    world.clock.run(lambda: provisioner.up("c", make_plan(world.task)))
    world.clock.run(lambda: provisioner.down("c"))
    assert world.store.clusters.get("c") is None and not world.list_live_nodes()


def test_a_login_that_expires_after_an_unanswered_create_closes_no_intent(tmp_path: Path) -> None:
    """The nodes may exist: only a list can show that."""
    world = World(tmp_path)

    async def create(request: NodeRequest) -> Sequence[Node]:
        make = type(world.cloud).create_nodes
        await make(world.cloud, request)
        world.cloud.faults = FaultRates(auth=1.0)
        raise UnknownOutcomeError("no answer")

    world.cloud.create_nodes = create  # type: ignore[method-assign]
    with pytest.raises(AuthError):
        world.clock.run(lambda: world.make_provisioner().up("c", make_plan(world.task)))
    assert len(world.list_live_nodes()) == 2
    assert len(world.store.intents.list_open("c")) == 1
    world.cloud.faults = FaultRates()
    world.clock.run(lambda: world.clock.sleep(100.0))
    world.clock.run(lambda: world.make_provisioner().down("c"))
    assert not world.list_live_nodes() and not world.store.intents.list_open("c")


def test_time_in_which_a_region_is_silent_does_not_close_an_unanswered_create(tmp_path: Path) -> None:
    """Found by the simulator: four quick polls, a minute of silence and one empty list closed the intent of a node."""
    world = World(tmp_path)
    provisioner = world.make_provisioner()
    cluster = world.clock.run(lambda: provisioner.up("c", make_plan(world.task)))
    nodes = cluster.nodes
    closed_s: list[float] = []

    async def confirm() -> None:
        await confirm_gone(
            world.cloud, Lister(OWNER, clock=world.clock), known=(), is_ours=lambda listed: listed.cluster == "c",
            expected_count=len(nodes), places={(node.account, node.region) for node in nodes}, clock=world.clock,
        )  # fmt: skip
        closed_s.append(world.clock.now_s())

    async def disturb() -> None:
        world.cloud.black_out(3.0)  # the create is on its way
        await world.clock.sleep(3.0)
        world.cloud.silence(nodes[0].region, 60.0)
        await world.clock.sleep(58.0)
        world.cloud.black_out(10.0)

    async def both() -> None:
        await asyncio.gather(confirm(), disturb())

    world.clock.run(both)
    assert closed_s and not world.list_live_nodes()


def test_two_commands_cannot_bring_up_one_name_concurrently(tmp_path: Path) -> None:

    world = World(tmp_path)

    async def both() -> list[object]:
        ups = (world.make_provisioner().up("dev", make_plan(world.task)) for _ in range(2))
        return list(await asyncio.gather(*ups, return_exceptions=True))

    results = world.clock.run(both)
    assert sum(isinstance(result, UsageError) for result in results) == 1
    assert len(world.list_live_nodes()) == 2


class SlowClock(VirtualClock):
    """The clock of a starved process: each wait takes nine times as long."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock

    def now_s(self) -> float:
        return self._clock.now_s()

    async def sleep(self, duration_s: float) -> None:
        await self._clock.sleep(9.0 * duration_s)


def test_one_of_two_commands_that_wait_for_the_old_cluster_gets_the_name(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.cloud.timings = CloudTimings(boot_s=2.0, boot_s_max=3.0, terminate_s=120.0)
    slow = Provisioner({"simulated": world.cloud}, world.store, clock=SlowClock(world.clock), owner=OWNER)

    async def scenario() -> list[object]:
        await world.make_provisioner().up("dev", make_plan(world.task))
        going = asyncio.ensure_future(world.make_provisioner().down("dev"))
        await world.clock.sleep(1.0)
        ups = [each.up("dev", make_plan(world.task)) for each in (world.make_provisioner(), slow)]
        return list(await asyncio.gather(*ups, going, return_exceptions=True))

    results = world.clock.run(scenario)
    assert sum(isinstance(result, UsageError) for result in results) == 1
    record = world.store.clusters.get("dev")
    assert record is not None and {node.id for node in record.nodes} == {node.id for node in world.list_live_nodes()}


def test_a_resumed_up_keeps_no_extra_nodes_where_others_were_refused_since(tmp_path: Path) -> None:
    """Otherwise those nodes would cost money, unused, until the cluster goes down."""
    world = World(tmp_path, crash_at=8)  # just after the nodes were made
    with pytest.raises(BaseException, match="create:after"):
        world.clock.run(lambda: world.make_provisioner().up("c", make_plan(world.task), job_id=world.job_id))
    world.reborn()
    made = world.list_live_nodes()
    assert {node.zone for node in made} == {"east1a"}
    world.store.refusals.add("simulated", "east1", "east1a", "big", True, 600.0, "full")
    provisioner = world.make_provisioner()
    cluster = world.clock.run(lambda: provisioner.up("c", make_plan(world.task), job_id=world.job_id))
    assert sorted(node.id for node in world.list_live_nodes()) == sorted(node.id for node in cluster.nodes)
    assert not world.store.intents.list_open("c")


def test_a_cluster_taken_down_while_it_comes_up_does_not_come_back(tmp_path: Path) -> None:

    world = World(tmp_path)
    world.cloud.faults = FaultRates(throttled=1.0)

    async def scenario() -> None:
        coming = asyncio.ensure_future(world.make_provisioner().up("dev", make_plan(world.task)))
        await world.clock.sleep(0.5)
        world.store.intents.close(world.store.intents.list_open("dev")[0].request.token, IntentEnd.TERMINATED)
        world.cloud.faults = FaultRates()
        with pytest.raises(UsageError, match="terminated"):
            await coming

    world.clock.run(scenario)
    assert not world.list_live_nodes()


def test_a_cluster_does_not_come_up_while_down_still_confirms_its_end(tmp_path: Path) -> None:
    """Found by the simulator: UP overwrote TERMINATING, and the record went while a replacement node ran."""
    world = World(tmp_path)

    async def scenario() -> None:
        coming = asyncio.ensure_future(world.make_provisioner().up("dev", make_plan(world.task)))
        while not world.list_live_nodes():
            await world.clock.sleep(0.1)
        world.cloud.faults = FaultRates(ignored=1.0)
        going = asyncio.ensure_future(world.make_provisioner().down("dev"))
        with pytest.raises(UsageError, match="terminated"):
            await coming
        record = world.store.clusters.get("dev")
        assert record is not None and record.status is ClusterStatus.TERMINATING
        world.cloud.faults = FaultRates()
        await going

    world.clock.run(scenario)
    assert world.store.clusters.get("dev") is None and not world.list_live_nodes()


def test_a_clock_jump_between_empty_lists_ends_no_node() -> None:
    absence = Absence(settle_s=10.0)
    assert not any(absence.note("n", is_listed=False, now_s=now_s) for now_s in (0.0, 1.0, 2.0, 3602.0, 3603.0))
    assert absence.note("n", is_listed=False, now_s=3700.0), "a node that is missing for that long is gone"


class DeafCloud:
    """A cloud that lists no node, and accepts a terminate call only `deaf_s` after its first one."""

    name, settle_s = "deaf", 0.0

    def __init__(self, clock: VirtualClock, deaf_s: float) -> None:
        self._clock, self._accepts_s = clock, clock.now_s() + deaf_s
        self.accepted_s: list[float] = []

    async def list_nodes(self, owner: str) -> NodeList:
        return NodeList(nodes=())

    async def terminate_nodes(self, nodes: Sequence[Node]) -> None:
        if self._clock.now_s() < self._accepts_s:
            raise TransientError("no answer")
        self.accepted_s.append(self._clock.now_s())


def test_a_node_that_lists_omit_is_not_gone_before_its_cloud_has_accepted_to_terminate_it() -> None:
    """An empty list and a call without an answer are no evidence: it would run, and cost money, without a record."""
    clock = VirtualClock()
    cloud = DeafCloud(clock, 60.0)

    async def scenario() -> Sequence[Node]:
        return await confirm_gone(
            cast(Cloud, cloud), Lister(OWNER, clock=clock), known=[PENDING], is_ours=lambda node: False,
            expected_count=1, places={("", "")}, clock=clock,
        )  # fmt: skip

    (gone,) = clock.run(scenario)
    assert gone.state is NodeState.TERMINATED and len(cloud.accepted_s) == 1
    assert clock.now_s() >= cloud.accepted_s[0]


def test_nodes_of_a_gang_are_in_the_order_of_their_ranks_without_others_that_carry_its_token() -> None:
    clock = VirtualClock()
    created = [replace(PENDING, id=name, rank=rank) for name, rank in (("b", 1), ("a", 0))]
    answers: list[Any] = [AuthError("the session has expired"), TransientError("no answer")]

    class Booting:
        name, settle_s = "booting", 0.0

        async def list_nodes(self, owner: str) -> NodeList:
            if answers:
                raise answers.pop()
            listed = (*created, replace(PENDING, id="of an earlier zone", rank=0))
            return NodeList(nodes=tuple(replace(node, state=NodeState.RUNNING) for node in listed))

    async def scenario() -> Sequence[Node] | None:
        return await wait_running(
            cast(Cloud, Booting()), Lister(OWNER, clock=clock), token="t", created=created, node_count=2,
            timeout_s=600.0, clock=clock, on_look=lambda nodes: None,
        )  # fmt: skip

    assert [node.id for node in clock.run(scenario) or ()] == ["a", "b"]


def test_time_to_boot_counts_from_the_newest_node() -> None:
    clock = VirtualClock()
    now_s = clock.now_s()
    nodes = [replace(PENDING, created_s=now_s - age_s) for age_s in (3000.0, 100.0)]
    assert measure_left_s(nodes, 600.0, clock) == 500.0
    assert measure_left_s(nodes[:1], 600.0, clock) == 60.0, "lists get a moment to show how it is now"


class SetBackClock(VirtualClock):
    """A clock that is set back by an hour one minute after its start."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock, self._begun_s = clock, clock.now_s()

    def now_s(self) -> float:
        now_s = self._clock.now_s()
        return now_s - 3600.0 if now_s - self._begun_s > 60.0 else now_s

    async def sleep(self, duration_s: float) -> None:
        await self._clock.sleep(duration_s)


class PendingCloud:
    """A cloud whose node never boots."""

    name, settle_s = "slow", 0.0

    async def list_nodes(self, owner: str) -> NodeList:
        return NodeList(nodes=(PENDING,))


PENDING = Node(id="n", cloud="slow", owner=OWNER, cluster="c", attempt=1, rank=0,
               state=NodeState.PENDING, token="t", created_s=0.0)  # fmt: skip


def test_a_clock_that_is_set_back_does_not_extend_the_wait_for_nodes_that_never_boot() -> None:
    """They cost money in the meantime."""
    clock = VirtualClock()
    begun_s = clock.now_s()

    async def scenario() -> object:
        wall, cloud = SetBackClock(clock), cast(Cloud, PendingCloud())
        return await wait_running(
            cloud, Lister(OWNER, clock=wall), token="t", created=[PENDING], node_count=1, timeout_s=600.0,
            clock=wall, on_look=lambda nodes: None,
        )  # fmt: skip

    assert clock.run(scenario) is None
    assert 600.0 <= clock.now_s() - begun_s < 610.0
