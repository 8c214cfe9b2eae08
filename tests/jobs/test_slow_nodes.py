"""A node that slows its gang down is replaced if the rest of the job is long enough, in a simulated cloud."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from broker.jobs.stragglers import SLOW_S_MIN
from broker.types import Cluster, EventKind, Job, JobRecovery, JobStatus, NodeState, OutcomeKind, Task
from tests.simulation.test_crashes import check, run_to_end
from tests.simulation.world import World
from tests.tiers import long, spread

LONG, SHORT = 700, 100  # steps of a second; with a slow node, of two


def make_world(folder: Path, *, steps: int, crash_at: int | None = None, checks_health: bool | None = None) -> World:
    """Return a world in which the node of rank 1 is slow from the start, as machines with a fault are."""
    world = World(folder, crash_at=crash_at)
    world.gang.steps = steps
    world.task = Task(name="train", run="train", num_nodes=2, recovery=JobRecovery(checks_health=checks_health))
    world.job_id = world.store.jobs.add("train", world.task).id
    start = world.gang.start

    async def plant(
        cluster: Cluster, task: Task, *, run_id: int, envs: Mapping[str, str], lease_s: float | None = None, **_: object
    ) -> None:
        if not world.gang.slow_nodes:
            world.gang.slow_nodes.add(cluster.nodes[1].id)
        await start(cluster, task, run_id=run_id, envs=envs, lease_s=lease_s)

    world.gang.start = plant  # type: ignore[method-assign]
    return world


def list_events(world: World, kind: EventKind) -> list[Mapping[str, object]]:
    return [each.data for each in world.store.events.list(job_id=world.job_id) if each.kind is kind]


def get_duration_s(job: Job) -> float:
    assert job.ended_s is not None
    return job.ended_s - job.submitted_s


def test_slow_node_is_replaced_and_the_job_ends_sooner(tmp_path: Path) -> None:
    world = make_world(tmp_path, steps=LONG)
    run_to_end(world, "plain")
    check(world, JobStatus.SUCCEEDED)
    job = world.get_job()
    first, second = job.attempts
    assert first.outcome is not None and first.outcome.kind is OutcomeKind.UNHEALTHY, "no market took it"
    assert "2 s for its own part of a step, 1 s on the others" in first.outcome.detail
    assert first.cluster == second.cluster, "the other node is kept"
    (slow,) = world.gang.slow_nodes
    (event,) = list_events(world, EventKind.NODE_UNHEALTHY)
    assert event["node"] == slow and event["rank"] == 1
    assert get_duration_s(job) < 1.3 * LONG + SLOW_S_MIN, f"{get_duration_s(job)} s; {2 * LONG} s with the slow node"


def test_slow_node_of_a_job_that_is_nearly_done_is_only_named(tmp_path: Path) -> None:
    world = make_world(tmp_path, steps=SHORT)
    run_to_end(world, "plain")
    check(world, JobStatus.SUCCEEDED)
    assert len(world.get_job().attempts) == 1
    assert list_events(world, EventKind.NODE_SLOW) and not list_events(world, EventKind.NODE_UNHEALTHY)


@long
def test_rank_whose_new_node_is_slow_too_is_replaced_once(tmp_path: Path) -> None:
    world = make_world(tmp_path, steps=LONG)
    world.gang.slow_rank = 1
    run_to_end(world, "plain")
    check(world, JobStatus.SUCCEEDED)
    assert len(world.get_job().attempts) == 2
    assert len(list_events(world, EventKind.NODE_UNHEALTHY)) == 1
    assert len(list_events(world, EventKind.NODE_SLOW)) == 2


@long
def test_slow_nodes_stay_where_checks_are_switched_off(tmp_path: Path) -> None:
    world = make_world(tmp_path, steps=LONG, checks_health=False)
    run_to_end(world, "plain")
    check(world, JobStatus.SUCCEEDED)
    assert len(world.get_job().attempts) == 1 and list_events(world, EventKind.NODE_SLOW)


@pytest.mark.parametrize("delay_s", spread([0.0, 60.0], every=2))
def test_controller_that_restarts_after_the_decision_ends_the_node(tmp_path: Path, delay_s: float) -> None:
    world = make_world(tmp_path, steps=LONG)
    provisioner = world.make_provisioner()
    asked: list[str] = []

    async def be_killed(cluster: Cluster, node: object) -> None:
        asked.append(node.id)  # type: ignore[attr-defined]
        raise KeyboardInterrupt

    provisioner.end_node = be_killed  # type: ignore[method-assign]

    async def run_until_killed() -> None:
        controller = world.make_controller(provisioner)
        try:
            while True:
                await world.clock.sleep(await controller.step())
        except KeyboardInterrupt:
            await world.clock.sleep(delay_s)

    world.clock.run(run_until_killed)
    assert asked == list(world.gang.slow_nodes)
    run_to_end(world, "plain")
    check(world, JobStatus.SUCCEEDED)
    (ended,) = (node for node in world.cloud.observe() if node.id == asked[0])
    assert ended.state is NodeState.TERMINATED
    assert len(list_events(world, EventKind.NODE_UNHEALTHY)) == 1
