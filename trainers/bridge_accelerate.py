"""Atomic checkpoints for Hugging Face Accelerate, whose `save_state` alone is not atomic."""

from __future__ import annotations

from typing import Any

from trainers import bridge


def load(accelerator: Any) -> int:
    """Load the newest complete checkpoint into all prepared objects; return its step, or 0 if there is none."""
    step, folder = bridge.resume()
    if folder:
        accelerator.load_state(str(folder))
    return step


def save(accelerator: Any, step: int) -> None:
    """Save on all ranks, then commit the checkpoint. No rank returns before the commit."""
    accelerator.save_state(str(bridge.folder_of(step)))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        bridge.commit(step)
    accelerator.wait_for_everyone()
