"""The templates of `task_templates/batch` start workers of a map; the program for vLLM works with a stand-in for it."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from broker.app.mapping import find_engine
from broker.task.loader import load_tasks_text
from tests.cli.conftest import ROOT
from trainers.map_worker import call_function, load_function

FOLDER = ROOT / "task_templates/batch"
ENGINES = {
    "embed": "worker", "embed-dask": "dask", "embed-ray": "ray", "embed-spark": "spark", "generate": "worker",
}  # fmt: skip


def test_every_template_is_known_here() -> None:
    assert {path.stem for path in FOLDER.glob("*.yaml")} == set(ENGINES)


@pytest.mark.parametrize("name", ENGINES)
def test_template_starts_a_worker_of_a_map_with_a_program_beside_it(name: str) -> None:
    path = FOLDER / f"{name}.yaml"
    (task,) = load_tasks_text(path.read_text(), str(path))
    assert find_engine(task) == ENGINES[name]
    assert task.run is not None
    (program,) = (word for word in task.run.split() if word.endswith(".py"))
    assert (FOLDER / program).exists()


class StandIn:
    """Answers as vLLM's `LLM.chat` does: a list of outputs with texts, in the order of the conversations."""

    def __init__(self, **options: Any) -> None:
        assert options["model"] == "small" and options["tensor_parallel_size"] == 2

    def chat(self, conversations: list[list[dict[str, str]]], sampling: Any, *, use_tqdm: bool) -> list[Any]:
        assert sampling.temperature == 0.0
        texts = [each[-1]["content"].upper() for each in conversations]
        return [SimpleNamespace(outputs=[SimpleNamespace(text=text)]) for text in texts]


def test_program_for_vllm_answers_each_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("vllm")
    module.LLM = StandIn  # type: ignore[attr-defined]
    module.SamplingParams = SimpleNamespace  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setenv("MODEL", "small")
    monkeypatch.setenv("SKYPILOT_NUM_GPUS_PER_NODE", "2")
    monkeypatch.setattr(sys, "path", [*sys.path])
    process = load_function(FOLDER / "generate.py")
    monkeypatch.delitem(sys.modules, "generate")
    lines = b'{"id": 1, "prompt": "a"}\n{"prompt": "b"}\n'
    assert call_function(process, lines, 8, lambda: False) == [b'{"id": 1, "text": "A"}', b'{"text": "B"}']
