"""Starts real training runs and reads what they reported."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from broker.runtime.credentials import make_credential
from trainers.launch import find_free_port

from .strategies.conftest import Ended, Worlds

REPOSITORY = Path(__file__).parents[2]
TOTAL = 60
TINY = [
    *("--model.depth", "1", "--model.width", "16", "--model.heads", "2", "--model.context", "16"),
    *("--model.dropout", "0.1", "--train.batch", "6", "--train.micro_batch", "2", "--train.steps", str(TOTAL)),
    *("--checkpoint.every_steps", "5"),
]

# The schedule must not depend on the number of steps, and a low rate keeps rounding from growing over a thousand:
# a step's loss then shows which samples it is from.
STEADY = ("--model.dropout", "0", "--train.learning_rate", "1e-4", "--train.learning_rate_min", "1e-4")
ENDLESS = "1000000"
PACE = {"PYTHONPATH": str(Path(__file__).parents[1] / "torture" / "pace"), "TORTURE_PACE_S": "0.03"}

HELD = str(Path(__file__).parent / "held")

Start = Callable[..., "subprocess.Popen[str]"]


@dataclass(frozen=True, kw_only=True)
class TrainingFolder:
    """One job's checkpoints and progress, across attempts."""

    path: Path
    environment: Mapping[str, str] = field(default_factory=dict)

    def start(
        self,
        *flags: str,
        workers: int = 1,
        attempt: int = 1,
        strategy: str = "ddp",
        module: str = "trainers.lm",
        held_at: int = 0,
    ) -> "subprocess.Popen[str]":
        """Begin an attempt in a process group of its own. It waits after the step `held_at` for a signal."""
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
        if held_at:
            variables |= {"PYTHONPATH": HELD, "HELD_AT": str(held_at), "HELD_UNTIL": str(self.path / "released")}
        command = [sys.executable, "-m", "trainers.launch", "-m", module, "--strategy", strategy, *TINY, *flags]
        pipe = subprocess.PIPE
        return subprocess.Popen(
            command, cwd=REPOSITORY, env=variables, stdout=pipe, stderr=pipe, text=True, start_new_session=True
        )

    def run(self, *flags: str, workers: int = 1, attempt: int = 1, strategy: str = "ddp") -> tuple[int, str]:
        """Run an attempt to its end; return its exit code and stderr."""
        process = self.start(*flags, workers=workers, attempt=attempt, strategy=strategy)
        _, errors = process.communicate(timeout=600)
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
        """Run as `run` does, by the warm process without the launcher; `kill_after` a step, all ranks get SIGKILL."""
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
        """Return all lines reported so far."""
        return [json.loads(line) for line in (self.path / "progress.jsonl").read_text().splitlines()]

    def losses(self) -> dict[int, list[float]]:
        """Return every loss ever reported for each step, as exact floats."""
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
    """Kill the launcher and all its workers with SIGKILL."""
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=300)


@pytest.fixture
def folder(tmp_path: Path) -> TrainingFolder:
    """An empty job folder."""
    return TrainingFolder(path=tmp_path)


@pytest.fixture
def start_node(folder: TrainingFolder, tmp_path: Path) -> Iterator[Start]:
    """Start nodes of one rank each, all on this machine; none outlives the test."""
    pem = tmp_path / "gang.pem"
    pem.write_text(make_credential("elastic").value)
    port = find_free_ports(4)
    nodes: list[subprocess.Popen[str]] = []

    def start(
        rank: int, *flags: str, count: int = 3, strategy: str = "allreduce", module: str = "trainers.lm"
    ) -> "subprocess.Popen[str]":
        environment = {
            "SKYPILOT_NODE_RANK": str(rank),
            "SKYPILOT_NUM_NODES": str(count),
            "SKYPILOT_NODE_IPS": "\n".join(["127.0.0.1"] * count),
            "BROKER_MASTER_PORT": str(port),
            "BROKER_GANG_PEM": str(pem),
            **PACE,  # or thousands of steps are taken while a newcomer starts, and taken again to compare them
        }
        node = TrainingFolder(path=folder.path, environment=environment)
        steps = ("--train.steps", ENDLESS, *STEADY)
        nodes.append(node.start("--elastic", "2:3", *steps, *flags, strategy=strategy, module=module))
        return nodes[-1]

    yield start
    for node in nodes:
        if node.poll() is None:
            os.killpg(node.pid, signal.SIGKILL)
        node.communicate(timeout=300)


def find_free_ports(count: int) -> int:
    """Return the first of some ports in a row: each node's launcher has the next one."""
    for _ in range(100):
        port = find_free_port()
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for step in range(count):
                stack.enter_context(socket.create_server(("127.0.0.1", port + step)))
            return port
    raise AssertionError("no ports in a row")


def await_line(process: "subprocess.Popen[str]", words: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if words in line:
            return
        assert "started" not in line and "resumed" not in line, f"`{line.strip()}` came before `{words}`"
    raise AssertionError(f"the run ended without `{words}`: {process.stderr and process.stderr.read()}")


def count_lost_steps(folder: TrainingFolder) -> list[int]:
    """Count, for each loss of a node, the reported steps that the run had to take again."""
    lost, reported = [], 0
    for line in folder.lines():
        if line.get("event") == "resumed from memory":
            lost.append(max(0, reported - int(str(line["step"]))))
        elif line.get("loss") is not None:
            reported = int(str(line["step"]))
    return lost
