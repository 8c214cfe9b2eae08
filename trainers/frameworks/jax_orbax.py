"""JAX: data parallel over all devices of all nodes, flax and optax, orbax checkpoints."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from trainers import bridge
from trainers.bridge_orbax import agree, make_manager, restore, save
from trainers.frameworks.points import SAVE_STEPS, STEPS, WIDTH, read_points

PEER_S = 20  # a process exits this long after it has lost a peer; JAX's default is 100
optimizer = optax.adamw(1e-2)


class Model(nn.Module):
    """A small regression network."""

    @nn.compact
    def __call__(self, inputs: Any) -> Any:
        return nn.Dense(1)(nn.tanh(nn.Dense(64)(inputs)))


@jax.jit
def train_step(params: Any, moments: Any, inputs: Any, targets: Any) -> tuple[Any, Any, Any]:
    """Return parameters and moments after one step, and its loss."""

    def loss_of(params: Any) -> Any:
        return jnp.mean((Model().apply(params, inputs) - targets) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(params)
    updates, moments = optimizer.update(gradients, moments, params)
    return optax.apply_updates(params, updates), moments, loss


def make_state() -> Any:
    """Draw the weights from a key: the same ones in every process."""
    params = Model().init(jax.random.key(0), jnp.zeros((1, WIDTH)))
    return params, optimizer.init(params)


def main() -> None:
    """Train from the newest checkpoint to the last step."""
    ips, rank = bridge.node_addresses(), bridge.node_rank()
    coordinator = f"{ips[0]}:{bridge.port()}"
    jax.distributed.initialize(coordinator, len(ips), rank, heartbeat_timeout_seconds=PEER_S)
    bridge.listen()  # after JAX, which installs its own handler
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
    whole, split = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))
    manager = make_manager(every_steps=SAVE_STEPS)
    step, (params, moments) = restore(manager, jax.jit(make_state, out_shardings=whole)())
    while step < STEPS:
        points = read_points(step, rank, len(ips))
        inputs, targets = (jax.make_array_from_process_local_data(split, each) for each in points)
        params, moments, loss = train_step(params, moments, inputs, targets)
        step += 1
        is_leaving = agree(is_true=bridge.preempted())
        saved = save(manager, step, (params, moments), is_leaving=is_leaving)
        bridge.progress(step, STEPS, float(loss), checkpoint_step=saved)
        if is_leaving:
            bridge.leave()
    manager.wait_until_finished()
    if rank == 0:
        bridge.finish(STEPS, [np.asarray(each) for each in jax.tree.leaves(params)])
    manager.close()
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()
