"""Extra state of modules (`get_extra_state`) in checkpoints and in the memory of elastic runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trainers.checkpoint import CheckpointManager
from trainers.config import TrainConfig
from trainers.extra_state import unpack_extra_state
from trainers.live_state import ChangeLock, LiveState
from trainers.loop import Position
from trainers.optimizer import Optimizer
from trainers.peer_checkpoint import PeerCheckpoint
from trainers.ranks import Ranks
from trainers.state_transfer import Holding, transfer_state
from trainers.storage import FolderStorage
from trainers.strategies.grid import Part
from trainers.strategies.islands import OwnTensors

from .test_checkpoint import hold_copies

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

ALONE = Ranks(rank=0, world_size=1, device=torch.device("cpu"))
WHOLE = Part(index=0, count=1)
needs_memfd = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux")


class Model(nn.Module):
    """With a layer whose extra state is any object, and its own state dict one level deeper."""

    def __init__(self, value: Any = 0) -> None:
        super().__init__()
        self.layer = Layer(value)


class Layer(nn.Module):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.value = value

    def get_extra_state(self) -> Any:
        return self.value

    def set_extra_state(self, state: Any) -> None:
        self.value = state


def open_manager(path: Path, model: nn.Module, *, attempt: int) -> CheckpointManager:
    return CheckpointManager(
        FolderStorage(path), ALONE, attempt=attempt, keep=1, shared={"model": model}, own={}, buffers=model.buffers
    )


@pytest.mark.parametrize(
    ("first", "saved"),
    [
        ({}, {"seen": 3}),
        ({"seen": 3}, {}),
        ({1: torch.zeros(2)}, {1: torch.ones(2)}),
        (torch.zeros(0, dtype=torch.uint8), torch.ones(5, dtype=torch.uint8)),
        (None, [1, (2.5, 3)]),
    ],
    ids=["grows", "shrinks", "tensors", "length", "list"],
)
def test_extra_state_of_any_shape_is_restored_into_a_new_module(tmp_path: Path, first: Any, saved: Any) -> None:
    model, other = Model(first), Model(first)
    model.layer.value = saved
    manager = open_manager(tmp_path, model, attempt=1)
    manager.save(1)
    manager.wait()
    assert open_manager(tmp_path, other, attempt=2).restore() == 1
    torch.testing.assert_close(other.layer.value, saved, rtol=0, atol=0)


def test_extra_state_that_the_next_pass_changes_is_that_of_the_saved_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_released = hold_copies(monkeypatch)
    model, other = Model({"seen": [1], "sums": torch.ones(2)}), Model({})
    manager = open_manager(tmp_path, model, attempt=1)
    manager.save(1)
    model.layer.value["seen"].append(2)
    model.layer.value["sums"] += 1
    is_released.set()
    manager.wait_for_copy()
    manager.wait()
    assert open_manager(tmp_path, other, attempt=2).restore() == 1
    assert other.layer.value["seen"] == [1] and other.layer.value["sums"].tolist() == [1.0, 1.0]


class Growing(nn.Module):
    """Its first pass puts a longer buffer in place of the empty one; later passes change that in place."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Tensor
        self.register_buffer("counts", torch.zeros(3))

    def forward(self) -> None:
        if not self.counts.any():
            self.counts = torch.ones(3)
        else:
            self.counts += 1


def test_buffer_that_a_pass_put_in_place_of_another_is_that_of_the_saved_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, other = Growing(), Growing()
    manager = open_manager(tmp_path, model, attempt=1)
    model()
    is_released = hold_copies(monkeypatch)
    manager.save(1)
    model()
    is_released.set()
    manager.wait_for_copy()
    manager.wait()
    assert open_manager(tmp_path, other, attempt=2).restore() == 1
    assert other.counts.tolist() == [1.0, 1.0, 1.0] and model.counts.tolist() == [2.0, 2.0, 2.0]


@needs_memfd
def test_state_kept_in_memory_has_the_extra_state_of_its_step() -> None:
    """Before, it was that of the start of the world: the next world counted everything again from there."""
    model, other, changing, position = Model({}), Model({}), ChangeLock(), Position("data")
    shared = {"model": model, "position": position}
    live = LiveState(changing, position, WHOLE, shared)
    with changing:
        model.layer.value = {"seen": [1]}
        position.advance(1)
    model.layer.value["seen"].append(2)  # a pass of the step that is interrupted
    descriptor = live.keep()
    assert descriptor is not None

    def read() -> Any:
        with os.fdopen(descriptor, "rb") as file:
            file.seek(0)
            return torch.load(file, weights_only=True)

    heirs = {"model": other, "position": Position("data")}
    assert transfer_state(ALONE, WHOLE, [Holding(step=1, part=WHOLE)], read, heirs) == (1, 0)
    assert other.layer.value == {"seen": [1]}


@needs_memfd
def test_copies_for_peers_have_the_extra_state_of_their_step() -> None:
    model, other = Model({}), Model({})
    peers = PeerCheckpoint(ALONE, {"model": model}, every_steps=1, node="a")
    model.layer.value = {"seen": 7}
    peers.begin(1)
    peers.wait()
    heirs = PeerCheckpoint(ALONE, {"model": other}, every_steps=1, node="a", inherited=peers.hold())
    assert heirs.restore(0) == 1
    assert other.layer.value == {"seen": 7}


def test_ranks_that_drift_apart_keep_their_own_extra_state(tmp_path: Path) -> None:
    def open_own(model: Model, attempt: int) -> CheckpointManager:
        own = OwnTensors(model, Optimizer(model.named_parameters(), TrainConfig()))
        return CheckpointManager(
            FolderStorage(tmp_path), ALONE, attempt=attempt, keep=1, shared={}, own={"island": own}
        )

    model, other = Model({"seen": 5}), Model({})
    manager = open_own(model, 1)
    manager.save(1)
    manager.wait()
    assert open_own(other, 2).restore() == 1
    assert other.layer.value == {"seen": 5}


def test_extra_state_of_older_checkpoints_is_kept_as_it_is() -> None:
    state = {"layer": {"_extra_state": 5}, "bytes": b"other"}
    assert unpack_extra_state(state) == state
