"""The state that a rank of an elastic run keeps when a peer is lost, at any moment of a step."""

import os
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trainers import live_state
from trainers.config import TrainConfig
from trainers.elastic import ElasticMember, keep_state
from trainers.live_state import ChangeLock, LiveState
from trainers.loop import Position
from trainers.optimizer import Optimizer
from trainers.peer_checkpoint import PeerCheckpoint
from trainers.peer_memory import open_memory
from trainers.ranks import Ranks
from trainers.strategies.grid import Part

WHOLE = Part(index=0, count=1)
SAMPLES = torch.arange(12.0).view(4, 3)


class Model(nn.Module):
    """With BatchNorm's statistics, changed in place, and a buffer that each pass replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.passes: Tensor
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, points: Tensor) -> Tensor:
        self.passes = self.passes + 1
        points = self.norm(points)
        return points


class Run:
    """A run of one rank whose steps are taken by hand."""

    def __init__(self) -> None:
        self.model = Model()
        self.optimizer = Optimizer(self.model.named_parameters(), TrainConfig())
        self.position, self.changing = Position("data"), ChangeLock()
        self.shared = {"model": self.model, "optimizer": self.optimizer, "position": self.position}
        self.live = LiveState(self.changing, self.position, WHOLE, self.shared)

    def compute(self) -> None:
        self.model(SAMPLES * (1 + self.position.steps_done)).square().sum().backward()

    def step(self) -> None:
        self.compute()
        with self.changing:
            self.optimizer.step()
            self.position.advance(4)

    def copy(self) -> dict[str, Any]:
        return {name: value.clone() for name, value in self.model.state_dict().items()}


def read(descriptor: int | None) -> dict[str, Any]:
    assert descriptor is not None
    with os.fdopen(descriptor, "rb") as file:
        file.seek(0)
        state: dict[str, Any] = torch.load(file, weights_only=True)
    return state


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_passes_of_an_interrupted_step_leave_no_trace_in_buffers(steps: int) -> None:
    """The step is taken again in the next world, and would otherwise count twice in the statistics."""
    run = Run()
    for _ in range(steps):
        run.step()
    expected = run.copy()
    run.compute()
    kept = read(run.live.keep())
    assert kept["position"]["steps_done"] == steps == run.live.holding[0]
    assert kept["model"].keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(kept["model"][name], value), name
    assert int(expected["passes"]) == int(expected["norm.num_batches_tracked"]) == steps
    assert int(run.model.passes) == steps + 1, "the pass took place"


def test_state_between_two_steps_is_kept_whole() -> None:
    run = Run()
    run.step()
    expected = run.optimizer.state_dict()["first"]["norm.weight"].clone()
    kept = read(run.live.keep())
    assert torch.equal(kept["optimizer"]["first"]["norm.weight"], expected) and kept["optimizer"]["steps_done"] == 1


def test_state_of_an_update_that_fails_halfway_is_not_kept(capsys: pytest.CaptureFixture[str]) -> None:
    """As when the user's own optimizer waits for a rank that is lost: some parameters have moved, others have not."""
    run = Run()
    run.step()
    with pytest.raises(RuntimeError, match="peer"), run.changing:
        nn.init.ones_(run.model.norm.weight)
        raise RuntimeError("the connection to a peer was lost")
    assert run.live.keep() is None
    assert "interrupted while it changed the state" in capsys.readouterr().err


def test_update_whose_device_fails_is_not_kept() -> None:
    run = Run()

    def fail() -> None:
        raise RuntimeError("NCCL was aborted")

    live = LiveState(run.changing, run.position, WHOLE, run.shared, fail)
    with pytest.raises(RuntimeError, match="aborted"):
        run.step()
    assert live.keep() is None


def test_update_that_never_ends_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_state, "LOCK_S_MAX", 0.01)
    run = Run()
    with run.changing:
        assert run.live.keep() is None


class Weights:
    """A state behind a collective that waits for a lost peer: it cannot be read before that is aborted."""

    def __init__(self) -> None:
        self.is_aborted = False

    def state_dict(self) -> dict[str, Any]:
        assert self.is_aborted, "the copy would wait forever"
        return {"weight": torch.ones(2)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


def test_collectives_of_a_lost_peer_are_aborted_before_the_state_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, changing = Weights(), ChangeLock()

    def abort() -> None:
        assert not changing.end_changes(), "the training thread may still queue an update behind what is aborted"
        weights.is_aborted = True

    monkeypatch.setattr(live_state, "LOCK_S_MAX", 0.01)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: "nccl")
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_abort_process_group", abort)
    live = LiveState(changing, Position("data"), WHOLE, {"weights": weights})
    assert read(live.keep())["weights"]["weight"].tolist() == [1.0, 1.0]
    assert weights.is_aborted


def test_restart_without_memory_for_a_copy_goes_on_without_the_state(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error ended the thread that restarts the program, and the rank hung until its watchdog ended it."""
    run = Run()

    def fail(name: str, flags: int) -> int:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(os, "memfd_create", fail, raising=False)
    assert keep_state(run.live) is None
    assert "note: the state was not kept" in capsys.readouterr().err


def test_update_waits_for_all_gradients_once_state_is_offered() -> None:
    member = ElasticMember.__new__(ElasticMember)  # without a rendezvous
    member._kept, member._live, member._restarting = [], None, threading.Lock()
    assert not member.keeps_state
    run = Run()
    member.offer(LiveState(run.changing, run.position, WHOLE, run.shared))
    assert member.keeps_state


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux")
def test_copies_for_peers_have_the_buffers_that_a_pass_put_in_place_of_others() -> None:
    run = Run()
    peers = PeerCheckpoint(Ranks(rank=0, world_size=1, device=torch.device("cpu")), run.shared, every_steps=1, node="a")
    run.step()
    run.step()
    peers.begin(2)
    peers.wait()
    (memory,) = [open_memory(descriptor) for descriptor in peers.hold()]
    values = {piece.path: memory.view(piece) for piece in memory.list_pieces()}
    assert values["model", "passes"] == values["model", "norm.num_batches_tracked"] == 2
