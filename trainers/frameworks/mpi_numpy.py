"""MPI with mpi4py and numpy: a hand-written all-reduce of the gradients, for any number of ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
from mpi4py import MPI

from trainers import bridge
from trainers.frameworks.points import SAVE_STEPS, STEPS, WIDTH, read_points

SHAPES = ((WIDTH, 64), (64,), (64, 1), (1,))


def compute_gradients(
    weights: list[np.ndarray], inputs: np.ndarray, targets: np.ndarray
) -> tuple[list[np.ndarray], float]:
    """Return the gradients of the mean squared error of a network with one tanh layer, and that error."""
    first, bias, last, shift = weights
    hidden = np.tanh(inputs @ first + bias)
    error = hidden @ last + shift - targets
    slope = 2 * error / len(inputs)
    inner = (slope @ last.T) * (1 - hidden**2)
    return [inputs.T @ inner, inner.sum(0), hidden.T @ slope, slope.sum(0)], float((error**2).mean())


def main() -> None:
    """Train from the newest checkpoint to the last step."""
    bridge.listen()
    world = MPI.COMM_WORLD
    rank, ranks = world.Get_rank(), world.Get_size()
    generator = np.random.default_rng(0)
    weights = [(generator.standard_normal(shape) * 0.2).astype(np.float32) for shape in SHAPES]
    moments = [np.zeros(shape, np.float32) for shape in SHAPES]
    step, folder = bridge.resume()
    if folder:
        saved = np.load(folder / "state.npz")
        weights = [saved[f"weight{place}"] for place in range(len(SHAPES))]
        moments = [saved[f"moment{place}"] for place in range(len(SHAPES))]
    while step < STEPS:
        gradients, loss = compute_gradients(weights, *read_points(step, rank, ranks))
        own = np.concatenate([*(each.ravel() for each in gradients), [loss, bridge.preempted()]]).astype(np.float32)
        summed = np.empty_like(own)
        world.Allreduce(own, summed)
        place = 0
        for weight, moment in zip(weights, moments, strict=True):
            gradient = summed[place : place + weight.size].reshape(weight.shape) / ranks
            moment[...] = 0.9 * moment + gradient
            weight -= 0.02 * moment
            place += weight.size
        step += 1
        is_leaving = summed[-1] > 0
        if is_leaving or step % SAVE_STEPS == 0 or step == STEPS:
            if rank == 0:
                state: dict[str, Any] = {f"weight{place}": each for place, each in enumerate(weights)}
                state.update({f"moment{place}": each for place, each in enumerate(moments)})
                np.savez(bridge.folder_of(step) / "state.npz", **state)
                bridge.commit(step)
            world.Barrier()  # no rank leaves before the checkpoint is complete
        bridge.progress(step, STEPS, float(summed[-2]) / ranks)
        if is_leaving:
            bridge.leave()
    if rank == 0:
        bridge.finish(STEPS, weights)


if __name__ == "__main__":
    main()
