"""The whole story at the command line: broker, real daemons and real ssh over fake AWS and fake Google, real hosts."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from broker.clock import SystemClock
from broker.state.store import Store
from broker.types import Job, JobStatus
from tests.cli.conftest import ROOT, Shell
from tests.testbed.bridge import Bridge
from tests.testbed.ec2 import FakeAws
from tests.testbed.ec2_account import Account
from tests.testbed.gce import FakeGce
from tests.testbed.gce_server import serve
from tests.testbed.metadata import MetadataServer
from tests.testbed.world import CONTROL

STORY_S_MAX = 150.0  # training processes import torch for many seconds on a busy machine
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
  {sys.executable} -m trainers.lm --strategy ddp --train.steps 60 --checkpoint.every_steps 50 $MORE
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

    def wait_until(self, is_so: Callable[[], bool], what: str) -> None:
        end_s = time.monotonic() + STORY_S_MAX
        while not is_so():
            assert time.monotonic() < end_s, f"it never came to this: {what}\n{self.tell()}"
            time.sleep(0.1)

    def tell(self) -> str:
        """The story so far."""
        parts = [self.run("jobs", "events", "1", code=None).stdout, self.run("jobs", "queue", code=None).stdout]
        parts += [path.read_text()[-3000:] for path in (self.home / "logs").rglob("*.log")]
        return "\n".join(parts)

    def wait_for_step(self, step: int, *, attempt: int = 1) -> None:
        """Read from the store: a command each look would take the processors that train."""
        store = Store(self.home / "state.db", clock=SystemClock())

        def is_there() -> bool:
            job = store.get_job(1)
            assert job and not job.status.is_terminal, f"it ended before step {step}\n{self.tell()}"
            return len(job.attempts) >= attempt and job.progress is not None and job.progress.step >= step

        self.wait_until(is_there, f"step {step} of attempt {attempt}")

    def finish(self) -> Job:
        """Wait for the end of job 1 and of its machines."""
        store = Store(self.home / "state.db", clock=SystemClock())
        self.wait_until(lambda: (job := store.get_job(1)) is not None and job.status.is_terminal, "the job has ended")
        self.wait_until(lambda: not self.list_living(), "its machines have ended")
        job = store.get_job(1)
        assert job
        return job


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
    refused = stage.run("autostop", "dev", "-i", "1", code=2).stderr
    assert "cannot stop themselves" in refused and "--down" in refused
    stage.run("autostop", "dev", "-i", "0", "--down")
    stage.wait_until(lambda: not stage.list_living(), "an idle cluster ends by itself")
    stage.run("down", "dev", "--yes")
    assert stage.list_living() == set()
    assert stage.read_json("status")["clusters"] == []


def test_training_moves_from_region_to_region_to_another_cloud_and_loses_no_step(stage: Stage) -> None:
    task = stage.write("train.yaml", TRAIN)
    stage.account.full.add(("us-east-1b", "m5.large"))
    stage.run("jobs", "launch", task, "--yes", "--detach-run")
    stage.wait_for_step(3)
    stage.account.full.add(("us-east-1a", "m5.large"))
    stage.bridge.preempt(min(stage.list_living()), notice_s=3)
    stage.wait_for_step(20, attempt=2)
    stage.account.full.add(("us-west-2a", "m5.large"))
    stage.bridge.preempt(max(stage.list_living()), notice_s=3)
    job = stage.finish()
    assert job.status is JobStatus.SUCCEEDED, stage.tell()
    zones = [attempt.placement.offer.zone for attempt in job.attempts]
    assert zones == ["us-east-1a", "us-west-2a", "us-central1-a"]
    events = stage.run("jobs", "events", "1").stdout
    assert events.count("preempted") == 2 and events.count("recovered: step") == 2, events
    steps = [
        int(found[1]) for found in re.finditer(r"^step (\d+)/60  loss", stage.run("jobs", "logs", "1").stdout, re.M)
    ]
    assert steps == list(range(1, 61)), "each step once: what was done is kept, and nothing is done twice"
    print(events)


def test_secret_is_seen_by_the_program_and_by_nobody_else(stage: Stage) -> None:
    task = f"""\
name: quiet
resources: {{infra: aws/us-east-1/us-east-1a, instance_type: m5.large, use_spot: true}}
secrets: {{TOKEN: null}}
setup: echo set up
run: |
  test "$(printenv TOKEN | tr a-z A-Z)" = {CANARY.upper()} && echo heard
  echo '{{"step": 1}}' >> $BROKER_PROGRESS_FILE
  until [ -e stop ]; do sleep 0.1; done
"""
    stage.environment["TOKEN"] = CANARY
    stage.run("jobs", "launch", stage.write("quiet.yaml", task), "--secret", "TOKEN", "--yes", "-d")
    stage.wait_for_step(1)
    (name,) = stage.list_living()
    host = stage.bridge.hosts[name]
    processes = host.execute("sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' '\\n'")
    assert "agent.py" in processes and CANARY not in processes
    ours = b"".join(path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline"))
    assert b"broker" in ours and CANARY.encode() not in ours
    # The program's environment is private to its user, and so is what the agent keeps to start it.
    for path in host.execute("grep", "-rl", CANARY, "/home/ubuntu", "/var/log", "/run").split():
        assert host.execute("stat", "-c", "%a %U", path) == "600 ubuntu\n", path
    assert CANARY not in repr(stage.account.calls) + repr([each.user_data for each in stage.account.instances.values()])
    for path in (each for each in stage.home.rglob("*") if each.is_file()):
        if path.parent.name == "secrets":
            assert path.stat().st_mode & 0o777 == 0o600
        else:
            assert CANARY.encode() not in path.read_bytes(), path
    host.execute("touch", "/home/ubuntu/sky_workdir/stop")
    assert stage.finish().status is JobStatus.SUCCEEDED, stage.tell()
    assert "heard" in stage.run("jobs", "logs", "1").stdout
    stage.wait_until(lambda: not list((stage.home / "secrets").glob("*")), "the secret is forgotten")
