"""Things that new contributors rely on: CI, hooks, templates and the picture of the README."""

from __future__ import annotations

import json
import re
import runpy
import tomllib
from typing import Any

import pytest
import yaml

from tests.docs.pages import ROOT

PICTURES = ROOT / "docs/pictures"


def read_yaml(path: str) -> Any:
    return yaml.safe_load((ROOT / path).read_text())


def test_picture_is_what_its_script_draws_from_the_recorded_rehearsal() -> None:
    script = runpy.run_path(str(PICTURES / "make_rehearsal.py"))
    record = json.loads((PICTURES / "rehearsal.json").read_text())
    assert script["draw"](record) == (PICTURES / "rehearsal.svg").read_text()
    timeline = script["read_timeline"](record["story"])
    assert len(timeline.steps) == record["result"]["preemptions"] + 1 == len(timeline.preemptions) + 1
    assert [step for _, step in timeline.checkpoints][-1] == record["result"]["summary"]["steps"]


def test_ci_runs_the_make_targets_on_every_python_that_the_package_supports() -> None:
    jobs = read_yaml(".github/workflows/ci.yml")["jobs"]
    versions = jobs["test"]["strategy"]["matrix"]["python"]
    oldest = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    assert versions[0] == oldest.removeprefix(">=") and versions == ["3.11", "3.12", "3.13", "3.14"]
    commands = " ".join(step.get("run", "") for job in jobs.values() for step in job["steps"])
    targets = re.findall(r"\bmake ([a-z-]+)", commands)
    assert {"lint", "test", "test-slow", "testbed", "audit", "docs"} == set(targets)
    known = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(targets) <= set(known)


@pytest.mark.parametrize("name", ["ci", "frameworks"])
def test_ci_pins_actions_and_needs_no_secret(name: str) -> None:
    text = (ROOT / f".github/workflows/{name}.yml").read_text()
    assert "secrets." not in text
    uses = re.findall(r"uses: (\S+)", text)
    assert uses and all(re.fullmatch(r"actions/[a-z-]+@v\d+", each) for each in uses)
    assert read_yaml(f".github/workflows/{name}.yml")["permissions"] == {"contents": "read"}


def test_hooks_run_the_tools_of_make_lint_from_the_environment_of_the_project() -> None:
    (repo,) = read_yaml(".pre-commit-config.yaml")["repos"]
    assert repo["repo"] == "local"
    lint = (ROOT / "Makefile").read_text().partition("\nlint:")[2].partition("\n\n")[0]
    for hook in repo["hooks"]:
        program, *words = hook["entry"].split()
        assert program.startswith(".venv/bin/") and hook["language"] == "system"
        assert program.removeprefix(".venv/bin/") in lint
        assert not words or words[0].startswith("-") or words[0] in lint


def test_issue_forms_ask_for_what_a_report_needs() -> None:
    for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"):
        form = yaml.safe_load(path.read_text())
        if path.stem == "config":
            continue
        assert form["name"] and form["description"] and form["body"]
        ids = [part["id"] for part in form["body"] if "id" in part]
        assert len(ids) == len(set(ids))


def test_architecture_names_each_module_in_one_row() -> None:
    """Merges have doubled rows before; the two then changed apart."""
    rows = re.findall(r"^\| (`[^|]+) \|", (ROOT / "docs/ARCHITECTURE.md").read_text(), re.MULTILINE)
    assert len(rows) > 100 and sorted(set(rows)) == sorted(rows)
