"""A managed job that continues while its nodes come and go: one attempt, whatever the number of machines."""

from __future__ import annotations

import contextlib
import json
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.cli.conftest import ROOT, Shell
from tests.tiers import long

TASK = """
name: elastic
num_nodes: 3
resources:
  infra: local
  use_spot: true
  job_recovery: {min_nodes: 2}
run: |
  trap 'echo left; exit 143' TERM
  echo "here at $SKYPILOT_NODE_RANK of $BROKER_NODES_MIN" | tee -a %s/starts
  while [ ! -e %s/end ]; do sleep 0.1; done
"""


FOLLOWER = TASK.replace("run: |", 'run: |\n  touch "$BROKER_GANG_FILE.followed"')


def count_starts(shell: Shell, rank: int) -> int:
    starts = shell.folder / "starts"
    return starts.read_text().count(f"here at {rank} of 2") if starts.exists() else 0


def list_events(shell: Shell) -> str:
    return shell.run("jobs", "events", "1").stdout


@pytest.mark.slow
@long
def test_lost_nodes_are_replaced_during_the_work_within_the_first_attempt(shell: Shell) -> None:
    """One is taken without notice, one with notice: the first node's program notices neither."""
    task = shell.write("task.yaml", TASK % (shell.folder, shell.folder))
    shell.run("jobs", "launch", task, "--yes", "--detach-run")
    shell.wait_until(lambda: all(count_starts(shell, rank) == 1 for rank in range(3)), "all three run")
    shell.run("local", "preempt", "1", "--node", "2")
    shell.wait_until(lambda: count_starts(shell, 2) == 2, "a new third node takes part")
    shell.run("local", "preempt", "1", "--node", "1", "--notice", "20")  # enough for a busy machine to tell its end
    shell.wait_until(lambda: count_starts(shell, 1) == 2, "a new second node takes part")
    assert count_starts(shell, 0) == 1
    (shell.folder / "end").touch()
    shell.wait_until(lambda: shell.get_status(1) == "SUCCEEDED", "the job is done")
    log = shell.run("jobs", "logs", "1", "--no-follow").stdout
    assert log.count("left") == 1 and [log.count(f"here at {rank} of 2") for rank in range(3)] == [1, 2, 2]
    events = list_events(shell)
    assert "node 2 gone; continuing on 2 of 3 nodes" in events and "node 1 gone; continuing on 2 of 3 nodes" in events
    assert "attempt 1" in events and "attempt 2" not in events


@pytest.mark.long
@pytest.mark.slow
def test_program_that_follows_the_head_outlives_the_first_node(shell: Shell) -> None:
    """The first node is lost twice, its replacement included: the others' programs are never touched."""

    def wait_for_starts(*counts: int) -> None:
        # Lines that the head has merged, but the daemon has not copied, are lost with the head.
        log = shell.home / "logs" / "jobs" / "1.log"

        def are_copied() -> bool:
            text = log.read_text(errors="replace") if log.exists() else ""
            return all(text.count(f"here at {rank} of 2") == count for rank, count in enumerate(counts))

        shell.wait_until(are_copied, f"{counts} starts of the three ranks are in the job's log")
        assert [count_starts(shell, rank) for rank in range(3)] == list(counts)

    task = shell.write("task.yaml", FOLLOWER % (shell.folder, shell.folder))
    shell.run("jobs", "launch", task, "--yes", "--detach-run")
    wait_for_starts(1, 1, 1)
    shell.run("local", "preempt", "1", "--node", "0")
    wait_for_starts(2, 1, 1)
    shell.run("local", "preempt", "1", "--node", "1")
    wait_for_starts(2, 2, 1)
    (shell.folder / "end").touch()
    shell.wait_until(lambda: shell.get_status(1) == "SUCCEEDED", "the job is done")
    events = list_events(shell)
    assert "node 1 now coordinates the others" in events and "node 0 now coordinates the others" in events
    assert "attempt 1" in events and "attempt 2" not in events


TRAINING = """
name: training
num_nodes: 3
resources:
  infra: local
  use_spot: true
  job_recovery: {{min_nodes: {nodes_min}}}
run: |
  export PYTHONPATH={root}/tests/torture/pace:{root} TORTURE_PACE_S=0.1
  export TORTURE_HELD_AT=30 TORTURE_HELD_UNTIL={folder}/go
  {python} -m trainers.lm --strategy allreduce --model.depth 1 --model.width 16 --model.heads 2 --model.context 16 \\
    --model.dropout 0 --train.batch 6 --train.micro_batch 2 --train.steps {steps} --checkpoint.every_steps 0 \\
    --log.metrics {folder}/metrics.jsonl
"""
STEPS = 60


def list_steps(shell: Shell) -> list[int]:
    """List the steps that were reported, in the order of the reports."""
    path = shell.folder / "metrics.jsonl"
    steps = []
    for line in path.read_text().splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):  # the last line may be half written
            report = json.loads(line)
            if report.get("loss") is not None:
                steps.append(report["step"])
    return steps


def find_ranks(shell: Shell) -> dict[int, int]:
    """Find the process that trains on each node, by the node's rank."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            pairs = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
            environment = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
            is_ours = environment.get("BROKER_GANG_FILE", "").startswith(str(shell.folder))
            if is_ours and "BROKER_ELASTIC_AT" in environment:
                found[int(environment["SKYPILOT_NODE_RANK"])] = int(entry.name)
    return found


@pytest.mark.long
@pytest.mark.parametrize("nodes_min", [1, 2])
def test_training_outlives_its_first_node_and_repeats_at_most_the_step_under_way(shell: Shell, nodes_min: int) -> None:
    """If one node may continue alone, broker names the next leader; if two are needed, they agree by majority."""
    text = TRAINING.format(nodes_min=nodes_min, root=ROOT, python=sys.executable, steps=STEPS, folder=shell.folder)
    shell.run("jobs", "launch", shell.write("task.yaml", text), "--yes", "--detach-run")
    shell.wait_until(lambda: len(list_steps(shell)) > 5, "it trains")
    before = find_ranks(shell)
    shell.run("local", "preempt", "1", "--node", "0")
    (shell.folder / "go").touch()
    reported = len(list_steps(shell))
    shell.wait_until(lambda: len(list_steps(shell)) > reported + 2, "the others train on")
    survivors = {rank: before[rank] for rank in (1, 2)}
    # A process that re-executes itself has no environment for a moment.
    shell.wait_until(lambda: survivors.items() <= find_ranks(shell).items(), "the same processes")
    shell.wait_until(lambda: shell.get_status(1) == "SUCCEEDED", "the job is done")
    assert "attempt 2" not in list_events(shell)
    counts = Counter(list_steps(shell))
    assert max(counts) == STEPS and sum(counts.values()) <= STEPS + 1
    assert len(set(range(1, STEPS + 1)) - set(counts)) <= 1, "a step whose loss the lost node could no longer report"
