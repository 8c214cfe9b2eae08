"""Measure how a training run scales over the devices of this node: `python -m trainers.lm --scale_report`.

Each row is a short run with the same flags and another number of ranks. Strong scaling keeps the batch of the run,
weak scaling the batch per rank. For the share of communication, the same number of single ranks run concurrently
without communicating: they compete for the same memory and cores, so the remaining difference is communication.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainers.errors import TrainerError

STEPS, WARM_STEPS = 12, 4
RUN_S_MAX = 3600.0
QUIET = (
    "--checkpoint.every_steps",
    "0",
    "--sample.tokens",
    "0",
    "--log.every_steps",
    "1",
    "--evaluate.every_steps",
    "0",
)


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The measured rates of one run, over all of its ranks."""

    tokens_per_s: float
    mfu: float | None


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row of the table: a number of ranks under strong or weak scaling."""

    kind: str
    ranks: int
    batch: int
    measured: Measurement
    efficiency: float  # tokens/s relative to one rank, divided by the number of ranks
    communication: float | None  # share of a step; None if a single rank cannot run it


def report_scaling(flags: Sequence[str], *, batch: int, ranks_max: int | None = None) -> int:
    """Measure short runs of `trainers.lm` with these flags and print a table; return the exit code."""
    counts = list_counts(ranks_max or count_devices())
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for kind in ("strong", "weak"):
            alone: Measurement | None = None
            for ranks in counts:
                size = batch if kind == "strong" else batch * ranks
                try:
                    measured = run(flags, Path(folder), ranks=ranks, batch=size)
                    apart = (
                        run_apart(flags, Path(folder), ranks=ranks, batch=max(1, size // ranks)) if ranks > 1 else None
                    )
                except TrainerError as error:
                    print(f"error: {error}", file=sys.stderr)
                    return 1
                alone = alone or measured
                rows.append(make_row(kind, ranks, size, measured, alone, apart))
                print(format_row(rows[-1], with_head=len(rows) == 1), flush=True)
    return 0


def make_row(
    kind: str, ranks: int, batch: int, measured: Measurement, alone: Measurement, apart: Measurement | None
) -> Row:
    """Compare a run with a single rank, and with the same number of ranks that do not communicate."""
    communication = None if apart is None else max(0.0, 1.0 - measured.tokens_per_s / apart.tokens_per_s)
    return Row(
        kind=kind,
        ranks=ranks,
        batch=batch,
        measured=measured,
        efficiency=measured.tokens_per_s / (alone.tokens_per_s * ranks),
        communication=0.0 if ranks == 1 else communication,
    )


def format_row(row: Row, *, with_head: bool) -> str:
    """Return a line of the table, preceded by the header if `with_head`."""
    head = f"{'scaling':8} {'ranks':>5} {'batch':>6} {'tokens/s':>12} {'efficiency':>10} {'MFU':>7} "
    head += "communication\n"
    mfu = "-" if row.measured.mfu is None else f"{100 * row.measured.mfu:.1f} %"
    communication = "-" if row.communication is None else f"{100 * row.communication:.0f} %"
    return (head if with_head else "") + (
        f"{row.kind:8} {row.ranks:5} {row.batch:6} {row.measured.tokens_per_s:12,.0f} {100 * row.efficiency:8.0f} % "
        f"{mfu:>7} {communication:>13}"
    )


def list_counts(ranks_max: int) -> list[int]:
    """Return the powers of two below `ranks_max`, and `ranks_max`."""
    return sorted({1 << power for power in range(ranks_max.bit_length())} | {ranks_max})


def count_devices() -> int:
    """Return the number of GPUs on this node, or of cores if it has none."""
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return torch.cuda.device_count() or cores


def run(flags: Sequence[str], folder: Path, *, ranks: int, batch: int) -> Measurement:
    """Train a few steps and return the measurement. Raises TrainerError if the run fails."""
    return finish(*start(flags, folder, ranks=ranks, batch=batch))


def run_apart(flags: Sequence[str], folder: Path, *, ranks: int, batch: int) -> Measurement | None:
    """Run `ranks` single ranks concurrently; return None if one rank cannot run the model alone."""
    started = [start(flags, folder, ranks=1, batch=batch, device=rank) for rank in range(ranks)]
    try:
        found = [finish(*each) for each in started]
    except TrainerError:
        for process, _ in started:
            process.kill()
            process.wait()
        return None
    return Measurement(tokens_per_s=sum(each.tokens_per_s for each in found), mfu=None)


def start(
    flags: Sequence[str], folder: Path, *, ranks: int, batch: int, device: int | None = None
) -> "tuple[subprocess.Popen[str], Path]":
    """Start a run, optionally with a single visible GPU."""
    own = Path(tempfile.mkdtemp(dir=folder))
    outside = ("BROKER_", "SKYPILOT_")
    variables = {name: value for name, value in os.environ.items() if not name.startswith(outside)}
    variables["BROKER_CHECKPOINT_DIR"] = str(own / "checkpoints")
    if device is not None:
        visible = variables.get("CUDA_VISIBLE_DEVICES", "")
        variables["CUDA_VISIBLE_DEVICES"] = visible.split(",")[device] if "," in visible else str(device)
    size = ["--train.batch", str(batch), "--train.steps", str(STEPS), "--log.metrics", str(own / "metrics.jsonl")]
    command = [sys.executable, "-m", "trainers.launch", "--workers", str(ranks), "-m", "trainers.lm"]
    process = subprocess.Popen(
        [*command, *flags, *QUIET, *size], env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    return process, own / "metrics.jsonl"


def finish(process: "subprocess.Popen[str]", metrics: Path) -> Measurement:
    """Wait for a run; return the medians over its steps."""
    try:
        _, errors = process.communicate(timeout=RUN_S_MAX)
    except subprocess.TimeoutExpired:
        process.kill()
        raise TrainerError(f"{STEPS} steps took longer than {RUN_S_MAX:.0f} s") from None
    if process.returncode:
        raise TrainerError(f"a run ended with code {process.returncode}: {errors.strip()[-500:]}")
    lines: list[dict[str, Any]] = [json.loads(line) for line in metrics.read_text().splitlines()][WARM_STEPS:]
    shares = [line["mfu"] for line in lines if "mfu" in line]
    return Measurement(
        tokens_per_s=statistics.median(line["tokens_per_s"] for line in lines),
        mfu=statistics.median(shares) if shares else None,
    )
