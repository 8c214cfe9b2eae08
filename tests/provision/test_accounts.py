"""Lists that cannot see a node: of another account, without its region, or failing. An agent that answers is alive."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from broker.errors import AccountError, AuthError, BrokerError, DeniedError, TransientError
from broker.types import ClusterStatus, JobStatus, Node, NodeEnd, NodeList, NodeRequest, NodeState
from tests.simulation.world import OWNER, World, make_plan

STEPS = 3000


@pytest.fixture
def world(tmp_path: Path) -> World:
    world = World(tmp_path)
    world.gang.steps = STEPS
    return world


async def drive(world: World, controller: Any, until: Callable[[], bool], *, limit_s: float = 7200.0) -> None:
    """Step as the daemon does, errors included, until the condition holds or the time is up."""
    start_s = world.clock.now_s()
    while not until() and world.clock.now_s() - start_s < limit_s:
        try:
            wait_s = await controller.step()
        except BrokerError:
            wait_s = 5.0
        await world.clock.sleep(min(max(wait_s, 0.5), 60.0))


def is_started(world: World) -> bool:
    return any(attempt.running_s for attempt in world.store.jobs.list_attempts(world.job_id))


def play(world: World, scenario: Callable[[Any], Coroutine[Any, Any, None]]) -> None:
    """Run the scenario from the start of the job's program."""

    async def act() -> None:
        controller = world.make_controller()
        await drive(world, controller, lambda: is_started(world))
        await scenario(controller)

    world.clock.run(act)


def wait(world: World, duration_s: float) -> Callable[[], bool]:
    end_s = world.clock.now_s() + duration_s
    return lambda: world.clock.now_s() >= end_s


def count_attempts(world: World) -> int:
    return len(world.store.jobs.list_attempts(world.job_id))


def note_terminates(world: World) -> list[str]:
    asked: list[str] = []
    terminate = world.cloud.terminate_nodes

    async def note(nodes: Any) -> None:
        asked.extend(node.id for node in nodes)
        await terminate(nodes)

    world.cloud.terminate_nodes = note  # type: ignore[method-assign]
    return asked


@pytest.mark.long
def test_answering_agents_outweigh_lists_of_another_account(world: World) -> None:
    async def scenario(controller: Any) -> None:
        nodes = world.list_live_nodes()
        world.cloud.account = "account-2"
        await drive(world, controller, wait(world, 1200.0))
        assert count_attempts(world) == 1
        assert world.list_live_nodes() == nodes

    play(world, scenario)


@pytest.mark.long
def test_answering_agents_outweigh_lists_of_another_owner(world: World) -> None:
    """The `owner` file was lost: lists are complete, of the right account, and empty."""

    async def scenario(controller: Any) -> None:
        list_nodes = world.cloud.list_nodes
        world.cloud.list_nodes = lambda owner: list_nodes("someone-new")  # type: ignore[method-assign]
        await drive(world, controller, wait(world, 1200.0))
        assert count_attempts(world) == 1

    play(world, scenario)


@pytest.mark.long
def test_an_unreachable_gang_of_another_account_is_neither_replaced_nor_forgotten(world: World) -> None:
    """No attempt starts alongside it, and its nodes are terminated once the login is correct again."""

    async def scenario(controller: Any) -> None:
        first = {node.id for node in world.list_live_nodes()}
        poll = world.gang.poll
        world.cloud.account = "account-2"
        world.gang.poll = silence(world, first)  # type: ignore[method-assign]
        await drive(world, controller, wait(world, 3600.0))
        assert count_attempts(world) == 1
        messages = [event.message for event in world.store.events.list(job_id=world.job_id) if event.kind == "unseen"]
        assert len(messages) == 1 and "account account-1" in messages[0] and "account-2" in messages[0]
        world.cloud.account = "account-1"
        await drive(world, controller, lambda: count_attempts(world) == 2)
        assert not first & {node.id for node in world.list_live_nodes()}
        world.gang.poll = poll  # type: ignore[method-assign]

    play(world, scenario)


@pytest.mark.long
def test_nodes_on_a_machine_that_left_the_users_file_are_neither_replaced_nor_forgotten(world: World) -> None:
    removal = AuthError("host `h1` is no longer in `ssh_pools.yaml`", hints=("add the host again",))

    async def scenario(controller: Any) -> None:
        first = {node.id for node in world.list_live_nodes()}
        list_nodes = world.cloud.list_nodes
        world.gang.poll = silence(world, first)  # type: ignore[method-assign]

        async def list_none(owner: str) -> NodeList:
            return NodeList()

        world.cloud.list_nodes = list_none  # type: ignore[method-assign]
        world.cloud.find_removal = lambda region, node=None: removal  # type: ignore[attr-defined]
        await drive(world, controller, wait(world, 1200.0))
        assert count_attempts(world) == 1 and first <= {node.id for node in world.list_live_nodes()}
        events = world.store.events.list(job_id=world.job_id)
        (message,) = [event.message for event in events if event.kind == "unseen"]
        assert message == "cannot list the nodes: host `h1` is no longer in `ssh_pools.yaml`; add the host again"

        world.store.jobs.request_cancel(world.job_id)
        await drive(world, controller, wait(world, 600.0))
        assert world.get_job().status is JobStatus.CANCELLING, "its end cannot be confirmed"
        world.cloud.list_nodes = list_nodes  # type: ignore[method-assign]
        del world.cloud.find_removal  # type: ignore[attr-defined]
        await drive(world, controller, lambda: world.get_job().status.is_terminal)
        assert world.get_job().status is JobStatus.CANCELLED and not world.list_live_nodes()

    play(world, scenario)


def silence(world: World, ids: set[str]) -> Callable[..., Any]:
    """Return a `poll` that gets no answer from these nodes."""
    poll = world.gang.poll

    async def answer(cluster: Any, run_id: int) -> Any:
        report = await poll(cluster, run_id)
        ranks = tuple(node.rank for node in cluster.nodes if node.id in ids)
        return replace(report, unreachable=ranks, progress=None) if ranks else report

    return answer


def test_missing_nodes_are_terminated_before_the_next_attempt_starts(world: World) -> None:
    """They are believed gone because lists omit them, so a terminate call must be accepted for each."""

    async def scenario(controller: Any) -> None:
        first = {node.id for node in world.list_live_nodes()}
        asked = note_terminates(world)
        list_nodes = world.cloud.list_nodes

        async def leave_out(owner: str) -> Any:
            listed = await list_nodes(owner)
            return replace(listed, nodes=tuple(node for node in listed if node.id not in first))

        world.cloud.list_nodes = leave_out  # type: ignore[method-assign]
        world.gang.poll = silence(world, first)  # type: ignore[method-assign]
        await drive(world, controller, lambda: count_attempts(world) == 2)
        assert first <= set(asked)
        assert not first & {node.id for node in world.list_live_nodes()}

    play(world, scenario)


def test_failing_lists_do_not_delay_terminate(world: World) -> None:
    async def scenario(controller: Any) -> None:
        async def fail(owner: str) -> Any:
            raise TransientError("ServiceUnavailable (describe_instances, north1)")

        world.cloud.list_nodes = fail  # type: ignore[method-assign]
        name = world.store.clusters.list()[0].name
        with pytest.raises(TransientError):
            await world.make_provisioner().down(name)
        await world.clock.sleep(30.0)
        assert not world.list_live_nodes()
        assert world.store.clusters.get(name) is not None  # until a list confirms it

    play(world, scenario)


def test_a_region_without_lists_does_not_block_down_in_another_region(world: World) -> None:
    async def scenario(controller: Any) -> None:
        world.cloud.silent_regions["north1"] = TransientError("ServiceUnavailable (describe_instances, north1)")
        name = world.store.clusters.list()[0].name
        await world.make_provisioner().down(name)
        assert not world.list_live_nodes() and world.store.clusters.get(name) is None

    play(world, scenario)


@pytest.mark.long
def test_answering_nodes_in_a_region_without_lists_are_kept(world: World) -> None:
    async def scenario(controller: Any) -> None:
        region = world.list_live_nodes()[0].region
        world.cloud.silent_regions[region] = TransientError("ServiceUnavailable")
        await drive(world, controller, wait(world, 1200.0))
        assert count_attempts(world) == 1 and len(world.list_live_nodes()) == 2

    play(world, scenario)


@pytest.mark.long
def test_a_working_gang_keeps_its_lease_while_lists_fail(world: World) -> None:
    """An expired login must not terminate nodes that it can no longer list."""

    async def scenario(controller: Any) -> None:
        renewed: list[float] = []

        async def deny(owner: str) -> Any:
            raise AuthError("the login has expired")

        async def note(cluster: Any, *, lease_s: float) -> None:
            renewed.append(world.clock.now_s())

        world.cloud.list_nodes = deny  # type: ignore[method-assign]
        world.gang.renew_lease = note  # type: ignore[method-assign]
        await drive(world, controller, wait(world, 1200.0))
        assert len(renewed) >= 15 and count_attempts(world) == 1

    play(world, scenario)


def test_nodes_of_a_failed_job_are_terminated_even_if_lists_are_denied(world: World) -> None:
    async def deny(owner: str) -> Any:
        raise DeniedError("UnauthorizedOperation: explicit deny in a service control policy", scope="cloud")

    world.cloud.list_nodes = deny  # type: ignore[method-assign]

    async def act() -> None:
        controller = world.make_controller()
        await drive(world, controller, lambda: world.get_job().status.is_terminal)
        await drive(world, controller, lambda: not world.list_live_nodes(), limit_s=600.0)
        assert world.get_job().status is JobStatus.FAILED_PRECHECKS
        assert not world.list_live_nodes()
        assert world.store.intents.list_open()  # the end is not confirmed yet: it is requested again and again

    world.clock.run(act)


def test_nodes_created_by_a_dead_process_are_terminated_even_if_no_list_shows_them(world: World) -> None:
    """The answer of the create call was recorded with the node ids."""

    async def act() -> None:
        provisioner = world.make_provisioner()
        world.cloud.timings = replace(world.cloud.timings, boot_s=1e6, boot_s_max=1e6)
        work = asyncio.ensure_future(provisioner.up("dev", make_plan(world.task), hedge=1))
        while not world.list_live_nodes():
            await world.clock.sleep(0.5)
        await world.clock.sleep(30.0)
        work.cancel()
        for region in ("east1", "west1", "north1"):
            world.cloud.silent_regions[region] = AuthError("denied")
        with pytest.raises(AuthError):
            await world.make_provisioner().down("dev")
        await world.clock.sleep(30.0)
        assert not world.list_live_nodes()

    world.clock.run(act)


@pytest.mark.long
def test_a_search_begun_in_another_account_neither_fails_nor_is_forgotten(world: World) -> None:
    async def act() -> None:
        world.cloud.timings = replace(world.cloud.timings, boot_s=300.0, boot_s_max=300.0)
        controller = world.make_controller()
        work = asyncio.ensure_future(controller.step())
        while not world.list_live_nodes():
            await world.clock.sleep(0.5)
        made = {node.token for node in world.list_live_nodes()}
        work.cancel()
        world.cloud.account = "account-2"
        await drive(world, world.make_controller(), wait(world, 1800.0))
        assert not world.get_job().status.is_terminal
        assert made <= {intent.request.token for intent in world.store.intents.list_open()}
        world.cloud.account = "account-1"
        await world.make_provisioner().collect()
        assert not made & {intent.request.token for intent in world.store.intents.list_open()}
        assert not made & {node.token for node in world.list_live_nodes()}

    world.clock.run(act)


def test_every_intent_names_the_account_before_nodes_are_created(world: World) -> None:
    create = world.cloud.create_nodes

    async def check(request: Any) -> Any:
        written = world.store.intents.get_request(request.token)
        assert written is not None and written.account == request.account == "account-1"
        return await create(request)

    world.cloud.create_nodes = check  # type: ignore[method-assign]
    cluster = world.clock.run(lambda: world.make_provisioner().up("dev", make_plan(world.task)))
    assert {node.account for node in cluster.nodes} == {"account-1"}


def test_down_names_the_required_login(world: World) -> None:
    async def scenario(controller: Any) -> None:
        world.cloud.account = "account-2"
        name = world.store.clusters.list()[0].name
        with pytest.raises(AccountError, match=r"account-1.*account-2"):
            await world.make_provisioner().down(name)
        record = world.store.clusters.get(name)
        assert record is not None and record.status is ClusterStatus.TERMINATING

    play(world, scenario)


@pytest.mark.parametrize(("blocked_s", "attempts"), [(500.0, 1), pytest.param(1200.0, 2, marks=pytest.mark.long)])
def test_blocked_ssh_to_a_whole_running_gang_gets_a_longer_timeout(
    world: World, blocked_s: float, attempts: int
) -> None:
    """The user's own network is a more likely cause than two nodes that hang at the same time."""

    async def scenario(controller: Any) -> None:
        first, poll = {node.id for node in world.list_live_nodes()}, world.gang.poll
        world.gang.poll = silence(world, first)  # type: ignore[method-assign]
        await drive(world, controller, wait(world, blocked_s))
        world.gang.poll = poll  # type: ignore[method-assign]
        await drive(world, controller, wait(world, 60.0))
        assert count_attempts(world) == attempts

    play(world, scenario)


def test_the_collector_terminates_listed_nodes_while_another_region_is_silent(world: World) -> None:
    async def act() -> None:
        lost = Node(
            id="lost-1", cloud="simulated", owner=OWNER, cluster="gone", attempt=1, rank=0,
            state=NodeState.RUNNING, region="east1", account="account-1", created_s=world.clock.now_s(),
        )  # fmt: skip
        world.cloud.add_foreign_node(lost)
        world.cloud.silent_regions["north1"] = AuthError("denied")
        await world.clock.sleep(60.0)
        world.store.meta.mark_adopted("simulated")  # or a node that this store did not request is recorded, not ended
        assert await world.make_provisioner().collect() == 1
        await world.clock.sleep(10.0)
        assert [node.state for node in world.cloud.find(["lost-1"])] == [NodeState.TERMINATED]

    world.clock.run(act)


def test_a_missing_node_counts_as_alive_until_terminate_is_accepted(world: World) -> None:
    async def scenario(controller: Any) -> None:
        cluster = world.store.clusters.list()[0]
        nodes = tuple(replace(node, state=NodeState.TERMINATED, reason=NodeEnd.MISSING) for node in cluster.nodes)
        world.store.clusters.put(replace(cluster, nodes=nodes))
        await world.make_provisioner().down(cluster.name)
        assert not world.list_live_nodes()

    play(world, scenario)


def test_terminate_uses_the_account_that_was_noted_after_the_request_was_read(world: World) -> None:
    """The account of a create call may be noted after its request was read; another login cannot confirm the end."""
    placement = make_plan(world.task).estimates[0].placement
    request = NodeRequest(owner=OWNER, cluster="c", attempt=1, token="t", placement=placement)
    world.store.intents.put(request)
    world.store.intents.note_account("t", "account-1")
    world.cloud.account = "account-2"
    launcher = world.make_provisioner()._failover.launcher
    with pytest.raises(AccountError):
        world.clock.run(lambda: launcher.terminate(world.cloud, request))
    assert world.store.intents.is_open("t")
