"""Starts real training runs and reads what they reported."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from .strategies.conftest import Ended, Worlds

REPOSITORY = Path(__file__).parents[2]
TOTAL = 60
TINY = [
    *("--model.depth", "1", "--model.width", "16", "--model.heads", "2", "--model.context", "16"),
    *("--model.dropout", "0.1", "--train.batch", "6", "--train.micro_batch", "2", "--train.steps", str(TOTAL)),
    *("--checkpoint.every_steps", "5"),
]


@dataclass(frozen=True, kw_only=True)
class TrainingFolder:
    """One job's checkpoints and progress, across attempts."""

    path: Path
    environment: Mapping[str, str] = field(default_factory=dict)

    def start(
        self, *flags: str, workers: int = 1, attempt: int = 1, strategy: str = "ddp", module: str = "trainers.lm"
    ) -> "subprocess.Popen[str]":
        """Begin an attempt in a process group of its own."""
        variables = {key: value for key, value in os.environ.items() if not key.startswith(("BROKER_", "SKYPILOT_"))}
        variables |= {
            "BROKER_CHECKPOINT_DIR": str(self.path / "checkpoints"),
            "BROKER_PROGRESS_FILE": str(self.path / "progress.jsonl"),
            "BROKER_PREEMPTION_FILE": str(self.path / "preempted"),
            "BROKER_ATTEMPT": str(attempt),
            "SKYPILOT_NUM_GPUS_PER_NODE": str(workers),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            **self.environment,
        }
        command = [sys.executable, "-m", "trainers.launch", "-m", module, "--strategy", strategy, *TINY, *flags]
        pipe = subprocess.PIPE
        return subprocess.Popen(
            command, cwd=REPOSITORY, env=variables, stdout=pipe, stderr=pipe, text=True, start_new_session=True
        )

    def run(self, *flags: str, workers: int = 1, attempt: int = 1, strategy: str = "ddp") -> tuple[int, str]:
        """Run an attempt to its end; its exit code and stderr."""
        process = self.start(*flags, workers=workers, attempt=attempt, strategy=strategy)
        _, errors = process.communicate(timeout=120)
        return process.returncode, errors

    def fork(
        self,
        worlds: Worlds,
        *flags: str,
        workers: int = 1,
        attempt: int = 1,
        strategy: str = "ddp",
        kill_after: int = 0,
    ) -> Ended:
        """As `run`, by the warm process and without the launcher; `kill_after` a step, kill -9 for all ranks."""
        return worlds.call(
            self.path,
            "trainers.lm:main",
            ["--strategy", strategy, *TINY, *flags],
            ranks=workers,
            attempt=attempt,
            kill_at=f"step {kill_after}/" if kill_after else "",
            environment=self.environment,
        )

    def lines(self) -> list[dict[str, object]]:
        """All that was reported so far."""
        return [json.loads(line) for line in (self.path / "progress.jsonl").read_text().splitlines()]

    def losses(self) -> dict[int, list[float]]:
        """Every loss ever reported for a step, as exact floats."""
        losses: dict[int, list[float]] = {}
        for line in self.lines():
            if line.get("loss") is not None:
                losses.setdefault(int(str(line["step"])), []).append(float(str(line["loss"])))
        return losses


def await_step(process: "subprocess.Popen[str]", step: int) -> None:
    """Read the run's output until it reports a step."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(f"step {step}/") and "loss" in line:
            return
    raise AssertionError(f"the run ended before step {step}: {process.stderr and process.stderr.read()}")


def kill_all(process: "subprocess.Popen[str]") -> None:
    """kill -9 for the launcher and all its workers."""
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=300)


@pytest.fixture
def folder(tmp_path: Path) -> TrainingFolder:
    """An empty job folder."""
    return TrainingFolder(path=tmp_path)
