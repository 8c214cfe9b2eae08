"""The checkpoint interval is advised for the place where a job runs, and the bundled trainer follows it."""

from __future__ import annotations

import sys

import pytest

from tests.cli.conftest import Shell

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's /proc")

# Steps of a few milliseconds; every checkpoint is kept, so that they can be counted.
TRAIN = """\
name: train
resources: {{infra: local, use_spot: true}}
checkpoint: {{stall: {stall}}}
run: |
  python -m trainers.lm --model.depth 1 --model.width 16 --model.heads 2 --model.context 16 --train.batch 2 \\
    --train.steps 600 --checkpoint.keep 1000
"""
TELL = """\
name: tell
resources: {infra: local, use_spot: true}
checkpoint: {stall: 5s}
run: |
  mkdir -p $BROKER_CHECKPOINT_DIR
  echo $BROKER_CHECKPOINT_EVERY_S >> $BROKER_CHECKPOINT_DIR/told
  [ $BROKER_ATTEMPT != 1 ] || sleep 1000
"""


def count_saves(shell: Shell, job_id: int) -> int:
    return len(list(shell.find_checkpoints(job_id).glob("step*")))


def test_the_trainer_saves_at_the_interval_for_the_stated_checkpoint_cost(shell: Shell) -> None:
    """The more a checkpoint costs, the longer the advised interval: only the task's `stall` differs."""
    for job_id, stall in enumerate(("0s", "60s"), start=1):
        shell.run("jobs", "launch", shell.write(f"{job_id}.yaml", TRAIN.format(stall=stall)), "--yes")
        assert shell.read_json("jobs", "queue")[0]["status"] == "SUCCEEDED"
    cheap, dear = count_saves(shell, 1), count_saves(shell, 2)
    assert dear == 3  # the two that measure the duration of a save, and the last
    assert cheap > dear


def test_a_place_that_has_just_preempted_the_job_is_saved_at_more_often(shell: Shell) -> None:
    shell.run("jobs", "launch", shell.write("tell.yaml", TELL), "--yes", "--detach-run")
    shell.wait_until(lambda: (shell.find_checkpoints(1) / "told").exists(), "the program runs")
    told = shell.find_checkpoints(1) / "told"
    shell.run("local", "preempt", "tell")
    shell.wait_until(lambda: not shell.list_live_jobs(), "the job has ended")
    first_s, second_s = map(float, told.read_text().split())
    assert 1 <= second_s < 0.9 * first_s
