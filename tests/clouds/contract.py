"""The contract of all clouds: one suite, run on each of them.

A cloud's test file makes a `Bed` (a cloud with a simulated provider) in a fixture named `bed` and inherits
`CloudContract`. A bed overrides only what it can simulate; claims that need anything else are skipped.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from broker.clouds.base import CanSweep
from broker.errors import (
    AuthError,
    CapacityError,
    InvalidRequestError,
    QuotaError,
    ThrottledError,
    UnknownOutcomeError,
    UsageError,
)
from broker.types import MachineSpec, NodeState
from tests.clouds.beds import (
    OWNER,
    Bed,
    count_living,
    find_stopper,
    list_of,
    make_request,
    settle,
    wait_for,
    wait_for_none,
    wait_state,
)

__all__ = [
    "OWNER",
    "Bed",
    "CloudContract",
    "count_living",
    "find_stopper",
    "list_of",
    "make_request",
    "settle",
    "wait_for",
    "wait_state",
]


class CloudContract:
    """Inherit, and provide a fixture `bed`."""

    def test_check_accepts_a_login(self, bed: Bed) -> None:
        bed.run(bed.cloud.check())

    def test_check_reports_a_missing_login_with_a_hint(self, bed: Bed) -> None:
        bed.log_out()

        async def act() -> None:
            with pytest.raises(AuthError) as caught:
                await bed.cloud.check()
            assert caught.value.hints

        bed.run(act())

    @pytest.mark.parametrize("is_spot", [False, True], ids=["on-demand", "spot"])
    def test_gang_comes_up_whole_with_its_tags(self, bed: Bed, is_spot: bool) -> None:
        async def act() -> None:
            request = make_request(bed, node_count=3, is_spot=is_spot, attempt=7)
            start_s = bed.clock.now_s()
            created = await bed.cloud.create_nodes(request)
            nodes = await wait_state(bed, request.token, NodeState.RUNNING, 3)
            assert [node.rank for node in nodes] == [0, 1, 2]
            assert {node.id for node in nodes} == {node.id for node in created}
            assert {node.id: node.rank for node in nodes} == {node.id: node.rank for node in created}
            price = bed.offer.spot_usd_hour if is_spot else bed.offer.ondemand_usd_hour
            for node in nodes:
                assert (node.cloud, node.owner, node.cluster, node.attempt) == (bed.cloud.name, OWNER, "train", 7)
                assert (node.region, node.zone, node.is_spot) == (bed.offer.region, bed.offer.zone, is_spot)
                assert node.usd_hour == pytest.approx(price)
                assert (node.address and node.handle) or not bed.has_machines
                assert node.ended_s is None and node.reason == ""
                assert start_s - 2 <= node.created_s <= bed.clock.now_s() + 2
            assert len({node.handle for node in nodes}) == 3 or not bed.has_machines

        bed.run(act())

    def test_same_token_gives_the_same_nodes_also_to_another_process(self, bed: Bed) -> None:
        async def act() -> None:
            request = make_request(bed, node_count=2)
            first = await bed.cloud.create_nodes(request)
            again = await bed.cloud.create_nodes(request)
            assert {node.id for node in again} == {node.id for node in first}
            other = await bed.reopen().create_nodes(request)
            assert {node.id: node.rank for node in other} == {node.id: node.rank for node in first}
            assert await count_living(bed) == 2

        bed.run(act())

    def test_concurrent_calls_with_one_token_make_one_gang(self, bed: Bed) -> None:
        async def act() -> None:
            request = make_request(bed, node_count=2)
            results = await asyncio.gather(
                bed.cloud.create_nodes(request), bed.reopen().create_nodes(request), return_exceptions=True
            )
            assert any(not isinstance(result, BaseException) for result in results), results
            for result in results:
                assert not isinstance(result, BaseException) or isinstance(result, UnknownOutcomeError), result
            assert await count_living(bed) == 2

        bed.run(act())

    def test_another_token_gives_other_nodes(self, bed: Bed) -> None:
        async def act() -> None:
            first = await bed.cloud.create_nodes(make_request(bed))
            second = await bed.cloud.create_nodes(make_request(bed, attempt=2))
            assert {node.id for node in first}.isdisjoint(node.id for node in second)
            assert await count_living(bed) == 2

        bed.run(act())

    def test_token_of_ended_nodes_makes_no_new_ones(self, bed: Bed) -> None:
        async def act() -> None:
            request = make_request(bed)
            (node,) = await bed.cloud.create_nodes(request)
            await wait_state(bed, request.token, NodeState.RUNNING)
            await bed.cloud.terminate_nodes([node])
            await wait_state(bed, request.token, NodeState.TERMINATED)
            (dead,) = await bed.cloud.create_nodes(request)
            assert (dead.id, dead.state) == (node.id, NodeState.TERMINATED)
            assert await count_living(bed) == 0

        bed.run(act())

    def test_list_shows_only_the_owners_nodes(self, bed: Bed) -> None:
        async def act() -> None:
            mine, theirs = make_request(bed), make_request(bed, owner="somebody-else")
            await bed.cloud.create_nodes(mine)
            created = await bed.cloud.create_nodes(theirs)
            await settle(bed)
            assert {node.token for node in await bed.cloud.list_nodes(OWNER)} == {mine.token}
            assert {node.token for node in await bed.cloud.list_nodes("somebody-else")} == {theirs.token}
            assert not (await bed.cloud.list_nodes("nobody")).nodes
            await bed.cloud.terminate_nodes(created)  # the bed ends the nodes of its own owner only

        bed.run(act())

    def test_ended_nodes_stay_listed_with_reason_and_time(self, bed: Bed) -> None:
        async def act() -> None:
            request = make_request(bed, node_count=2)
            created = await bed.cloud.create_nodes(request)
            await wait_state(bed, request.token, NodeState.RUNNING, 2)
            await bed.reopen().terminate_nodes(created)
            for node in await wait_state(bed, request.token, NodeState.TERMINATED, 2):
                assert node.reason == "terminated"
                assert node.ended_s is not None and node.created_s - 2 <= node.ended_s <= bed.clock.now_s() + 2

        bed.run(act())

    def test_terminating_twice_or_an_unknown_node_succeeds_and_spares_the_rest(self, bed: Bed) -> None:
        async def act() -> None:
            keep, end = make_request(bed), make_request(bed)
            await bed.cloud.create_nodes(keep)
            (node,) = await bed.cloud.create_nodes(end)
            await wait_state(bed, end.token, NodeState.RUNNING)
            await wait_state(bed, keep.token, NodeState.RUNNING)
            unknown = replace(node, id=node.id[:-4] + "dead")
            await bed.cloud.terminate_nodes([])
            await bed.cloud.terminate_nodes([unknown])
            await bed.cloud.terminate_nodes([unknown, node])
            await bed.cloud.terminate_nodes([node])
            await wait_state(bed, end.token, NodeState.TERMINATED)
            await bed.cloud.terminate_nodes([node])
            (kept,) = await list_of(bed, keep.token)
            assert kept.state is NodeState.RUNNING

        bed.run(act())

    def test_full_zone_refuses_and_leaves_nothing(self, bed: Bed) -> None:
        bed.fill()

        async def act() -> None:
            with pytest.raises(CapacityError) as caught:
                await bed.cloud.create_nodes(make_request(bed, node_count=2))
            assert caught.value.scope == "zone"
            assert await count_living(bed) == 0

        bed.run(act())

    def test_quota_refuses_and_leaves_nothing(self, bed: Bed) -> None:
        bed.exhaust_quota()

        async def act() -> None:
            with pytest.raises(QuotaError) as caught:
                await bed.cloud.create_nodes(make_request(bed, node_count=2))
            assert caught.value.hints
            assert await count_living(bed) == 0

        bed.run(act())

    def test_lost_answer_is_neither_success_nor_failure(self, bed: Bed) -> None:
        bed.lose_next_answer()

        async def act() -> None:
            request = make_request(bed, node_count=2)
            with pytest.raises(UnknownOutcomeError):
                await bed.cloud.create_nodes(request)
            made = await wait_for(bed, request.token, lambda nodes: len(nodes) == 2)
            again = await bed.cloud.create_nodes(request)
            assert {node.id for node in again} == {node.id for node in made}
            assert await count_living(bed) == 2

        bed.run(act())

    def test_throttled_create_has_created_nothing_and_may_be_repeated(self, bed: Bed) -> None:
        bed.throttle_next_create()

        async def act() -> None:
            request = make_request(bed, node_count=2)
            with pytest.raises(ThrottledError):
                await bed.cloud.create_nodes(request)
            await wait_for_none(bed, request.token)
            assert len(await bed.cloud.create_nodes(request)) == 2

        bed.run(act())

    def test_zone_with_capacity_for_a_part_of_the_gang_creates_none(self, bed: Bed) -> None:
        bed.leave_room(2)

        async def act() -> None:
            with pytest.raises(CapacityError):
                await bed.cloud.create_nodes(make_request(bed, node_count=3))
            assert await count_living(bed) == 0
            assert len(await bed.cloud.create_nodes(make_request(bed, node_count=2))) == 2

        bed.run(act())

    def test_lost_login_does_not_make_a_list_look_empty(self, bed: Bed) -> None:
        async def act() -> None:
            request = make_request(bed)
            await bed.cloud.create_nodes(request)
            await settle(bed)
            bed.log_out()
            try:
                found = await bed.reopen().list_nodes(OWNER)
            except AuthError as error:
                assert error.hints
            else:
                assert [node.token for node in found] == [request.token]

        bed.run(act())

    def test_every_resource_is_tagged_with_its_owner(self, bed: Bed) -> None:
        async def act() -> None:
            spec = MachineSpec(ports=("8080",), labels={"team": "vision"})
            await bed.cloud.create_nodes(make_request(bed, node_count=2, spec=spec))

        bed.run(act())
        assert bed.list_untagged() == []

    def test_sweep_leaves_nothing_of_a_cluster_that_is_gone(self, bed: Bed) -> None:
        cloud = bed.cloud
        if not isinstance(cloud, CanSweep):
            pytest.skip(f"{cloud.name} leaves nothing behind")

        async def act() -> None:
            spec = MachineSpec(ports=("8080",))
            request = make_request(bed, node_count=2, spec=spec)
            created = await bed.cloud.create_nodes(request)
            await wait_state(bed, request.token, NodeState.RUNNING, 2)
            await cloud.sweep(OWNER, ["train"])
            assert bed.list_orphans() != [], "what a living cluster needs stays"
            await bed.cloud.terminate_nodes(created)
            await wait_state(bed, request.token, NodeState.TERMINATED, 2)
            await cloud.sweep(OWNER, [])
            assert bed.list_orphans() == []
            assert await cloud.sweep(OWNER, []) == 0

        bed.run(act())

    def test_machine_that_dies_at_boot_is_reported_with_its_reason(self, bed: Bed) -> None:
        async def act() -> None:
            request = make_request(bed, node_count=2)
            created = await bed.cloud.create_nodes(request)
            await settle(bed)
            why = await bed.kill_newborn(min(created, key=lambda node: node.rank))
            nodes = await wait_for(bed, request.token, lambda nodes: nodes[0].state is NodeState.TERMINATED)
            assert why in nodes[0].reason

        bed.run(act())

    def test_preempted_node_is_distinguished(self, bed: Bed) -> None:
        async def act() -> None:
            request = make_request(bed, node_count=2, is_spot=True)
            await bed.cloud.create_nodes(request)
            nodes = await wait_state(bed, request.token, NodeState.RUNNING, 2)
            await bed.preempt(nodes[0])
            nodes = await wait_for(bed, request.token, lambda nodes: nodes[0].state is NodeState.TERMINATED)
            assert nodes[0].reason == "preempted" and nodes[0].ended_s is not None
            assert nodes[1].state is NodeState.RUNNING

        bed.run(act())

    def test_machine_that_shuts_itself_down_is_terminated(self, bed: Bed) -> None:
        async def act() -> None:
            request = make_request(bed)
            await bed.cloud.create_nodes(request)
            (node,) = await wait_state(bed, request.token, NodeState.RUNNING)
            await bed.end_from_inside(node)
            (ended,) = await wait_state(bed, request.token, NodeState.TERMINATED)
            assert ended.reason == "lease"

        bed.run(act())

    def test_stopped_node_keeps_its_identity(self, bed: Bed) -> None:
        cloud = find_stopper(bed)

        async def act() -> None:
            request = make_request(bed, node_count=2)
            await bed.cloud.create_nodes(request)
            before = await wait_state(bed, request.token, NodeState.RUNNING, 2)
            ids = [node.id for node in before]
            await cloud.stop_nodes(ids)
            await wait_state(bed, request.token, NodeState.STOPPED, 2)
            await cloud.stop_nodes(ids)
            await cloud.start_nodes(ids)
            after = await wait_state(bed, request.token, NodeState.RUNNING, 2)
            await cloud.start_nodes(ids)
            assert [(node.id, node.rank) for node in after] == [(node.id, node.rank) for node in before]
            await bed.cloud.terminate_nodes(after)
            await wait_state(bed, request.token, NodeState.TERMINATED, 2)

        bed.run(act())

    def test_stopped_node_can_be_ended(self, bed: Bed) -> None:
        cloud = find_stopper(bed)

        async def act() -> None:
            request = make_request(bed)
            (node,) = await bed.cloud.create_nodes(request)
            await wait_state(bed, request.token, NodeState.RUNNING)
            await cloud.stop_nodes([node.id])
            await wait_state(bed, request.token, NodeState.STOPPED)
            await bed.cloud.terminate_nodes([node])
            await wait_state(bed, request.token, NodeState.TERMINATED)

        bed.run(act())

    def test_ended_node_cannot_be_started(self, bed: Bed) -> None:
        cloud = find_stopper(bed)

        async def act() -> None:
            request = make_request(bed)
            (node,) = await bed.cloud.create_nodes(request)
            await wait_state(bed, request.token, NodeState.RUNNING)
            await bed.cloud.terminate_nodes([node])
            await wait_state(bed, request.token, NodeState.TERMINATED)
            with pytest.raises((UsageError, InvalidRequestError)):
                await cloud.start_nodes([node.id])
            (still,) = await list_of(bed, request.token)
            assert still.state is NodeState.TERMINATED

        bed.run(act())

    def test_spec_and_boot_script_are_accepted(self, bed: Bed) -> None:
        async def act() -> None:
            spec = MachineSpec(disk_size_gib=100, ports=("8080", "8000-8010"), labels={"team": "vision"})
            request = make_request(bed, spec=spec, boot="#!/bin/sh\nexit 0\n")
            await bed.cloud.create_nodes(request)
            await wait_state(bed, request.token, NodeState.RUNNING)

        bed.run(act())
