"""The table of docs/FRAMEWORKS.md is what was measured, and the task files of the migration pages are planned."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from broker.task.loader import load_tasks
from tests.docs.pages import ROOT, Block, list_blocks
from tests.docs.test_commands import run_broker
from tests.frameworks.registry import FRAMEWORKS, GPU_TEMPLATES
from tests.frameworks.report import show, show_costs

PAGE = ROOT / "docs/FRAMEWORKS.md"
RESULTS = ROOT / "tests/frameworks/results.json"
TEMPLATES = [path for path in (ROOT / "task_templates").glob("*.yaml") if "-m trainers.venv" in path.read_text()]
PROGRAM_LINES_MAX = 120


def test_report() -> None:
    rows = json.loads(RESULTS.read_text())
    assert show(rows) in PAGE.read_text()
    assert show_costs([row for row in rows if row["framework"] in list_workflow_templates()]) in PAGE.read_text()


def list_workflow_templates() -> list[str]:
    workflow = yaml.safe_load((ROOT / ".github/workflows/frameworks.yml").read_text())
    found: list[str] = workflow["jobs"]["template"]["strategy"]["matrix"]["template"]
    return found


def test_workflow_tests_templates_that_exist_and_watches_their_files() -> None:
    text = (ROOT / ".github/workflows/frameworks.yml").read_text()
    assert set(list_workflow_templates()) <= set(FRAMEWORKS)
    assert "make test-frameworks NAMES=${{ matrix.template }}" in text
    watched = yaml.safe_load(text)[True]["pull_request"]["paths"]  # YAML 1.1 reads `on` as true
    assert [path for path in watched if not list(ROOT.glob(path))] == []
    assert {f"task_templates/{name}.yaml" for name in list_workflow_templates()} <= set(watched)


def test_every_template_that_runs_on_cpus_was_killed_and_preempted_with_its_pinned_version() -> None:
    rows = {row["framework"]: row for row in json.loads(RESULTS.read_text())}
    tried = [path for path in TEMPLATES if path.stem not in GPU_TEMPLATES]
    assert {path.stem for path in tried} == set(FRAMEWORKS) == set(rows)
    for path in tried:
        version = rows[path.stem]["version"].partition("+")[0]
        distribution = FRAMEWORKS[path.stem].distribution
        names = (distribution, "jax", "ray", "dask", "mpi4py", "torch")
        assert any(re.search(rf"\b{name}(\[\w+\])?=={re.escape(version)}\b", path.read_text()) for name in names), path


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_template_names_a_program_that_ships_and_survives_a_lost_peer(path: Path) -> None:
    (task,) = load_tasks(path)
    assert task.run is not None
    found = re.search(r"-m trainers\.frameworks\.(\w+)", task.run)
    assert found
    program = ROOT / f"trainers/frameworks/{found[1]}.py"
    assert len(program.read_text().splitlines()) <= PROGRAM_LINES_MAX
    assert f"trainers/frameworks/{found[1]}.py" in path.read_text().partition("name:")[0]
    assert "max_restarts_on_errors: 3" in path.read_text()


def list_task_blocks() -> list[Block]:
    pages = sorted((ROOT / "docs/coming_from").glob("*.md"))
    return [block for page in pages for block in list_blocks(page) if block.language == "yaml"]


@pytest.mark.parametrize("block", list_task_blocks(), ids=lambda block: f"{block.page.name}:{block.line}")
def test_task_file_of_a_migration_page_is_planned(block: Block, tmp_path: Path) -> None:
    (tmp_path / "task.yaml").write_text(block.text)
    done = run_broker(tmp_path, "plan", str(tmp_path / "task.yaml"))
    assert done.returncode == 0, done.stderr
    assert "Choice: " in done.stdout


def test_pages_cover_the_launchers_that_users_come_from() -> None:
    text = "\n".join(page.read_text() for page in (ROOT / "docs/coming_from").glob("*.md"))
    names = (
        "sbatch",
        "torchrun",
        "ray job submit",
        "accelerate launch",
        "deepspeed",
        "SageMaker",
        "Vertex",
        "SkyPilot",
    )
    assert [name for name in names if name not in text] == []
