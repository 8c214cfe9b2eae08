"""TensorFlow MultiWorkerMirroredStrategy with a custom loop, because Keras 3's `fit` does not support this strategy."""

from __future__ import annotations

import json
import os
import tempfile
from typing import Any

from trainers import bridge

ips, rank = bridge.node_addresses(), bridge.node_rank()
workers = [f"{ip}:{bridge.port(place)}" for place, ip in enumerate(ips)]  # a port per worker: local nodes share one IP
os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}})

import tensorflow as tf  # noqa: E402 - reads TF_CONFIG

from trainers.frameworks.points import SAVE_STEPS, STEPS, WIDTH, read_points  # noqa: E402

SHAPES = ((WIDTH, 64), (64,), (64, 1), (1,))


class State(tf.Module):
    """Weights and momentum, the same in every worker."""

    def __init__(self) -> None:
        super().__init__()
        draw = tf.random.stateless_normal
        starts = [draw(shape, seed=(0, place)) * 0.2 for place, shape in enumerate(SHAPES)]
        self.weights = [tf.Variable(start) for start in starts]
        self.moments = [tf.Variable(tf.zeros(shape)) for shape in SHAPES]

    def predict(self, inputs: Any) -> Any:
        first, bias, last, shift = self.weights
        return tf.tanh(inputs @ first + bias) @ last + shift


def make_step(strategy: Any, state: State) -> Any:
    """Return the compiled training step of all replicas: a GPU each, or a worker without one.

    All GPUs of a worker compute the same part of the batch; for more speed, give each its own.
    """
    count = strategy.num_replicas_in_sync

    def compute(inputs: Any, targets: Any, flag: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((state.predict(inputs) - targets) ** 2)
        gradients = tape.gradient(loss, state.weights)
        return tf.distribute.get_replica_context().all_reduce(
            "sum", [*gradients, loss, flag * 1.0]
        )  # times 1.0, because an argument itself has no device to reduce on

    @tf.function
    def step(inputs: Any, targets: Any, flag: Any) -> Any:
        summed = [
            strategy.experimental_local_results(each)[0] for each in strategy.run(compute, (inputs, targets, flag))
        ]
        for weight, moment, gradient in zip(state.weights, state.moments, summed[:-2], strict=True):
            moment.assign(0.9 * moment + gradient / count)
            weight.assign_sub(0.02 * moment)
        return summed[-2] / count, summed[-1]

    return step


def save(checkpoint: Any, step: int) -> None:
    """Write on every worker, as the strategy requires, but keep only the files of the first one."""
    if rank == 0:
        checkpoint.write(str(bridge.folder_of(step) / "state"))
        bridge.commit(step)
    else:
        with tempfile.TemporaryDirectory() as scratch:
            checkpoint.write(f"{scratch}/state")


def main() -> None:
    """Train from the newest checkpoint to the last step."""
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    bridge.listen()
    with strategy.scope():
        state = State()
    checkpoint = tf.train.Checkpoint(state=state)
    step, folder = bridge.resume()
    if folder:
        checkpoint.read(str(folder / "state")).assert_consumed()
    train_step = make_step(strategy, state)
    while step < STEPS:
        inputs, targets = (tf.constant(each) for each in read_points(step, rank, len(ips)))
        loss, leaving = train_step(inputs, targets, tf.constant(float(bridge.preempted())))
        step += 1
        is_leaving = float(leaving) > 0
        if is_leaving or step % SAVE_STEPS == 0 or step == STEPS:
            save(checkpoint, step)
        bridge.progress(step, STEPS, float(loss))
        if is_leaving:
            bridge.leave()
    if rank == 0:
        bridge.finish(STEPS, [each.numpy() for each in state.weights])


if __name__ == "__main__":
    main()
