"""Clusters that leave `slurm.yaml`, or are marked as off in it, while jobs of ours are in their queue."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from broker.clock import SystemClock
from broker.clouds.slurm.cloud import SlurmCloud
from broker.errors import AuthError, InvalidRequestError
from broker.sites.openssh import Completed
from broker.sites.slurm import SlurmCluster
from broker.types import Node, NodeState
from tests.clouds.beds import OWNER


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


def test_file_that_cannot_be_read_is_no_lasting_refusal() -> None:
    def fail() -> object:
        raise InvalidRequestError("slurm.yaml:1:1: invalid")

    cloud = SlurmCloud(fail, clock=SystemClock())  # type: ignore[arg-type]
    with pytest.raises(Exception, match="invalid") as caught:
        asyncio.run(cloud.list_nodes(OWNER))
    assert not isinstance(caught.value, InvalidRequestError)
