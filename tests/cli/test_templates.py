"""Every task template runs on this machine unchanged, except for fewer steps and a smaller model."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from broker.task.loader import load_tasks
from tests.cli.conftest import ROOT, Shell
from tests.tiers import exhaustive, long
from trainers.strategies import STRATEGIES

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's /proc")
# Those of other frameworks need packages of their own: `make test-frameworks` runs them. `test_groups.py` runs groups.
ELSEWHERE = ("-m trainers.venv", "execution: parallel")
TEMPLATES = [
    path
    for path in sorted((ROOT / "task_templates").glob("*.yaml"))
    if not any(mark in path.read_text() for mark in ELSEWHERE)
]
# Run by `make test`: a program that is not ours, and a trainer. The others differ in programs and strategies, which
# tests/trainers runs; their commands are always parsed.
OFTEN = {"hello"}
SOMETIMES = {"ddp", "fsdp"}  # run by `make test-slow`; the others by `make test-exhaustive`
RUN_S_MAX = 900  # far more than required
STEPS = "--train.steps 4"
SMALL = {
    "trainers.lm": "--model.width 32 --model.context 32",
    "trainers.image": "--model.width 8 --data.size 8",
}
# In place of Python: prints its arguments, one per line, and an empty line after each command.
SHOW = 'python() { printf "%s\\n" "$@" ""; }; python3() { python "$@"; }\n'


def shorten(task: dict[str, str], envs: dict[str, str]) -> list[str]:
    """Append flags: a later flag overrides an earlier one."""
    found = []
    if "MODEL" in envs:
        small = next(flags for program, flags in SMALL.items() if f"-m {program} " in task["run"])
        found += ["--env", f"MODEL={envs['MODEL']} {STEPS} {small}"]
    if "SIZES" in envs:
        found += ["--env", "SIZES=--largest 64K"]
    return found


def test_every_template_that_runs_a_trainer_sets_torch_up_first() -> None:
    for path in TEMPLATES:
        task = yaml.safe_load(path.read_text())
        if "-m trainers." in task["run"]:
            assert task["setup"].split("\n")[0] == "python3 -m trainers.setup", path


def test_every_template_installs_what_its_program_needs_on_a_bare_node() -> None:
    """Those of other frameworks, groups, pipelines, maps and services, too."""
    checked = 0
    for path in (ROOT / "task_templates").rglob("*.yaml"):
        for task in yaml.safe_load_all(path.read_text()):
            if re.search(r"-m trainers\.|\btorchrun\b|\bmpiexec\b|\b(ray|dask|vllm) ", task.get("run", "")):
                assert re.search(r"^ *python3 -m trainers\.(setup|venv)\b", task.get("setup", ""), re.M), path
                checked += 1
    assert checked > 35


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.stem)
def test_trainers_understand_the_commands_of_every_template(template: Path, tmp_path: Path) -> None:
    (task,) = load_tasks(template)
    assert task.run is not None
    variables = {**os.environ, **task.envs, "SKYPILOT_NUM_GPUS_PER_NODE": "0"}
    done = subprocess.run(
        ["bash", "-ec", SHOW + task.run], cwd=tmp_path, env=variables, capture_output=True, text=True, check=True
    )
    commands = [command.split("\n") for command in done.stdout.split("\n\n") if command.startswith("-m\n")]
    assert bool(commands) == ("-m trainers." in task.run)
    for command in commands:
        start = max(place for place, word in enumerate(command) if word == "-m")  # the launcher's, then the program's
        config = importlib.import_module(command[start + 1]).parse_config(command[start + 2 :])
        assert set(getattr(config, "strategy", "ddp").split("+")) <= set(STRATEGIES)


def find_tier(name: str) -> Any:
    return () if name in OFTEN else long if name in SOMETIMES else exhaustive


@pytest.mark.parametrize(
    "template", [pytest.param(path, marks=find_tier(path.stem), id=path.stem) for path in TEMPLATES]
)
def test_template_runs_to_completion(shell: Shell, template: Path) -> None:
    task = yaml.safe_load(template.read_text())
    envs = task.get("envs", {})
    running = shell.open("launch", str(template), "-c", "here", "--infra", "local", *shorten(task, envs), "--yes")
    output, notes = running.communicate(timeout=RUN_S_MAX)
    assert running.returncode == 0, f"{output}\n{notes}"
    assert "with status SUCCEEDED" in notes
    if "MODEL" in envs:
        assert "4/4" in output, output
