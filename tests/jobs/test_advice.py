"""Recommendations and notices of a cloud are events of the job, once per node, and change nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from broker.types import Cluster, EventKind, JobStatus
from broker.wording import make_place
from tests.simulation.test_crashes import check, run_to_end
from tests.simulation.world import Crash, Report, SimulatedGang, World


class AdvisedGang(SimulatedGang):
    """A gang that reports on every poll that node 1 is expected to go."""

    async def poll(self, cluster: Cluster, run_id: int) -> Report:
        return replace(await super().poll(cluster, run_id), advised=(1,))


class NoticedGang(SimulatedGang):
    """A gang that reports on every poll that the cloud announced the preemption of node 1. One poll kills broker."""

    polls = 0

    async def poll(self, cluster: Cluster, run_id: int) -> Report:
        self.polls += 1
        if self.polls == 5:
            raise Crash
        return replace(await super().poll(cluster, run_id), noticed=(1,))


def test_advice_is_sent_once_per_node(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.gang = AdvisedGang(world.cloud, world.clock, exit_codes=())
    run_to_end(world, "none")
    check(world, JobStatus.SUCCEEDED)
    told = [event.message for event in world.store.events.list(job_id=world.job_id) if event.kind == "advised"]
    assert told == ["the cloud reports an elevated preemption risk for node 1"]
    assert len(world.get_job().attempts) == 1


def test_notice_is_an_event_with_its_place_once_per_node_across_a_restart(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.gang = NoticedGang(world.cloud, world.clock, exit_codes=())
    assert run_to_end(world, "none") == 1
    check(world, JobStatus.SUCCEEDED)
    (event,) = [event for event in world.store.events.list(job_id=world.job_id) if event.kind is EventKind.NOTICED]
    assert event.message.startswith(f"the cloud announced the preemption of node 1 ({event.data['node']}): ")
    placement = world.get_job().attempts[0].placement
    assert placement and event.data["place"] == make_place(placement)
