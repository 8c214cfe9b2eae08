"""Checks that single ranks run in the worlds of `test_peer_checkpoint.py`."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainers.config import TrainConfig
from trainers.loop import Position
from trainers.optimizer import Optimizer, local
from trainers.peer_checkpoint import PeerCheckpoint
from trainers.peer_memory import find_box, iterate_values, open_memory
from trainers.ranks import Ranks, join_ranks, leave_ranks
from trainers.strategies import create_strategy

STEPS = (1, 2, 3)


class Model(nn.Module):
    """Layers whose rows do not divide equally, one of fewer rows than ranks, and a buffer that no rank shards."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(5, 7), nn.Linear(7, 2)])
        self.norm = nn.LayerNorm(5)
        self.table: Tensor
        self.register_buffer("table", torch.zeros(4))


def keep_parts(arguments: Sequence[str]) -> int:
    """Copy the state of some steps, and write the memory that a restart would keep to files."""
    strategy, folder = arguments[0], Path(arguments[1])
    ranks = join_ranks()
    shared = make_state(strategy, ranks)
    peers = PeerCheckpoint(ranks, shared, every_steps=1, node=f"node {ranks.rank}")
    for step in STEPS:
        for _, tensor, expected in list_tensors(shared, step):
            tensor.copy_(expected)
        shared["position"].steps_done = step
        peers.begin(step)
        peers.wait_for_copy()
    peers.wait()
    last = ranks.world_size - 1
    assert peers.secure(STEPS[-1], is_leaving=False)
    assert peers.secure(STEPS[-1], is_leaving=ranks.rank == last) == (last > 0), "the others have the part of the last"
    assert not peers.secure(STEPS[-1], is_leaving=True)
    for number, descriptor in enumerate(peers.hold()):
        with Path(f"/proc/self/fd/{descriptor}").open("rb") as memory:
            (folder / f"{ranks.rank}.{number}").write_bytes(memory.read())
    leave_ranks()
    return 0


def restore_parts(arguments: Sequence[str]) -> int:
    """Restore in a world whose ranks inherit the files of former ranks; `-` inherits none. Check every element."""
    strategy, folder, former, step_expected = arguments[0], Path(arguments[1]), arguments[2].split(","), arguments[3]
    ranks = join_ranks()
    shared = make_state(strategy, ranks)
    for _, tensor, _ in list_tensors(shared, 0):
        tensor.fill_(-1.0)
    mine = sorted(folder.glob(f"{former[ranks.rank]}.*"))
    inherited = [os.open(file, os.O_RDWR) for file in mine]
    peers = PeerCheckpoint(ranks, shared, every_steps=1, node=f"node {ranks.rank}", inherited=inherited)
    step = peers.restore(-1)
    assert str(step) == step_expected, f"restored step {step}"
    if step is not None:
        assert shared["position"].steps_done == step
        for path, tensor, expected in list_tensors(shared, step):
            assert torch.equal(tensor, expected), path
        peers.begin(step)
        peers.wait()
        kept = [open_memory(descriptor).header for descriptor in peers.hold()]
        worlds = {header.world for header in kept if header is not None}
        assert len(worlds) == 1, "the memory of the former world is released"
    leave_ranks()
    return 0


def make_state(name: str, ranks: Ranks) -> dict[str, Any]:
    """Return the shared state of a run under a strategy."""
    strategy = create_strategy(name, ranks)
    assert strategy.HAS_PEER_COPIES
    model = Model()
    strategy.wrap(model)
    optimizer = Optimizer(strategy.list_trained(model), TrainConfig())
    return {**strategy.shared_state(model, optimizer), "position": Position("data")}


def list_tensors(shared: dict[str, Any], step: int) -> list[tuple[str, Tensor, Tensor]]:
    """List the path of each tensor, its elements on this rank, and their values at a step; all elements differ."""
    found = []
    for key, holder in shared.items():
        for path, value in iterate_values(holder.state_dict(), (key,)):
            if isinstance(value, Tensor) and local(value).numel():
                name = "/".join(path)
                base = 1000.0 * step + 10_000.0 * (sum(name.encode()) % 977)
                whole = base + torch.arange(value.numel(), dtype=torch.float32).view(value.shape)
                box = find_box(value)
                part = whole[tuple(slice(a, a + n) for a, n in zip(box.offset, box.shape, strict=True))]
                found.append((name, local(value).detach(), part))
    return found
