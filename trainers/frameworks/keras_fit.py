"""Keras `fit` on several nodes: tf_keras (Keras 2) under MultiWorkerMirroredStrategy, with BackupAndRestore.

Keras 3 cannot train under this strategy. Every epoch reads the same data, so a run that resumes at an epoch is exact;
the steps of an interrupted epoch are repeated.
"""

from __future__ import annotations

import json
import os
import time

import numpy as np

from trainers import bridge

ips, rank = bridge.node_addresses(), bridge.node_rank()
workers = [f"{ip}:{bridge.port(place)}" for place, ip in enumerate(ips)]  # a port per worker: local nodes share one IP
os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}})
os.environ["TF_USE_LEGACY_KERAS"] = "1"

import tensorflow as tf  # noqa: E402 - reads TF_CONFIG
import tf_keras  # noqa: E402

from trainers.bridge_keras import BridgeKerasCallback  # noqa: E402
from trainers.frameworks.points import SAVE_STEPS, STEP_S, STEPS, WIDTH, read_points  # noqa: E402

EPOCHS = STEPS // SAVE_STEPS


class Pace(tf_keras.callbacks.Callback):
    """Simulate the duration of a step in a callback, because the data is read before training."""

    def on_train_batch_begin(self, batch: int, logs: object = None) -> None:
        time.sleep(STEP_S)


def main() -> None:
    """Train from the newest checkpoint to the last step."""
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    parts = [read_points(step, 0, 1) for step in range(SAVE_STEPS)]
    inputs, targets = (np.concatenate(each) for each in zip(*parts, strict=True))
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    data = tf.data.Dataset.from_tensor_slices((inputs, targets)).batch(len(parts[0][0])).with_options(options)
    with strategy.scope():
        tf_keras.utils.set_random_seed(0)
        layers = [tf_keras.layers.Dense(64, activation="tanh"), tf_keras.layers.Dense(1)]
        model = tf_keras.Sequential([tf_keras.Input((WIDTH,)), *layers])
        model.compile(optimizer=tf_keras.optimizers.Adam(1e-2), loss="mse")
    backup = tf_keras.callbacks.BackupAndRestore(str(bridge.checkpoint_folder() / "keras"), delete_checkpoint=False)
    callbacks = [backup, BridgeKerasCallback(epochs=EPOCHS, steps_per_epoch=SAVE_STEPS), Pace()]
    model.fit(data, epochs=EPOCHS, verbose=0, callbacks=callbacks)
    if rank == 0:
        bridge.finish(STEPS, model.get_weights())


if __name__ == "__main__":
    main()
