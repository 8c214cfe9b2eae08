"""Real hosts of two clouds without a login: a job reaches its bucket, and its outcome does even without the broker."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from broker.types import JobStatus
from tests.testbed.metadata import MetadataServer
from tests.testbed.stage import Stage, open_stage
from tests.testbed.sts import KEY, SECRET, FakeStore, serve_store
from tests.testbed.world import CONTROL

TASK = f"""\
name: bare
resources:
  use_spot: true
  ordered:
    - {{infra: aws/us-east-1/us-east-1a, instance_type: m5.large}}
    - {{infra: gcp/us-central1/us-central1-a, instance_type: e2-standard-4}}
checkpoint: {{to: s3://testbed/runs}}
run: |
  {sys.executable} -c '
  import boto3, os
  key = os.environ["BROKER_CHECKPOINT_DIR"].split("/", 3)[3]
  boto3.client("s3").put_object(Bucket="testbed", Key=key + "/from-" + os.environ["BROKER_ATTEMPT"], Body=b"1")
  '
  echo "{{\\"step\\": $BROKER_ATTEMPT}}" >> $BROKER_PROGRESS_FILE
  until [ -e stop ]; do sleep 0.1; done
"""


@pytest.fixture
def store() -> Iterator[FakeStore]:
    with serve_store(CONTROL) as served:
        yield served


@pytest.fixture
def stage(tmp_path: Path, metadata: MetadataServer, store: FakeStore) -> Iterator[Stage]:
    with open_stage(tmp_path, metadata) as stage:
        stage.environment |= {
            "AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_ENDPOINT_URL_S3": store.url,
            "AWS_ENDPOINT_URL_STS": store.url,
        }  # fmt: skip
        yield stage


def test_job_without_keys_reaches_its_bucket_from_two_clouds_and_without_its_broker(
    stage: Stage, store: FakeStore
) -> None:
    stage.run("jobs", "launch", stage.write("bare.yaml", TASK), "--yes", "-d")
    stage.wait_for_step(1)
    (on_aws,) = stage.list_living()
    expect_secret(stage, on_aws)
    stage.account.full.add(("us-east-1a", "m5.large"))
    stage.bridge.preempt(on_aws, notice_s=0)
    stage.wait_for_step(2, attempt=2)
    (on_gcp,) = stage.list_living()
    expect_secret(stage, on_gcp)
    stage.kill_daemon()
    stage.bridge.hosts[on_gcp].execute("touch", "/home/ubuntu/sky_workdir/stop")
    stage.wait_until(lambda: any(key.endswith("/outcomes/2.json") for key in store.objects), "the outcome arrives")
    stage.wait_until(lambda: any(key.endswith("/logs/2.log") for key in store.objects), "the log arrives")
    stage.bridge.hosts[on_gcp].shut_down()
    stage.wait_until(lambda: not stage.list_living(), "the machine has ended itself")
    stage.run("status")  # brings a daemon back
    assert stage.finish().status is JobStatus.SUCCEEDED, stage.describe()
    assert {key.rpartition("/")[2] for key in store.objects} >= {"from-1", "from-2"}
    assert store.used_keys and KEY not in store.used_keys, "each write was made with a session"


def expect_secret(stage: Stage, name: str) -> None:
    """Expect sessions in the program's user's own files; the user's own key is on no machine; the store has neither."""
    host = stage.bridge.hosts[name]
    assert not host.execute("sh", "-c", f"grep -rl {SECRET} /home/ubuntu /var/log /run || true").strip()
    found = host.execute("sh", "-c", "grep -rl session-secret- /home/ubuntu /var/log /run || true").split()
    assert found, "there is a session"
    for path in found:
        assert host.execute("stat", "-c", "%a %U", path) == "600 ubuntu\n", path
    assert "session-secret-" not in host.execute("sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' '\\n'")
    for path in (each for each in stage.home.rglob("*") if each.is_file()):
        assert b"session-secret-" not in path.read_bytes(), path
