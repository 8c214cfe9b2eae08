"""Managed jobs on the command line: real daemon, real processes, kill -9."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Shell
from tests.signals import suspend
from tests.tiers import long

pytestmark = pytest.mark.skipif(not Path("/proc").exists(), reason="needs Linux's /proc")

# Counts to 40 and writes each number with its attempt into a ledger that outlives the nodes.
COUNT = """\
name: count
resources: {infra: local, use_spot: true}
num_nodes: 2
run: |
  n=$(cat $BROKER_CHECKPOINT_DIR/n 2>/dev/null || echo 0)
  mkdir -p $BROKER_CHECKPOINT_DIR
  while [ $n -lt 40 ]; do
    n=$((n + 1))
    if [ $SKYPILOT_NODE_RANK = 0 ]; then
      echo "$BROKER_ATTEMPT $n" >> $BROKER_CHECKPOINT_DIR/ledger
      echo $n > $BROKER_CHECKPOINT_DIR/n.new && mv $BROKER_CHECKPOINT_DIR/n.new $BROKER_CHECKPOINT_DIR/n
      echo "{\\"step\\": $n, \\"total\\": 40, \\"checkpoint_step\\": $((n > 1 ? n - 1 : 1))}" >> $BROKER_PROGRESS_FILE
      echo "step $n"
    fi
    sleep 0.1
    while [ -e $BROKER_CHECKPOINT_DIR/../hold ] && [ $n -ge 25 ]; do sleep 0.1; done
  done
"""


def read_ledger(shell: Shell) -> list[tuple[int, int]]:
    lines = (shell.find_checkpoints(1) / "ledger").read_text().splitlines()
    return [(int(attempt), int(step)) for attempt, step in (line.split() for line in lines)]


def hold(shell: Shell) -> Path:
    """Hold the first job at 25 while this file exists, so that the test's actions are never late."""
    path = shell.home / "checkpoints" / "hold"
    path.parent.mkdir(mode=0o700, parents=True)
    path.touch()
    return path


def wait_for_step(shell: Shell, step: int) -> None:
    def is_there() -> bool:
        with shell.open_store() as store:
            job = store.jobs.get(1)
        return job is not None and job.progress is not None and job.progress.step >= step

    shell.wait_until(is_there, f"step {step}")


def wait_for_end(shell: Shell) -> dict[str, object]:
    shell.wait_for_jobs()
    job: dict[str, object] = shell.read_json("jobs", "queue")[0]
    return job


@long
def test_the_daemon_may_be_killed_and_the_job_continues(shell: Shell) -> None:
    held = hold(shell)
    shell.run("jobs", "launch", shell.write("count.yaml", COUNT), "--yes", "--detach-run")
    wait_for_step(shell, 5)
    shell.kill_daemon()
    held.unlink()
    job = wait_for_end(shell)  # its commands restart the daemon
    assert job["status"] == "SUCCEEDED"
    assert read_ledger(shell) == [(1, step) for step in range(1, 41)]
    log = shell.run("jobs", "logs", "1").stdout.splitlines()
    assert [line for line in log if "step" in line] == [f"step {step}" for step in range(1, 41)]
    shell.wait_for_termination()


def test_nodes_lost_while_the_daemon_is_dead_are_replaced_and_no_step_runs_twice_at_once(shell: Shell) -> None:
    held = hold(shell)
    shell.run("jobs", "launch", shell.write("count.yaml", COUNT), "--yes", "--detach-run")
    wait_for_step(shell, 5)
    shell.kill_daemon()
    shell.run("local", "preempt", "count")
    held.unlink()
    job = wait_for_end(shell)
    assert job["status"] == "SUCCEEDED"
    ledger = read_ledger(shell)
    attempts = [attempt for attempt, _ in ledger]
    assert attempts == sorted(attempts) and set(attempts) == {1, 2}, "one attempt after the other"
    assert {step for _, step in ledger} == set(range(1, 41))
    assert len(ledger) <= 41, "at most the step under way is done again"
    story = shell.run("jobs", "events", "1").stdout
    for word in ("attempt 1", "preempted", "attempt 2", "recovered at step", "SUCCEEDED"):
        assert word in story


@pytest.mark.long
def test_one_lost_node_is_replaced_and_the_program_restarted_on_all(shell: Shell) -> None:
    held = hold(shell)
    text = COUNT.replace("run: |", "setup: mkdir $HOME/made && echo setting up\nrun: |")
    shell.run("jobs", "launch", shell.write("count.yaml", text), "--yes", "--detach-run")
    wait_for_step(shell, 5)
    shell.run("local", "preempt", "count", "--node", "1")
    held.unlink()
    job = wait_for_end(shell)
    assert job["status"] == "SUCCEEDED"
    assert len({each["cluster"] for each in job["attempts"]}) == 1  # type: ignore[attr-defined]
    ledger = read_ledger(shell)
    attempts = [attempt for attempt, _ in ledger]
    assert attempts == sorted(attempts) and set(attempts) == {1, 2}, "one attempt after the other"
    assert {step for _, step in ledger} == set(range(1, 41))
    story = shell.run("jobs", "events", "1").stdout
    assert "keeping 1 of 2 nodes while replacing the rest" in story and "node 1 of job-1-" in story, story
    log = shell.run("jobs", "logs", "1", "--no-follow").stdout
    assert log.count("setting up") == 3, "on the first two nodes and on the new one"


@pytest.mark.long
def test_a_stopped_daemon_is_replaced_and_does_nothing_when_it_wakes(shell: Shell) -> None:
    held = hold(shell)
    shell.run("jobs", "launch", shell.write("count.yaml", COUNT), "--yes", "--detach-run")
    wait_for_step(shell, 3)
    (zombie,) = shell.find_processes("broker daemon")
    suspend(zombie, shell.database, shell.home.rglob("local*/lock"))
    held.unlink()
    try:
        job = wait_for_end(shell)
    finally:
        os.kill(zombie, signal.SIGCONT)
    assert job["status"] == "SUCCEEDED" and len(read_ledger(shell)) == 40
    shell.wait_until(lambda: zombie not in shell.find_processes(), "the zombie leaves")
    assert len(shell.read_json("jobs", "queue")) == 1
    assert "taken over" in (shell.home / "logs" / "daemon.log").read_text()


def test_a_failed_program_is_not_restarted_and_its_exit_code_is_shown(shell: Shell) -> None:
    task = shell.write("fails.yaml", "name: bad\nresources: {infra: local}\nrun: 'echo oh no; exit 3'\n")
    done = shell.run("jobs", "launch", task, "--yes", code=100)
    assert "oh no" in done.stdout and "FAILED" in done.stderr and "code 3" in done.stderr
    (job,) = shell.read_json("jobs", "queue")
    assert len(job["attempts"]) == 1


def test_a_cancelled_job_ends_with_its_machines(shell: Shell) -> None:
    hold(shell)
    shell.run("jobs", "launch", shell.write("count.yaml", COUNT), "--yes", "--detach-run")
    wait_for_step(shell, 2)
    shell.run("jobs", "cancel", "count")
    assert wait_for_end(shell)["status"] == "CANCELLED"
    shell.wait_for_termination()
    assert read_ledger(shell)[-1][1] < 40


@long
def test_the_daemon_sends_a_workdir_relative_to_the_users_folder(shell: Shell) -> None:
    (shell.folder / "code").mkdir()
    (shell.folder / "code" / "main.sh").write_text("echo I was sent\n")
    task = shell.write("code.yaml", "resources: {infra: local}\nworkdir: code\nrun: sh main.sh\n")
    assert "I was sent" in shell.run("jobs", "launch", task, "--yes").stdout


@pytest.mark.long
def test_two_concurrent_jobs_both_end(shell: Shell) -> None:
    task = shell.write("count.yaml", COUNT)
    for name in ("one", "two"):
        shell.run("jobs", "launch", task, "--name", name, "--yes", "--detach-run")
    wait_for_end(shell)
    assert [job["status"] for job in shell.read_json("jobs", "queue")] == ["SUCCEEDED"] * 2


PIPELINE = """\
name: pipe
---
name: prepare
resources: {infra: local}
run: mkdir -p $BROKER_PIPELINE_DIR && echo data > $BROKER_PIPELINE_DIR/x
---
name: train
resources: {infra: local}
run: cat $BROKER_PIPELINE_DIR/x
"""


def test_a_pipeline_runs_in_order_and_passes_on_its_data(shell: Shell) -> None:
    done = shell.run("jobs", "launch", shell.write("pipe.yaml", PIPELINE), "--yes")
    assert "data" in done.stdout
    first, second = shell.read_json("jobs", "queue")
    assert (first["status"], second["status"], second["needs"]) == ("SUCCEEDED", "SUCCEEDED", [1])
    assert second["attempts"][0]["started_s"] >= first["ended_s"]


@long
def test_dependents_of_a_failed_task_never_start(shell: Shell) -> None:
    broken = PIPELINE.replace("mkdir -p $BROKER_PIPELINE_DIR && ", "exit 4; ")
    shell.run("jobs", "launch", shell.write("pipe.yaml", broken), "--yes", "--detach-run")
    shell.run("jobs", "wait", "2", "--for", "CANCELLED")
    first, second = shell.read_json("jobs", "queue")
    assert first["status"] == "FAILED" and second["attempts"] == []
    assert "it depends on job 1 (prepare), which is FAILED" in shell.run("jobs", "why", "2").stdout


@pytest.mark.long
def test_a_retried_job_continues_from_its_checkpoints_with_later_attempt_numbers(shell: Shell) -> None:
    text = COUNT.replace(
        "sleep 0.1\n", "sleep 0.02\n    [ $n$SKYPILOT_NODE_RANK != 100 ] || [ $BROKER_ATTEMPT -gt 1 ] || exit 5\n"
    ).replace("use_spot: true", "use_spot: true, job_recovery: {max_restarts_on_errors: 0}")
    task = shell.write("count.yaml", text)
    shell.run("jobs", "launch", task, "--yes", code=100)
    refused = shell.run("jobs", "wait", "1", code=1)
    assert "with status FAILED" in refused.stderr
    shell.run("jobs", "retry", "1")
    assert read_ledger(shell) == [(1, step) for step in range(1, 11)] + [(2, step) for step in range(11, 41)]
    twice = shell.run("jobs", "retry", "1", code=2)
    assert "job 2 already continues from the checkpoints of job 1" in twice.stderr


def test_a_killed_rank_costs_a_restart_and_why_names_the_cause(shell: Shell) -> None:
    die = "[ $n$SKYPILOT_NODE_RANK != 101 ] || [ $BROKER_ATTEMPT -gt 1 ] || { echo allocating; kill -9 $$; }"
    # The second rank begins where the first one is, which therefore waits for it.
    meet = "[ $SKYPILOT_NODE_RANK = 0 ] || touch $BROKER_CHECKPOINT_DIR/met"
    meet += "; until [ -e $BROKER_CHECKPOINT_DIR/met ]; do sleep 0.1; done"
    text = COUNT.replace("sleep 0.1\n", f"sleep 0.1\n    {meet}\n    {die}\n", 1)
    text = text.replace("run: |", "setup: mkdir $HOME/made && echo setting up\nrun: |")  # it cannot be repeated
    shell.run("jobs", "launch", shell.write("count.yaml", text), "--yes")
    (job,) = shell.read_json("jobs", "queue")
    assert len({each["cluster"] for each in job["attempts"]}) == 1, "it is restarted on the same nodes"
    log = shell.run("jobs", "logs", "1", "--no-follow").stdout
    assert log.count("setting up") == 2, "once on each node"
    assert [each["outcome"] for each in job["attempts"]] == ["failed with exit code 137", "succeeded"]
    story = shell.run("jobs", "why", "1").stdout
    assert "exited with code 137 (SIGKILL: killed; running out of memory is the usual cause) at step" in story
    assert "last lines of rank 1 in attempt 1:\n  (rank1) setting up\n  (rank1) allocating\n" in story
    if "oom_kill " in Path("/proc/vmstat").read_text():
        assert "(rank1) broker: the kernel's OOM killer ended" in story


@pytest.mark.long
def test_a_submit_repeated_with_its_request_id_is_one_job(shell: Shell) -> None:
    task = shell.write("hello.yaml", "resources: {infra: local}\nrun: echo hi\n")
    for _ in range(2):
        shell.run("jobs", "launch", task, "--yes", "--detach-run", "--request-id", "mine")
    shell.run("jobs", "wait", "1")
    assert len(shell.read_json("jobs", "queue")) == 1


@long
def test_job_whose_daemon_is_killed_at_its_start_runs_with_the_next_one(shell: Shell) -> None:
    """Otherwise the user, who sees only an error, would launch it a second time."""
    (shell.folder / "sitecustomize.py").write_text(
        "import os, pathlib, sys\n"
        "if sys.orig_argv[-1] == 'daemon' and not pathlib.Path('spared').exists(): os.kill(os.getpid(), 9)\n"
    )
    shell.environment["PYTHONPATH"] = f"{shell.folder}{os.pathsep}{shell.environment['PYTHONPATH']}"
    task = shell.write("hello.yaml", "name: hello\nresources: {infra: local}\nrun: echo hi\n")
    done = shell.run("jobs", "launch", task, "--yes", "--detach-run", code=4)
    assert "Submitted managed job 1 (hello)" in done.stdout
    assert "the jobs daemon did not start: killed by signal 9" in done.stderr and "broker status" in done.stderr
    for command in (("status",), ("jobs", "queue")):
        looked = shell.run(*command)
        assert "1 live managed job" in looked.stdout or "hello" in looked.stdout, "both commands show what is on record"
        assert "killed by signal 9" in looked.stderr
    (shell.folder / "spared").touch()
    assert wait_for_end(shell)["status"] == "SUCCEEDED"


@pytest.mark.long
def test_every_jobs_command_answers_in_json(shell: Shell) -> None:
    task = shell.write("fail.yaml", "name: fail\nresources: {infra: local}\nrun: echo hello; exit 3\n")

    def read(*arguments: str, code: int = 0) -> Any:
        return json.loads(shell.run("jobs", *arguments, "-o", "json", code=code).stdout)

    (launched,) = read("launch", task, "--yes")
    assert launched["id"] == 1 and launched["hedge"] == 2
    assert read("wait", "1", code=1)["status"] == "FAILED"
    assert [read("retry", "1", "--request-id", "again")["id"] for _ in range(2)] == [2, 2], "one request, one job"
    assert read("wait", "2", "--for", "FAILED")["status"] == "FAILED"
    assert [job["status"] for job in read("queue")] == ["FAILED"] * 2
    assert read("logs", "2", "--no-follow") == {"job": 2, "line": "hello"}
    assert "attempt" in [event["kind"] for event in read("events", "2")]
    assert read("why", "2")["failure"] == "`run` exited with code 3"
    assert read("cancel", "2") == [{"id": 2, "name": "fail", "status": "FAILED", "is_cancelling": False}]


@pytest.mark.long
def test_cost_is_shown_by_job_cloud_and_day_and_nothing_is_left_to_collect(shell: Shell) -> None:
    shell.run(
        "jobs", "launch", shell.write("hello.yaml", "name: hi\nresources: {infra: local}\nrun: echo hi\n"), "--yes"
    )
    shell.wait_until(shell.is_at_rest, "its cluster is down")
    sums = {by: shell.read_json("cost", "--by", by)["usd"] for by in ("job", "cloud", "day")}
    assert sums["job"] > 0 and len(set(sums.values())) == 1
    assert "job 1 (hi)" in shell.run("cost").stdout
    nothing = {"nodes": [], "clusters": [], "is_ended": False, "adopted": [], "setup_archives": []}
    assert shell.read_json("gc", "--dry-run") == nothing
