"""Measures recovery of the trainers on a CPU: `python -m tests.bench.bench_recovery`. Ratios within one run.

- start: seconds from exec to the first step of a resumed run, over those of as many bare `import torch` at once
- standby: seconds from kill -9 of a rank to the next step, with `--warm`
- peer: time of a step of `fsdp` with `--checkpoint.peer_every_steps 1` over that of a step without
"""

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.bench.bench_restore import compare
from tests.bench.bench_trainers import WARM_STEPS, Halting, launch, start

RANKS = 2
# The bars: over the bare import of torch, and in seconds.
START_RATIO_MAX, STANDBY_S_MAX = 1.5, 2.0


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure recovery of the trainers.")
    parser.add_argument("--rounds", type=int, default=5, help="starts and kills to time")
    parser.add_argument("--steps", type=int, default=80, help="steps of the comparison of copies to a peer")
    parser.add_argument("--width", type=int, default=128, help="width of the model of the comparison of copies")
    parser.add_argument("--only", choices=("start", "standby", "peer"), help="measure one thing")
    options = parser.parse_args()
    measures: dict[str, Callable[[], None]] = {
        "start": lambda: measure_start(options.rounds),
        "standby": lambda: measure_standby(options.rounds),
        "peer": lambda: measure_peers(options.steps, options.width),
    }
    for name, measure in measures.items():
        if options.only in (None, name):
            measure()


def measure_start(rounds: int) -> None:
    """Measure one rank, and as many as there are cores."""
    for workers in (1, RANKS):
        compare_start(workers, rounds)


def compare_start(workers: int, rounds: int) -> None:
    """Alternate resumed runs and bare imports."""
    ours, bare = [], []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "progress.jsonl"
        for turn in range(rounds + 1):
            begin = time.perf_counter()
            imports = [subprocess.Popen([sys.executable, "-c", "import torch"]) for _ in range(workers)]
            for process in imports:
                process.wait()
            bare.append(time.perf_counter() - begin)
            file.unlink(missing_ok=True)
            begin_s = time.time()
            steps = ["--train.steps", str(5 * (turn + 1)), "--sample.tokens", "0"]
            launch(workers, ["trainers.lm", "--strategy", "ddp", *steps], Path(folder))
            ours.append(next(line["time"] for line in read_lines(file) if line["loss"] is not None) - begin_s)
    ratio = statistics.median(mine / other for mine, other in zip(ours[1:], bare[1:], strict=True))
    print(
        f"restart to first step, {workers} rank(s) of ddp: {statistics.median(ours[1:]):.2f} s, bare import of torch "
        f"{statistics.median(bare[1:]):.2f} s; {compare(ratio, most=START_RATIO_MAX)} by median of {rounds} pairs",
        flush=True,
    )


def measure_standby(rounds: int) -> None:
    """Kill one of two ranks; the launcher restarts it, and both continue in their standbys."""
    seconds, startups = [], []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder, training(
            Path(folder), RANKS, "--strategy", "allreduce", "--elastic", "1:2", "--warm"
        ) as run:  # fmt: skip
            wait_for(lambda run=run: len(list_children(run.pid, "trainers.standby")) == RANKS)  # type: ignore[misc]
            time.sleep(10)  # a standby is ready only once its imports are done
            victim = next(pid for pid in list_children(run.pid, "") if pid not in list_children(run.pid, "standby"))
            file = Path(folder) / "progress.jsonl"
            lines_before = len(read_lines(file))
            killed_s = time.time()
            os.kill(victim, signal.SIGKILL)
            later: list[dict[str, Any]] = []
            while not any(line.get("event") == "resumed from memory" for line in later) or later[-1]["loss"] is None:
                time.sleep(0.01)
                later = read_lines(file)[lines_before:]
            resumed = next(line for line in later if line.get("event") == "resumed from memory")
            if not resumed.get("is_warm"):
                raise SystemExit("the rank did not restart in its standby")
            after = later[later.index(resumed) :]
            seconds.append(next(line["time"] for line in after if line["loss"] is not None) - killed_s)
            startups.append(float(resumed["startup_s"]))
    print(
        f"warm standby: seconds from kill -9 of one of {RANKS} ranks to the next step "
        f"{compare(statistics.median(seconds), most=STANDBY_S_MAX)}, in turn "
        f"{' '.join(f'{each:.2f}' for each in seconds)}; {statistics.median(startups):.2f} s of them from the takeover "
        "to the restored state",
        flush=True,
    )


def measure_peers(steps: int, width: int) -> None:
    """Let two runs take steps in turn, the other one halted."""
    model = ["--model.width", str(width), "--train.steps", str(steps), "--checkpoint.every_steps", "0"]
    common = ["trainers.lm", "--strategy", "fsdp", "--elastic", "2:2", *model, "--sample.tokens", "0"]
    commands = {"copies": [*common, "--checkpoint.peer_every_steps", "1"], "none": common}
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        folders = {"copies": Path(first), "none": Path(second)}
        processes = {name: start(RANKS, command, folders[name]) for name, command in commands.items()}
        programs = {name: Halting(process) for name, process in processes.items()}
        cpu_s = dict.fromkeys(processes, 0.0)
        for step in range(1, steps):
            if step == WARM_STEPS:
                cpu_s = {name: read_cpu_s(process.pid) for name, process in processes.items()}
            for name in ("copies", "none") if step % 2 else ("none", "copies"):
                seconds[name].append(programs[name].run_to(f"step {step}/"))
        cpu_s = {name: read_cpu_s(process.pid) - cpu_s[name] for name, process in processes.items()}
        for program in programs.values():
            program.finish()
    copies, none = (seconds[name][WARM_STEPS:] for name in ("copies", "none"))
    more_cpu_s = (cpu_s["copies"] - cpu_s["none"]) / (steps - WARM_STEPS)
    more = statistics.median(mine - other for mine, other in zip(copies, none, strict=True))
    ratio = statistics.median(mine / other for mine, other in zip(copies, none, strict=True))
    print(
        f"copies to a peer after every step, width {width}, {RANKS} ranks of fsdp, by {len(none)} pairs of steps: "
        f"{ratio:.3f} times as long, {1000 * more:.1f} ms more than {1000 * statistics.median(none):.1f} ms (medians); "
        f"processor time of all ranks {cpu_s['copies'] / cpu_s['none']:.3f} times, {1000 * more_cpu_s:.1f} ms more",
        flush=True,
    )


@contextlib.contextmanager
def training(folder: Path, workers: int, *flags: str) -> "Iterator[subprocess.Popen[str]]":
    """Start a run that ends with the block."""
    steps = ["--train.steps", "1000000", "--checkpoint.every_steps", "0", "--sample.tokens", "0"]
    process = start(workers, ["trainers.lm", *steps, *flags], folder)
    try:
        wait_for(lambda: any(line["loss"] is not None for line in read_lines(folder / "progress.jsonl")))
        yield process
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def list_children(pid: int, words: str) -> list[int]:
    """List the children of a process whose command line contains some words."""
    children = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [child for child in children if words in Path(f"/proc/{child}/cmdline").read_text().replace("\0", " ")]


def read_cpu_s(pid: int) -> float:
    """Return the processor time that the children of a process have used."""
    fields = [Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split() for child in list_children(pid, "")]
    return sum(int(each[11]) + int(each[12]) for each in fields) / os.sysconf("SC_CLK_TCK")


def wait_for(is_true: Callable[[], bool], limit_s: float = 300.0) -> None:
    """Wait until a condition holds; end the benchmark if it does not."""
    end_s = time.monotonic() + limit_s
    while not is_true():
        if time.monotonic() > end_s:
            raise SystemExit("the run did not get that far")
        time.sleep(0.05)


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Read all complete lines that a run has reported."""
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


if __name__ == "__main__":
    main()
