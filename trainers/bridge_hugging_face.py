"""A callback for the Trainer of Hugging Face Transformers, and a search for the checkpoint to resume from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from trainers import bridge
from trainers.bridge_torch import agree

LAST_FILE = "trainer_state.json"  # the Trainer writes this file last


def find_checkpoint(folder: Path) -> str | None:
    """Return the newest complete checkpoint; `get_last_checkpoint` would also return an incomplete one."""
    found = [path.parent for path in folder.glob(f"checkpoint-*/{LAST_FILE}")]
    found = [path for path in found if path.name.rpartition("-")[2].isdecimal()]  # others are copies of the user's
    return str(max(found, key=lambda path: int(path.name.rpartition("-")[2]))) if found else None


class BridgeTrainerCallback(TrainerCallback):
    """Report logged steps (every step with `logging_steps=1`); save and stop after a preemption notice.

    Call `leave_if_asked` when `train` has returned.
    """

    def __init__(self) -> None:
        bridge.listen()
        self.is_leaving = False

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **others: Any) -> None:
        if logs and "loss" in logs:
            bridge.progress(state.global_step, state.max_steps, float(logs["loss"]))

    def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if bridge.is_first():
            bridge.progress(state.global_step, state.max_steps, checkpoint_step=state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if agree(bridge.preempted()):
            self.is_leaving = control.should_save = control.should_training_stop = True

    def leave_if_asked(self) -> None:
        """End the process if training stopped because of a notice."""
        if self.is_leaving:
            bridge.leave()
