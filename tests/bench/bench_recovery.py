"""Measures recovery of the trainers on a CPU: `python -m tests.bench.bench_recovery`. Ratios within one run.

- start: seconds from exec to the first step of a resumed run, over those of as many bare `import torch` at once
- standby: seconds from kill -9 of a rank to the next step, with `--warm`
- restore: seconds to restore a checkpoint through a store of limited rate on two ranks, over the transfer's own time
- peer: time of a step of `fsdp` with `--checkpoint.peer_every_steps 1` over that of a step without
"""

import argparse
import contextlib
import json
import multiprocessing
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

from tests.bench.bench_trainers import WARM_STEPS, Halting, launch, start

RANKS = 2
TENSOR_BYTES = 128 * 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure recovery of the trainers.")
    parser.add_argument("--rounds", type=int, default=5, help="starts and kills to time")
    parser.add_argument("--steps", type=int, default=80, help="steps of the comparison of copies to a peer")
    parser.add_argument("--gigabytes", type=float, default=6.0, help="size of the restored checkpoint; twice in memory")
    parser.add_argument("--megabytes_s", type=float, default=200.0, help="rate of the store")
    parser.add_argument("--width", type=int, default=128, help="width of the model of the comparison of copies")
    parser.add_argument("--only", choices=("start", "standby", "restore", "peer"), help="measure one thing")
    options = parser.parse_args()
    measures: dict[str, Callable[[], None]] = {
        "start": lambda: measure_start(options.rounds),
        "standby": lambda: measure_standby(options.rounds),
        "restore": lambda: measure_restore(options.gigabytes * 1e9, options.megabytes_s * 1e6),
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
        f"{statistics.median(bare[1:]):.2f} s; {ratio:.2f} by median of {rounds} pairs",
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
        f"warm standby: {statistics.median(seconds):.2f} s from kill -9 of one of {RANKS} ranks to the next step "
        f"({' '.join(f'{each:.2f}' for each in seconds)}), {statistics.median(startups):.2f} s of them from the "
        "takeover to the restored state",
        flush=True,
    )


def measure_restore(size: float, rate: float) -> None:
    """Generate a checkpoint, then restore it on as many ranks from a folder whose total rate is limited."""
    with tempfile.TemporaryDirectory() as folder:
        run_ranks("save", folder, size, rate)
        seconds = max(run_ranks("restore", folder, size, rate))
        files = sum(file.stat().st_size for file in Path(folder).rglob("*.distcp"))
    own_s = files / rate
    print(
        f"restore of {files / 1e9:.2f} GB on {RANKS} ranks at {rate / 1e6:.0f} MB/s: {seconds:.1f} s, the transfer "
        f"alone {own_s:.1f} s; {seconds / own_s:.3f}",
        flush=True,
    )


def run_ranks(action: str, folder: str, size: float, rate: float) -> list[float]:
    """Save or restore on all ranks; return the seconds of each."""
    from trainers.launch import find_free_port

    context = multiprocessing.get_context("spawn")
    free_s, answers, port = context.Value("d", 0.0), context.Queue(), find_free_port()
    ranks = [
        context.Process(target=be_rank, args=(action, rank, port, folder, size, rate, free_s, answers))
        for rank in range(RANKS)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
        if process.exitcode:
            raise SystemExit(f"a rank ended with {process.exitcode}")
    return [answers.get() for _ in ranks]


def be_rank(
    action: str, rank: int, port: int, folder: str, size: float, rate: float, free_s: Any, answers: Any
) -> None:
    """Save or restore this rank's half of sharded tensors, whose values are its number."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    from trainers.checkpoint import CheckpointManager
    from trainers.ranks import join_ranks, leave_ranks
    from trainers.storage import FolderStorage

    class LimitedFolder(FolderStorage):
        """A folder whose readers share a rate of bytes."""

        def stream(self, path: str) -> Iterator[bytes]:
            for part in super().stream(path):
                with free_s.get_lock():
                    free_s.value = max(free_s.value, time.monotonic()) + len(part) / rate
                    until_s = free_s.value
                time.sleep(max(0.0, until_s - time.monotonic()))
                yield part

    ranks = join_ranks(start_s=600.0, checkpoint_s=3600.0)
    mesh = init_device_mesh("cpu", (RANKS,))
    count, length = round(size / TENSOR_BYTES), TENSOR_BYTES // 4
    parts = [torch.full((length // RANKS,), float(number if action == "save" else -1)) for number in range(count)]

    class Weights:
        def state_dict(self) -> dict[str, Any]:
            return {
                str(number): DTensor.from_local(part, mesh, [Shard(0)], run_check=False)
                for number, part in enumerate(parts)
            }

        def load_state_dict(self, state: dict[str, Any]) -> None:
            for number, part in enumerate(parts):
                part.copy_(state[str(number)].to_local())

    storage = (FolderStorage if action == "save" else LimitedFolder)(Path(folder))
    attempt = 1 if action == "save" else 2
    manager = CheckpointManager(storage, ranks, attempt=attempt, keep=1, shared={"weights": Weights()}, own={})
    begin = time.perf_counter()
    if action == "save":
        manager.save(1)
        manager.wait()
    elif manager.restore() != 1 or any(float(part[-1]) != number for number, part in enumerate(parts)):
        raise SystemExit("the checkpoint was not restored")
    answers.put(time.perf_counter() - begin)
    leave_ranks()


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
