"""A daemon whose gangs report news by themselves: what it still polls, and what wakes it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from broker.config import Config
from broker.jobs.controller import NEWS_S
from broker.jobs.daemon import run_daemon
from broker.types import Cluster, JobStatus
from tests.simulation.world import OWNER, Report, SimulatedGang, World

POLLS_S = 60.0


class TellingGang(SimulatedGang):
    """A gang that reports nothing by itself and counts polls. `fails` makes waiting for news a bug."""

    polls = 0
    fails = 0

    async def poll(self, cluster: Cluster, run_id: int) -> Report:
        self.polls += 1
        return await super().poll(cluster, run_id)

    async def wait_news(self, cluster: Cluster, run_id: int, *, wake: asyncio.Event, timeout_s: float) -> None:
        if self.fails:
            self.fails -= 1
            raise RuntimeError("a bug")
        try:
            await asyncio.wait_for(wake.wait(), timeout_s)
        except TimeoutError:
            pass
        wake.clear()


@pytest.fixture
def world(tmp_path: Path) -> World:
    world = World(tmp_path)
    world.gang = TellingGang(world.cloud, world.clock, steps=10_000)
    return world


def start_daemon(world: World) -> asyncio.Task[None]:
    provisioner = world.make_provisioner()
    return asyncio.ensure_future(
        run_daemon(
            store=world.store,
            make_controller=lambda job_id: world.make_controller(provisioner),
            provisioner=provisioner,
            clock=world.clock,
            config=Config(home=world.folder, owner=OWNER),
        )
    )


async def wait_until_running(world: World) -> None:
    while world.get_job().status is not JobStatus.RUNNING:
        await world.clock.sleep(0.5)
    await world.clock.sleep(2 * NEWS_S)


def test_cancel_is_noticed_within_a_second(world: World) -> None:
    async def work() -> None:
        daemon = start_daemon(world)
        await wait_until_running(world)
        assert isinstance(world.gang, TellingGang)
        looked = world.gang.polls
        while world.gang.polls == looked:  # just after a look: the next one is far
            await world.clock.sleep(0.1)
        world.store.jobs.request_cancel(world.job_id)
        await world.clock.sleep(1.0)
        assert world.get_job().status in (JobStatus.CANCELLING, JobStatus.CANCELLED)
        await daemon

    world.clock.run(work)
    assert world.get_job().status is JobStatus.CANCELLED
    assert not world.list_live_nodes()


def test_reporting_gang_is_still_checked_for_timeouts(world: World) -> None:
    async def work() -> None:
        daemon = start_daemon(world)
        await wait_until_running(world)
        assert isinstance(world.gang, TellingGang)
        before = world.gang.polls
        await world.clock.sleep(POLLS_S)
        assert POLLS_S / NEWS_S - 1 <= world.gang.polls - before <= POLLS_S / NEWS_S + 1
        daemon.cancel()

    world.clock.run(work)


def test_lost_node_is_replaced_without_any_report(world: World) -> None:
    async def work() -> None:
        daemon = start_daemon(world)
        await wait_until_running(world)
        world.cloud.preempt([world.list_live_nodes()[0].id])
        await world.clock.sleep(60.0)
        assert len(world.get_job().attempts) == 2
        daemon.cancel()

    world.clock.run(work)


def test_bug_while_waiting_pauses_only_this_job(world: World) -> None:
    assert isinstance(world.gang, TellingGang)
    world.gang.fails = 3

    async def work() -> None:
        daemon = start_daemon(world)
        await wait_until_running(world)
        await world.clock.sleep(60.0)
        assert isinstance(world.gang, TellingGang)
        assert not world.gang.fails and world.get_job().status is JobStatus.RUNNING
        daemon.cancel()

    world.clock.run(work)
