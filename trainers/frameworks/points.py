"""The training samples and the number of steps, shared by the programs of all frameworks."""

from __future__ import annotations

import os
import time

import numpy as np

STEPS = int(os.environ.get("STEPS") or 200)
SAVE_STEPS = int(os.environ.get("SAVE_STEPS") or 20)
STEP_S = float(os.environ.get("STEP_S") or 0)  # simulated duration of a step, so that a small model can be preempted
WIDTH = 8


def read_points(step: int, rank: int, ranks: int, *, batch: int = 32) -> tuple[np.ndarray, np.ndarray]:
    """Return this rank's part of the batch of `step`: inputs (batch / ranks, 8) and targets (batch / ranks, 1).

    The samples depend only on the step, so no data position is saved, and any number of ranks sees the same ones.
    """
    time.sleep(STEP_S)
    inputs = np.random.default_rng(step).standard_normal((batch, WIDTH)).astype(np.float32)
    targets = np.sin(inputs.sum(axis=1, keepdims=True))
    part = slice(rank * batch // ranks, (rank + 1) * batch // ranks)
    return inputs[part], targets[part]
