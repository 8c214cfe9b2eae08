"""`image_id: docker:...` on hosts with a real docker engine, which confirms the fake docker of the unit tests."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from broker.types import Cluster, Resources, RunStatus, Task
from tests.testbed.docker import find_obstacle, start_docker
from tests.testbed.metadata import MetadataServer
from tests.testbed.test_hosts import Bed, follow

IMAGE = "team/image:1"


@pytest.fixture
def bed(tmp_path: Path, metadata: MetadataServer, shared: Path) -> Iterator[Bed]:
    if obstacle := find_obstacle():
        pytest.skip(obstacle)
    bed = Bed(tmp_path, metadata, shared=shared)
    yield bed
    bed.cloud.end_all()


async def open_cluster(bed: Bed, shared: Path, node_count: int = 1) -> Cluster:
    cluster = await bed.make_cluster(node_count)
    await asyncio.gather(*(bed.transport.run(node, ["true"], timeout_s=300) for node in cluster.nodes))
    for node in cluster.nodes:
        if obstacle := await asyncio.to_thread(start_docker, bed.cloud.hosts[node.id], IMAGE, shared):
            pytest.skip(obstacle)
    return cluster


async def start(bed: Bed, cluster: Cluster, run: str, *, setup: str | None = None) -> None:
    wish = Resources(image_id=f"docker:{IMAGE}")
    task = Task(name="t", resources=(wish,), num_nodes=len(cluster.nodes), setup=setup, run=run)
    await bed.gang.prepare(cluster, task)
    await bed.gang.start(cluster, task, run_id=1, envs={"SAID": "it's\ntwo lines"})


async def wait_until_up(bed: Bed, cluster: Cluster) -> None:
    while "up" not in (log := (await bed.gang.read_log(cluster, 1, offset=0))[0].decode()):
        assert not (await bed.gang.poll(cluster, 1)).status.is_terminal, log
        await asyncio.sleep(0.1)


def list_processes(bed: Bed, cluster: Cluster, word: str) -> str:
    host = bed.cloud.hosts[cluster.nodes[0].id]
    return host.try_execute("pgrep", "-f", word).stdout


def test_setup_and_run_are_inside_and_outcome_and_progress_come_out(bed: Bed, shared: Path) -> None:
    run = """
        command -v python3 || echo "no python in here"
        echo "$FROM_IMAGE $SKYPILOT_NODE_RANK $(cat ~/installed) $(id -u) $SAID" | cat
        echo "$SKYPILOT_NODE_IPS" | wc -l
        echo '{"step": 7}' >> "$BROKER_PROGRESS_FILE"
        exit 3
    """

    async def act() -> None:
        cluster = await open_cluster(bed, shared, 2)
        await start(bed, cluster, run, setup="echo ready > ~/installed; command -v dockerd || echo apart")
        status, log = await follow(bed, cluster)
        assert status is RunStatus.FAILED, log
        report = await bed.gang.poll(cluster, 1)
        assert report.returncode == 3 and report.progress and report.progress.step == 7
        own = [line for line in log.splitlines() if not line.startswith("(rank1) ")]
        assert own == ["apart", "no python in here", "yes 0 ready 0 it's", "two lines", "2"], log
        assert "(rank1) yes 1 ready 0 it's" in log.splitlines()

    asyncio.run(act())


def test_notice_reaches_the_program_inside(bed: Bed, shared: Path) -> None:
    trapping = """
        trap 'test -e "$BROKER_PREEMPTION_FILE" && echo saved; exit 0' TERM
        echo up; while :; do sleep 0.05; done
    """

    async def act() -> None:
        cluster = await open_cluster(bed, shared)
        await start(bed, cluster, trapping)
        await wait_until_up(bed, cluster)
        bed.cloud.give_notice(cluster.nodes[0].id, in_s=120)
        status, log = await follow(bed, cluster)
        assert status is RunStatus.SUCCEEDED and "saved" in log.splitlines(), log

    asyncio.run(act())


def test_cancel_ends_what_the_program_left_behind_inside(bed: Bed, shared: Path) -> None:
    async def act() -> None:
        cluster = await open_cluster(bed, shared)
        await start(bed, cluster, "trap '' TERM; sleep 4711 & echo up; while :; do sleep 0.05; done")
        await wait_until_up(bed, cluster)
        assert list_processes(bed, cluster, "sleep 4711")
        await bed.gang.cancel(cluster, 1)
        assert (await follow(bed, cluster))[0] is RunStatus.CANCELLED
        assert not list_processes(bed, cluster, "sleep 4711"), "it ignored SIGTERM, and is gone with the run"

    asyncio.run(act())
