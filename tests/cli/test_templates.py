"""Every ready task runs on this machine as it is; only its steps are fewer."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml

from tests.cli.conftest import ROOT, Shell

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's /proc")
TEMPLATES = sorted((ROOT / "task_templates").glob("*.yaml"))
RUN_S_MAX = 300  # far more than any needs
STEPS = "--train.steps 4"


def shorten(envs: dict[str, str]) -> list[str]:
    """A later flag beats an earlier one."""
    found = []
    if "MODEL" in envs:
        found += ["--env", f"MODEL={envs['MODEL']} {STEPS}"]
    if "SIZES" in envs:
        found += ["--env", "SIZES=--largest 64K"]
    return found


def test_every_template_that_runs_a_trainer_sets_torch_up_first() -> None:
    for path in TEMPLATES:
        task = yaml.safe_load(path.read_text())
        if "-m trainers." in task["run"]:
            assert task["setup"].split("\n")[0] == "python3 -m trainers.setup", path


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.stem)
def test_template_runs_to_its_end(shell: Shell, template: Path) -> None:
    envs = yaml.safe_load(template.read_text()).get("envs", {})
    running = shell.open("launch", str(template), "-c", "here", "--infra", "local", *shorten(envs), "--yes")
    output, notes = running.communicate(timeout=RUN_S_MAX)
    assert running.returncode == 0, f"{output}\n{notes}"
    assert "with status SUCCEEDED" in notes
    if "MODEL" in envs:
        assert "4/4" in output, output
