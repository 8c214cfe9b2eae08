"""A managed job on a real Slurm is preempted by a job of a higher partition, and comes back."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from broker.types import JobStatus
from tests.cli.conftest import Shell, shell
from tests.clouds.slurm.real import RealSlurm

__all__ = ["shell"]

pytestmark = pytest.mark.exhaustive
STORY_S_MAX = 900.0  # training processes import torch for many seconds on a busy machine
STEPS = 16
TASK = f"""\
name: train
num_nodes: 2
resources: {{infra: slurm/here/low, cpus: 1+, memory: 1+, use_spot: true}}
checkpoint: {{to: SHARED}}
run: |
  {sys.executable} -m trainers.lm --strategy ddp --train.steps {STEPS} --checkpoint.every_steps 4
"""


def wait_until(is_so: Callable[[], bool], describe: Callable[[], str]) -> None:
    end_s = time.monotonic() + STORY_S_MAX
    while not is_so():
        assert time.monotonic() < end_s, describe()
        time.sleep(0.2)


def launch(shell: Shell, slurm: RealSlurm, task: str) -> int:
    for name in ("SLURM_CONF", "PATH"):
        shell.environment[name] = slurm.environment[name]
    shell.environment["BROKER_OFFLINE"] = "1"
    shell.home.mkdir(exist_ok=True)
    (shell.home / "slurm.yaml").write_text("here: {usd_hour: {low: 0.1, high: 1}}\n")
    shell.run("check", "slurm")
    shell.run("jobs", "launch", shell.write("task.yaml", task), "--yes", "--detach-run")
    with shell.open_store() as store:
        return max(job.id for job in store.jobs.list())


def read_step(shell: Shell, job_id: int) -> int:
    with shell.open_store() as store:
        job = store.jobs.get(job_id)
    return job.progress.step if job and job.progress else 0


def read_losses(shell: Shell, job_id: int) -> list[tuple[int, str]]:
    log = shell.run("jobs", "logs", str(job_id)).stdout
    return [(int(found[1]), found[2]) for found in re.finditer(rf"^step (\d+)/{STEPS}  (loss \S+)", log, re.M)]


def test_job_preempted_by_a_higher_partition_comes_back_and_finishes_bit_identically(
    shell: Shell, slurm: RealSlurm, tmp_path: Path
) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    task = TASK.replace("SHARED", str(folder))

    def describe() -> str:
        events = shell.run("jobs", "events", "1").stdout
        return f"{events}\n{shell.run('jobs', 'logs', '1', code=None).stdout}\n{slurm.run('squeue', '-a', '-t', 'all')}"

    job_id = launch(shell, slurm, task)
    wait_until(lambda: read_step(shell, job_id) >= 5, describe)
    higher = slurm.submit("high", "sleep 5", "-N3", "-c4", "--mem=6000")
    wait_until(lambda: slurm.get_state(higher) in ("RUNNING", "COMPLETED"), describe)
    wait_until(lambda: shell.get_status(job_id).is_terminal, describe)
    assert shell.get_status(job_id) is JobStatus.SUCCEEDED, describe()
    events = shell.run("jobs", "events", str(job_id)).stdout
    assert "the cloud gave notice" in events, events
    assert "recovered at step" in events, events
    again = launch(shell, slurm, task)
    wait_until(lambda: shell.get_status(again).is_terminal, describe)
    cut, whole = read_losses(shell, job_id), read_losses(shell, again)
    assert [step for step, _ in whole] == list(range(1, STEPS + 1))
    assert {loss for loss in cut} == set(whole), "a repeated step comes to the same loss"
    repeated = sum(new <= old for (old, _), (new, _) in pairwise(cut))
    print(f"steps logged {len(cut)}, restarts in the log {repeated}")
    assert not slurm.run("squeue", "-h", "-t", "PENDING,CONFIGURING,RUNNING,SUSPENDED"), "no allocation is left"
    with shell.open_store() as store:
        clusters = [each.cluster for job in (job_id, again) for each in store.jobs.list_attempts(job)]
    root = Path(f"/tmp/broker-slurm-{os.getuid()}")
    left = [path for cluster in clusters for path in root.glob(f"{cluster}-*")]
    assert len(clusters) >= 3 and not left, "no file of a node is left"
