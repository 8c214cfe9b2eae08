"""Checkpoint JAX programs with Orbax, in broker's folder or bucket (`gs://` requires an extra of Orbax)."""

from __future__ import annotations

from typing import Any

import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from trainers import bridge


def make_manager(*, every_steps: int, keep: int = 3) -> ocp.CheckpointManager:
    """Return a manager that saves the shards of all processes and ignores incomplete steps when it restores."""
    options = ocp.CheckpointManagerOptions(max_to_keep=keep, save_interval_steps=every_steps)
    return ocp.CheckpointManager(bridge.checkpoint_dir() + "/orbax", options=options)


def restore(manager: ocp.CheckpointManager, tree: Any) -> tuple[int, Any]:
    """Return the newest step and its tree, sharded like `tree`; (0, tree) if there is none."""
    step = manager.latest_step()
    if step is None:
        return 0, tree
    return step, manager.restore(step, args=ocp.args.StandardRestore(tree))


def save(manager: ocp.CheckpointManager, step: int, tree: Any, *, is_leaving: bool = False) -> int | None:
    """Save if `step` is due, or at once when leaving; return the newest complete step."""
    manager.save(step, args=ocp.args.StandardSave(tree), force=is_leaving)
    if is_leaving:
        manager.wait_until_finished()
    steps = [each for each in manager.all_steps() if each != step or not manager.is_saving_in_progress()]
    return max(steps, default=None)


def agree(*, is_true: bool) -> bool:
    """Return True in every process if it is True in any. A collective call: make it at the same step everywhere."""
    return bool(np.any(multihost_utils.process_allgather(np.array(is_true))))
