"""An elastic job under losses, faults and crashes: one attempt while possible, and never a node too many."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from broker.types import Cluster, GangHead, JobRecovery, JobStatus, Node, NodeState, RunStatus, Task
from tests.clouds.simulated import FaultRates
from tests.simulation.test_crashes import check, drive
from tests.simulation.world import Crash, Report, SimulatedGang, World, _Run
from tests.tiers import spread

RATES = FaultRates(transient=0.05, throttled=0.03, unknown_before=0.1, unknown_after=0.1, full=0.2, forgotten=0.05)


class ElasticGang(SimulatedGang):
    """A gang whose program continues while the first node is there; nodes recorded as gone are not asked."""

    def _measure(self, run: _Run) -> tuple[int, RunStatus, int | None]:
        return super()._measure(replace(run, ids=run.ids[:1]))

    def _find_nodes(self, cluster: Cluster) -> list[Node]:
        return super()._find_nodes(replace(cluster, nodes=live(cluster)))

    async def poll(self, cluster: Cluster, run_id: int) -> Report:
        report = await super().poll(cluster, run_id)
        ranks = tuple(live(cluster)[place].rank for place in report.unreachable)
        return replace(report, unreachable=ranks)


class FollowingGang(ElasticGang):
    """A gang whose program continues while any node is there, under the head that the controller names."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._members: dict[int, set[str]] = {}  # run -> nodes on which its program was started
        self.heads: dict[int, dict[int, int]] = {}  # run -> epoch -> rank of its head

    def _measure(self, run: _Run) -> tuple[int, RunStatus, int | None]:
        nodes = self._cloud.find(tuple(self._members.get(run.number) or run.ids))
        ended = [node for node in nodes if node.ended_s is not None]
        last = () if len(ended) < len(nodes) else (max(ended, key=lambda node: node.ended_s or 0.0).id,)
        return SimulatedGang._measure(self, replace(run, ids=last))

    async def start(
        self, cluster: Cluster, task: Task, *, run_id: int, head: GangHead | None = None, **options: Any
    ) -> None:
        await super().start(cluster, task, run_id=run_id, **options)
        number = self._runs[cluster.name, run_id].number
        if head is not None:
            assert self.heads[number][head.epoch] == head.rank, "a new node is sent to a head that was never notified"
        self.heads.setdefault(number, {0: 0})
        self._members.setdefault(number, set()).update(node.id for node in live(cluster))

    async def move_head(
        self, cluster: Cluster, run_id: int, head: GangHead, *, members: Sequence[int], log_bytes: int
    ) -> bool:
        await self._clock.sleep(0.1)
        self._reach(replace(cluster, nodes=tuple(cluster.nodes[rank] for rank in {head.rank, *members})))
        told = self.heads[self._runs[cluster.name, run_id].number]
        assert told.setdefault(head.epoch, head.rank) == head.rank, "two heads of one epoch"
        assert head.epoch == max(told), "nodes are notified of an older head again"
        return True

    async def poll(self, cluster: Cluster, run_id: int) -> Report:
        report = await super().poll(cluster, run_id)
        members = self._members[self._runs[cluster.name, run_id].number]
        ranks = [node.rank for node in live(cluster) if node.id in members and node.rank not in report.unreachable]
        statuses = tuple(report.status if rank in ranks else None for rank in range(len(cluster.nodes)))
        return replace(report, statuses=statuses, followers=tuple(ranks))


def live(cluster: Cluster) -> tuple[Node, ...]:
    return tuple(node for node in cluster.nodes if node.state is not NodeState.TERMINATED)


def make_world(
    folder: Path, *, crash_at: int | None = None, maker: type[ElasticGang] = ElasticGang, **options: object
) -> World:
    world = World(folder, **options)  # type: ignore[arg-type]
    world.gang = maker(world.cloud, world.clock, steps=150)
    recovery = JobRecovery(nodes_min=1)
    world.task = Task(name="train", run="train", num_nodes=2, recovery=recovery)
    world.job_id = world.store.jobs.add("train", world.task).id
    world.points.crash_at = None if crash_at is None else world.points.count + crash_at
    return world


async def take_nodes(world: World, *losses: tuple[float, int]) -> None:
    """End the live node of a rank at each of these times of the program."""
    while not (started := [each.running_s for each in world.store.jobs.list_attempts(world.job_id) if each.running_s]):
        await world.clock.sleep(0.5)
    for after_s, rank in losses:
        await world.clock.sleep(max(0.0, min(started) + after_s - world.clock.now_s()))
        (cluster,) = world.store.clusters.list()
        world.cloud.preempt([node.id for node in cluster.nodes if node.rank == rank])


async def act(world: World, *losses: tuple[float, int]) -> None:
    outside = asyncio.ensure_future(take_nodes(world, *losses))
    try:
        await drive(world, "plain", set())
    finally:
        outside.cancel()


def list_events(world: World) -> list[str]:
    return [event.message for event in world.store.events.list(job_id=world.job_id)]


def test_two_losses_cost_two_nodes_and_no_attempt(tmp_path: Path) -> None:
    world = make_world(tmp_path)
    world.clock.run(lambda: act(world, (10, 1), (80, 1)))
    check(world, JobStatus.SUCCEEDED)
    assert len(world.get_job().attempts) == 1 and world.gang.starts == 1
    nodes = [node for node in world.cloud.observe() if node.owner == "me"]
    assert len(nodes) == 4, "each loss is made good once"
    assert list_events(world).count("node 1 gone; continuing on 1 of 2 nodes") == 2


def test_loss_of_the_first_node_is_a_new_attempt_also_while_another_is_on_its_way(tmp_path: Path) -> None:
    world = make_world(tmp_path)
    world.clock.run(lambda: act(world, (10, 1), (10.2, 0)))
    check(world, JobStatus.SUCCEEDED)
    assert len(world.get_job().attempts) == 2


def test_full_place_is_retried_later_while_the_program_continues(tmp_path: Path) -> None:
    world = make_world(tmp_path)

    async def fill() -> None:
        outside = asyncio.ensure_future(take_nodes(world, (10, 1)))
        while not any("going on" in event for event in list_events(world)):
            if any("started" in event for event in list_events(world)):
                world.cloud.faults = FaultRates(full=1.0)
            await world.clock.sleep(0.2)
        outside.cancel()

    async def both() -> None:
        filling = asyncio.ensure_future(fill())
        await drive(world, "plain", set())
        filling.cancel()

    world.clock.run(both)
    check(world, JobStatus.SUCCEEDED)
    refusals = [event for event in list_events(world) if "cannot replace the lost node" in event]
    assert 1 <= len(refusals) <= 9, "it waits longer each time"
    assert len(world.get_job().attempts) == 1


def run_with_crashes(world: World, losses: tuple[tuple[float, int], ...], next_crash: Callable[[], int | None]) -> None:
    for _ in range(30):
        try:
            world.clock.run(lambda: act(world, *losses))
            return
        except Crash:
            world.reborn(next_crash())
    world.reborn()
    world.clock.run(lambda: act(world, *losses))


@pytest.mark.parametrize("crash_at", spread(range(1, 60, 2), every=10, more=4))
def test_crash_at_any_effect_leaves_a_finished_job_and_no_node(tmp_path: Path, crash_at: int) -> None:
    world = make_world(tmp_path, crash_at=crash_at)
    run_with_crashes(world, ((10, 1),), lambda: None)
    check(world, JobStatus.SUCCEEDED)


@pytest.mark.parametrize("seed", spread(range(20), every=20, more=3))
def test_random_faults_and_crashes_leave_a_finished_job_and_no_node(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    world = make_world(tmp_path, crash_at=draw.randrange(5, 60), faults=RATES, seed=seed)
    losses = tuple((draw.uniform(5, 120), draw.choice((1, 1, 1, 0))) for _ in range(draw.randrange(1, 4)))
    run_with_crashes(world, tuple(sorted(losses)), lambda: draw.randrange(5, 80))
    check(world, JobStatus.SUCCEEDED)
    assert world.cloud.fault_counts, "no fault was played"


def test_loss_of_the_first_node_costs_one_node_and_no_attempt_where_the_program_follows(tmp_path: Path) -> None:
    world = make_world(tmp_path, maker=FollowingGang)
    world.clock.run(lambda: act(world, (10, 0), (60, 1), (110, 0)))
    check(world, JobStatus.SUCCEEDED)
    assert len(world.get_job().attempts) == 1 and world.gang.starts == 1
    assert world.gang.heads[0] == {0: 0, 1: 1, 2: 0, 3: 1}  # type: ignore[attr-defined]
    assert len([node for node in world.cloud.observe() if node.owner == "me"]) == 5, "each loss is made good once"


@pytest.mark.parametrize("crash_at", spread(range(1, 60, 6), every=5))
def test_crash_while_the_head_moves_costs_no_attempt(tmp_path: Path, crash_at: int) -> None:
    world = make_world(tmp_path, crash_at=crash_at, maker=FollowingGang)
    run_with_crashes(world, ((10, 0),), lambda: None)
    check(world, JobStatus.SUCCEEDED)
    assert world.gang.starts == 1


@pytest.mark.parametrize("seed", spread(range(10), every=5))
def test_random_losses_of_any_node_leave_a_finished_job_and_one_head_an_epoch(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    world = make_world(tmp_path, crash_at=draw.randrange(5, 60), faults=RATES, seed=seed, maker=FollowingGang)
    losses = tuple((draw.uniform(5, 120), draw.randrange(2)) for _ in range(draw.randrange(1, 4)))
    run_with_crashes(world, tuple(sorted(losses)), lambda: draw.randrange(5, 80))
    check(world, JobStatus.SUCCEEDED)
