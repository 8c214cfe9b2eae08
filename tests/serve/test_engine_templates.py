"""The templates of engines load, are planned and priced, and their commands listen where the balancer asks."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from broker.catalog.bundle import open_book
from broker.optimizer.planner import make_plan
from broker.serve.replicas import SERVICE_VARIABLE
from broker.task.loader import load_tasks
from broker.types import Task

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "task_templates/serving"
# name: program, probe, flag of the port
ENGINES = {
    "vllm": ("vllm", "/health", "--port"),
    "sglang": ("python", "/health", "--port"),
    "llama-cpp": ("llama-server", "/health", "--port"),
    "triton": ("python3", "/health/ready", "--openai-port"),
}
NEVER = "Never run"
STUB = '#!/bin/sh\nprintf "%s\\n" "$(basename "$0")" "$@"\n'


def load(name: str) -> Task:
    (task,) = load_tasks(FOLDER / f"{name}.yaml")
    return task


def run(script: str, task: Task, folder: Path) -> list[str]:
    """Run a command of the template with stand-ins for its programs, and return the words that the program gets."""
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    for program, _, _ in ENGINES.values():
        (programs / program).write_text(STUB)
        (programs / program).chmod(0o755)
    variables = {
        **os.environ, **task.envs, "HOME": str(folder), "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "SKYPILOT_NUM_GPUS_PER_NODE": "2", "BROKER_REPLICA_HOST": "127.0.0.1", "BROKER_REPLICA_PORT": "8123",
        SERVICE_VARIABLE: task.name or "",
    }  # fmt: skip
    done = subprocess.run(
        ["bash", "-euc", script], env=variables, cwd=folder, capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()


def test_every_template_is_known_here() -> None:
    assert {path.stem for path in FOLDER.glob("*.yaml")} == {*ENGINES, "train_and_serve"}


@pytest.mark.parametrize("name", ENGINES)
def test_template_is_planned_and_priced_on_spot_of_the_shipped_catalog(name: str, tmp_path: Path) -> None:
    task = load(name)
    plan = make_plan(task, open_book(tmp_path).find_offers(task), prices_as_of="2026-01-01")
    placement = plan.choice.placement
    assert placement.is_spot and placement.usd_hour > 0 and placement.offer.accelerator_count == 1


@pytest.mark.parametrize("name", ENGINES)
def test_service_is_probed_and_scaled(name: str) -> None:
    task = load(name)
    service = task.service
    assert service is not None and service.probe.path == ENGINES[name][1]
    assert service.policy.replicas_min == 2 and service.policy.replicas_max == 8
    assert service.availability == 0.99 and len(task.resources[0].ports) == 1


@pytest.mark.parametrize("name", ENGINES)
def test_engine_listens_where_the_balancer_expects_it(name: str, tmp_path: Path) -> None:
    task = load(name)
    assert task.run is not None
    program, _, flag = ENGINES[name]
    words = run(task.run, task, tmp_path)
    assert words[0] == program
    assert words[words.index("--host") + 1] == "127.0.0.1" and words[words.index(flag) + 1] == "8123"
    assert task.envs["MODEL"] in words
    if name in ("vllm", "sglang"):
        assert "2" in words, "all GPUs of the machine"


def test_model_repository_of_triton_is_complete(tmp_path: Path) -> None:
    task = load("triton")
    assert task.setup is not None
    run(task.setup, task, tmp_path)
    model = json.loads((tmp_path / "models/llm/1/model.json").read_text())
    assert model == {"model": task.envs["MODEL"], "max_model_len": 8192, "tensor_parallel_size": 2}
    assert 'backend: "vllm"' in (tmp_path / "models/llm/config.pbtxt").read_text()


@pytest.mark.parametrize("name", ENGINES)
def test_versions_are_pinned(name: str) -> None:
    text = (FOLDER / f"{name}.yaml").read_text()
    image = load(name).resources[0].image_id
    assert "==" in text.partition("setup:")[2].partition("\n")[0] if image is None else "latest" not in str(image)


@pytest.mark.parametrize("name", ENGINES)
def test_template_and_page_say_that_it_never_ran(name: str) -> None:
    assert NEVER in (FOLDER / f"{name}.yaml").read_text().partition("\nname:")[0]
    section = (ROOT / "docs/SERVING.md").read_text().partition("\n## Engines\n")[2].partition("\n## ")[0]
    assert f"`task_templates/serving/{name}.yaml`" in section and "never run" in section
