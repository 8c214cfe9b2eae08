"""A callback for Lightning: atomic checkpoints, progress, and a save after a preemption notice."""

from __future__ import annotations

from typing import Any

import lightning

from trainers import bridge
from trainers.bridge_torch import agree

FILE = "state.ckpt"


def find_checkpoint() -> tuple[int, str | None]:
    """Return step and `ckpt_path` of the newest complete checkpoint. The caller skips the data up to that step."""
    step, folder = bridge.resume()
    return step, str(folder / FILE) if folder else None


class BridgeLightningCallback(lightning.Callback):
    """Save every `every_steps` steps; after a preemption notice, save and end the process.

    Use it with `enable_checkpointing=False`.
    """

    def __init__(self, *, every_steps: int) -> None:
        self._every_steps = every_steps
        self._saved = 0
        bridge.listen()

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self._saved = trainer.global_step

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_index: int) -> None:
        step = trainer.global_step  # unchanged by a batch whose gradients are only accumulated
        is_leaving = agree(bridge.preempted())
        is_due = is_leaving or step % self._every_steps == 0 or step == trainer.max_steps
        if is_due and step != self._saved:
            self._saved = step
            trainer.save_checkpoint(bridge.folder_of(step) / FILE)  # a collective call: it ends with a barrier
            if trainer.is_global_zero:
                bridge.commit(step)
            trainer.strategy.barrier()
        if trainer.is_global_zero:
            bridge.progress(step, trainer.max_steps, float(outputs["loss"]))
        if is_leaving:
            bridge.leave()
