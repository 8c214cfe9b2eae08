"""Nodes that are left of a gang are kept while that costs less than new ones elsewhere."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from broker.errors import NoOfferError
from broker.jobs.node_retention import RETENTION_S_MAX, Alternative, NodeRetention, is_at, measure_retention_s
from broker.types import (
    Attempt,
    Cluster,
    ClusterStatus,
    EventKind,
    Job,
    JobStatus,
    NodeState,
    OutcomeKind,
    Placement,
    Plan,
    RunStatus,
)
from tests.clouds.simulated import FaultRates
from tests.jobs.test_node_replacement import take_nodes
from tests.simulation.test_crashes import check, drive, run_to_end
from tests.simulation.world import Report, SimulatedGang, World, _Run, make_offer
from tests.state.samples import NODE
from tests.tiers import spread

GANG = Placement(offer=make_offer("east1a", usd_hour=2.0), is_spot=True, node_count=4)


@pytest.mark.parametrize(
    ("lost", "elsewhere", "retention_s"),
    [
        (1, Alternative(usd_hour=8.0), 140.0 * 4 / 3),
        (1, Alternative(usd_hour=24.0), 140.0 * 4),  # the more expensive the others are, the longer
        (1, Alternative(usd_hour=2400.0), RETENTION_S_MAX),
        (1, None, RETENTION_S_MAX),
        (2, Alternative(usd_hour=8.0), 0.0),  # two come one after the other: over 280 s
        (3, Alternative(usd_hour=8.0), 140.0 * 4),
        (1, Alternative(usd_hour=8.0, saving_usd=5.0), 0.0),  # the rest of the job is cheaper there
        (1, Alternative(usd_hour=1.0), 0.0),
    ],
)
def test_waiting_is_worth_what_a_start_elsewhere_costs(
    lost: int, elsewhere: Alternative | None, retention_s: float
) -> None:
    assert measure_retention_s(GANG, lost_count=lost, start_s=140.0, elsewhere=elsewhere) == pytest.approx(retention_s)


def test_free_nodes_are_kept_while_waiting() -> None:
    free = replace(GANG, offer=make_offer("east1a", usd_hour=0.0))
    assert (
        measure_retention_s(free, lost_count=1, start_s=140.0, elsewhere=Alternative(usd_hour=8.0)) == RETENTION_S_MAX
    )


def test_a_location_is_identified_by_its_zone_even_among_several() -> None:
    west = Placement(offer=make_offer("west1a", usd_hour=2.0), is_spot=True, node_count=4, other_zones=("west1b",))
    assert is_at(replace(west, offer=make_offer("west1a"), other_zones=()), west)
    assert is_at(west, replace(west, offer=replace(west.offer, zone="west1b"), other_zones=()))
    assert not is_at(GANG, west) and not is_at(GANG, replace(GANG, is_spot=False))


@pytest.mark.parametrize(
    ("states", "noticed", "is_kept"),
    [
        ((NodeState.TERMINATED, NodeState.TERMINATED, NodeState.RUNNING), (), True),
        ((NodeState.TERMINATED, NodeState.STOPPED, NodeState.RUNNING), (), False),  # one of the lost still exists
        ((NodeState.TERMINATED, NodeState.RUNNING, NodeState.PENDING), (), False),
        ((NodeState.TERMINATED, NodeState.TERMINATED, NodeState.TERMINATED), (), False),
        ((NodeState.RUNNING, NodeState.RUNNING, NodeState.RUNNING), (), False),
        ((NodeState.RUNNING, NodeState.RUNNING, NodeState.RUNNING), (1,), True),
        ((NodeState.TERMINATED, NodeState.RUNNING, NodeState.RUNNING), (1,), True),
        ((NodeState.RUNNING, NodeState.RUNNING, NodeState.RUNNING), (0, 1, 2), False),
        ((NodeState.TERMINATED, NodeState.RUNNING, NodeState.RUNNING), (1, 2), False),
        ((NodeState.RUNNING, NodeState.RUNNING, NodeState.PENDING), (1,), False),
    ],
)
def test_survivors_are_kept_where_all_others_are_confirmed_gone_or_noticed(
    tmp_path: Path, states: tuple[NodeState, ...], noticed: tuple[int, ...], is_kept: bool
) -> None:
    world = World(tmp_path)
    placement = replace(GANG, node_count=len(states))
    nodes = tuple(replace(NODE, id=f"n{rank}", rank=rank, state=state) for rank, state in enumerate(states))
    cluster = Cluster(name="c", status=ClusterStatus.UP, placement=placement, attempt=1, nodes=nodes)
    attempt = Attempt(job_id=1, number=1, cluster="c", placement=placement, started_s=world.clock.now_s())
    report = Report(status=RunStatus.RUNNING, returncode=None, unreachable=(), progress=None, noticed=noticed)
    stub: Any = Stub()
    until_s = NodeRetention(world.store, stub, stub, world.clock).find_until_s(
        world.get_job(), attempt, cluster, report
    )
    assert (until_s is not None) is is_kept
    if until_s is not None:
        assert until_s - world.clock.now_s() == RETENTION_S_MAX


class Stub:
    """A place where nodes can be replaced, as the only one."""

    def can_replace_node(self, cluster: Cluster) -> bool:
        return True

    def measure_start_s(self, cloud: str) -> float:
        return 140.0

    def plan_rest(self, job: Job) -> Plan:
        raise NoOfferError("none")


async def act(world: World, *losses: tuple[float, int]) -> None:
    outside = asyncio.ensure_future(take_nodes(world, *losses))
    try:
        await drive(world, "plain", set())
    finally:
        outside.cancel()


@pytest.mark.parametrize("rank", [0, 1])
def test_one_lost_node_costs_one_node(tmp_path: Path, rank: int) -> None:
    world = World(tmp_path)
    world.clock.run(lambda: act(world, (10, rank)))
    check(world, JobStatus.SUCCEEDED)
    first, second = world.get_job().attempts
    assert first.cluster == second.cluster
    assert first.outcome is not None and first.outcome.kind is OutcomeKind.PREEMPTED and first.outcome.step
    (lost,) = (each for each in world.store.events.list() if each.kind is EventKind.ATTEMPT_LOST)
    assert (lost.data["kept_count"], lost.data["node_count"]) == (1, 2)
    assert lost.message.startswith(f"preempted: node {rank} gone after step")
    assert lost.message.endswith("; keeping 1 of 2 nodes while replacing the rest")
    assert len([node for node in world.cloud.observe() if node.owner == "me"]) == 3


def test_a_job_leaves_a_location_without_a_replacement_node(tmp_path: Path) -> None:
    world = World(tmp_path)

    async def lose() -> None:
        outside = asyncio.ensure_future(take_nodes(world, (10, 1)))
        while not outside.done():
            await world.clock.sleep(0.2)
        world.cloud.full_zones["east1a"] = float("inf")

    async def both() -> None:
        losing = asyncio.ensure_future(lose())
        await drive(world, "plain", set())
        losing.cancel()

    world.clock.run(both)
    check(world, JobStatus.SUCCEEDED)
    first, second = world.get_job().attempts
    assert first.cluster != second.cluster and second.placement.offer.zone == "east1b"
    told = [event.message for event in world.store.events.list(job_id=world.job_id)]
    assert any(each.startswith("cannot replace the lost node") for each in told)
    assert "releasing the nodes of attempt 1; requesting new ones" in told


def test_whole_gangs_that_are_lost_leave_nothing_to_keep(tmp_path: Path) -> None:
    world = World(tmp_path, faults=FaultRates())
    world.clock.run(lambda: act(world, (10, 0), (10, 1)))
    check(world, JobStatus.SUCCEEDED)
    assert len({attempt.cluster for attempt in world.get_job().attempts}) == 2


class NoticedGang(SimulatedGang):
    """A gang whose node `rank` gets a preemption notice at step 12, on which the program ends; node 1 saves for longer.

    The cloud never takes the node, so only broker can have terminated it.
    """

    rank = 1
    save_s = 3.0

    def _is_saved(self, run: _Run) -> bool:
        return run.cancelled_s is not None and self._clock.now_s() >= run.cancelled_s + self.save_s

    async def read_log(self, cluster: Cluster, run_id: int, *, offset: int) -> tuple[bytes, int]:
        """Read the log from the first node of the run, which has it."""
        whole, _ = await super().read_log(cluster, run_id, offset=0)
        run = self._runs.get((cluster.name, run_id))
        if run is None or self._cloud.find(run.ids)[0].ended_s is not None:
            return b"", offset
        whole += b"saved\n" if run.number == 0 and self._is_saved(run) else b""
        return whole[offset:], len(whole)

    async def poll(self, cluster: Cluster, run_id: int) -> Report:
        report = await super().poll(cluster, run_id)
        run = self._runs[cluster.name, run_id]
        if run.number == 0 and report.progress is not None and report.progress.step >= 12:
            run.cancelled_s = run.cancelled_s or self._clock.now_s()
            second = RunStatus.FAILED if self._is_saved(run) else RunStatus.RUNNING
            statuses = (RunStatus.FAILED, second)
            report = replace(report, status=RunStatus.FAILED, returncode=None, reason="preempted", statuses=statuses)
        noticed = run.ids[self.rank] if run.number == 0 and run.cancelled_s else None
        ranks = (rank for rank, node in enumerate(self._find_nodes(cluster)) if node.id == noticed)
        return replace(report, noticed=tuple(rank for rank in ranks if rank not in report.unreachable))


def make_noticed_world(folder: Path, *, rank: int, crash_at: int | None = None) -> World:
    world = World(folder)
    world.gang = NoticedGang(world.cloud, world.clock)
    world.gang.rank = rank
    world.points.crash_at = None if crash_at is None else world.points.count + crash_at
    return world


@pytest.mark.parametrize("rank", [0, 1])
def test_a_notice_to_one_node_costs_one_node(tmp_path: Path, rank: int) -> None:
    world = make_noticed_world(tmp_path, rank=rank)
    run_to_end(world, "plain")
    check(world, JobStatus.SUCCEEDED)
    first, second = world.get_job().attempts
    assert first.cluster == second.cluster
    assert first.outcome is not None and first.outcome.kind is OutcomeKind.PREEMPTED
    (lost,) = (each for each in world.store.events.list() if each.kind is EventKind.ATTEMPT_LOST)
    assert lost.message.startswith("preempted: the cloud gave notice")
    assert lost.message.endswith("; keeping 1 of 2 nodes while replacing the rest")
    log = (world.folder / "logs" / "jobs" / f"{world.job_id}.log").read_text()
    assert "step 12\nsaved\n" in log, "all nodes had saved, and the log was copied, before the node was terminated"
    nodes = [node for node in world.cloud.observe() if node.owner == "me"]
    assert len(nodes) == 3
    (ended,) = (node for node in nodes if node.ended_s is not None and node.ended_s < second.started_s)
    assert ended.rank == rank, "the noticed node alone was terminated, before the next attempt"


@pytest.mark.parametrize("crash_at", spread(range(8, 60, 3), every=6, more=2))
def test_crash_at_any_effect_after_a_notice_leaves_a_finished_job_and_no_node(tmp_path: Path, crash_at: int) -> None:
    world = make_noticed_world(tmp_path, rank=1, crash_at=crash_at)
    run_to_end(world, "plain")
    check(world, JobStatus.SUCCEEDED)
