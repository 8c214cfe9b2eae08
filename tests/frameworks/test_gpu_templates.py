"""Templates that need GPUs: their programs use names that exist, clouds have their machines, the page says what ran."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
from pathlib import Path

import pytest

from tests.docs.test_commands import run_broker
from tests.frameworks.registry import GPU_TEMPLATES

ROOT = Path(__file__).parents[2]
NEVER = "has never been run on one"
PROGRAMS = sorted({template.program for template in GPU_TEMPLATES.values()} | {"torchtitan_bytes"})


def find_template(name: str) -> Path:
    return ROOT / f"task_templates/{name}.yaml"


def list_missing_names(text: str, frameworks: tuple[str, ...]) -> list[str]:
    """Return the names that a program takes from these packages, by import or as an attribute, and that they lack."""
    missing, modules = [], {}
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith(frameworks):
            continue
        module = importlib.import_module(node.module or "")
        for each in node.names:
            path = f"{node.module}.{each.name}"
            if hasattr(module, each.name):
                modules[each.asname or each.name] = getattr(module, each.name)
            elif importlib.util.find_spec(path):
                modules[each.asname or each.name] = importlib.import_module(path)
            else:
                missing.append(path)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Name):
            continue
        if node.value.id in modules and not hasattr(modules[node.value.id], node.attr):
            missing.append(f"{node.value.id}.{node.attr}")
    return missing


def test_a_name_that_a_package_lacks_is_found() -> None:
    program = "from json import decoder, loads, nothing\ndecoder.JSONDecoder\ndecoder.Nothing\nloads.x\n"
    assert list_missing_names(program, ("json",)) == ["json.nothing", "decoder.Nothing", "loads.x"]


@pytest.mark.parametrize("program", PROGRAMS)
def test_program_uses_only_names_that_its_framework_has(program: str) -> None:
    path = ROOT / f"trainers/frameworks/{program}.py"
    compile(path.read_text(), str(path), "exec")
    pytest.importorskip("torch")
    package = pytest.importorskip("megatron.core" if program.startswith("megatron") else "torchtitan").__name__
    assert list_missing_names(path.read_text(), (package,)) == []


@pytest.mark.parametrize("name", GPU_TEMPLATES)
def test_template_is_planned_on_gpus_of_a_cloud(name: str, tmp_path: Path) -> None:
    done = run_broker(tmp_path, "plan", str(find_template(name)))
    assert done.returncode == 0, done.stderr
    assert re.search(r"(?s)Choice: .*\b8 x (A100|H100|H200)", done.stdout), done.stdout


@pytest.mark.parametrize("name", GPU_TEMPLATES)
def test_template_and_page_say_that_it_never_ran_on_a_gpu(name: str) -> None:
    header = find_template(name).read_text().partition("name:")[0]
    assert NEVER in " ".join(header.replace("#", "").split())
    page = (ROOT / "docs/FRAMEWORKS.md").read_text()
    assert f"`{name}.yaml`" in page.partition("## Templates that need GPUs")[2].partition("\n## ")[0]
