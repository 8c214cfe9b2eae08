"""`broker sweep` on real nodes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Shell

pytestmark = pytest.mark.skipif(not Path("/proc").exists(), reason="needs Linux's /proc")

RUN_S_MAX = 900  # far more than required
TASK = """\
name: fit
resources: {infra: local, use_spot: true}
envs: {width: 1}
run: echo "{\\"step\\":9,\\"total\\":9,\\"loss\\":$((width * width - 4 * width + 9))}" >> $BROKER_PROGRESS_FILE
"""


def test_a_sweep_runs_each_value_once_and_shows_the_best(shell: Shell) -> None:
    task = shell.write("fit.yaml", TASK)
    command = ("sweep", task, "--param", "width=1,2,4", "--parallel", "2", "--yes")
    running = shell.open(*command, "--json", "--plot", "plot.svg")
    output, notes = running.communicate(timeout=RUN_S_MAX)
    assert running.returncode == 0, notes
    found = json.loads(output)
    assert found["is_over"] and found["best"] == {"width": "2"}
    assert [(each["parameters"]["width"], each["loss"]) for each in found["results"]] == [
        ("2", 5.0), ("1", 6.0), ("4", 9.0),
    ]  # fmt: skip
    plot = (shell.folder / "plot.svg").read_text()
    assert plot.count("<circle") == 3 and "loss against width" in plot
    again = shell.run(*command)  # nothing is left, so nothing starts
    assert "Best: --env width=2" in again.stdout and len(shell.read_json("jobs", "queue")) == 3
    assert "given twice" in shell.run(*command, "--param", "width=1", code=2).stderr


@pytest.mark.long
def test_a_sweep_of_failed_runs_fails(shell: Shell) -> None:
    task = shell.write("fit.yaml", "resources: {infra: local}\nenvs: {width: 1}\nrun: echo no; exit 3\n")
    done = shell.run("sweep", task, "--param", "width=1,2", "--yes", code=100)
    assert "FAILED" in done.stdout and "no run of sweep-" in done.stderr and "`broker jobs logs " in done.stderr
    again = shell.run("sweep", task, "--param", "width=1,2", "--yes", code=100)
    assert done.stdout.endswith(again.stdout) and again.stdout.startswith("RUN"), "it starts nothing, and fails again"


@pytest.mark.long
def test_a_dry_run_lists_the_configurations_and_a_bad_plot_is_refused_first(shell: Shell) -> None:
    task = shell.write("fit.yaml", TASK)
    shown = shell.run("sweep", task, "--param", "lr=1e-4..1e-2:log", "--runs", "3", "--dryrun").stdout
    assert "RUN" in shown and "lr" in shown
    assert "a range" in shell.run("sweep", task, "--param", "lr=1..2", code=2).stderr
    assert ".svg" in shell.run("sweep", task, "--param", "a=1,2", "--plot", "x.png", code=2).stderr
    assert shell.read_json("jobs", "queue") == []


def test_the_note_of_a_detached_sweep_names_only_what_is_left(shell: Shell) -> None:
    task = shell.write("fit.yaml", TASK)
    command = ("sweep", task, "--param", "width=1,2", "--yes", "-d")
    notes = shell.run(*command).stderr
    assert "2 runs, each at the price of the first placement, 2 at a time" in notes
    assert "the same command without `-d` shows their results" in notes
    notes = shell.run(*command, "--param", "seed=0,1", "--parallel", "3", "--early-stop", "asha").stderr
    assert "without `-d` starts the remaining 1 run and stops poor runs early" in notes
