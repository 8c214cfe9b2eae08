"""A broker under random faults and crashes ends every job as an undisturbed one would (every effect: test_scenes)."""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from pathlib import Path

import pytest

from broker.errors import BrokerError
from broker.jobs.acquisition import Planner
from broker.types import JobStatus, NodeState
from tests.clouds.simulated import FaultRates
from tests.simulation.world import FOREIGN, OWNER, Crash, World
from tests.tiers import spread

LIMIT_S = 6 * 3600.0


async def drive(world: World, scenario: str, done: set[str], planner: Planner | None = None) -> None:
    """Run one process: the controller, and alongside it the scenario's own events."""
    outside = asyncio.ensure_future(disturb(world, scenario, done))
    controller = world.make_controller(planner=planner)
    provisioner = world.make_provisioner()
    start_s = world.clock.now_s()
    try:
        while True:
            assert world.clock.now_s() - start_s < LIMIT_S, "the job does not end"
            try:
                wait_s = await controller.step()
                await provisioner.collect() if scenario == "collector" else None
            except BrokerError:
                wait_s = 1.0
            if math.isinf(wait_s):
                return
            await world.clock.sleep(wait_s)
    finally:
        outside.cancel()


async def disturb(world: World, scenario: str, done: set[str]) -> None:
    if scenario == "plain" or scenario in done:
        return
    started_s = None
    while started_s is None or world.clock.now_s() < started_s + 12.0:
        await world.clock.sleep(0.5)
        started_s = min(
            (a.running_s for a in world.store.jobs.list_attempts(world.job_id) if a.running_s), default=None
        )
    if scenario == "cancel":
        world.store.jobs.request_cancel(world.job_id)
    live = world.list_live_nodes()
    if scenario == "preemption" and live:
        world.cloud.preempt([live[0].id])
    done.add(scenario)


def run_to_end(world: World, scenario: str, planner: Planner | None = None) -> int:
    """Run to the end and return the number of crashes; a new process takes over after each."""
    crashes = 0
    done: set[str] = set()
    while True:
        try:
            world.clock.run(lambda: drive(world, scenario, done, planner))
            return crashes
        except Crash:
            crashes += 1
            world.reborn()


def check(world: World, expected: JobStatus) -> None:
    job = world.get_job()
    assert job.status is expected, (job.status, job.failure)
    assert not world.list_live_nodes(), "a node outlived its job"
    assert not world.store.clusters.list()
    assert not world.store.intents.list_open()
    assert [node.state for node in world.cloud.observe() if node.id == FOREIGN.id] == [NodeState.RUNNING]
    assert all(attempt.ended_s is not None for attempt in job.attempts)
    mine = [node for node in world.cloud.observe() if node.owner == OWNER]
    twins = Counter((node.cluster, node.rank, node.token) for node in mine)
    assert max(twins.values(), default=0) <= 1
    # A preempted node is billed to the second that the cloud reports, whenever it was noticed.
    spend_usd = world.store.bills.spend_usd(job_id=world.job_id, now_s=world.clock.now_s())
    assert spend_usd == pytest.approx(world.cloud.bill_usd(), rel=0.05, abs=0.01)


EXPECTED = {"plain": JobStatus.SUCCEEDED, "preemption": JobStatus.SUCCEEDED, "cancel": JobStatus.CANCELLED}


@pytest.mark.parametrize("seed", spread(range(50), every=6, more=2))
def test_random_faults_and_crashes_leave_a_finished_job_and_no_node(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    rates = FaultRates(transient=0.05, throttled=0.03, unknown_before=0.1, unknown_after=0.1, full=0.2, forgotten=0.05)
    world = World(tmp_path, faults=rates, seed=seed, crash_at=draw.randrange(5, 60))
    scenario = draw.choice(list(EXPECTED))
    done: set[str] = set()
    for _ in range(20):
        try:
            world.clock.run(lambda: drive(world, scenario, done))
            break
        except Crash:
            world.reborn(draw.randrange(5, 80))
    else:
        world.reborn()
        world.clock.run(lambda: drive(world, scenario, done))
    is_cancelled = world.get_job().cancel_requested  # many crashes may let the job end before a cancel
    check(world, JobStatus.CANCELLED if is_cancelled else JobStatus.SUCCEEDED)
    assert world.cloud.fault_counts, "no fault was played"
