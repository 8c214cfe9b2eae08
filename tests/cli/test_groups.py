"""A job group on this machine: real daemon, nodes and programs."""

from __future__ import annotations

import re
import sys

import pytest

from broker.types import Attempt, JobStatus, OutcomeKind
from tests.cli.conftest import ROOT, Shell
from tests.cli.test_server import Served, terminal
from tests.tiers import long

__all__ = ["terminal"]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's /proc")

GROUP = """
name: pair
execution: parallel
primary_tasks: [head]
---
name: head
resources: {{infra: local}}
run: |
  echo "I know $BROKER_GROUP_TAIL_IPS, in $SKYPILOT_JOBGROUP_NAME"
  while [ ! -e {end} ]; do sleep 0.1; done
  exit {code}
---
name: tail
resources: {{infra: local}}
setup: sleep 1; date +%s.%N > {folder}/ready
run: |
  trap 'echo bye; exit 0' TERM
  echo "port $BROKER_GROUP_HEAD_PORT"
  while true; do sleep 0.1; done
"""


def launch_pair(shell: Shell, code: int = 0) -> None:
    text = GROUP.format(end=shell.folder / "end", folder=shell.folder, code=code)
    shell.run("jobs", "launch", shell.write("pair.yaml", text), "--yes", "--detach-run")
    shell.wait_until(lambda: shell.get_status(1) == shell.get_status(2) == JobStatus.RUNNING, "both run")


def list_attempts(shell: Shell, job_id: int) -> list[Attempt]:
    with shell.open_store() as store:
        return list(store.jobs.list_attempts(job_id))


def read_step(shell: Shell) -> int:
    with shell.open_store() as store:
        job = store.jobs.get(1)
    return job.progress.step if job and job.progress else 0


@pytest.mark.long
def test_a_learner_outlives_its_workers_and_they_find_it_after_its_own_preemption(shell: Shell) -> None:
    """Kill the daemon, then preempt one worker's node, then the learner: the group ends as if nothing had happened."""
    template = str(ROOT / "task_templates" / "rl-group.yaml")
    envs = ["--env", "STEPS=100000"]  # it is cancelled
    shell.run("jobs", "launch", template, *envs, "--yes", "--detach-run")
    shell.wait_until(lambda: read_step(shell) >= 3, "the learner works")
    shell.kill_daemon()
    shell.run("jobs", "queue")  # starts another one
    shell.run("local", "preempt", "2", "--node", "1")
    shell.wait_until(lambda: len(list_attempts(shell, 2)) == 2, "the workers have a second attempt")
    shell.wait_until(lambda: bool(list_attempts(shell, 2)[1].released_s), "and play")
    assert len(list_attempts(shell, 1)) == 1, "the learner was not touched"
    before = read_step(shell)
    shell.wait_until(lambda: read_step(shell) > before + 5, "the learner continues")
    shell.run("local", "preempt", "1")
    shell.wait_until(lambda: len(list_attempts(shell, 1)) == 2, "the learner has a second attempt")
    reached = read_step(shell)
    shell.wait_until(lambda: read_step(shell) > reached + 5, "the workers have found it")
    assert len(list_attempts(shell, 2)) == 2, "the workers were not touched"
    shell.run("jobs", "cancel", "rl-group")
    shell.wait_until(lambda: not shell.list_live_jobs(), "the group has ended")
    first, second = list_attempts(shell, 1)
    assert first.outcome is not None and first.outcome.kind is OutcomeKind.PREEMPTED
    assert first.generation == second.generation == 1


@pytest.mark.long
def test_no_program_starts_before_all_tasks_are_set_up_and_the_others_end_after_the_primary_one(shell: Shell) -> None:
    launch_pair(shell)
    ready_s = float((shell.folder / "ready").read_text())
    assert all(list_attempts(shell, job_id)[0].released_s > ready_s for job_id in (1, 2))  # type: ignore[operator]
    (shell.folder / "end").touch()
    shell.wait_until(lambda: not shell.list_live_jobs(), "the group has ended")
    assert shell.get_status(1) == shell.get_status(2) == JobStatus.SUCCEEDED
    log = shell.run("jobs", "logs", "pair").stdout
    assert (
        "(head) I know 127.0.0." in log
        and ", in pair" in log
        and re.search(r"\(tail\) port \d+", log)
        and "(tail) bye" in log
    )
    why = shell.run("jobs", "why", "pair").stdout
    assert "It is an auxiliary task of group pair-" in why
    assert "group pair: placing in local" in why and "all tasks of group pair are up" in why
    events = shell.read_json("jobs", "events", "pair")
    assert {each["task"] for each in events} == {"head", "tail"}


@long
def test_the_failure_of_a_primary_task_ends_the_group(shell: Shell) -> None:
    launch_pair(shell, code=3)
    (shell.folder / "end").touch()
    shell.wait_until(lambda: not shell.list_live_jobs(), "the group has ended")
    assert (shell.get_status(1), shell.get_status(2)) == (JobStatus.FAILED, JobStatus.CANCELLED)
    with shell.open_store() as store:
        tail = store.jobs.get(2)
    assert tail is not None and tail.failure == "its group failed: job 1 (head) is FAILED"


RETRIED = """
name: again
execution: parallel
primary_tasks: [head]
---
name: head
resources: {{infra: local}}
secrets: {{TOKEN: null}}
run: |
  [ -z "$TOKEN" ] || echo "it has its secret"
  if [ -e "$BROKER_CHECKPOINT_DIR/step" ]; then
    echo "resumed from $(cat "$BROKER_CHECKPOINT_DIR/step"), $(cat "$BROKER_PIPELINE_DIR/shared"), $BROKER_ATTEMPT"
    echo "$BROKER_GROUP_TAIL_IPS" > {folder}/tail_ips
    while [ ! -e {folder}/tail-4 ]; do sleep 0.1; done
    exit 0
  fi
  echo "step 7" > "$BROKER_CHECKPOINT_DIR/step"
  echo "shared" > "$BROKER_PIPELINE_DIR/shared"
  exit 3
---
name: tail
resources: {{infra: local}}
run: |
  trap 'exit 0' TERM
  touch {folder}/tail-$BROKER_JOB_ID
  while true; do sleep 0.1; done
"""


@pytest.mark.long
def test_a_failed_group_is_retried_as_a_group_from_its_checkpoints(terminal: Shell) -> None:
    owner = terminal.server if isinstance(terminal, Served) else terminal
    file = terminal.write("again.yaml", RETRIED.format(folder=terminal.folder))
    terminal.run("jobs", "launch", file, "--secret", "TOKEN=hush", code=100)
    assert (owner.get_status(1), owner.get_status(2)) == (JobStatus.FAILED, JobStatus.CANCELLED)
    group = terminal.read_json("jobs", "queue")[0]["pipeline"]

    member = terminal.run("jobs", "retry", "2", code=2).stderr
    assert f"job 2 belongs to group {group}" in member and f"`broker jobs retry {group}`" in member
    no_secret = terminal.run("jobs", "retry", "again", code=2).stderr
    assert f"`broker jobs retry {group} --secret TOKEN`" in no_secret

    arguments = ("jobs", "retry", "again", "--secret", "TOKEN=hush", "--request-id", "r")
    again = terminal.read_json(*arguments)
    assert [(job["id"], job["name"], job["resumes"]) for job in again] == [(3, "head", 1), (4, "tail", 2)]
    assert [job["id"] for job in terminal.read_json(*arguments)] == [3, 4], "one request, one group"
    twice = terminal.run("jobs", "retry", group, "--secret", "TOKEN=hush", code=2).stderr
    assert f"group {again[0]['pipeline']} already continues" in twice

    owner.wait_for_jobs()
    log = terminal.run("jobs", "logs", "again", "--no-follow").stdout
    assert "(head) it has its secret\n(head) resumed from step 7, shared, 2\n" in log
    assert (owner.get_status(3), owner.get_status(4)) == (JobStatus.SUCCEEDED, JobStatus.SUCCEEDED)
    assert (terminal.folder / "tail_ips").read_text().startswith("127.0.0.")
    done = terminal.run("jobs", "retry", "again", code=2).stderr
    assert "has already succeeded" in done
