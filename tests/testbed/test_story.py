"""The whole story at the command line: broker, real daemons and real ssh over fake AWS and fake Google, real hosts."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from broker.clock import SystemClock
from tests.cli.conftest import ROOT, Shell
from tests.testbed.bridge import Bridge
from tests.testbed.ec2 import FakeAws
from tests.testbed.ec2_account import Account
from tests.testbed.gce import FakeGce
from tests.testbed.gce_server import serve
from tests.testbed.metadata import MetadataServer
from tests.testbed.world import CONTROL

CANARY = "canary-of-the-task-4711"
PLACES = """\
  ordered:
    - {infra: aws/us-east-1/us-east-1a, instance_type: m5.large}
    - {infra: aws/us-east-1/us-east-1b, instance_type: m5.large}
    - {infra: aws/us-west-2/us-west-2a, instance_type: m5.large}
    - {infra: gcp/us-central1/us-central1-a, instance_type: e2-standard-4}
"""
HELLO = f"""\
name: hello
num_nodes: 2
resources:
  use_spot: true
{PLACES}
run: echo "hello from $(hostname) at $(date +%s.%N)"
"""
TRAIN = f"""\
name: train
num_nodes: 2
workdir: work
resources:
  use_spot: true
{PLACES}
secrets:
  WANDB_API_KEY: {CANARY}
run: |
  {sys.executable} -m trainers.lm --strategy ddp --train.steps 60 --checkpoint.every_steps 10 $MORE
envs:
  MORE: ""
"""


class Stage(Shell):
    """A user's terminal in front of two clouds."""

    def __init__(self, folder: Path, metadata: MetadataServer) -> None:
        super().__init__(folder)
        checkpoints = self.home / "checkpoints"
        checkpoints.mkdir(parents=True)
        checkpoints.chmod(0o777)  # as a bucket: whoever has the key may write
        (self.home / "aws.toml").write_text(f'ssh_from = ["{CONTROL}/32"]\n')
        self.account = Account(clock=SystemClock(), boot_s=0.0, shutdown_s=0.1, list_lag_s=0.0)
        self.aws = FakeAws(self.account)
        self.gce = FakeGce()
        self.bridge = Bridge(folder / "hosts", metadata, aws=self.aws, gce=self.gce, shared=[checkpoints])
        (folder / "work").mkdir()
        shutil.copytree(ROOT / "trainers", folder / "work" / "trainers")
        self.environment |= {**self.aws.environment, "GOOGLE_CLOUD_PROJECT": self.gce.project}

    def list_living(self) -> set[str]:
        return {name for name, host in self.bridge.hosts.items() if host.is_alive}

    def wait_for_step(self, step: int, *, attempt: int = 1) -> None:
        def is_there() -> bool:
            job = self.read_json("jobs", "queue")[0]
            assert not job["status"].startswith("FAILED"), self.run("jobs", "events", "1").stdout
            progress = job["progress"]
            return len(job["attempts"]) >= attempt and progress is not None and progress["step"] >= step

        self.wait_until(is_there, f"step {step} of attempt {attempt}")


@pytest.fixture
def stage(tmp_path: Path, metadata: MetadataServer) -> Iterator[Stage]:
    stage = Stage(tmp_path, metadata)
    try:
        with serve(stage.gce) as url:
            stage.environment["BROKER_GCP_ENDPOINT"] = url
            yield stage
            for pid in stage.find_processes("broker daemon"):
                os.kill(pid, signal.SIGTERM)
    finally:
        stage.bridge.end_all()
        stage.aws.close()


def test_launch_runs_a_gang_on_spot_machines_and_down_leaves_nothing(stage: Stage) -> None:
    start_s = time.time()
    done = stage.run("launch", stage.write("hello.yaml", HELLO), "-c", "dev", "--yes")
    print(done.stdout, done.stderr, f"launched and run in {time.time() - start_s:.2f} s")
    names = sorted(each.id for each in stage.account.instances.values())
    hellos = [line for line in done.stdout.splitlines() if "hello from" in line]
    assert sorted(line.split("hello from ")[1].split()[0] for line in hellos) == names
    assert {each.is_spot for each in stage.account.instances.values()} == {True}
    assert stage.run("ssh", "dev-1", "--", "hostname").stdout.strip() in names
    stage.run("down", "dev", "--yes")
    assert stage.list_living() == set()
    assert stage.read_json("status")["clusters"] == []
