"""Rehearsals on the command line: real processes on simulated clouds, and reports on programs that do not resume."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest

from tests.cli.conftest import Shell
from tests.tiers import long, spread

pytestmark = pytest.mark.skipif(not Path("/proc").exists(), reason="needs Linux's /proc")

# Counts to 30, saving every tenth number before reporting it. `loss` is a function of the step. It waits to be
# preempted P times, a few steps after the preemption is due and before the next save: however slow this machine is, no
# preemption comes too late, and none during a save.
COUNT = """\
name: count
resources: {infra: aws, cpus: 2+, use_spot: true}
num_nodes: 2
envs: {P: 1}
run: |
  n=$(cat $BROKER_CHECKPOINT_DIR/n 2>/dev/null || echo 0)
  mkdir -p $BROKER_CHECKPOINT_DIR
  while [ $n -lt 30 ]; do
    n=$((n + 1))
    if [ $SKYPILOT_NODE_RANK = 0 ]; then
      saved=$((n / 10 * 10))
      echo $saved > $BROKER_CHECKPOINT_DIR/n.new && mv $BROKER_CHECKPOINT_DIR/n.new $BROKER_CHECKPOINT_DIR/n
      line="\\"total\\": 30, \\"loss\\": 0.$((30 - n)), \\"tokens_per_s\\": 4000, \\"checkpoint_step\\": $saved"
      echo "{\\"step\\": $n, $line}" >> $BROKER_PROGRESS_FILE
    fi
    while [ $BROKER_ATTEMPT -le $P ] && [ $n -ge $((30 * BROKER_ATTEMPT / (P + 1) + 3)) ]; do sleep 0.1; done
    sleep 0.05
  done
"""
FORGETFUL = COUNT.replace("n=$(cat $BROKER_CHECKPOINT_DIR/n 2>/dev/null || echo 0)", "n=0")
DEAF = COUNT.replace("run: |", "run: |\n  trap '' TERM")


def test_a_rehearsal_moves_the_job_to_another_zone_and_shows_that_it_resumed(shell: Shell) -> None:
    target = shell.folder / "report.html"
    shown = shell.run("rehearse", shell.write("count.yaml", COUNT), "--html", str(target)).stdout
    page = target.read_text()
    assert "<style>:root { color-scheme: light dark;" in page and not re.search(r"<script|<link|https?://|src=", page)
    assert "<h1>Rehearsal of" in page and 'class="timeline"' in page and "<caption>Findings</caption>" in page
    (bill,) = [line.strip().removeprefix("simulated bill  ") for line in shown.splitlines() if "simulated bill" in line]
    assert f"<dd>{bill}</dd>" in page
    for word in (
        "Choice: 2 x",
        "preempts all nodes",
        "preempted: node 0 and 1 gone",
        "no spot capacity",
        "SUCCEEDED",
    ):
        assert word in shown
    assert "ok  resume: resumed once, from step" in shown
    assert "all losses are bit-identical" in shown
    assert "  4,000 tokens/s  checkpoint " in shown and " useful; " in shown
    assert "recoveries  1\n" in shown and "steps  30 of 30\n" in shown
    assert not shell.find_processes()


@long
def test_two_preemptions_and_a_warning_as_data(shell: Shell) -> None:
    done = shell.run("rehearse", shell.write("count.yaml", COUNT), "--preemptions", "2", "--env", "P=2", "--json")
    found = json.loads(done.stdout)
    assert found["status"] == "SUCCEEDED" and found["preemptions"] == 2
    assert [each["begin_step"] for each in found["trials"]] == [0, 10, 20], "it resumes where it had saved"
    assert all(each["begin_step"] > 0 for each in found["resumes"])
    assert (found["notices"], found["notices_ignored"]) == (1, 0)
    assert found["repeats"]["equal"] == found["repeats"]["steps"]
    assert found["places"][0] != found["places"][1], "a place that took machines away has none left"
    assert found["summary"]["paid_usd"] > 0


@pytest.mark.long
def test_a_program_that_restarts_from_step_0_is_reported(shell: Shell) -> None:
    done = shell.run("rehearse", shell.write("count.yaml", FORGETFUL), code=1)
    assert "BAD resume: attempt 2 restarted from step 0, although it had reported" in done.stdout
    assert "-> load the newest checkpoint from $BROKER_CHECKPOINT_DIR" in done.stdout
    assert done.stderr.splitlines()[-1] == "error: the rehearsal failed, see the lines marked BAD", "not twice"


@pytest.mark.long
def test_a_program_that_ignores_its_warning_is_reported(shell: Shell) -> None:
    done = shell.run("rehearse", shell.write("count.yaml", DEAF), "--notice", "1", code=1)
    assert "BAD notice: the program ignored SIGTERM" in done.stdout
    assert "was terminated 1.0s later" in " ".join(done.stdout.split())
    assert "resumed once" in done.stdout


@pytest.mark.parametrize("asked", spread([signal.SIGINT, signal.SIGTERM, signal.SIGHUP], every=3))
def test_an_interrupted_rehearsal_is_reported_and_leaves_nothing_running(shell: Shell, asked: signal.Signals) -> None:
    process = shell.open("rehearse", shell.write("count.yaml", COUNT))
    assert process.stdout is not None
    assert any("the program was started" in line for line in iter(process.stdout.readline, ""))
    assert len(shell.find_processes()) > 3, "its nodes run"
    process.send_signal(asked)
    shown, said = process.communicate(timeout=300)
    assert process.returncode == 130, said
    assert "interrupted: terminating the nodes" in shown and "CANCELLED" in shown
    assert not shell.find_processes()
    assert not list(shell.folder.glob("broker-rehearsal-*")), "its state folder has gone with it"


@pytest.mark.long
def test_more_nodes_than_this_machine_can_play_are_billed_all_the_same(shell: Shell) -> None:
    path = shell.write("count.yaml", COUNT.replace("num_nodes: 2", "num_nodes: 6"))
    done = shell.run(
        "rehearse", path, "--nodes-local", "1", "--preemptions", "0", "--env", "P=0", "--infra", "aws/us-east-1"
    )
    assert "Running 1 of 6 nodes on this machine; the bill counts all nodes" in done.stdout
    assert "attempt 1: 1 x" in done.stdout


def test_a_folder_without_traces_is_refused(shell: Shell) -> None:
    done = shell.run("rehearse", shell.write("count.yaml", COUNT), "--traces", str(shell.folder / "none"), code=2)
    assert "no traces (`*.json`)" in done.stderr
