"""When the cyclic garbage of a training run is collected."""

import gc
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from .strategies.conftest import TINY, Worlds

MISTIMED, UNTIMED = 41, 42


def train_and_watch(arguments: Sequence[str]) -> int:
    """Run a rank; return `MISTIMED` where something was collected during a pass or by another thread."""
    from trainers import loop
    from trainers.lm import main

    forward_backward, trainer = loop.forward_backward, threading.current_thread()
    state = {"is_passing": False, "is_training": False}
    found: list[tuple[str, bool]] = []

    def watch(phase: str, about: Any) -> None:
        if phase == "start" and state["is_training"]:
            found.append((threading.current_thread().name, state["is_passing"]))

    def run(*given: Any) -> Any:
        state.update(is_passing=True, is_training=True)
        try:
            return forward_backward(*given)
        finally:
            state["is_passing"] = False

    loop.forward_backward = run
    gc.callbacks.append(watch)
    code = main(arguments)
    if not found:
        return UNTIMED
    return MISTIMED if any(each != (trainer.name, False) for each in found) else code


@pytest.mark.long
def test_garbage_is_collected_between_steps_and_by_the_training_thread_alone(worlds: Worlds, tmp_path: Path) -> None:
    """Otherwise torch takes live parts of the graph for garbage, and DDP's backward pass finds its own parts gone."""
    flags = [*TINY, "--strategy", "ddp", "--train.steps", "50"]
    ended = worlds.call(tmp_path, "tests.trainers.test_gc_control:train_and_watch", flags, ranks=2)
    assert ended.codes == [0, 0], ended.errors
