"""The ready tasks on machines as a cloud gives them: Python and nothing else, and a package index within reach.

Each host installs torch, 200 MB to fetch and 1 GB of memory, as its disk is in memory.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from broker.types import JobStatus
from tests.cli.conftest import ROOT
from tests.testbed.metadata import MetadataServer
from tests.testbed.registry import find_obstacle, serve_index
from tests.testbed.s3 import BUCKET
from tests.testbed.stage import BUCKET_LOGIN, Stage, open_stage

# Brought by broker and this machine: their Python, its packages and pip, and this working tree.
DIST_PACKAGES = Path("/usr/lib/python3/dist-packages")
BROUGHT = (ROOT, Path(sys.prefix), Path(sys.base_prefix), DIST_PACKAGES, *Path("/usr/local/lib").glob("python3*"))
BARE = """\
for name in torch numpy trainers broker pip; do
  python3 -c "import $name" 2>/dev/null && echo "has $name"
done
for name in python uv; do command -v "$name" >/dev/null && echo "has $name"; done
true
"""
# Python imports it at its start. The first node stays up to 5 s at each step until it is released, so that the
# run does not end before the new host has installed torch, however fast the machine is.
HOLD = """\
import os, sys, time
if "trainers.lm" in sys.orig_argv and os.environ.get("SKYPILOT_NODE_RANK") == "0":
    from trainers.progress import Progress
    report = Progress.report
    def report_and_stay(self, **values):
        report(self, **values)
        for _ in range(50 if values.get("loss") is not None else 0):
            if os.path.exists("released"):
                break
            time.sleep(0.1)
    Progress.report = report_and_stay
"""
# The first attempt waits for its preemption at step 40, however late it comes.
HOLD_FIRST = """\
import os, sys
if "trainers.lm" in sys.orig_argv and os.environ.get("BROKER_ATTEMPT") == "1":
    os.environ.update(HELD_AT="40", HELD_UNTIL="/never")
"""
PATIENCE_S = 900.0  # several hosts install at once, on processors that others may use


@pytest.fixture
def stage(tmp_path: Path, metadata: MetadataServer) -> Iterator[Stage]:
    if obstacle := find_obstacle():
        pytest.skip(obstacle)
    with serve_index() as url, open_stage(tmp_path, metadata, hidden=BROUGHT) as stage:
        stage.patience_s = PATIENCE_S
        stage.environment |= {"BROKER_CHECKPOINTS": f"s3://{BUCKET}/runs", "UV_DEFAULT_INDEX": url}
        yield stage


def test_server_installs_its_python_on_a_bare_machine(stage: Stage) -> None:
    """The packages come from the index that the machine's own settings name."""
    settings = f"[global]\nindex-url = {stage.environment['UV_DEFAULT_INDEX']}\n"
    stage.bridge.on_aws_host = lambda host: host.execute("sh", "-c", "cat >/etc/pip.conf", stdin=settings)
    done = stage.run("server", "up", "--infra", "aws/us-east-1", "--yes", "--login")
    assert "Logged in as admin" in done.stdout
    (name,) = stage.bridge.hosts
    expect_bare(stage, name)  # what the server needs is in its own folder
    assert stage.read_json("server", "status")["is_running"]
    assert stage.run("jobs", "queue").stdout.startswith("No managed jobs")
    stage.run("server", "down")
    assert stage.list_living() == set()


def launch(stage: Stage, template: str, model: str, *options: str) -> None:
    place = ("--infra", "aws/us-east-1/us-east-1a", "--instance-type", "m5.large")
    envs = ("--env", "UV_DEFAULT_INDEX", "--env", "AWS_REGION=us-east-1", "--env", f"MODEL={model}")
    stage.run(
        "jobs", "launch", str(ROOT / "task_templates" / template), *place, *BUCKET_LOGIN, *envs, *options, "--yes", "-d"
    )  # fmt: skip


def expect_bare(stage: Stage, name: str) -> None:
    said = stage.bridge.hosts[name].execute("sudo", "-u", "ubuntu", "sh", "-c", BARE)
    assert said == ""


def test_ddp_trains_on_bare_hosts_through_a_preemption_to_its_end(stage: Stage) -> None:
    folder = stage.folder / "work"
    (folder / "sitecustomize.py").write_text(HOLD_FIRST + (ROOT / "tests/trainers/held/sitecustomize.py").read_text())
    hold = ("--workdir", str(folder), "--env", "PYTHONPATH=/home/ubuntu/sky_workdir")
    launch(stage, "ddp.yaml", "--train.steps 60 --checkpoint.every_steps 5", *hold)
    stage.wait_for_step(1)
    first = stage.list_by_rank()
    for name in first:
        expect_bare(stage, name)  # setup installs into the agent's folder, not as a command of the host's
    stage.wait_for_step(10)
    stage.bridge.preempt(first[1], notice_s=0)
    job = stage.finish()
    assert job.status is JobStatus.SUCCEEDED, stage.describe()
    log = stage.run("jobs", "logs", "1").stdout
    assert len(job.attempts) == 2 and "step 60/60" in log, log
    installs = [line for line in log.splitlines() if "trainers: installing torch" in line]
    assert len(installs) == len(stage.bridge.hosts) > len(first), log  # once on each, the replacement included
    resumed = re.search(r"^step (\d+)/60  resumed", log, re.MULTILINE)
    assert resumed and int(resumed[1]) >= 5, log


@pytest.mark.exhaustive
def test_elastic_run_takes_in_a_bare_host_for_a_lost_one(stage: Stage) -> None:
    folder = stage.folder / "work"
    (folder / "sitecustomize.py").write_text(HOLD)
    hold = ("--workdir", str(folder), "--env", "PYTHONPATH=/home/ubuntu/sky_workdir")
    launch(stage, "elastic.yaml", "--train.batch 24 --train.steps 200 --checkpoint.every_steps 50", *hold)
    stage.wait_for_step(2)
    first = stage.list_by_rank()
    stage.bridge.preempt(first[2], notice_s=0)

    def is_taken_in() -> bool:
        log = stage.run("jobs", "logs", "1", "--no-follow", code=None).stdout
        return log.count("trainers: torch") == 4 and log.count("ranks 3") > log.count("started  ranks 3")

    stage.wait_until(is_taken_in, "the new host trains with the others")
    stage.bridge.hosts[first[0]].execute("touch", "/home/ubuntu/sky_workdir/released")
    job = stage.finish()
    assert job.status is JobStatus.SUCCEEDED and len(job.attempts) == 1, stage.describe()
