"""Slurm fulfils the contract of all clouds: on a real slurmctld with three slurmd."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from broker.clock import SystemClock
from broker.clouds.base import Cloud
from broker.clouds.slurm.cloud import SlurmCloud, read_handle
from broker.clouds.slurm.commands import run_command
from broker.errors import TransientError
from broker.sites.facts import Machine
from broker.sites.openssh import Completed
from broker.sites.slurm import Partition, SlurmCluster
from broker.types import Node, Offer
from tests.clouds.contract import Bed, CloudContract, make_request
from tests.clouds.slurm.real import GRACE_S, RealSlurm

pytestmark = pytest.mark.long
MACHINE = Machine(vcpus=1, memory_gib=0.5)


class SlurmBed(Bed):
    look_s = 0.5

    def __init__(self, slurm: RealSlurm) -> None:
        self.slurm = slurm
        self.clock = SystemClock()
        self.is_answer_lost = False
        self.older = set(slurm.run("squeue", "-h", "-a", "-t", "all", "-o", "%i").split())
        self.cloud = self.make_cloud()
        self.offer = Offer(
            cloud="slurm", region="here", zone="low", instance_type=MACHINE.name, vcpus=1, memory_gib=0.5,
            ondemand_usd_hour=0.1, spot_usd_hour=0.03,
        )  # fmt: skip

    def make_cloud(self) -> SlurmCloud:
        partition = Partition(name="low", machine=MACHINE, node_count=3, is_preemptible=True, grace_s=GRACE_S)
        files = {"here": SlurmCluster(name="here")}, {"here": [partition]}
        return SlurmCloud(lambda: files, clock=self.clock, run=self.run_here)

    def reopen(self) -> Cloud:
        return self.make_cloud()

    async def run_here(self, cluster: SlurmCluster, argv: Sequence[str], stdin: bytes) -> Completed:
        done = await run_command(cluster, argv, stdin)
        if self.is_answer_lost and argv[0] == "sbatch" and "--test-only" not in argv:
            self.is_answer_lost = False
            raise TransientError("`sbatch` did not answer")
        if "squeue" in argv:  # the jobs of earlier tests have the same owner
            lines = done.stdout.decode().splitlines(keepends=True)
            new = "".join(line for line in lines if line.partition("|")[0] not in self.older)
            return replace(done, stdout=new.encode())
        return done

    def fill(self) -> None:
        self.slurm.run("scontrol", "update", "PartitionName=low", "State=DRAIN")

    def lose_next_answer(self) -> None:
        self.is_answer_lost = True

    async def end_from_inside(self, node: Node) -> None:
        state = Path(f"/tmp/broker-slurm-{os.getuid()}/{node.id}/home/.broker")
        while not state.is_dir():  # Slurm lists a job as running before its tasks have started
            await self.clock.sleep(0.1)
        (state / "shutdown").write_text("lease")


@pytest.fixture
def bed(slurm: RealSlurm, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmBed]:
    for name in ("SLURM_CONF", "PATH"):
        monkeypatch.setenv(name, slurm.environment[name])
    yield SlurmBed(slurm)
    slurm.run("scontrol", "update", "PartitionName=low", "State=UP")
    slurm.cancel_all()


class TestSlurm(CloudContract):
    pass


def test_other_jobs_of_the_user_do_not_disturb_the_list(bed: SlurmBed) -> None:
    """Arrays, heterogeneous jobs and comments of several lines are in `squeue --me`, too."""
    common = ("--parsable", "--partition=low", "--output=/dev/null", "--mem=100M")
    bed.slurm.run("sbatch", *common, "--array=0-3%1", "--comment=two\nlines | more", "--wrap=sleep 60")
    bed.slurm.run("sbatch", *common, "--hold", ":", "--mem=100M", "--partition=low", "--wrap=sleep 60")
    listed = bed.slurm.run("squeue", "-h", "-a", "-t", "all", "-o", "%i")
    assert "_" in listed and "+" in listed

    async def act() -> None:
        request = make_request(bed, node_count=2)
        created = await bed.cloud.create_nodes(request)
        assert [node.id for node in await bed.cloud.list_nodes(request.owner)] == [node.id for node in created]
        await bed.cloud.terminate_nodes(created)

    asyncio.run(act())


def test_a_job_of_the_user_that_has_the_number_of_an_earlier_node_is_not_cancelled(bed: SlurmBed) -> None:
    """A controller that has lost its state counts from 1 again."""
    other = bed.slurm.run(
        "sbatch", "--parsable", "--partition=low", "--output=/dev/null", "--mem=100M", "--wrap=sleep 600"
    ).strip()

    async def act() -> None:
        (node,) = await bed.cloud.create_nodes(make_request(bed))
        region, job_id = read_handle(node)
        await bed.cloud.terminate_nodes([replace(node, handle=f"slurm://{region}/{other}//{node.id}")])
        states = bed.slurm.run("squeue", "-h", "-t", "all", "-j", f"{other},{job_id}", "-o", "%T").split()
        assert set(states) <= {"PENDING", "CONFIGURING", "RUNNING"} and len(states) == 2
        await bed.cloud.terminate_nodes([node])

    asyncio.run(act())
