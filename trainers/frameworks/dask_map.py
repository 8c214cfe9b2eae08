"""Dask: run tasks on the workers of all nodes. Results are saved, so a restart computes only the missing ones."""

from __future__ import annotations

import os

import numpy as np
from distributed import Client, as_completed

from trainers import bridge
from trainers.frameworks.points import SAVE_STEPS, STEPS, read_points


def compute(item: int) -> float:
    """Return the result of one item, without side effects: Dask recomputes the items of a lost worker."""
    inputs, targets = read_points(item, 0, 1)
    return float(np.square(inputs.mean(axis=1, keepdims=True) - targets).mean())


def main() -> None:
    """Submit the items that no earlier attempt finished; save the results every SAVE_STEPS items."""
    bridge.listen()
    client = Client(os.environ["SCHEDULER"], timeout="300s")
    count, folder = bridge.resume()
    results = dict(np.load(folder / "results.npy").tolist()) if folder else {}
    pending = [item for item in range(STEPS) if item not in results]
    futures = client.map(compute, pending, pure=False, retries=10, key=[f"item-{item}" for item in pending])
    for future, value in as_completed(futures, with_results=True):
        results[int(future.key.rpartition("-")[2])] = value
        future.release()
        count += 1
        is_leaving = bridge.preempted()
        if is_leaving or count % SAVE_STEPS == 0 or count == STEPS:
            np.save(bridge.folder_of(count) / "results.npy", np.array(sorted(results.items())))
            bridge.commit(count)
        bridge.progress(count, STEPS, value)
        if is_leaving:
            bridge.leave()
    bridge.finish(STEPS, [np.array([results[item] for item in range(STEPS)])])


if __name__ == "__main__":
    main()
