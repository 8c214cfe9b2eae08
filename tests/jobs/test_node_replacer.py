"""A loss is reported once, the rest is submitted to once, and a full place is asked ever less often."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from broker.errors import CapacityError, TransientError
from broker.jobs.monitor import AttemptMonitor
from broker.jobs.node_replacement import NodeReplacer
from broker.state.store import Store
from broker.types import (
    Attempt,
    Cluster,
    ClusterStatus,
    EventKind,
    JobRecovery,
    Node,
    NodeState,
    Placement,
    RunStatus,
    Task,
)
from tests.simulation.world import Report, make_offer
from tests.state.samples import NODE, START_S, Hands

TASK = Task(num_nodes=2, recovery=JobRecovery(nodes_min=1))
POLL_S = 2.0
CALM = Report(status=RunStatus.RUNNING, returncode=None, unreachable=(), progress=None)


class Full:
    """A provisioner whose places are full, and a gang that accepts every run."""

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

    async def start(self, cluster: Cluster, task: Task, *, run_id: int, envs: Any, **options: Any) -> None:
        self.started.append((run_id, options["lease_s"]))


class Faulty(Full):
    """A provisioner with a fault in its code."""

    async def replace_node(self, cluster: Cluster, task: Task, *, rank: int, check_budget: Any) -> Cluster:
        raise ZeroDivisionError("a fault of ours")


class Stage:
    """A job whose cluster of two has lost its second node, or has this one in its place, and its replacer."""

    def __init__(self, folder: Path, world: type[Full] = Full, *, second: NodeState = NodeState.TERMINATED) -> None:
        self.clock = Hands()
        self.store = Store(folder / "state.db", clock=self.clock)
        self.job = self.store.jobs.add("j", TASK)
        placement = Placement(offer=make_offer("east1a"), is_spot=True, node_count=2)
        nodes = (NODE, replace(NODE, id="m", rank=1, state=second))
        self.cluster = Cluster(
            name="c", status=ClusterStatus.UP, placement=placement, attempt=1, nodes=nodes, created_s=START_S
        )
        self.store.clusters.put(self.cluster)
        self.attempt = Attempt(job_id=self.job.id, number=1, cluster="c", placement=placement, started_s=START_S)
        self.world: Any = world(self.clock)
        self.replacer = NodeReplacer(self.store, self.world, self.world, self.clock)

    def list_recorded(self, kind: EventKind) -> list[str]:
        return [event.message for event in self.store.events.list(job_id=self.job.id) if event.kind is kind]

    def step(self, cluster: Cluster, report: Report, *, until_s: float) -> None:
        async def act() -> None:
            while self.clock.time_s < START_S + until_s:
                signals = AttemptMonitor("c").read_signals(report, cluster, self.clock.time_s, nodes_min=1)
                await self.replacer.step(
                    self.job, self.attempt, cluster, report, signals, make_envs=dict, find_lease_s=lambda: 900.0
                )
                await asyncio.sleep(0)
                self.clock.time_s += POLL_S

        asyncio.run(act())


def test_a_loss_is_recorded_once_and_a_full_place_is_retried_with_backoff_up_to_five_minutes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("random.uniform", lambda low, high: high)
    stage = Stage(tmp_path)
    stage.step(stage.cluster, CALM, until_s=1200.0)
    pauses = [later - earlier for (earlier, _), (later, _) in pairwise(stage.world.asked)]
    assert pauses == pytest.approx([30.0, 60.0, 120.0, 240.0, 300.0, 300.0], abs=2 * POLL_S)
    assert {rank for _, rank in stage.world.asked} == {1} and stage.world.started == [(1, 900.0)]
    [shrunk] = stage.list_recorded(EventKind.SHRUNK)
    assert "on 1 of 2 nodes" in shrunk
    assert len(stage.list_recorded(EventKind.REPLACEMENT_FAILED)) == len(stage.world.asked)


def test_a_node_that_is_gone_is_not_ended_again_although_its_setup_failed(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    stage.step(stage.cluster, replace(CALM, unfit=((1, "setup exited with 3 on rank 1"),)), until_s=40.0)
    assert not stage.world.ended and not stage.list_recorded(EventKind.UNFIT)
    assert {rank for _, rank in stage.world.asked} == {1}


def test_a_node_whose_setup_failed_is_ended_and_then_replaced_as_a_lost_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("random.uniform", lambda low, high: high)
    stage = Stage(tmp_path, second=NodeState.RUNNING)
    unfit = replace(CALM, unfit=((1, "setup exited with 3 on rank 1"),))
    stage.step(stage.cluster, unfit, until_s=40.0)
    ended = [(time_s - START_S, node_id) for time_s, node_id in stage.world.ended]
    assert ended == [(0.0, "m"), (30.0, "m")], "asked again"
    assert not stage.world.asked, "it is not replaced before it is gone"
    first, second = stage.cluster.nodes
    gone = replace(stage.cluster, nodes=(first, replace(second, state=NodeState.TERMINATED)))
    stage.store.clusters.put(gone)
    stage.step(gone, CALM, until_s=50.0)
    assert [rank for _, rank in stage.world.asked] == [1]
    [told] = stage.list_recorded(EventKind.UNFIT)
    assert told.startswith("setup exited with 3 on rank 1") and f"`broker jobs logs {stage.job.id}`" in told
    assert "(rank1)" in told and "in 30 s" in told
    assert not stage.list_recorded(EventKind.SHRUNK), "reported once"


def test_a_bug_during_a_replacement_does_not_count_as_missing_capacity(tmp_path: Path) -> None:
    stage = Stage(tmp_path, Faulty)
    with pytest.raises(ZeroDivisionError):
        stage.step(stage.cluster, CALM, until_s=10.0)
    assert not stage.list_recorded(EventKind.REPLACEMENT_FAILED)
