"""TensorFlow ParameterServerStrategy with a custom loop: if a worker is lost, the others take over its steps.

The first node runs the coordinator and the parameter server, every other node one worker.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from trainers import bridge

ips, rank = bridge.node_addresses(), bridge.node_rank()
CLUSTER = {
    "chief": [f"{ips[0]}:{bridge.port(0)}"],
    "ps": [f"{ips[0]}:{bridge.port(1)}"],
    "worker": [f"{ip}:{bridge.port(1 + place)}" for place, ip in enumerate(ips) if place],
}


def name_task(kind: str, index: int) -> str:
    """Return the value of `TF_CONFIG` for a task of the cluster."""
    return json.dumps({"cluster": CLUSTER, "task": {"type": kind, "index": index}})


def serve() -> None:
    """Serve as a worker or parameter server until this process is terminated."""
    import tensorflow as tf

    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    protocol = resolver.rpc_layer or "grpc"
    server = tf.distribute.Server(
        resolver.cluster_spec(), job_name=resolver.task_type, task_index=resolver.task_id, protocol=protocol
    )
    server.join()


def coordinate() -> None:
    """Train as the coordinator, from the newest checkpoint to the last step."""
    import tensorflow as tf

    from trainers.frameworks.points import SAVE_STEPS, STEPS, WIDTH, read_points

    tf.keras.utils.set_random_seed(0)
    strategy = tf.distribute.ParameterServerStrategy(tf.distribute.cluster_resolver.TFConfigClusterResolver())
    bridge.listen()
    shapes = ((WIDTH, 64), (64,), (64, 1), (1,))
    with strategy.scope():
        draw = tf.random.stateless_normal
        weights = [tf.Variable(draw(shape, seed=(0, place)) * 0.2) for place, shape in enumerate(shapes)]
        applied = tf.Variable(0, dtype=tf.int64)
    checkpoint = tf.train.Checkpoint(weights=weights, applied=applied)
    step, folder = bridge.resume()
    if folder:
        checkpoint.read(str(folder / "state")).assert_consumed()
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)

    @tf.function
    def learn(inputs: Any, targets: Any) -> Any:
        with tf.GradientTape() as tape:
            first, bias, last, shift = [each.read_value() for each in weights]
            loss = tf.reduce_mean((tf.tanh(inputs @ first + bias) @ last + shift - targets) ** 2)
            gradients = tape.gradient(loss, weights)
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.assign_sub(0.02 * gradient)
        applied.assign_add(1)
        return loss

    while step < STEPS:
        batch = tuple(tf.constant(each) for each in read_points(step, 0, 1))
        loss = coordinator.schedule(learn, args=batch)
        coordinator.join()  # one step at a time, so that runs are comparable; schedule several to use all workers
        step += 1
        is_leaving = bridge.preempted()
        if is_leaving or step % SAVE_STEPS == 0 or step == STEPS:
            checkpoint.write(str(bridge.folder_of(step) / "state"))
            bridge.commit(step)
        bridge.progress(step, STEPS, float(loss.fetch()))
        if is_leaving:
            bridge.leave()
    bridge.finish(STEPS, [each.numpy() for each in weights], applied=int(applied.numpy()))


def main() -> int:
    """Return the exit code. The parameter server is a second process on the first node."""
    if rank:
        os.environ["TF_CONFIG"] = name_task("worker", rank - 1)
        serve()
        return 0
    if "--parameter-server" in sys.argv:
        os.environ["TF_CONFIG"] = name_task("ps", 0)
        serve()
        return 0
    server = subprocess.Popen(
        [sys.executable, "-m", "trainers.frameworks.tensorflow_parameter_server", "--parameter-server"]
    )
    try:
        os.environ["TF_CONFIG"] = name_task("chief", 0)
        coordinate()
    finally:
        server.terminate()
    return 0


if __name__ == "__main__":
    sys.exit(main())
