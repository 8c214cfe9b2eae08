"""Specifics of a cloud behind SkyPilot: late verdicts, orphans, whole gangs, access."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from broker.clouds.sky.errors import SkyError
from broker.clouds.sky.state_file import SkyStateFile
from broker.errors import (
    AccountError,
    AuthError,
    CapacityError,
    InvalidRequestError,
    TransientError,
    UnknownOutcomeError,
)
from broker.types import Node, NodeState
from tests.clouds.beds import make_node
from tests.clouds.contract import OWNER, list_of, make_request, wait_state

PENDING, RUNNING, STOPPED, TERMINATED = (
    NodeState.PENDING, NodeState.RUNNING, NodeState.STOPPED, NodeState.TERMINATED,
)  # fmt: skip
NO_ROOM = SkyError(
    type="ResourcesUnavailableError", message="Failed to provision", history=(SkyError(type="CloudError"),)
)


def list_states(nodes: Sequence[Node]) -> list[tuple[int, NodeState, str]]:
    return [(node.rank, node.state, node.reason) for node in nodes]


def test_a_launch_does_not_block(bed: Any) -> None:
    async def act() -> None:
        start_s = bed.clock.now_s()
        nodes = await bed.cloud.create_nodes(make_request(bed, node_count=2))
        assert list_states(nodes) == [(0, PENDING, ""), (1, PENDING, "")]
        assert bed.clock.now_s() - start_s < 60

    asyncio.run(act())


def test_nodes_know_each_other_and_the_way_to_them_is_kept(bed: Any) -> None:
    async def act() -> None:
        request = make_request(bed, node_count=2)
        await bed.cloud.create_nodes(request)
        nodes = await wait_state(bed, request.token, RUNNING, 2)
        name = f"b-{OWNER}-lambda-{request.token}"
        assert [node.handle for node in nodes] == [f"sky://{name}/0", f"sky://{name}/1"]
        assert [node.address for node in nodes] == ["10.0.0.4", "10.0.0.5"]
        file = bed.folder / "sky" / "ssh" / name
        first = file.read_text()
        await bed.cloud.stop_nodes([nodes[0].id])
        await wait_state(bed, request.token, STOPPED, 2)
        await bed.cloud.start_nodes([nodes[0].id])
        await wait_state(bed, request.token, RUNNING, 2)
        assert file.read_text() != first, "it listens elsewhere now"
        await bed.cloud.terminate_nodes([nodes[1]])
        await wait_state(bed, request.token, TERMINATED, 2)
        assert not file.exists()

    asyncio.run(act())


def test_a_start_counts_as_a_launch(bed: Any) -> None:
    async def act() -> None:
        request = make_request(bed)
        (node,) = await bed.cloud.create_nodes(request)
        await wait_state(bed, request.token, RUNNING)
        await bed.cloud.stop_nodes([node.id])
        await bed.cloud.start_nodes([node.id])
        await bed.reopen().start_nodes([node.id])  # twice, from another process
        await wait_state(bed, request.token, RUNNING)
        first, second = bed.engine.launched
        assert first == second and "shutdown" in second[1]["run"]

    asyncio.run(act())


def test_a_launch_that_fails_late_leaves_nothing(bed: Any) -> None:
    """The verdict comes after `create_nodes` has returned, and SkyPilot keeps what it has created by then."""
    bed.engine.refusal, bed.engine.refuses_late = NO_ROOM, True

    async def act() -> None:
        request = make_request(bed, node_count=2)
        await bed.cloud.create_nodes(request)
        nodes = await wait_state(bed, request.token, TERMINATED, 2)
        assert {node.reason for node in nodes} == {"refused"}
        assert not bed.engine.clusters

    asyncio.run(act())


def test_a_launch_that_fails_early_with_machines_is_refused_once_they_are_gone(bed: Any) -> None:
    bed.engine.refusal, bed.engine.refuses_late = NO_ROOM, True

    async def act() -> None:
        request = make_request(bed)
        name = f"b-{OWNER}-lambda-{request.token}"
        await bed.engine.launch(name, {"num_nodes": 1, "resources": {"infra": "lambda/us-east-1", "labels": {}}})
        await bed.clock.sleep(160)  # an earlier command requested it and died; the launch is about to fail
        with pytest.raises(CapacityError):
            await bed.cloud.create_nodes(request)
        assert len(bed.engine.launched) == 1 and not bed.engine.clusters

    asyncio.run(act())


def test_refusals_of_a_cloud_that_is_not_enabled_end_the_search(bed: Any) -> None:
    bed.engine.refusal, bed.engine.enabled = SkyError(type="ResourcesUnavailableError", message="No launchable"), []

    async def act() -> None:
        with pytest.raises(AuthError) as caught:
            await bed.cloud.create_nodes(make_request(bed))
        assert any("sky check" in hint for hint in caught.value.hints)

    asyncio.run(act())


@pytest.mark.parametrize(("is_spot", "reason"), [(True, "preempted"), (False, "lease")])
def test_a_gang_that_vanished_from_the_table_is_gone_as_a_whole(bed: Any, is_spot: bool, reason: str) -> None:
    async def act() -> None:
        request = make_request(bed, node_count=2, is_spot=is_spot)
        (first, _) = await bed.cloud.create_nodes(request)
        await wait_state(bed, request.token, RUNNING, 2)
        bed.engine.vanish(first.id.partition("/")[0])
        assert list_states(await list_of(bed, request.token)) == [(0, TERMINATED, reason), (1, TERMINATED, reason)]

    asyncio.run(act())


def test_a_gang_of_another_api_server_or_user_is_unseen_and_not_gone(bed: Any) -> None:
    """`sky api login` to another server, or as another user: its table is complete, and lacks our clusters."""

    async def act() -> None:
        request = make_request(bed)
        (node,) = await bed.cloud.create_nodes(request)
        await wait_state(bed, request.token, RUNNING)
        clusters, account = dict(bed.engine.clusters), bed.engine.account
        bed.engine.account = "https://sky.example.com as 5678"
        bed.engine.clusters.clear()
        found = await bed.cloud.list_nodes(OWNER)
        error = found.unseen[node.region]
        assert not found.nodes and isinstance(error, AccountError)
        assert "sky api login -e http://127.0.0.1:46580" in error.hints[0]
        with pytest.raises(AccountError):
            await bed.cloud.create_nodes(request)
        bed.engine.clusters.update(clusters)
        bed.engine.account = account
        assert [each.state for each in await list_of(bed, request.token)] == [RUNNING]

    asyncio.run(act())


def test_one_cluster_that_cannot_be_taken_down_hides_no_other(bed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def act() -> None:
        request = make_request(bed, is_spot=True)
        await bed.cloud.create_nodes(request)
        await wait_state(bed, request.token, RUNNING)
        bed.engine.refusal, bed.engine.refuses_late = NO_ROOM, True
        failing = make_request(bed)
        await bed.cloud.create_nodes(failing)
        await bed.clock.sleep(400)
        bed.engine.broken = TransientError("the permission to delete it is missing")
        states = {node.token: node.state for node in await bed.cloud.list_nodes(OWNER)}
        assert states == {request.token: RUNNING, failing.token: PENDING}
        bed.engine.broken = None
        await wait_state(bed, failing.token, TERMINATED)

    asyncio.run(act())


def test_an_accepted_launch_that_cannot_be_followed_is_no_refusal(bed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The login may expire at that moment: after a refusal, no one would look for the cluster."""
    fetch_state = bed.engine.fetch_state

    async def fetch_until_launched(prefix: str, request_ids: Sequence[str]) -> Any:
        if bed.engine.launched:
            raise AuthError("the login to SkyPilot has expired")
        return await fetch_state(prefix, request_ids)

    monkeypatch.setattr(bed.engine, "fetch_state", fetch_until_launched)
    with pytest.raises(UnknownOutcomeError):
        asyncio.run(bed.cloud.create_nodes(make_request(bed)))
    assert len(bed.engine.launched) == 1


def test_records_that_cannot_be_read_now_are_not_replaced(bed: Any) -> None:
    """A daemon with many nodes may run out of descriptors for a moment; an adopted gang has no price."""

    async def act() -> None:
        request = make_request(bed)
        await bed.cloud.create_nodes(request)
        path = bed.folder / "sky" / "gangs.json"
        kept = path.rename(path.with_name("kept"))
        path.symlink_to(path)  # ELOOP
        with pytest.raises(TransientError):
            await bed.cloud.list_nodes(OWNER)
        path.unlink()
        kept.rename(path)
        (node,) = await list_of(bed, request.token)
        assert node.usd_hour > 0

    asyncio.run(act())


def test_a_cancelled_launch_never_comes_up(bed: Any) -> None:
    async def act() -> None:
        request = make_request(bed)
        (node,) = await bed.cloud.create_nodes(request)
        await bed.cloud.terminate_nodes([node])
        (ended,) = await wait_state(bed, request.token, TERMINATED)
        assert ended.reason == "terminated"
        await bed.clock.sleep(600)
        assert not (await bed.engine.fetch_state("", [])).clusters

    asyncio.run(act())


def test_nodes_are_found_without_the_memory_and_can_be_ended(bed: Any) -> None:
    """The state files are gone; names and labels identify the owner."""

    async def act() -> None:
        request = make_request(bed, node_count=2, attempt=4)
        await bed.cloud.create_nodes(request)
        await wait_state(bed, request.token, RUNNING, 2)
        (bed.folder / "sky" / "gangs.json").unlink()
        found = await list_of(bed, request.token)
        assert [(node.cluster, node.attempt, node.rank, node.state) for node in found] == [
            ("train", 4, 0, RUNNING),
            ("train", 4, 1, RUNNING),
        ]
        await bed.cloud.terminate_nodes([found[0]])
        await wait_state(bed, request.token, TERMINATED, 2)

    asyncio.run(act())


def test_a_cloud_does_not_list_its_neighbours(bed: Any) -> None:
    """All clouds behind SkyPilot share one table."""
    from broker.clouds.sky.cloud import SkyCloud

    async def act() -> None:
        request = make_request(bed)
        await bed.cloud.create_nodes(request)
        await wait_state(bed, request.token, RUNNING)
        for folder in (bed.folder / "sky", bed.folder / "none"):
            other = SkyCloud("nebius", engine=bed.engine, state_file=SkyStateFile(folder), clock=bed.clock)
            assert not (await other.list_nodes(OWNER)).nodes

    asyncio.run(act())


def test_a_request_that_never_arrived_is_repeated(bed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from broker.errors import UnknownOutcomeError

    launch = bed.engine.launch

    async def lose(*_: Any, **__: Any) -> str:
        raise UnknownOutcomeError("SkyPilot did not answer `launch` within 120 s")

    async def act() -> None:
        request = make_request(bed)
        monkeypatch.setattr(bed.engine, "launch", lose)
        with pytest.raises(UnknownOutcomeError):
            await bed.cloud.create_nodes(request)
        assert not (await bed.cloud.list_nodes(OWNER)).nodes
        monkeypatch.setattr(bed.engine, "launch", launch)
        await bed.cloud.create_nodes(request)
        await wait_state(bed, request.token, RUNNING)

    asyncio.run(act())


def test_spot_is_refreshed_more_often_than_by_skypilot(bed: Any) -> None:
    async def act() -> None:
        for is_spot in (False, True):
            request = make_request(bed, is_spot=is_spot)
            await bed.cloud.create_nodes(request)
            await wait_state(bed, request.token, RUNNING)
            bed.engine.refreshed.clear()
            for _ in range(60):
                await bed.clock.sleep(1)
                await bed.cloud.list_nodes(OWNER)
            asked = [name for names in bed.engine.refreshed for name in names]
            assert (
                (3 <= len(asked) <= 5 and set(asked) == {f"b-{OWNER}-lambda-{request.token}"}) if is_spot else not asked
            )

    asyncio.run(act())


def test_a_cluster_in_an_unclear_state_is_neither_lost_nor_running(bed: Any) -> None:
    """SkyPilot's INIT after UP: it may be live; the agents on its nodes are queried before any recovery."""
    from dataclasses import replace

    async def act() -> None:
        request = make_request(bed)
        (node,) = await bed.cloud.create_nodes(request)
        await wait_state(bed, request.token, RUNNING)
        name = node.id.partition("/")[0]
        bed.engine.clusters[name] = replace(bed.engine.clusters[name], status="INIT")
        assert list_states(await list_of(bed, request.token)) == [(0, PENDING, "")]
        assert not any(job.verb == "down" for job in bed.engine.jobs)

    asyncio.run(act())


def test_ids_of_another_cloud_are_refused(bed: Any) -> None:
    with pytest.raises(InvalidRequestError):
        asyncio.run(bed.cloud.terminate_nodes([make_node("i-0123456789", cloud="lambda")]))


def test_check_remembers_what_skypilot_has_enabled(bed: Any) -> None:
    asyncio.run(bed.cloud.check())
    assert SkyStateFile(bed.folder / "sky").read_enabled() == ["lambda"]
    bed.engine.enabled = ["nebius"]
    with pytest.raises(AuthError, match="has not enabled lambda"):
        asyncio.run(bed.cloud.check())
    assert SkyStateFile(bed.folder / "sky").read_enabled() == ["nebius"]
