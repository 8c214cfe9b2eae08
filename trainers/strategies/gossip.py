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
from trainers.strategies.islands import OwnTensors, hold_by_first, list_local

NEVER = torch.iinfo(torch.int64).max


class Gossip(Strategy):
    """Ranks hold slightly different models; that of the first rank is the shared one of a checkpoint."""

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
        """Return this rank's loss. A requested stop is scheduled far enough ahead to reach all ranks in time."""
        every_steps, count = self.options.gossip.every_steps, self.grid.size("island")
        if is_stop_asked and self._stop_step == NEVER:
            turns = self._turns if count > 1 else 0
            self._stop_step = self._steps_done if not turns else (self._steps_done // every_steps + turns) * every_steps
        is_stopping = self._steps_done >= self._stop_step
        return torch.stack([loss / weight, torch.full_like(loss, float(is_stopping))])

    def shared_state(self, model: nn.Module, optimizer: Optimizer) -> Mapping[str, Any]:
        """Return the first rank's model."""
        if self.grid.size("island") == 1:
            return super().shared_state(model, optimizer)
        return hold_by_first(model, optimizer, is_first=self.grid.index("island") == 0)

    def own_state(self, model: nn.Module, optimizer: Optimizer) -> Mapping[str, Any]:
        """Return this rank's model."""
        return {"island": OwnTensors(model, optimizer)} if self.grid.size("island") > 1 else {}

    def _exchange(self, parameters: list[Tensor], distance: int) -> None:
        group: Any = self.grid.group("island") or dist.group.WORLD
        rank, count = self.grid.index("island"), self.grid.size("island")
        to, source = (dist.get_global_rank(group, peer % count) for peer in (rank + distance, rank - distance))
        outgoing = torch.cat([tensor.reshape(-1) for tensor in parameters])
        incoming = torch.empty_like(outgoing)
        stop_step = torch.tensor([self._stop_step], device=self.ranks.device)
        stop_step_heard = torch.empty_like(stop_step)
        operations = [
            dist.P2POp(dist.isend, stop_step, to, group=group),
            dist.P2POp(dist.irecv, stop_step_heard, source, group=group),
            dist.P2POp(dist.isend, outgoing, to, group=group),
            dist.P2POp(dist.irecv, incoming, source, group=group),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        self._stop_step = min(self._stop_step, int(stop_step_heard.item()))
        parts = incoming.split([tensor.numel() for tensor in parameters])
        heard = [part.view_as(to) for part, to in zip(parts, parameters, strict=True)]
        torch._foreach_lerp_(parameters, heard, 0.5)
