"""The checkpoint interval is advised for the place where a job runs; tests/trainers has runs that follow it."""

from __future__ import annotations

import re
import sys

import pytest

from tests.cli.conftest import Shell
from tests.tiers import long

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's /proc")

SHOW = """\
name: show
resources: {{infra: local, use_spot: true}}
checkpoint: {{stall: {stall}}}
run: echo every $BROKER_CHECKPOINT_EVERY_S
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


@long
def test_the_advised_interval_is_longer_the_more_a_checkpoint_costs(shell: Shell) -> None:
    """Only the task's `stall` differs."""
    told_s = []
    for stall in ("1s", "60s"):
        task = shell.write("task.yaml", SHOW.format(stall=stall))
        shown = shell.run("jobs", "launch", task, "--yes").stdout
        (told,) = re.findall(r"^every (\S+)$", shown, re.MULTILINE)
        told_s.append(float(told))
    cheap_s, dear_s = told_s
    assert 5 * cheap_s < dear_s < 10 * cheap_s  # the square root of the costs: Young's formula


@pytest.mark.long
def test_checkpoints_are_more_frequent_after_a_recent_preemption(shell: Shell) -> None:
    shell.run("jobs", "launch", shell.write("tell.yaml", TELL), "--yes", "--detach-run")
    shell.wait_until(lambda: (shell.find_checkpoints(1) / "told").exists(), "the program runs")
    told = shell.find_checkpoints(1) / "told"
    shell.run("local", "preempt", "tell")
    shell.wait_until(lambda: not shell.list_live_jobs(), "the job has ended")
    first_s, second_s = map(float, told.read_text().split())
    assert 1 <= second_s < 0.9 * first_s
