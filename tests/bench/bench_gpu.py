"""Measures the trainers on one GPU: `python -m tests.bench.bench_gpu`. Prints the card and the date with each figure.

- throughput: tokens/s of `trainers.lm --preset gpt2 --compile` over those of nanoGPT's loop, in turn
- stack: MFU of a stack of Llama 2 7B's layers, as many as fit beside their moments
- exact: losses of a run with `--deterministic` that is killed and resumed, compared with those of an undisturbed one

Never run on a GPU so far. `--tiny` uses tiny models on any device: it checks the bench, not the trainers.
"""

import argparse
import datetime
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.bench.bench_restore import compare

ROOT = Path(__file__).parents[2]
# Readings of ten steps that are left out: compilation, and the allocation of memory.
WARM_READINGS = 2
RATIO_MIN = 1.0
RUN_S_MAX = 1800.0
SHAPE = {"depth": 12, "width": 768, "heads": 12, "context": 1024, "vocabulary": 50304}
TINY_SHAPE = {"depth": 2, "width": 32, "heads": 2, "context": 32, "vocabulary": 512}
TOKEN_COUNT = 2**22


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the trainers on one GPU.")
    parser.add_argument("--only", choices=("throughput", "stack", "exact"), help="measure one thing")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each program for the throughput")
    parser.add_argument("--steps", type=int, default=80, help="steps of each run")
    parser.add_argument("--micro_batch", type=int, default=12, help="samples of one pass of GPT-2")
    parser.add_argument("--depth", type=int, default=12, help="layers of the stack: 12 take 64 GB with activations")
    parser.add_argument("--tiny", action="store_true", help="tiny models, on any device")
    asked = parser.parse_args()
    card = find_card(asked.tiny)
    measures = {"throughput": measure_throughput, "stack": measure_stack, "exact": measure_exact}
    for name, measure in measures.items():
        if asked.only in (None, name):
            with tempfile.TemporaryDirectory() as folder:
                print(f"{card}: {measure(asked, Path(folder))}", flush=True)


def find_card(is_tiny: bool) -> str:
    """Return the name of the GPU and today's date."""
    name = "torch.cuda.get_device_name() if torch.cuda.is_available() else ''"
    program = f"import torch; print({name}, torch.__version__)"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip()
    if " " not in found and not is_tiny:
        raise SystemExit("no GPU: not measured")
    return f"{found}, {datetime.datetime.now(datetime.UTC).date()}"


def measure_throughput(asked: argparse.Namespace, folder: Path) -> str:
    """Compare with nanoGPT's loop; both read the same file of tokens."""
    shape = TINY_SHAPE if asked.tiny else SHAPE
    write_tokens(folder, shape["vocabulary"])
    batch = 4 * asked.micro_batch
    common = {"batch": batch, "micro_batch": asked.micro_batch, "steps": asked.steps}
    nano = ["tests.bench.nano_loop", *to_flags({**shape, **common}), "--data", str(folder / "train.bin")]
    flags = to_flags({f"model.{name}": value for name, value in shape.items()})
    flags += to_flags({f"train.{name}": value for name, value in common.items()})
    ours_rates, nano_rates = [], []
    for turn in range(asked.rounds):
        nano_rates += json.loads(run(nano, folder))["tokens_per_s"][WARM_READINGS:]
        ours = train(folder / str(turn), "gpt2", [*flags, "--compile", "--data.path", str(folder)])
        ours_rates += [line["tokens_per_s"] for line in ours if line.get("tokens_per_s")][WARM_READINGS:]
    ratio = statistics.median(ours_rates) / statistics.median(nano_rates)
    return (
        f"GPT-2, bfloat16, compiled, {batch} x {shape['context']} tokens a step: {statistics.median(ours_rates):,.0f} "
        f"tokens/s, nanoGPT's loop {statistics.median(nano_rates):,.0f}; {compare(ratio, least=RATIO_MIN)}"
    )


def measure_stack(asked: argparse.Namespace, folder: Path) -> str:
    """Train some layers of Llama 2 7B."""
    write_tokens(folder, 512)
    shape = {"depth": 2, "width": 64, "heads": 4, "context": 64, "hidden_width": 0} if asked.tiny else {}
    flags = to_flags({f"model.{name}": value for name, value in {"depth": asked.depth, **shape}.items()})
    flags += ["--train.batch", "4", "--train.steps", str(asked.steps), "--compile", "--recompute", "none"]
    lines = train(folder / "run", "llama2-7b", [*flags, "--data.path", str(folder)])
    shares = [line["mfu"] for line in lines if line.get("mfu")][WARM_READINGS:]
    memory = max(line.get("memory_gib") or 0.0 for line in lines)
    mfu = f"{100 * statistics.median(shares):.1f} %" if shares else "unknown: the peak of this device is not known"
    return f"{asked.depth} layers of Llama 2 7B, bfloat16, compiled: MFU {mfu}, {memory:.1f} GiB"


def measure_exact(asked: argparse.Namespace, folder: Path) -> str:
    """Kill and resume a deterministic run."""
    write_tokens(folder, 512)
    shape = TINY_SHAPE if asked.tiny else {**SHAPE, "depth": 6}
    flags = [*to_flags({f"model.{name}": value for name, value in shape.items()}), "--deterministic"]
    flags += ["--train.batch", "8", "--train.micro_batch", "4", "--train.steps", "60", "--log.every_steps", "1"]
    flags += ["--checkpoint.every_steps", "10", "--data.path", str(folder), "--model.dropout", "0.1"]
    whole = read_losses(train(folder / "whole", "gpt2", flags))
    again = read_losses(train(folder / "again", "gpt2", flags))
    train(folder / "broken", "gpt2", flags, kill_at="step 35/")
    broken = read_losses(train(folder / "broken", "gpt2", flags, attempt=2))
    alike = sum(again[step] == loss for step, loss in whole.items())
    equal = sum(broken.get(step) == loss for step, loss in whole.items())
    return (
        f"--deterministic: {alike} of {len(whole)} losses of a second run and {equal} of a run that was killed and "
        f"resumed are bit-identical ({'MET' if alike == equal == len(whole) else 'MISSED'})"
    )


def train(folder: Path, preset: str, flags: Sequence[str], *, attempt: int = 1, kill_at: str = "") -> list[Any]:
    """Run `trainers.lm` to its end or to a kill; return the lines of its progress file."""
    folder.mkdir(exist_ok=True)
    variables = {
        "BROKER_CHECKPOINT_DIR": str(folder / "checkpoints"),
        "BROKER_PROGRESS_FILE": str(folder / "progress.jsonl"),
        "BROKER_ATTEMPT": str(attempt),
    }
    quiet = ["--sample.tokens", "0", "--checkpoint.every_steps", "0"]
    command = ["trainers.lm", "--preset", preset, *quiet, *flags]
    run(command, folder, variables=variables, kill_at=kill_at)
    return [json.loads(line) for line in (folder / "progress.jsonl").read_text().splitlines()]


def run(command: Sequence[str], folder: Path, *, variables: dict[str, str] | None = None, kill_at: str = "") -> str:
    """Run a module to its end or until it prints a line that begins with `kill_at`; return its output."""
    errors = folder / "errors"
    with errors.open("w") as opened:
        process = subprocess.Popen(
            [sys.executable, "-m", *command], cwd=ROOT, env={**os.environ, **(variables or {})}, text=True,
            stdout=subprocess.PIPE, stderr=opened,
        )  # fmt: skip
    assert process.stdout is not None
    output = []
    for line in process.stdout:
        output.append(line)
        if kill_at and line.startswith(kill_at):
            process.send_signal(signal.SIGKILL)
    if process.wait(RUN_S_MAX) and not kill_at:
        raise SystemExit(errors.read_text()[-3000:])
    return "".join(output)


def read_losses(lines: Sequence[Any]) -> dict[int, float]:
    """Return the last loss that was reported for each step."""
    return {line["step"]: line["loss"] for line in lines if line.get("loss") is not None}


def to_flags(values: dict[str, int]) -> list[str]:
    """Return command line flags."""
    return [word for name, value in values.items() for word in (f"--{name}", str(value))]


def write_tokens(folder: Path, vocabulary: int) -> None:
    """Write random tokens in nanoGPT's format."""
    import torch

    ids = torch.randint(vocabulary, (TOKEN_COUNT,), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    (folder / "train.bin").write_bytes(ids.to(torch.uint16).numpy().tobytes())
    (folder / "tokens.json").write_text(json.dumps({"dtype": "uint16", "vocabulary": vocabulary}))


if __name__ == "__main__":
    main()
