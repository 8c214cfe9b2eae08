"""Gossip: after its own step each rank averages its parameters with one other (arXiv:2110.13363).

At exchange e, a rank sends to the rank 2^(e mod log n) places further: information reaches all ranks within log n
exchanges, and no rank waits for more than one other.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainers.optimizer import Optimizer
from trainers.strategies.base import Strategy
from trainers.strategies.islands import (
    average_loss,
    hold_by_first,
    list_inner_axes,
    list_local,
    list_own_state,
)

NEVER = torch.iinfo(torch.int64).max


class Gossip(Strategy):
    """Ranks, or islands of ranks, hold slightly different models; the first one is the shared one of a checkpoint."""

    AXES = ("island",)
    EXCHANGES_LAST = True

    def wrap(self, model: nn.Module) -> nn.Module:
        """Leave the model unchanged."""
        self._steps_done, self._stop_step = 0, NEVER
        self._turns = max(1, math.ceil(math.log2(self.grid.size("island"))))
        return model

    def step(self, model: nn.Module, optimizer: Optimizer, loss: Tensor) -> None:
        """Update the parameters, then average them with those of this exchange's partner."""
        optimizer.step()
        self._steps_done = optimizer.steps_done
        exchange, rest = divmod(self._steps_done, self.options.gossip.every_steps)
        if self.grid.size("island") > 1 and rest == 0:
            self._exchange(list_local(model), 2 ** (exchange % self._turns))

    def all_reduce_loss(self, loss: Tensor, *, weight: float, is_stop_asked: bool) -> Tensor:
        """Return this island's loss. A requested stop is scheduled far enough ahead to reach all ranks in time."""
        if self.grid.size("island") == 1:
            return super().all_reduce_loss(loss, weight=weight, is_stop_asked=is_stop_asked)
        every_steps = self.options.gossip.every_steps
        if is_stop_asked and self._stop_step == NEVER:
            self._stop_step = (self._steps_done // every_steps + self._turns) * every_steps
        is_stopping = self._steps_done >= self._stop_step
        mean = average_loss(loss, weight=weight, grid=self.grid, share=self.share)
        return torch.stack([mean, torch.full_like(loss, float(is_stopping))])

    def shared_state(self, model: nn.Module, optimizer: Optimizer) -> Mapping[str, Any]:
        """Return the first rank's model."""
        if self.grid.size("island") == 1:
            return super().shared_state(model, optimizer)
        return hold_by_first(model, optimizer, is_first=self.grid.index("island") == 0)

    def own_state(self, model: nn.Module, optimizer: Optimizer) -> Mapping[str, Any]:
        """Return this rank's model."""
        return list_own_state(self.grid, model, optimizer)

    def _exchange(self, parameters: list[Tensor], distance: int) -> None:
        group: Any = self.grid.group("island") or dist.group.WORLD
        rank, count = self.grid.index("island"), self.grid.size("island")
        to, source = (dist.get_global_rank(group, peer % count) for peer in (rank + distance, rank - distance))
        outgoing = torch.cat([tensor.reshape(-1) for tensor in parameters])
        incoming = torch.empty_like(outgoing)
        stop_step = torch.tensor([self._stop_step], device=self.ranks.device)
        # A request may have reached one rank of an island only, and each rank exchanges with one of another island.
        for axis in list_inner_axes(self.grid):
            dist.all_reduce(stop_step, op=dist.ReduceOp.MIN, group=self.grid.group(axis))
        stop_step_heard = torch.empty_like(stop_step)
        operations = [
            dist.P2POp(dist.isend, stop_step, to, group=group),
            dist.P2POp(dist.irecv, stop_step_heard, source, group=group),
            dist.P2POp(dist.isend, outgoing, to, group=group),
            dist.P2POp(dist.irecv, incoming, source, group=group),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        self._stop_step = int(torch.minimum(stop_step, stop_step_heard).item())
        parts = incoming.split([tensor.numel() for tensor in parameters])
        heard = [part.view_as(to) for part, to in zip(parts, parameters, strict=True)]
        torch._foreach_lerp_(parameters, heard, 0.5)
