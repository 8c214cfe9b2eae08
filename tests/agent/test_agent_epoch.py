"""A node obeys the newest server: requests of one that was replaced are refused, by real agents on the local cloud."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from broker import agent
from broker.agent import agent as program
from broker.clock import SystemClock
from broker.errors import FencedError, TransientError
from broker.runtime import gang as gang_module
from broker.runtime.gang import Gang
from broker.types import Autostop, Cluster, RunStatus
from tests.runtime.local_gang import Rig, make_task, wait_for
from tests.tiers import spread

epochs, files = program.agent_epoch, program.files
OLD, NEW = 1, 2


def make_gang(rig: Rig, epoch: int) -> Gang:
    """Make the gang of the server with this epoch."""
    return Gang(rig.transport, clock=SystemClock(), find_epoch=lambda: epoch)


async def start(gang: Gang, cluster: Cluster, run_id: int = 1) -> None:
    task = make_task("sleep 1000")
    await gang.prepare(cluster, task)
    await gang.start(cluster, task, run_id=run_id, envs={}, lease_s=1000.0)


async def is_running(gang: Gang, cluster: Cluster) -> bool:
    return (await gang.poll(cluster, 1)).status is RunStatus.RUNNING


async def try_orders(old: Gang, cluster: Cluster) -> list[str]:
    """Give every kind of order as the old server; return those that were obeyed."""
    obeyed = []
    orders = {
        "start": lambda: start(old, cluster, run_id=2),
        "stop": lambda: old.cancel(cluster, 1),
        "renew": lambda: old.renew_lease(cluster, lease_s=5.0),
        "autostop": lambda: old.set_autostop(cluster, Autostop(idle_minutes=0.0, is_down=True)),
        "peers": lambda: old.send_peers(cluster, 1, {}),
        "poll": lambda: old.poll(cluster, 1),
    }
    for name, give in orders.items():
        try:
            await give()
            obeyed.append(name)
        except FencedError as error:
            assert "obeys a server that was restored" in error.message
    return obeyed


async def replace_server(rig: Rig) -> tuple[Cluster, Gang, Gang]:
    """Let a server start a program, and a restored one speak to its nodes."""
    cluster = await rig.make_cluster(node_count=2)
    old, new = make_gang(rig, OLD), make_gang(rig, NEW)
    await start(old, cluster)
    await wait_for(lambda: is_running(old, cluster))
    await new.renew_lease(cluster, lease_s=2000.0)
    return cluster, old, new


def test_orders_of_a_replaced_server_are_refused_once_the_new_one_has_spoken(rig: Rig) -> None:
    async def act() -> None:
        cluster, old, new = await replace_server(rig)
        assert await try_orders(old, cluster) == []
        assert await is_running(new, cluster)
        assert [run.id for run in await new.list_runs(cluster)] == [1], "no second program"
        await new.cancel(cluster, 1)
        await wait_for(lambda: has_ended(new, cluster))

    async def has_ended(gang: Gang, cluster: Cluster) -> bool:
        return (await gang.poll(cluster, 1)).status is RunStatus.CANCELLED

    asyncio.run(act())


def test_session_that_was_open_before_is_refused_too(rig: Rig) -> None:
    async def act() -> None:
        cluster = await rig.make_cluster()
        old, new = make_gang(rig, OLD), make_gang(rig, NEW)
        await start(old, cluster)

        async def has_session() -> bool:
            await old.wait_news(cluster, 1, wake=asyncio.Event(), timeout_s=0.05)
            channel = old._channels.find(cluster.nodes[0], 1) if old._channels else None
            return channel is not None and channel.is_heard()

        await wait_for(has_session)
        await old.renew_lease(cluster, lease_s=1000.0)
        await new.renew_lease(cluster, lease_s=2000.0)
        with pytest.raises(FencedError):
            await old.renew_lease(cluster, lease_s=5.0)
        with pytest.raises(FencedError):
            await old.cancel(cluster, 1)
        assert await is_running(new, cluster)

    asyncio.run(act())


def test_node_without_a_restored_server_obeys_any(rig: Rig) -> None:
    async def act() -> None:
        cluster = await rig.make_cluster()
        await start(rig.gang, cluster)  # a state folder without backups
        await make_gang(rig, OLD).renew_lease(cluster, lease_s=500.0)  # backups are turned on
        await make_gang(rig, OLD).renew_lease(cluster, lease_s=600.0)
        with pytest.raises(FencedError):
            await rig.gang.renew_lease(cluster, lease_s=5.0)

    asyncio.run(act())


@pytest.fixture
def plant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Copy the agent to a folder where tests plant bugs, and send nodes this copy."""
    folder = tmp_path / "agent"
    shutil.copytree(agent.FOLDER, folder)
    monkeypatch.setattr(agent, "FOLDER", folder)
    gang_module.pack_agent.cache_clear()
    yield folder
    gang_module.pack_agent.cache_clear()


@pytest.mark.parametrize(
    ("old", "new"),
    spread(
        [
            ("if epoch < known:", "if epoch > known:"),
            ("if epoch > known:", "if epoch < known:"),
            ("        admit(epoch)", "        pass"),
        ],
        every=3,
    ),
    ids=["refuses the new one", "forgets the new one", "admits all"],
)
def test_planted_bug_of_the_epoch_is_detected(rig: Rig, plant: Path, old: str, new: str) -> None:
    path = plant / "agent_epoch.py"
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))

    async def act() -> list[str]:
        try:
            cluster, before, _ = await replace_server(rig)
        except FencedError:
            return ["the new server was refused"]
        return await try_orders(before, cluster)

    assert asyncio.run(act())


def test_damaged_record_refuses_instead_of_forgetting_the_successor(rig: Rig) -> None:
    async def act() -> None:
        cluster, old, _ = await replace_server(rig)
        for node in cluster.nodes:
            (rig.root / node.id / "home" / ".broker" / epochs.NAME).write_text("{")
        with pytest.raises(TransientError, match=r"epoch\.json cannot be read"):
            await old.renew_lease(cluster, lease_s=5.0)

    asyncio.run(act())


def test_request_is_carried_out_under_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise an order that was admitted could take effect after the first one of the new server."""
    monkeypatch.setattr(files, "STATE", tmp_path)
    seen: list[bool] = []

    def act(request: dict[str, object]) -> dict[str, object]:
        seen.append(files.is_locked(tmp_path / epochs.LOCK))
        return {"had": sorted(request)}

    assert epochs.guard(act)({"run_id": 1, epochs.FIELD: OLD}) == {"had": ["run_id"]}
    assert seen == [True] and json.loads((tmp_path / epochs.NAME).read_text()) == {epochs.FIELD: OLD}
    assert not files.is_locked(tmp_path / epochs.LOCK)


def test_broker_and_agent_agree_on_the_field_and_on_the_exit_code() -> None:
    assert (gang_module.EPOCH, gang_module.SUPERSEDED) == (epochs.FIELD, epochs.EXIT_CODE)


def test_request_without_an_epoch_ends_before_the_first_one_with_an_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The restored server is the first with an epoch: what the old one asked for must not take effect after it."""
    monkeypatch.setattr(files, "STATE", tmp_path)
    seen: list[bool] = []

    def verb(request: dict[str, object]) -> dict[str, object]:
        seen.append(files.is_locked(tmp_path / epochs.LOCK))  # of readers and writers: a reader may join it
        seen.append(files.try_lock(tmp_path / epochs.LOCK) is None)
        return request

    guarded = epochs.guard(verb)
    assert guarded({"a": 1}) == {"a": 1} and seen == [False, True]
    assert guarded({epochs.FIELD: 1}) == {} and seen[2:] == [True, True]
    with pytest.raises(epochs.SupersededError):
        guarded({})
