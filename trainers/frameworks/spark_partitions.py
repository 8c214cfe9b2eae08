"""Spark: a job of many partitions on the workers of all nodes. A partition with a committed file is not recomputed."""

from __future__ import annotations

import os
import threading
import uuid
from pathlib import Path

import numpy as np
from pyspark.sql import SparkSession

from trainers import bridge
from trainers.frameworks.points import SAVE_STEPS, STEPS, read_points

POLL_S = 0.1


def path_of(folder: Path, partition: int) -> Path:
    """Return the file of a committed partition."""
    return folder / f"part-{partition:05}.npy"


def compute(folder: Path, partition: int) -> None:
    """Compute one partition of SAVE_STEPS items on an executor, and commit it.

    Spark may compute a partition twice. Both results are equal, and the rename replaces the whole file.
    """
    values = []
    for item in range(partition * SAVE_STEPS, min(STEPS, (partition + 1) * SAVE_STEPS)):
        inputs, targets = read_points(item, 0, 1)
        values.append(float(np.square(inputs.mean(axis=1, keepdims=True) - targets).mean()))
    target = path_of(folder, partition)
    aside = target.with_name(f".{target.name}.{uuid.uuid4().hex}")  # the folder is shared, and hosts share pids
    with aside.open("wb") as file:
        np.save(file, np.array(values))
        file.flush()
        os.fsync(file.fileno())
    aside.replace(target)


def main() -> None:
    """Run the partitions that no earlier attempt has committed."""
    bridge.listen()
    folder = bridge.checkpoint_folder() / "partitions"
    folder.mkdir(exist_ok=True)
    partitions = range(-(-STEPS // SAVE_STEPS))
    pending = [each for each in partitions if not path_of(folder, each).exists()]
    context = SparkSession.builder.appName("spark").getOrCreate().sparkContext
    failures: list[Exception] = []

    def run() -> None:
        try:
            context.parallelize(pending, max(1, len(pending))).foreach(lambda each: compute(folder, each))
        except Exception as error:
            failures.append(error)

    job = threading.Thread(target=run, daemon=True)
    job.start()
    committed = set(partitions) - set(pending)
    while len(committed) < len(partitions):
        job.join(POLL_S)
        is_over = not job.is_alive()  # before the look: no file appears after the end
        fresh = {each for each in partitions if each not in committed and path_of(folder, each).exists()}
        committed |= fresh
        if fresh:
            step = min(STEPS, len(committed) * SAVE_STEPS)
            bridge.progress(step, STEPS, float(np.load(path_of(folder, max(fresh))).mean()), step)
        if failures:
            raise failures[0]
        if is_over and len(committed) < len(partitions):
            raise FileNotFoundError(
                f"Spark has finished, but not all partitions are in {folder}: do all nodes share it?"
            )
        if bridge.preempted():
            bridge.leave()  # committed partitions are kept
    bridge.finish(STEPS, [np.load(path_of(folder, each)) for each in partitions])
    context.stop()


if __name__ == "__main__":
    main()
