"""A managed job that continues while its nodes come and go: one attempt, whatever the number of machines."""

from __future__ import annotations

import pytest

from tests.cli.conftest import Shell

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


def count_starts(shell: Shell, rank: int) -> int:
    starts = shell.folder / "starts"
    return starts.read_text().count(f"here at {rank} of 2") if starts.exists() else 0


def list_events(shell: Shell) -> str:
    return shell.run("jobs", "events", "1").stdout


@pytest.mark.slow
def test_lost_nodes_are_replaced_during_the_work_within_the_first_attempt(shell: Shell) -> None:
    """One is taken without notice, one with notice: the first node's program never hears of either."""
    task = shell.write("task.yaml", TASK % (shell.folder, shell.folder))
    shell.run("jobs", "launch", task, "--yes", "--detach-run")
    shell.wait_until(lambda: all(count_starts(shell, rank) == 1 for rank in range(3)), "all three run")
    shell.run("local", "preempt", "1", "--node", "2")
    shell.wait_until(lambda: count_starts(shell, 2) == 2, "a new third node takes part")
    shell.run("local", "preempt", "1", "--node", "1", "--notice", "2")
    shell.wait_until(lambda: count_starts(shell, 1) == 2, "a new second node takes part")
    assert count_starts(shell, 0) == 1
    (shell.folder / "end").touch()
    shell.wait_until(lambda: shell.get_status(1) == "SUCCEEDED", "the job is done")
    log = shell.run("jobs", "logs", "1", "--no-follow").stdout
    assert log.count("left") == 1 and [log.count(f"here at {rank} of 2") for rank in range(3)] == [1, 2, 2]
    events = list_events(shell)
    assert "node 2 gone; continuing on 2 of 3 nodes" in events and "node 1 gone; continuing on 2 of 3 nodes" in events
    assert "attempt 1" in events and "attempt 2" not in events
