"""Real nodes without a login of their own: programs and agent reach the bucket through broker's grants."""

from __future__ import annotations

import asyncio
import json
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from broker.access.granting import Grants
from broker.clock import SystemClock
from broker.config import Config
from broker.jobs.outcomes import BucketOutcomes
from broker.runtime.gang import Gang
from broker.runtime.transports.local import LocalTransport
from broker.types import CheckpointSpec, Cluster, Node, RunStatus, StorageMount, Task
from tests.runtime.local_gang import Rig, make_task, wait_for
from tests.testbed.sts import KEY, SECRET, FakeStore

PLACE = "s3://testbed/runs"
ENVS = {"BROKER_CHECKPOINT_DIR": f"{PLACE}/0wner-job-1", "BROKER_ATTEMPT": "1"}
SEVERAL_LIBRARIES = f"""\
{sys.executable} - <<'END'
import boto3, os
assert not [name for name in os.environ if name.startswith("AWS_") and "KEY" in name]
boto3.client("s3").put_object(Bucket="testbed", Key="runs/0wner-job-1/by-boto3", Body=b"1")
from trainers.storage import open_storage
storage = open_storage(os.environ["BROKER_CHECKPOINT_DIR"])
assert storage.read("missing") is None
assert storage.create("by-trainers", b"2") and not storage.create("by-trainers", b"3")
try:
    boto3.client("s3").put_object(Bucket="testbed", Key="elsewhere", Body=b"1")
except Exception as error:
    print("refused:", error)
END
cat ~/data/a
"""
# A client made once, as in a program that runs for hours.
LONG = f"""\
{sys.executable} - <<'END'
import boto3, time
client = boto3.client("s3")
while True:
    client.put_object(Bucket="testbed", Key="runs/0wner-job-1/beat", Body=b"")
    try:
        client.get_object(Bucket="testbed", Key="runs/0wner-job-1/stop")
        break
    except client.exceptions.NoSuchKey:
        time.sleep(0.1)
END
"""


class AheadClock(SystemClock):
    ahead_s = 0.0

    def now_s(self) -> float:
        return super().now_s() + self.ahead_s


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path / "nodes")
    yield rig
    rig.end_all()


def grant_on(rig: Rig, config: Config, task: Task) -> AheadClock:
    """Make the rig's gang deliver access, wired as in `app/container.py`."""
    clock = AheadClock()
    grants = Grants(config, clock=clock, find_task=lambda cluster: task)
    rig.gang = Gang(LocalTransport(), clock=SystemClock(), access=grants)
    return clock


def find_access(node: Node) -> Path:
    return Path(node.handle) / "home/.broker/runs/1/access"


def read_login(node: Node) -> Any:
    return json.loads((find_access(node) / "aws.json").read_text())


def test_program_mount_outcome_and_log_reach_the_bucket_through_the_grant(
    rig: Rig, config: Config, store: FakeStore
) -> None:
    from broker.storage.mounts import add_mounts

    store.objects["testbed/data/a"] = b"content of the data\n"
    mounts = (StorageMount(target="~/data", source=("s3://testbed/data",), mode="COPY"),)
    task = make_task(SEVERAL_LIBRARIES, checkpoint=CheckpointSpec(to=PLACE), storage_mounts=mounts)
    grant_on(rig, config, task)

    async def act() -> Cluster:
        cluster = await rig.make_cluster()
        (node,) = cluster.nodes
        await rig.gang.prepare(cluster, task)
        await rig.gang.start(cluster, add_mounts(task), run_id=1, envs=ENVS, lease_s=3600)
        names = {path.name: stat.S_IMODE(path.stat().st_mode) for path in find_access(node).iterdir()}
        assert names == dict.fromkeys(("aws.json", "aws_config", "envs.json", "scope"), 0o600)
        report = await rig.finish(cluster)
        log = await rig.read_log(cluster)
        assert report.status is RunStatus.SUCCEEDED, log
        assert "refused:" in log and "AccessDenied" in log and "content of the data" in log
        await wait_for(lambda: f"testbed/runs/0wner-job-1/{'logs/1.log'}" in store.objects)
        await wait_for(lambda: not find_access(node).exists())
        return cluster

    cluster = asyncio.run(act())
    assert store.used_keys == {"ASIA1"}, "each write was made with the session, none with the user's key"
    assert {"by-boto3", "by-trainers"} <= {name.rpartition("/")[2] for name in store.objects}
    outcome = asyncio.run(BucketOutcomes().read_outcome(ENVS["BROKER_CHECKPOINT_DIR"], 1))
    assert outcome is not None and outcome.status is RunStatus.SUCCEEDED
    kept = [path for path in Path(cluster.nodes[0].handle).rglob("*") if path.is_file()]
    assert kept
    for path in kept:
        try:
            content = path.read_bytes()
        except FileNotFoundError:  # the agent replaces files meanwhile
            continue
        assert SECRET.encode() not in content and KEY.encode() not in content, f"the user's key is in {path}"
        assert b"session-secret" not in content, f"a session is left in {path}"


@pytest.mark.long
def test_renewed_grant_is_used_by_a_running_program(rig: Rig, config: Config, store: FakeStore) -> None:
    store.life_s = 560.0  # libraries request another session in the last ten minutes of one
    task = make_task(LONG, checkpoint=CheckpointSpec(to=PLACE))
    clock = grant_on(rig, config, task)

    async def act() -> None:
        cluster = await rig.make_cluster()
        (node,) = cluster.nodes
        await rig.gang.prepare(cluster, task)
        await rig.gang.start(cluster, task, run_id=1, envs=ENVS, lease_s=3600)
        await wait_for(lambda: "ASIA1" in store.used_keys)
        await rig.gang.renew_lease(cluster, lease_s=3600)
        assert read_login(node)["AccessKeyId"] == "ASIA1", "the session is still young: AWS is not called every minute"
        clock.ahead_s = 300.0
        await rig.gang.renew_lease(cluster, lease_s=3600)
        assert read_login(node)["AccessKeyId"] == "ASIA2"
        await wait_for(lambda: "ASIA2" in store.used_keys)
        store.objects["testbed/runs/0wner-job-1/stop"] = b""
        assert (await rig.finish(cluster)).status is RunStatus.SUCCEEDED

    asyncio.run(act())
