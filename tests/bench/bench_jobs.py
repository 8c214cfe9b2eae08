"""Ten thousand managed jobs on one controller process: memory, a reconcile round, the queue.

    python -m tests.bench.bench_jobs [--jobs 10000]

Jobs run on the simulated cloud in virtual time; what is measured is the processor's time and this process's memory.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from broker.clock import SystemClock
from broker.jobs.controller import JobController
from broker.state.store import Store
from broker.types import JobStatus
from tests.simulation.world import World, make_plan

MEMORY = Path("/dev/shm")  # the disk is not what is measured


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", type=int, default=10_000)
    count = parser.parse_args().jobs
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder:
        world = World(Path(folder))
        world.gang.steps = 100_000
        with world.store.transaction():
            ids = [world.store.jobs.add(f"job-{n}", world.task).id for n in range(count)]
        provisioner = world.make_provisioner()
        controllers = {job_id: make_controller(world, job_id, provisioner) for job_id in ids}
        start_s = time.process_time()
        world.clock.run(lambda: bring_up(world, controllers))
        report("to bring all up", time.process_time() - start_s, "s")
        rounds = []
        for _ in range(3):
            start_s = time.process_time()
            world.clock.run(lambda: step_all(controllers))
            rounds.append(time.process_time() - start_s)
        report("the first round over all", rounds[0], "s", bar=5.0)  # it writes each job's first step
        report("a round over all (best of 2)", min(rounds[1:]), "s", bar=5.0)
        report("memory at its most", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, "MiB", bar=1024)
        world.store.close()
        measure_queue(Path(folder), count)


def make_controller(world: World, job_id: int, provisioner: object) -> JobController:
    world.job_id = job_id
    return world.make_controller(provisioner, planner=lambda task, avoid: make_plan(task))  # type: ignore[arg-type]


async def bring_up(world: World, controllers: dict[int, JobController]) -> None:
    async def drive(job_id: int, controller: JobController) -> None:
        while True:
            job = world.store.jobs.get(job_id)
            assert job is not None
            if job.status is JobStatus.RUNNING:
                return
            wait_s = await controller.step()
            assert not math.isinf(wait_s)
            await world.clock.sleep(wait_s)

    await asyncio.gather(*(drive(job_id, controller) for job_id, controller in controllers.items()))


async def step_all(controllers: dict[int, JobController]) -> None:
    await asyncio.gather(*(controller.step() for controller in controllers.values()))


def measure_queue(folder: Path, count: int) -> None:
    """The whole process of `broker jobs queue`, when all jobs have ended, against a bare interpreter."""
    store = Store(folder / "state.db", clock=SystemClock())
    with store.transaction():
        for job_id in store.jobs.list_live_ids():
            store.jobs.set_status(job_id, JobStatus.SUCCEEDED)
    store.close()
    environment = {**os.environ, "BROKER_HOME": str(folder)}
    bare_s, _ = measure_process(environment, "-c", "pass")
    wall_s, cpu_s = measure_process(environment, "-m", "broker", "jobs", "queue")
    report(f"`broker jobs queue` over {count:,}", wall_s, "s", bar=0.5)
    report("... its processor time", cpu_s, "s", bar=0.5)
    report("... as a multiple of `python -c pass`", wall_s / bare_s, "x")


def measure_process(environment: Mapping[str, str], *arguments: str) -> tuple[float, float]:
    """Seconds of wall and processor of one Python process, the best of five."""
    times = []
    for _ in range(5):
        start_s, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *arguments], env=environment, stdout=subprocess.DEVNULL, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        times.append((time.perf_counter() - start_s, cpu_s))
    return min(wall_s for wall_s, _ in times), min(cpu_s for _, cpu_s in times)


def report(name: str, value: float, unit: str, bar: float | None = None) -> None:
    verdict = "" if bar is None else f"   bar {bar:g}: {'met' if value <= bar else 'MISSED'}"
    print(f"{name:<42}{value:>10.2f} {unit}{verdict}")


if __name__ == "__main__":
    main()
