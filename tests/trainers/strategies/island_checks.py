"""Saving and restoring ranks that drift apart; each function raises where a claim does not hold."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.trainers.strategies.checks import CONFIG, LOSS, make_model, put_gradient
from trainers.checkpoint import CheckpointManager
from trainers.optimizer import Optimizer
from trainers.ranks import join_ranks, leave_ranks
from trainers.storage import FolderStorage
from trainers.strategies import create_strategy
from trainers.strategies.options import DilocoOptions, GossipOptions, StrategyOptions

STEPS = 3  # no exchange before: all tensors of the islands differ
OPTIONS = StrategyOptions(
    diloco=DilocoOptions(every_steps=STEPS + 1), gossip=GossipOptions(every_steps=STEPS + 1)
)  # fmt: skip


class Island:
    """One rank's model, optimizer and checkpoints."""

    def __init__(self, name: str, folder: Path, *, attempt: int) -> None:
        self.ranks = join_ranks()
        self.strategy = create_strategy(name, self.ranks, OPTIONS)
        self.model = make_model()
        self.wrapped = self.strategy.wrap(self.model)
        self.optimizer = Optimizer(self.model.named_parameters(), CONFIG)
        self.checkpoints = CheckpointManager(
            FolderStorage(folder / "checkpoints"),
            self.ranks,
            attempt=attempt,
            keep=3,
            shared=self.strategy.shared_state(self.model, self.optimizer),
            own=self.strategy.own_state(self.model, self.optimizer),
        )

    def copy_tensors(self) -> dict[str, Tensor]:
        """Copy weights and both moments, by name."""
        state: Mapping[str, Any] = {"model": self.model.state_dict(), **self.optimizer.state_dict()}
        return {
            f"{part}.{name}": tensor.clone()
            for part in ("model", "first", "second")
            for name, tensor in state[part].items()
        }


def only_trained_parameters_travel(arguments: Sequence[str]) -> int:
    """Frozen parameters, such as the weights beside adapters, are equal on all islands and must stay as they are."""
    ranks = join_ranks()
    sent: list[int] = []
    strategy = create_strategy(arguments[0], ranks, StrategyOptions(diloco=DilocoOptions(every_steps=1)))
    model = make_model()
    frozen = next(model.parameters()).requires_grad_(False)
    before = frozen.detach().clone()
    wrapped = strategy.wrap(model)
    optimizer = Optimizer(model.named_parameters(), CONFIG)
    strategy.shared_state(wrapped, optimizer)
    all_reduce, operation = dist.all_reduce, dist.P2POp

    def note_and_reduce(tensor: Tensor, **named: Any) -> Any:
        sent.append(tensor.numel())
        return all_reduce(tensor, **named)

    def note_operation(way: Any, tensor: Tensor, peer: int, **named: Any) -> Any:
        sent.append(tensor.numel())
        return operation(way, tensor, peer, **named)

    patched: Any = dist
    patched.all_reduce, patched.P2POp = note_and_reduce, note_operation
    for step in range(STEPS):
        put_gradient(model, step, ranks.rank)
        frozen.grad = None
        strategy.step(wrapped, optimizer, LOSS)
    assert torch.equal(frozen, before), "a mean of equal values may differ from them in its last bit"
    assert max(sent) == sum(each.numel() for each in model.parameters() if each.requires_grad)
    leave_ranks()
    return 0


def save_islands(arguments: Sequence[str]) -> int:
    """Train apart, save, and note the tensors of each rank beside the checkpoint."""
    name, folder = arguments[0], Path(arguments[1])
    island = Island(name, folder, attempt=1)
    for step in range(STEPS):
        put_gradient(island.model, step, island.ranks.rank)
        island.optimizer.skip_unless(torch.tensor(step > island.ranks.rank))  # gradients that are not finite
        island.strategy.step(island.wrapped, island.optimizer, LOSS)
    island.checkpoints.save(STEPS)
    island.checkpoints.wait()
    torch.save(island.copy_tensors(), folder / f"rank-{island.ranks.rank}.pt")
    assert island.optimizer.moves_done == STEPS - 1 - island.ranks.rank
    leave_ranks()
    return 0


def restore_islands(arguments: Sequence[str]) -> int:
    """Check that each rank gets its own tensors back, and in a world of another size the first rank's."""
    name, folder, saved_ranks = arguments[0], Path(arguments[1]), int(arguments[2])
    island = Island(name, folder, attempt=2)
    assert island.checkpoints.restore() == STEPS
    saved = [torch.load(folder / f"rank-{rank}.pt") for rank in range(saved_ranks)]
    mine = island.ranks.rank if island.ranks.world_size == saved_ranks else 0
    for key, tensor in island.copy_tensors().items():
        assert torch.equal(tensor, saved[mine][key]), key
        others = [each[key] for rank, each in enumerate(saved) if rank != mine]
        assert not any(torch.equal(tensor, other) for other in others), f"{key} does not distinguish islands"
    assert island.optimizer.steps_done == STEPS
    assert island.optimizer.moves_done == STEPS - 1 - mine, "by which Adam corrects its moments"
    leave_ranks()
    return 0
