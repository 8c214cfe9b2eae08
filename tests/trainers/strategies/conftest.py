"""Worlds of ranks to train in."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

TOTAL = 8
TINY = [
    *("--model.depth", "2", "--model.width", "32", "--model.heads", "4", "--model.context", "32"),
    *("--train.batch", "8", "--train.micro_batch", "2", "--train.steps", str(TOTAL), "--train.warmup_steps", "2"),
    *("--train.norm_max", "0.5", "--checkpoint.every_steps", "2", "--checkpoint.keep", "9"),
]


@dataclass(frozen=True, kw_only=True)
class Ended:
    """The outcome of the ranks of a world."""

    codes: list[int]
    errors: str


class Worlds:
    """Runs one world after another on a warm process."""

    def __init__(self) -> None:
        variables = {key: value for key, value in os.environ.items() if not key.startswith(("BROKER_", "SKYPILOT_"))}
        variables |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        variables["TORCH_CPP_LOG_LEVEL"] = "ERROR"
        command = [sys.executable, str(Path(__file__).with_name("warm.py"))]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=variables)

    def call(
        self,
        path: Path,
        function: str,
        arguments: Sequence[str],
        *,
        ranks: int,
        kill_at: str = "",
        kill_share: float = 0.0,
        attempt: int = 1,
        environment: Mapping[str, str] | None = None,
    ) -> Ended:
        """Run a function of one argument on every rank; a line of output that begins with `kill_at` means kill -9.

        The kill comes at once, or after `kill_share` of a step.
        """
        assert self.process.stdin is not None and self.process.stdout is not None
        path.mkdir(exist_ok=True)
        errors = path / "errors"
        errors.write_text("")
        order = {
            "ranks": ranks,
            "call": function,
            "arguments": list(arguments),
            "kill_at": kill_at,
            "kill_share": kill_share,
            "errors": str(errors),
            "variables": {
                "BROKER_CHECKPOINT_DIR": str(path / "checkpoints"),
                "BROKER_PROGRESS_FILE": str(path / "progress.jsonl"),
                "BROKER_PREEMPTION_FILE": str(path / "preempted"),
                "BROKER_ATTEMPT": str(attempt),
                **(environment or {}),
            },
        }
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return Ended(codes=json.loads(self.process.stdout.readline()), errors=errors.read_text())

    def train(
        self,
        path: Path,
        strategy: str,
        *flags: str,
        ranks: int,
        kill_after: int = 0,
        kill_share: float = 0.0,
        attempt: int = 1,
        function: str = "trainers.lm:main",
    ) -> dict[int, list[float]]:
        """Train the tiny model to its end, or to a kill -9 after some step and a share of the next.

        Return all losses of the folder by step.
        """
        arguments = ["--strategy", strategy, *TINY, *flags]
        kill_at = f"step {kill_after}/" if kill_after else ""
        ended = self.call(
            path, function, arguments, ranks=ranks, kill_at=kill_at, kill_share=kill_share, attempt=attempt
        )
        assert ended.codes == [-9 if kill_after else 0] * ranks, ended.errors
        return read_losses(path)


def write_documents(folder: Path) -> list[str]:
    """Write token files of short documents; return the flags that stream them, mask them and fuse the loss."""
    folder.mkdir()
    for name in ("train-0", "train-1"):
        (folder / f"{name}.bin").write_bytes(
            b"\0".join(b"%s of %d %s" % (name.encode(), n, b"x" * (n % 23)) for n in range(900))
        )
    (folder / "tokens.json").write_text('{"dtype": "uint8", "tokenizer": "bytes", "vocabulary": 256}')
    stream = ["--data.stream", str(folder), "--data.cache", str(folder / "cache"), "--data.chunk_mib", "0.0005"]
    return [*stream, "--data.shuffle_chunks", "4", "--data.document_mask", "--fused_loss"]


def read_lines(path: Path) -> list[dict[str, object]]:
    """Return all lines that the runs in a folder reported."""
    return [json.loads(line) for line in (path / "progress.jsonl").read_text().splitlines()]


def read_losses(path: Path) -> dict[int, list[float]]:
    """Return every loss reported for each step, in the order of attempts."""
    losses: dict[int, list[float]] = {}
    for line in read_lines(path):
        if line.get("loss") is not None:
            losses.setdefault(int(str(line["step"])), []).append(float(str(line["loss"])))
    return losses


@pytest.fixture(scope="session")
def alone(worlds: Worlds, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Return the losses of one process on the same data."""
    losses = worlds.train(tmp_path_factory.mktemp("alone"), "ddp", ranks=1)
    return {step: each[0] for step, each in losses.items()}
