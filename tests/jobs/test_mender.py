"""The mender alone: a loss is told once, the rest is submitted to once, and a full place is asked ever more seldom."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from broker.errors import CapacityError, TransientError
from broker.jobs.mending import Mender
from broker.state.store import Store
from broker.types import Cluster, ClusterStatus, JobRecovery, Node, NodeState, Placement, Resources, RunStatus, Task
from tests.simulation.world import Report, make_offer
from tests.state.test_rows import NODE, START_S, Hands

TASK = Task(num_nodes=2, resources=(Resources(job_recovery=JobRecovery(nodes_min=1)),))
LOOK_S = 2.0
CALM = Report(status=RunStatus.RUNNING, returncode=None, unreachable=(), progress=None)


class Full:
    """A provisioner whose places are full, and a gang that takes whatever is submitted."""

    def __init__(self, clock: Hands) -> None:
        self._clock = clock
        self.asked: list[tuple[float, int]] = []
        self.started: list[tuple[int, float | None]] = []
        self.ended: list[tuple[float, str]] = []

    async def replace_node(self, cluster: Cluster, task: Task, *, rank: int, check_budget: Any) -> Cluster:
        self.asked.append((self._clock.now_s(), rank))
        raise CapacityError("full")

    async def end_node(self, cluster: Cluster, node: Node) -> None:
        self.ended.append((self._clock.now_s(), node.id))
        raise TransientError("no answer")

    async def prepare(self, cluster: Cluster, task: Task) -> None:
        return

    async def start(self, cluster: Cluster, task: Task, *, run_id: int, envs: Any, lease_s: float | None) -> None:
        self.started.append((run_id, lease_s))


class Faulty(Full):
    """A provisioner with a fault in its code."""

    async def replace_node(self, cluster: Cluster, task: Task, *, rank: int, check_budget: Any) -> Cluster:
        raise ZeroDivisionError("a fault of ours")


def test_a_loss_is_told_once_and_a_full_place_is_asked_later_and_later_up_to_five_minutes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("random.uniform", lambda low, high: high)
    clock = Hands()
    store = Store(tmp_path / "state.db", clock=clock)
    job = store.add_job("j", TASK)
    placement = Placement(offer=make_offer("east1a"), is_spot=True, node_count=2)
    lost = replace(NODE, id="m", rank=1, state=NodeState.TERMINATED)
    cluster = Cluster(
        name="c", status=ClusterStatus.UP, placement=placement, attempt=1, nodes=(NODE, lost), created_s=START_S
    )  # fmt: skip
    store.put_cluster(cluster)
    world: Any = Full(clock)
    mender = Mender(store, world, world, clock)

    async def act() -> None:
        while clock.time_s < START_S + 1200.0:
            await mender.look(job, cluster, CALM, run_id=1, make_envs=dict, find_lease_s=lambda: 900.0)
            await asyncio.sleep(0)
            clock.time_s += LOOK_S

    asyncio.run(act())
    pauses = [later - earlier for (earlier, _), (later, _) in pairwise(world.asked)]
    assert pauses == pytest.approx([30.0, 60.0, 120.0, 240.0, 300.0, 300.0], abs=2 * LOOK_S)
    assert {rank for _, rank in world.asked} == {1} and world.started == [(1, 900.0)]
    events = store.list_events(job_id=job.id)
    kinds = [event.kind for event in events]
    [shrunk] = [event.message for event in events if event.kind == "shrunk"]
    assert "with 1 of 2" in shrunk
    assert kinds.count("shrunk") == 1 and kinds.count("waiting") == len(world.asked)


def test_a_node_whose_setup_failed_is_ended_and_then_replaced_as_a_lost_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("random.uniform", lambda low, high: high)
    clock = Hands()
    store = Store(tmp_path / "state.db", clock=clock)
    job = store.add_job("j", TASK)
    placement = Placement(offer=make_offer("east1a"), is_spot=True, node_count=2)
    new = replace(NODE, id="m", rank=1)
    cluster = Cluster(
        name="c", status=ClusterStatus.UP, placement=placement, attempt=1, nodes=(NODE, new), created_s=START_S
    )  # fmt: skip
    store.put_cluster(cluster)
    world: Any = Full(clock)
    mender = Mender(store, world, world, clock)
    unfit = replace(CALM, unfit=((1, "setup exited with 3 on rank 1"),))

    async def act(cluster: Cluster, report: Report, until_s: float) -> None:
        while clock.time_s < START_S + until_s:
            await mender.look(job, cluster, report, run_id=1, make_envs=dict, find_lease_s=lambda: 900.0)
            await asyncio.sleep(0)
            clock.time_s += LOOK_S

    asyncio.run(act(cluster, unfit, 40.0))
    assert [(time_s - START_S, node_id) for time_s, node_id in world.ended] == [(0.0, "m"), (30.0, "m")], "asked again"
    assert not world.asked, "it is not replaced before it is gone"
    gone = replace(cluster, nodes=(NODE, replace(new, state=NodeState.TERMINATED)))
    store.put_cluster(gone)
    asyncio.run(act(gone, CALM, 50.0))
    assert [rank for _, rank in world.asked] == [1]
    (told,) = [event.message for event in store.list_events(job_id=job.id) if event.kind == "unfit"]
    assert told.startswith("setup exited with 3 on rank 1") and f"`broker jobs logs {job.id}`" in told
    assert "(rank1)" in told and "in 30 s" in told
    assert not [event for event in store.list_events(job_id=job.id) if event.kind == "shrunk"], "told once"


def test_a_fault_of_ours_while_a_node_is_replaced_is_not_taken_for_a_full_place(tmp_path: Path) -> None:
    clock = Hands()
    store = Store(tmp_path / "state.db", clock=clock)
    job = store.add_job("j", TASK)
    lost = replace(NODE, id="m", rank=1, state=NodeState.TERMINATED)
    placement = Placement(offer=make_offer("east1a"), is_spot=True, node_count=2)
    cluster = Cluster(
        name="c", status=ClusterStatus.UP, placement=placement, attempt=1, nodes=(NODE, lost), created_s=START_S
    )  # fmt: skip
    store.put_cluster(cluster)
    world: Any = Faulty(clock)
    mender = Mender(store, world, world, clock)

    async def act() -> None:
        for _ in range(4):
            await mender.look(job, cluster, CALM, run_id=1, make_envs=dict, find_lease_s=lambda: 900.0)
            await asyncio.sleep(0)

    with pytest.raises(ZeroDivisionError):
        asyncio.run(act())
    assert "waiting" not in [event.kind for event in store.list_events(job_id=job.id)]
