"""Measures the trainers: `python -m tests.bench.bench_trainers`. Ratios within one run, so that they carry over.

- tokens/s of `trainers.lm --strategy ddp` over those of a hand-written loop of the same model and batch
- how long a checkpoint of 100 million parameters with AdamW's moments holds training up, over a synchronous save
- seconds from the start of a resumed run to its first step
"""

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.bench.bench_restore import compare

ROOT = Path(__file__).parents[2]
# The bars: of the throughput over the bare loop's, and of the stall over a synchronous save.
RATIO_MIN, STALL_MAX = 1.0, 0.1
# The first steps warm caches and, under DDP, build buckets.
WARM_STEPS = 10
# 100 million weights, and enough samples for a step of a second or so.
LAYER_COUNT, LAYER_WIDTH, SAMPLE_COUNT = 25, 2000, 128


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure the trainers.")
    parser.add_argument("--rounds", type=int, default=5, help="resumed starts to time")
    parser.add_argument("--steps", type=int, default=120, help="steps of the throughput comparison")
    parser.add_argument("--only", choices=("throughput", "checkpoint", "start"), help="measure one thing")
    options = parser.parse_args()
    if options.only in (None, "throughput"):
        for workers in (1, 2):
            compare_throughput(workers, options.steps)
    if options.only in (None, "checkpoint"):
        measure_stall()
    if options.only in (None, "start"):
        measure_start(options.rounds)
    return 0


def compare_throughput(workers: int, steps: int) -> None:
    """Run both programs step by step in turn, the other one halted: a disturbance of the machine affects both alike."""
    flags = ["--train.steps", str(steps), "--checkpoint.every_steps", "0", "--sample.tokens", "0"]
    commands = {"ours": ["trainers.lm", "--strategy", "ddp", *flags], "bare": ["tests.bench.bare_loop", str(steps)]}
    with tempfile.TemporaryDirectory() as folder:
        programs = {name: Halting(start(workers, command, Path(folder))) for name, command in commands.items()}
        seconds: dict[str, list[float]] = {name: [] for name in programs}
        for step in range(1, steps):
            # The order alternates too.
            for name in ("ours", "bare") if step % 2 else ("bare", "ours"):
                seconds[name].append(programs[name].run_to(f"step {step}/"))
        for program in programs.values():
            program.finish()
    ours, bare = (seconds[name][WARM_STEPS:] for name in ("ours", "bare"))
    ratio = statistics.median(other / mine for mine, other in zip(ours, bare, strict=True))
    print(
        f"throughput, {workers} process(es): trainers.lm over bare loop {compare(ratio, least=RATIO_MIN)} by median of "
        f"{len(ours)} pairs of steps, {sum(bare) / sum(ours):.3f} in all; "
        f"{1000 * statistics.median(ours):.1f} ms a step against {1000 * statistics.median(bare):.1f} ms",
        flush=True,
    )


class Halting:
    """A program that runs only while it is asked to."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def run_to(self, line_begin: str) -> float:
        """Let it run until it prints such a line; return the seconds that took."""
        os.killpg(self._process.pid, signal.SIGCONT)
        begin = time.perf_counter()
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(line_begin):
                seconds = time.perf_counter() - begin
                os.killpg(self._process.pid, signal.SIGSTOP)
                return seconds
        raise SystemExit(self._process.stderr.read() if self._process.stderr else "")

    def finish(self) -> None:
        """Let it run to its end."""
        os.killpg(self._process.pid, signal.SIGCONT)
        _, errors = self._process.communicate(timeout=600)
        if self._process.returncode:
            raise SystemExit(errors)


def start(workers: int, command: list[str], folder: Path) -> "subprocess.Popen[str]":
    """Begin a program in a process group of its own."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "BROKER_CHECKPOINT_DIR": str(folder / "checkpoints"),
        "BROKER_PROGRESS_FILE": str(folder / "progress.jsonl"),
    }
    argv = [sys.executable, "-m", "trainers.launch", "--workers", str(workers), "-m", *command]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        argv, cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    )


def launch(workers: int, command: list[str], folder: Path) -> None:
    """Run to the end; end the benchmark if the run fails."""
    process = start(workers, command, folder)
    _, errors = process.communicate(timeout=600)
    if process.returncode:
        raise SystemExit(errors)


def measure_stall() -> None:
    """How long training is held up, against torch's synchronous save of the same tensors to the same disk.

    The state may be copied until the optimizer moves it, so a real forward and backward pass lies between.
    """
    import torch
    import torch.distributed.checkpoint as dcp
    from torch import nn
    from torch.distributed.checkpoint import FileSystemWriter

    from trainers.checkpoint import CheckpointManager
    from trainers.config import TrainConfig
    from trainers.optimizer import Optimizer
    from trainers.ranks import Ranks, _keep_freed_memory
    from trainers.storage import FolderStorage

    _keep_freed_memory()
    torch.set_num_threads(1)  # as the trainers do, so that a core is left for the copy
    model = nn.Sequential(*(nn.Linear(LAYER_WIDTH, LAYER_WIDTH, bias=False) for _ in range(LAYER_COUNT)))
    optimizer = Optimizer(model.named_parameters(), TrainConfig(learning_rate=1e-5, learning_rate_min=1e-5))
    alone = Ranks(rank=0, world_size=1, device=torch.device("cpu"))
    shared = {"model": model, "optimizer": optimizer}
    stalls, copies, whole, synchronous, passes = [], [], [], [], []
    beside: list[list[float]] = []
    written_s: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        manager = CheckpointManager(FolderStorage(Path(folder)), alone, attempt=1, keep=1, shared=shared, own={})
        for step in range(1, 6):
            begin = time.thread_time()
            model(torch.randn(SAMPLE_COUNT, LAYER_WIDTH)).square().mean().backward()
            passes.append(time.thread_time() - begin)
            optimizer.step()
            begin = time.perf_counter()
            manager.save(step)
            pass_begin = time.thread_time()
            model(torch.randn(SAMPLE_COUNT, LAYER_WIDTH)).square().mean().backward()
            copies.append(time.thread_time() - pass_begin)
            manager.wait_for_copy()
            stalls.append(manager.stall_s)
            optimizer.step()
            beside.append([])
            training_s, all_s = time.thread_time(), time.process_time()
            while manager.step_committed != step:  # it is written while training continues
                pass_begin = time.thread_time()
                model(torch.randn(SAMPLE_COUNT, LAYER_WIDTH)).square().mean().backward()
                beside[-1].append(time.thread_time() - pass_begin)
            written_s.append(time.process_time() - all_s - (time.thread_time() - training_s))
            manager.wait()
            whole.append(time.perf_counter() - begin)
            model.zero_grad()
            begin = time.perf_counter()
            writer = FileSystemWriter(Path(folder) / f"plain-{step}", sync_files=True)
            state = {name: each.state_dict() for name, each in shared.items()}
            dcp.save(state, storage_writer=writer, no_dist=True)
            synchronous.append(time.perf_counter() - begin)
            shutil.rmtree(Path(folder) / f"plain-{step}")
    stall, plain = statistics.median(stalls[1:]), statistics.median(synchronous[1:])
    slower = statistics.median(copy - alone for copy, alone in zip(copies[1:], passes[1:], strict=True))
    usual = statistics.median(passes)
    # The wait, and what it takes from the passes beside which it is copied and written: in the training thread's own
    # time, for other programs' share of the cores is not the checkpoint's doing. Who has no core to spare adds the
    # writer's.
    overhead = stall + max(0.0, slower) + statistics.median(sum(each) - len(each) * usual for each in beside[1:])
    million = LAYER_COUNT * LAYER_WIDTH**2 / 1e6
    print(
        f"checkpoint of {million:.0f} M parameters with moments: training waits {stall:.3f} s "
        f"for it, torch's synchronous save takes {plain:.3f} s, ours until committed "
        f"{statistics.median(whole[1:]):.3f} s; stall over synchronous "
        f"{compare(stall / plain, most=STALL_MAX)}; the step in which it is copied takes "
        f"{slower:.3f} s longer than one of {usual:.3f} s without",
        flush=True,
    )
    print(
        f"one such checkpoint a minute costs training {overhead:.3f} s, {100 * overhead / 60:.2f} % "
        f"of a minute with a core to spare (load {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores); writing it takes "
        f"another thread {statistics.median(written_s[1:]):.2f} s of a core",
        flush=True,
    )


def measure_start(rounds: int) -> None:
    """Measure from exec to the first step of two ranks that resume."""
    with tempfile.TemporaryDirectory() as folder:
        seconds = []
        for turn in range(rounds + 1):
            file = Path(folder) / "progress.jsonl"
            file.unlink(missing_ok=True)
            begin = time.time()
            steps = ["--train.steps", str(5 * (turn + 1)), "--sample.tokens", "0"]
            launch(2, ["trainers.lm", "--strategy", "ddp", *steps], Path(folder))
            lines = [json.loads(line) for line in file.read_text().splitlines()]
            seconds.append(next(line["time"] for line in lines if line["loss"] is not None) - begin)
    print(
        f"start to first step, ddp, 2 ranks resumed: median {statistics.median(seconds[1:]):.2f} s "
        f"({' '.join(f'{each:.2f}' for each in seconds[1:])}), first start {seconds[0]:.2f} s",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
