"""How long broker itself takes on real hosts behind fake clouds: `python -m tests.testbed.world python -m
tests.bench.bench_hosts` (Linux, root). Printed as a table; nothing is asserted: figures depend on the machine."""

from __future__ import annotations

import asyncio
import math
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

from broker.types import RunStatus
from tests.testbed.metadata import MetadataServer
from tests.testbed.stage import BUCKET_LOGIN, HELLO, TRAIN, Stage, open_stage
from tests.testbed.test_hosts import Bed, follow, start
from tests.testbed.world import build

ROUNDS = 5
WIDE = 64
PLACES = (("us-east-1a", "m5.large"), ("us-east-1b", "m5.large"), ("us-west-2a", "m5.large"))


def main() -> None:
    build()
    metadata = MetadataServer()
    sys.stdout.write(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors\n")
    show("bar s", "median s", "worst s", "what")
    with tempfile.TemporaryDirectory(prefix="hosts-") as folder:
        with open_stage(make(Path(folder) / "launch"), metadata) as stage:
            launches = [measure_launch(stage, f"plain{number}") for number in range(ROUNDS)]
            plain, apart = [each[1] for each in launches], [each[1] - each[0] for each in launches]
            show_times(plain, 3.0, "launch on 2 hosts to the last rank's first line of output, boot included")
            show_times(apart, 1.0, "between the first lines of the two ranks")
            stage.account.full.update(PLACES[:2])
            refused = [measure_launch(stage, f"refused{number}")[1] for number in range(ROUNDS)]
            each = (statistics.median(refused) - statistics.median(plain)) / 2
            show_times([each], 1.0, "each place that refuses")
        with open_stage(make(Path(folder) / "jobs"), metadata) as stage:
            started, stepped = measure_recoveries(stage)
            show_times(
                started, 4.0, "DDP job, 2 s notice, both hosts silently dead: until its program runs on new ones"
            )
            show_times(stepped, 12.0, "the same until its next step, imports of torch included")
        for kind in ("aws", "gcp"):
            told = measure_notices(make(Path(folder) / kind), metadata, kind=kind)
            show_times(told, 2.0, f"{kind}: notice of preemption until the program has its signal")
        took_s, apart_s = measure_wide(make(Path(folder) / "wide"), metadata)
        show_times([took_s], 10.0, f"a task put on {WIDE} hosts at once")
        show_times([apart_s], 1.0, f"between the first lines of {WIDE} ranks")
    metadata.close()


def make(folder: Path) -> Path:
    folder.mkdir()
    return folder


def measure_launch(stage: Stage, name: str) -> tuple[float, float]:
    """Seconds from the command's start until the program printed on its first and on its last node, by its own clock.

    Refusals are deleted first: no process has the store open, because `down` has ended and no job started a daemon.
    """
    for path in stage.home.glob("state.db*"):  # with its log, which belongs to no other database
        path.unlink()
    start_s = time.time()
    done = stage.run("launch", stage.write("hello.yaml", HELLO), "-c", name, "--yes")
    stamps = [float(line.rsplit(" ", 1)[1]) for line in done.stdout.splitlines() if "hello from" in line]
    stage.run("down", name, "--yes")
    assert len(stamps) == 2, done.stdout
    return min(stamps) - start_s, max(stamps) - start_s


def measure_notices(folder: Path, metadata: MetadataServer, *, kind: str) -> list[float]:
    """Measure from the metadata server's notice to the program's SIGTERM, by one clock; the host dies after 2 s."""

    async def act() -> float:
        cluster = await bed.make_cluster()
        told = shared / cluster.nodes[0].id
        await start(
            bed, cluster, f"trap 'date +%s.%N >{told}; exit' TERM; touch {told}.on; while :; do sleep 0.01; done"
        )
        while not told.with_suffix(".on").exists():
            await asyncio.sleep(0.01)
        await asyncio.sleep(random.random())  # anywhere between two looks
        given_s = time.time()
        bed.cloud.give_notice(cluster.nodes[0].id, in_s=2)
        await asyncio.sleep(2)
        bed.cloud.end(cluster.nodes[0].id, "preempted", is_silent=True)
        return float(told.read_text()) - given_s if told.exists() else math.inf

    shared = make(folder / "shared")
    shared.chmod(0o777)
    bed = Bed(folder, metadata, kind=kind, shared=shared)
    try:
        return [asyncio.run(act()) for _ in range(ROUNDS)]
    finally:
        bed.cloud.end_all()


def measure_wide(folder: Path, metadata: MetadataServer) -> tuple[float, float]:
    """Measure the start of a task on `WIDE` booted hosts, and the time between the first lines of its ranks."""

    async def act() -> tuple[float, float]:
        cluster = await bed.make_cluster(WIDE)
        await asyncio.gather(*(bed.transport.run(node, ["true"], timeout_s=60) for node in cluster.nodes))
        start_s = time.monotonic()
        await start(bed, cluster, 'echo "at $(date +%s.%N)"')
        took_s = time.monotonic() - start_s
        status, log = await follow(bed, cluster)
        stamps = [float(line.rsplit(" ", 1)[1]) for line in log.splitlines() if "at " in line]
        assert status is RunStatus.SUCCEEDED and len(stamps) == WIDE, log
        return took_s, max(stamps) - min(stamps)

    bed = Bed(folder, metadata, shared=make(folder / "shared"))
    try:
        return asyncio.run(act())
    finally:
        bed.cloud.end_all()


def measure_recoveries(stage: Stage) -> tuple[list[float], list[float]]:
    """Measure from the power loss of a machine until the program runs and until its first new step; by the store."""
    stage.run("jobs", "launch", stage.write("train.yaml", TRAIN), *BUCKET_LOGIN, "--yes", "--detach-run")
    for attempt, place in enumerate(PLACES[:2], 1):
        stage.wait_for_step(20 * attempt, attempt=attempt)
        stage.account.full.add(place)
        for name in stage.list_by_rank():
            stage.bridge.preempt(name, notice_s=2)
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
