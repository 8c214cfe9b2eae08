"""How long broker itself takes on real hosts behind fake clouds: `python -m tests.testbed.world python -m
tests.bench.bench_hosts` (Linux, root). Printed as a table; nothing is asserted, for the machine decides."""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

from tests.testbed.metadata import MetadataServer
from tests.testbed.stage import BUCKET_LOGIN, HELLO, TRAIN, Stage, open_stage
from tests.testbed.world import build

ROUNDS = 5
PLACES = (("us-east-1a", "m5.large"), ("us-east-1b", "m5.large"), ("us-west-2a", "m5.large"))


def main() -> None:
    build()
    metadata = MetadataServer()
    show("bar s", "median s", "worst s", "what")
    with tempfile.TemporaryDirectory(prefix="hosts-") as folder:
        with open_stage(make(Path(folder) / "launch"), metadata) as stage:
            plain = [measure_launch(stage, f"plain{number}") for number in range(ROUNDS)]
            show_times(plain, 3.0, "launch on 2 hosts to the first line of output, boot included")
            stage.account.full.update(PLACES[:2])
            refused = [measure_launch(stage, f"refused{number}") for number in range(ROUNDS)]
            each = (statistics.median(refused) - statistics.median(plain)) / 2
            show_times([each], 1.0, "each place that refuses")
        with open_stage(make(Path(folder) / "jobs"), metadata) as stage:
            started, stepped = measure_recoveries(stage)
            show_times(started, 3.0, "preemption of a DDP job until its program runs again, on new hosts")
            show_times(stepped, 12.0, "preemption of a DDP job until its next step, imports of torch included")
    metadata.close()


def make(folder: Path) -> Path:
    folder.mkdir()
    return folder


def measure_launch(stage: Stage, name: str) -> float:
    """Seconds from the command's start until the program printed, by its own clock. Refusals are forgotten before."""
    (stage.home / "state.db").unlink(missing_ok=True)
    start_s = time.time()
    done = stage.run("launch", stage.write("hello.yaml", HELLO), "-c", name, "--yes")
    stamps = [float(line.rsplit(" ", 1)[1]) for line in done.stdout.splitlines() if "hello from" in line]
    stage.run("down", name, "--yes")
    return max(stamps) - start_s


def measure_recoveries(stage: Stage) -> tuple[list[float], list[float]]:
    """From the moment the machine lost its power until the program runs, and until its first new step; by the store."""
    stage.run("jobs", "launch", stage.write("train.yaml", TRAIN), *BUCKET_LOGIN, "--yes", "--detach-run")
    for attempt, place in enumerate(PLACES[:2], 1):
        stage.wait_for_step(20 * attempt, attempt=attempt)
        stage.account.full.add(place)
        stage.bridge.preempt(min(stage.list_living()), notice_s=3)
    job = stage.finish()
    pairs = list(zip(job.attempts, job.attempts[1:], strict=False))
    started = [(after.running_s or 0.0) - (before.lost_s or 0.0) for before, after in pairs]
    return started, [(after.resumed_s or 0.0) - (before.lost_s or 0.0) for before, after in pairs]


def show_times(times: list[float], bar_s: float, what: str) -> None:
    show(f"{bar_s:.1f}", f"{statistics.median(times):.2f}", f"{max(times):.2f}", what)


def show(*cells: str) -> None:
    sys.stdout.write(f"{cells[0]:>6} {cells[1]:>9} {cells[2]:>8}  {cells[3]}\n")


if __name__ == "__main__":
    main()
