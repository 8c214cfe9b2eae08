"""A cluster's whole life on the command line, with real processes."""

from __future__ import annotations

import os
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from broker.clock import SystemClock
from broker.state.store import Store
from broker.types import Cluster, ClusterStatus, JobStatus, Placement, Task
from tests.cli.conftest import Shell
from tests.simulation.world import make_offer
from tests.tiers import long

pytestmark = pytest.mark.skipif(not Path("/proc").exists(), reason="needs Linux's /proc")

HELLO = """\
name: hello
resources: {infra: local}
num_nodes: 2
envs: {WHO: world}
secrets: {TOKEN: null}
setup: echo "setting up"
run: |
  echo "hello $WHO from node $SKYPILOT_NODE_RANK of $SKYPILOT_NUM_NODES"
  echo "token has ${#TOKEN} letters"
  echo kept >> ~/kept
"""
FAILS = "resources: {infra: local}\nnum_nodes: 2\nrun: '[ $SKYPILOT_NODE_RANK = 0 ] || exit 7; sleep 600'\n"
LONG = "resources: {infra: local}\nrun: 'echo begun; sleep 600'\n"


def test_a_cluster_lives_its_whole_life(shell: Shell) -> None:
    launched = shell.run("launch", shell.write("hello.yaml", HELLO), "-c", "dev", "--secret", "TOKEN=swordfish")
    for rank in (0, 1):
        assert f"hello world from node {rank} of 2" in launched.stdout
    assert "token has 9 letters" in launched.stdout and "setting up" in launched.stdout

    (cluster,) = shell.read_json("status")["clusters"]
    assert (cluster["name"], cluster["status"], len(cluster["nodes"])) == ("dev", "UP", 2)
    assert len({node["address"] for node in cluster["nodes"]}) == 2

    failed = shell.run("exec", "dev", shell.write("fails.yaml", FAILS), code=100)
    assert "exit code 7" in failed.stderr
    runs = {run["id"]: (run["status"], run["returncode"]) for run in shell.read_json("queue", "dev")}
    assert runs == {1: ("SUCCEEDED", 0), 2: ("FAILED", 7)}
    assert "hello world from node 1" in shell.run("logs", "dev", "1", "--no-follow").stdout

    shell.run("exec", "dev", shell.write("long.yaml", LONG), "--detach-run")
    assert "cancelled run 3" in shell.run("cancel", "dev", "--all").stdout
    assert "unknown run 99 on `dev`" in shell.run("cancel", "dev", "99").stderr
    shell.wait_until(lambda: shell.read_json("queue", "dev")[-1]["status"] == "CANCELLED", "run 3 has ended")

    assert shell.run("ssh", "dev-1", "--", "cat", "kept").stdout == "kept\n"
    shell.run("stop", "dev")
    assert shell.read_json("status")["clusters"][0]["status"] == "STOPPED"
    refused = shell.run("exec", "dev", shell.write("again.yaml", LONG), code=2)
    assert "`broker start dev`" in refused.stderr
    shell.run("start", "dev")
    assert shell.run("ssh", "dev-1", "--", "cat", "kept").stdout == "kept\n"

    shell.run("down", "dev", "--yes")
    after = shell.read_json("status")
    assert after["clusters"] == [] and after["spent_usd"] > 0
    assert not shell.find_processes(), "its machines are gone"
    found = [path for path in shell.home.rglob("*") if path.is_file() and b"swordfish" in path.read_bytes()]
    assert not found, "no file keeps the secret"


@pytest.mark.long
def test_task_without_run_makes_a_development_cluster_with_its_workdir(shell: Shell) -> None:
    (shell.folder / "code").mkdir()
    (shell.folder / "code" / "notes").write_text("sent")
    task = shell.write("dev.yaml", "resources: {infra: local}\nworkdir: code\n")
    launched = shell.run("launch", task, "-c", "dev")
    assert "`broker ssh dev`" in launched.stderr and "`broker down dev`" in launched.stderr
    assert shell.run("ssh", "dev", "--", "cat", "sky_workdir/notes").stdout == "sent"
    claimed = shell.run("ssh", "dev", "--", "ls", "-d", ".broker/runs")
    assert claimed.stdout, "a node whose agent was never asked anything would end itself as unclaimed"
    assert shell.read_json("queue", "dev") == []
    assert "7" in shell.run("exec", "dev", "echo 7").stdout


def test_managed_job_without_run_is_refused_before_it_is_submitted(shell: Shell) -> None:
    for text in ("resources: {infra: local}\n", "resources: {infra: local}\nsetup: echo hi\n"):
        refused = shell.run("jobs", "launch", shell.write("dev.yaml", text), "--yes", code=2)
        assert "no `run:`" in refused.stderr and "`broker launch TASK.yaml`" in refused.stderr
    assert shell.read_json("jobs", "queue") == []


def test_ssh_opens_a_shell_in_the_nodes_own_home(shell: Shell) -> None:
    shell.run("launch", shell.write("hello.yaml", "resources: {infra: local}\nrun: touch ~/mine\n"), "-c", "dev")
    process = shell.open("ssh", "dev", stdin=subprocess.PIPE)
    out, _ = process.communicate("ls; echo home is $HOME; exit 0\n", timeout=300)
    assert "mine" in out and f"home is {shell.home}" in out


def test_ctrl_c_detaches_and_explains_how_to_reattach(shell: Shell) -> None:
    process = shell.open("launch", shell.write("long.yaml", LONG), "-c", "dev")
    assert process.stdout is not None
    assert any("begun" in line for line in iter(process.stdout.readline, ""))
    process.send_signal(signal.SIGINT)
    _, notes = process.communicate(timeout=300)
    assert process.returncode == 130
    assert "`broker logs dev 1`" in notes and "`broker down dev`" in notes
    assert shell.read_json("queue", "dev")[0]["status"] == "RUNNING"
    assert "begun" in shell.run("logs", "dev", "--no-follow").stdout


@long
def test_an_idle_cluster_goes_down_by_itself(shell: Shell) -> None:
    task = shell.write("hello.yaml", "resources: {infra: local}\nrun: echo hi\n")
    shown = shell.run("launch", task, "-c", "dev", "--down")
    assert "hi" in shown.stdout and "SUCCEEDED" in shown.stderr, "its output can be read to the end"
    shell.wait_until(lambda: not shell.find_processes(), "its machine has ended itself")
    status = shell.run("status", "--refresh").stdout
    assert "ENDED" in status or "dev" not in status


def test_a_launch_killed_in_the_middle_leaves_a_cluster_that_the_next_command_finds(shell: Shell) -> None:
    task = shell.write("slow.yaml", "resources: {infra: local}\nnum_nodes: 2\nsetup: sleep 600\nrun: echo hi\n")
    process = shell.open("launch", task, "-c", "dev")
    assert process.stderr is not None
    assert any("is up" in line for line in iter(process.stderr.readline, ""))
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=300)
    assert [each["name"] for each in shell.read_json("status")["clusters"]] == ["dev"]
    shell.run("down", "dev", "--yes")
    assert not shell.find_processes()


def test_an_interrupted_launch_lists_remaining_nodes_and_how_to_terminate_them(shell: Shell) -> None:
    task = shell.write("slow.yaml", "resources: {infra: local}\nnum_nodes: 2\nrun: sleep 600\n")
    process = shell.open("launch", task, "-c", "dev")
    assert process.stderr is not None
    assert any("requesting 2 x" in line and "USD/h" in line for line in iter(process.stderr.readline, ""))
    process.send_signal(signal.SIGINT)
    _, notes = process.communicate(timeout=300)
    assert "`broker down dev`" in notes, notes
    assert process.returncode == 130, notes
    shell.run("down", "dev", "--yes")
    assert not shell.find_processes()


@pytest.mark.long
def test_two_launches_of_one_name_at_once_are_one_cluster_and_one_clear_error(shell: Shell) -> None:
    task = shell.write("slow.yaml", "resources: {infra: local}\nnum_nodes: 2\nrun: echo hi\n")
    both = [shell.open("launch", task, "-c", "dev") for _ in range(2)]
    notes = [process.communicate(timeout=300)[1] for process in both]
    codes = sorted(process.returncode for process in both)
    assert codes in ([0, 2], [0, 0]), notes  # [0, 0]: the second started when the first was up
    assert codes == [0, 0] or any("another command is bringing `dev` up" in note for note in notes)
    (cluster,) = shell.read_json("status")["clusters"]
    assert len(cluster["nodes"]) == 2 and shell.read_json("gc", "--dry-run")["nodes"] == []


@pytest.mark.parametrize("name", ["../x", "a b", "-x", "x" * 64, ""])
def test_a_name_that_cannot_be_a_folder_or_a_tag_is_refused(shell: Shell, name: str) -> None:
    refused = shell.run("launch", "--infra", "local", f"--cluster={name}", "echo hi", code=2)
    assert "invalid cluster name" in refused.stderr


def test_a_preempted_cluster_shows_it_and_can_be_taken_down(shell: Shell) -> None:
    task = shell.write("spot.yaml", "resources: {infra: local, use_spot: true}\nnum_nodes: 2\nrun: echo hi\n")
    shell.run("launch", task, "-c", "dev")
    assert "1 of 2 nodes" in shell.run("local", "preempt", "dev", "--node", "1").stdout
    shell.wait_until(lambda: "1 lost" in shell.run("status", "--refresh").stdout, "the loss shows")
    shell.run("down", "dev", "--yes")
    assert shell.read_json("status")["clusters"] == []


def test_cluster_that_still_comes_up_has_no_node_to_preempt(shell: Shell) -> None:
    store = Store(shell.home / "state.db", clock=SystemClock())
    placement = Placement(offer=replace(make_offer("here"), cloud="local"), is_spot=True, node_count=1)
    store.clusters.put(Cluster(name="dev", status=ClusterStatus.INIT, placement=placement, attempt=1, nodes=()))
    refused = shell.run("local", "preempt", "dev", code=2)
    assert "`dev` has no nodes yet" in refused.stderr
    store.clusters.delete("dev")
    store.close()


def test_a_cluster_belongs_to_its_job_until_the_job_ends(shell: Shell) -> None:
    """Jobs end before their clusters are gone: the rest must not prevent `down --all`."""
    store = Store(shell.home / "state.db", clock=SystemClock())
    job = store.jobs.add("train", Task())
    placement = Placement(offer=replace(make_offer("here"), cloud="local"), is_spot=False, node_count=1)
    store.clusters.put(
        Cluster(name="job-1-1", status=ClusterStatus.UP, placement=placement, attempt=1, nodes=(), job_id=job.id)
    )
    refused = shell.run("down", "--all", "--yes", code=2)
    assert "belongs to managed job 1" in refused.stderr and "broker jobs cancel 1" in refused.stderr
    store.jobs.set_status(job.id, JobStatus.CANCELLED)
    assert "terminated" in shell.run("down", "--all", "--yes").stdout
    assert not store.clusters.list()
    store.close()
