"""Real nodes whose broker is away: they leave outcome and log in a real bucket, and end themselves."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from broker.agent import agent
from broker.jobs.outcomes import BucketOutcomes
from broker.types import Node, NodeState, RunStatus, Secret
from tests.testbed.s3 import BUCKET, S3Server, serve_s3
from tests.tiers import long

sys.path.insert(0, str(Path(__file__).parent))
from local_gang import Rig, make_task, wait_for

PLACE = f"s3://{BUCKET}/runs/me-job-1"
ENVS = {"BROKER_CHECKPOINT_DIR": PLACE, "BROKER_ATTEMPT": "1"}


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with serve_s3() as server:
        yield server


def forget_the_broker(node: Node) -> None:
    """Move the node's last contact further back than it waits."""
    files = agent.files
    heard = {"at_s": files.read_uptime_s() - files.QUIET_S, "boot": files.read_boot()}
    files.write_json(Path(node.handle) / "home/.broker/heard.json", heard)


def read_json(node: Node, name: str) -> Any:
    path = Path(node.handle) / "home/.broker/runs/1" / name
    return json.loads(path.read_text()) if path.exists() else {}


def test_nodes_are_done_when_all_is_in_the_bucket(
    rig: Rig, server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said = tmp_path / "said"
    for name, value in server.variables.items():
        monkeypatch.setenv(name, value)

    async def act() -> None:
        cluster = await rig.make_cluster(2)
        secrets = {name: Secret(value=value) for name, value in server.variables.items()}
        # The failure of one node ends the other, so it waits until the other has printed its line.
        run = (
            'echo "hello from $SKYPILOT_NODE_RANK"\n'
            f"[ $SKYPILOT_NODE_RANK = 1 ] || {{ touch {said}; exit 0; }}\n"
            f"until [ -e {said} ]; do sleep 0.02; done\n"
            "exit 3"
        )
        task = make_task(run, num_nodes=2, secrets=secrets)
        await rig.gang.prepare(cluster, task)
        await rig.gang.start(cluster, task, run_id=1, envs=ENVS, lease_s=3600)
        report = await rig.finish(cluster)
        assert (report.status, report.returncode) == (RunStatus.FAILED, 3)
        head, other = cluster.nodes
        await wait_for(lambda: read_json(head, "delivery.json").get("log"))
        for node in (other, head):
            assert (await rig.state_of(node)).state is NodeState.RUNNING, "its broker may come back"
            forget_the_broker(node)
            assert (await rig.wait_state(node, NodeState.TERMINATED)).reason == "done"
        outcome = await BucketOutcomes().read_outcome(PLACE, 1)
        assert outcome is not None and (outcome.status, outcome.returncode) == (RunStatus.FAILED, 3)
        assert outcome.lease_left_s is not None and 0 < outcome.lease_left_s <= 3600
        log = await BucketOutcomes().read_log(PLACE, 1)
        assert log is not None and b"hello from 0" in log and b"(rank1) hello from 1" in log

    asyncio.run(act())


@long
def test_head_whose_bucket_refuses_stays_and_tries_again(rig: Rig) -> None:
    async def act() -> None:
        cluster = await rig.make_cluster()
        (node,) = cluster.nodes
        nowhere = {"AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s"}
        task = make_task("true", secrets={name: Secret(value=value) for name, value in nowhere.items()})
        await rig.gang.prepare(cluster, task)
        await rig.gang.start(cluster, task, run_id=1, envs=ENVS, lease_s=3600)
        await wait_for(lambda: read_json(node, "delivery.json").get("error"))
        forget_the_broker(node)
        first = (Path(node.handle) / "home/.broker/runs/1/delivery.json").stat().st_mtime_ns
        await wait_for(lambda: (Path(node.handle) / "home/.broker/runs/1/delivery.json").stat().st_mtime_ns > first)
        assert (await rig.state_of(node)).state is NodeState.RUNNING
        assert not read_json(node, "delivery.json").get("outcome")

    asyncio.run(act())
