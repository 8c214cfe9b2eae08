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

# What broker and this machine bring: their Python, its packages and pip, and this working tree.
DIST_PACKAGES = Path("/usr/lib/python3/dist-packages")
BROUGHT = (ROOT, Path(sys.prefix), Path(sys.base_prefix), DIST_PACKAGES, *Path("/usr/local/lib").glob("python3*"))
BARE = """\
for name in torch numpy trainers broker pip; do
  python3 -c "import $name" 2>/dev/null && echo "has $name"
done
for name in python uv; do command -v "$name" >/dev/null && echo "has $name"; done
true
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


def launch(stage: Stage, template: str, model: str) -> None:
    place = ("--infra", "aws/us-east-1/us-east-1a", "--instance-type", "m5.large")
    envs = ("--env", "UV_DEFAULT_INDEX", "--env", "AWS_REGION=us-east-1", "--env", f"MODEL={model}")
    stage.run(
        "jobs", "launch", str(ROOT / "task_templates" / template), *place, *BUCKET_LOGIN, *envs, "--yes", "-d"
    )  # fmt: skip


def expect_bare(stage: Stage, name: str) -> None:
    said = stage.bridge.hosts[name].execute("sudo", "-u", "ubuntu", "sh", "-c", BARE)
    assert said == ""


def test_ddp_trains_on_bare_hosts_through_a_preemption_to_its_end(stage: Stage) -> None:
    launch(stage, "ddp.yaml", "--train.steps 60 --checkpoint.every_steps 5")
    stage.wait_for_step(1)
    first = stage.list_by_rank()
    for name in first:
        expect_bare(stage, name)  # what setup installed is in the agent's folder, and no command of the host's
    stage.wait_for_step(10)
    stage.bridge.preempt(first[1], notice_s=0)
    job = stage.finish()
    assert job.status is JobStatus.SUCCEEDED, stage.tell()
    log = stage.run("jobs", "logs", "1").stdout
    assert len(job.attempts) == 2 and "step 60/60" in log, log
    installs = [line for line in log.splitlines() if "trainers: installing torch" in line]
    assert len(installs) == len(stage.bridge.hosts) > len(first), log  # once on each, the replacement included
    resumed = re.search(r"^step (\d+)/60  resumed", log, re.MULTILINE)
    assert resumed and int(resumed[1]) >= 5, log


def test_elastic_run_takes_in_a_bare_host_for_a_lost_one(stage: Stage) -> None:
    launch(stage, "elastic.yaml", "--train.batch 24 --train.steps 1500 --checkpoint.every_steps 200")
    stage.wait_for_step(5)
    first = stage.list_by_rank()
    stage.bridge.preempt(first[2], notice_s=0)

    def is_taken_in() -> bool:
        log = stage.run("jobs", "logs", "1", "--no-follow", code=None).stdout
        return log.count("trainers: torch") == 4 and log.count("ranks 3") > log.count("started  ranks 3")

    stage.wait_until(is_taken_in, "the new host trains with the others")
    job = stage.finish()
    assert job.status is JobStatus.SUCCEEDED and len(job.attempts) == 1, stage.tell()
