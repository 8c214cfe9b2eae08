"""What docs/TRAINERS.md promises to those who bring a script of their own."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "TRAINERS.md"


# Calls and names by which code takes another path on a GPU.
GPU_MARKS = re.compile(
    r'torch\.cuda|"cuda"|"nccl"|\.is_cuda|cudart|pin_memory|fused=True|(?<!re)\.compile\(|torchao\.|CudaStreams|non_blocking'
)


def test_every_module_with_a_path_for_gpus_is_in_the_list_of_those_never_executed() -> None:
    table = PAGE.read_text().partition("| path never executed on a GPU |")[2].partition("\n\n")[0]
    modules = [path for path in ROOT.glob("trainers/**/*.py") if path.parent.name != "frameworks"]
    marked = {path.name for path in modules if GPU_MARKS.search(path.read_text())}
    assert {"ranks.py", "snapshot.py", "own_time.py"} <= marked
    assert sorted(name for name in marked if f"{name}`" not in table) == []


def run_script(folder: Path, attempt: int) -> int:
    variables = {
        "BROKER_CHECKPOINT_DIR": str(folder / "checkpoints"),
        "BROKER_PROGRESS_FILE": str(folder / "progress.jsonl"),
        "BROKER_PREEMPTION_FILE": str(folder / "preempted"),
        "BROKER_ATTEMPT": str(attempt),
    }
    folder.mkdir(exist_ok=True)
    script = PAGE.read_text().partition("```python\n")[2].partition("```")[0]
    done = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, **variables}, capture_output=True, text=True, timeout=600
    )
    assert not done.stderr, done.stderr
    return done.returncode


def load(folder: Path, name: str) -> torch.Tensor:
    saved: torch.Tensor = torch.load(folder / "checkpoints" / name)["model"]["weight"]
    return saved


@pytest.mark.long
@pytest.mark.slow
def test_own_script_of_the_docs_resumes_bit_identically_after_a_preemption(tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert run_script(whole, 1) == 0
    broken.mkdir()
    (broken / "preempted").touch()
    assert run_script(broken, 1) == 143
    (broken / "preempted").unlink()
    assert run_script(broken, 2) == 0
    assert torch.equal(load(whole, "step-00000200-0001.pt"), load(broken, "step-00000200-0002.pt"))
    lines = [json.loads(line) for line in (broken / "progress.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 201))
    assert (lines[0]["checkpoint_step"], lines[48]["checkpoint_step"], lines[-1]["checkpoint_step"]) == (1, 1, 200)
    assert lines[-1]["loss"] < lines[0]["loss"] / 5
