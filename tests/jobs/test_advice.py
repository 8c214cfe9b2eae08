"""A cloud's advice is part of the job's story, once per node, and changes nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from broker.types import Cluster, JobStatus
from tests.simulation.test_crashes import check, run_to_end
from tests.simulation.world import Report, SimulatedGang, World


class AdvisedGang(SimulatedGang):
    """A gang that reports on every poll that node 1 is expected to go."""

    async def poll(self, cluster: Cluster, run_id: int) -> Report:
        return replace(await super().poll(cluster, run_id), advised=(1,))


def test_advice_is_sent_once_per_node(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.gang = AdvisedGang(world.cloud, world.clock, exit_codes=())
    run_to_end(world, "none")
    check(world, JobStatus.SUCCEEDED)
    told = [event.message for event in world.store.events.list(job_id=world.job_id) if event.kind == "advised"]
    assert told == ["the cloud reports an elevated preemption risk for node 1"]
    assert len(world.get_job().attempts) == 1
