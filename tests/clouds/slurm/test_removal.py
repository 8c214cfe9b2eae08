"""Clusters that leave `slurm.yaml`, or are marked as off in it, while jobs of ours are in their queue."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest

from broker.clock import SystemClock
from broker.clouds.slurm.cloud import SlurmCloud
from broker.clouds.slurm.script import make_comment
from broker.errors import AuthError, InvalidRequestError, TransientError, UnknownOutcomeError
from broker.sites.facts import Machine
from broker.sites.openssh import Completed
from broker.sites.slurm import Partition, SlurmCluster
from broker.types import Node, NodeState
from tests.clouds.beds import OWNER, make_request


def make_node(region: str) -> Node:
    return Node(
        id=f"train-1-{region}-0", cloud="slurm", owner=OWNER, cluster="train", attempt=1, rank=0, region=region,
        token="t", state=NodeState.RUNNING, handle=f"slurm://{region}/7/host/train-1-{region}-0",
    )  # fmt: skip


class Queue:
    """Clusters whose every command succeeds without output; `commands` are those that were run, with their cluster."""

    def __init__(self, *clusters: SlurmCluster) -> None:
        self.commands: list[tuple[str, str]] = []
        files = {cluster.name: cluster for cluster in clusters}, dict[str, Sequence[object]]()
        self.cloud = SlurmCloud(lambda: files, clock=SystemClock(), run=self._run)  # type: ignore[arg-type,return-value]

    async def _run(self, cluster: SlurmCluster, argv: Sequence[str], stdin: bytes) -> Completed:
        self.commands.append((cluster.name, argv[0]))
        return Completed(returncode=0, stdout=b"", stderr=b"")


def test_jobs_of_a_removed_cluster_do_not_count_as_ended_and_the_others_are_ended() -> None:
    queue = Queue(SlurmCluster(name="here"))
    with pytest.raises(AuthError) as caught:
        asyncio.run(queue.cloud.terminate_nodes([make_node("there"), make_node("here")]))
    assert "cluster `there` is no longer in `slurm.yaml`" in caught.value.message
    assert "add `there` to `slurm.yaml` again" in caught.value.hints[0]
    assert queue.commands and set(queue.commands) == {("here", "scancel")}
    assert isinstance(queue.cloud.find_removal("there"), AuthError)
    assert queue.cloud.find_removal("here") is None


def test_jobs_of_a_cluster_that_is_off_count_as_ended() -> None:
    queue = Queue(SlurmCluster(name="there", is_off=True))
    asyncio.run(queue.cloud.terminate_nodes([make_node("there")]))
    assert queue.cloud.find_removal("there", make_node("there")) is None
    assert not asyncio.run(queue.cloud.list_nodes(OWNER)).unseen
    assert not queue.commands, "it is not called"


def test_submitted_job_that_cannot_be_queried_is_no_refusal() -> None:
    """The login to the login node may be refused at that moment: after a refusal, no one would look for the job."""
    machine = Machine(vcpus=1, memory_gib=1)
    offer = machine.make_offer("slurm", "here", zone="low", ondemand_usd_hour=0.1)
    bed = SimpleNamespace(offer=replace(offer, spot_usd_hour=0.1))
    request = make_request(bed)  # type: ignore[arg-type]
    comment = json.dumps(make_comment(request, now_s=0.0))
    commands: list[str] = []

    async def run(cluster: SlurmCluster, argv: Sequence[str], stdin: bytes) -> Completed:
        program = "squeue" if "squeue" in argv else argv[0]
        if "node" in argv:
            raise AuthError("Permission denied (publickey)")
        line = f"7|RUNNING|None|1|n0|0|0|low|{comment}" if program == "squeue" and "sbatch" in commands else ""
        commands.append(program)
        return Completed(returncode=0, stdout=line.encode(), stderr=b"")

    files = {"here": SlurmCluster(name="here")}, {"here": [Partition(name="low", machine=machine, node_count=1)]}
    cloud = SlurmCloud(lambda: files, clock=SystemClock(), run=run)
    with pytest.raises(UnknownOutcomeError):
        asyncio.run(cloud.create_nodes(request))
    assert "sbatch" in commands


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        (["slurm_load_jobs error: Socket timed out on send/recv operation", 72], "done"),
        (["slurm_load_jobs error: Invalid job id specified"], "crashed"),
    ],
)
def test_end_is_not_judged_without_an_answer(answers: list[str | int], reason: str) -> None:
    """A busy slurmctld times out now and then; a job that it has forgotten has no exit code any more."""
    machine = Machine(vcpus=1, memory_gib=1)
    bed = SimpleNamespace(offer=replace(machine.make_offer("slurm", "here", zone="low", ondemand_usd_hour=0.1)))
    comment = json.dumps(make_comment(make_request(bed), now_s=0.0))  # type: ignore[arg-type]
    left = list(answers)

    async def run(cluster: SlurmCluster, argv: Sequence[str], stdin: bytes) -> Completed:
        if argv[0] != "scontrol":
            line = f"7|FAILED|NonZeroExitCode|1|n0|10|20|low|{comment}"
            return Completed(returncode=0, stdout=line.encode(), stderr=b"")
        answer = left.pop(0)
        if isinstance(answer, int):
            return Completed(returncode=0, stdout=f"JobId=7 ExitCode={answer}:0".encode(), stderr=b"")
        return Completed(returncode=1, stdout=b"", stderr=answer.encode())

    files = {"here": SlurmCluster(name="here")}, dict[str, Sequence[Partition]]()
    cloud = SlurmCloud(lambda: files, clock=SystemClock(), run=run)
    for _ in answers[1:]:
        with pytest.raises(TransientError, match="timed out"):
            asyncio.run(cloud.list_nodes(OWNER))
    for _ in range(2):
        (node,) = asyncio.run(cloud.list_nodes(OWNER))
        assert (node.state, node.reason) == (NodeState.TERMINATED, reason)


def test_file_that_cannot_be_read_is_no_lasting_refusal() -> None:
    def fail() -> object:
        raise InvalidRequestError("slurm.yaml:1:1: invalid")

    cloud = SlurmCloud(fail, clock=SystemClock())  # type: ignore[arg-type]
    with pytest.raises(Exception, match="invalid") as caught:
        asyncio.run(cloud.list_nodes(OWNER))
    assert not isinstance(caught.value, InvalidRequestError)
