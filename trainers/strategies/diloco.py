"""DiLoCo: islands train independently and synchronize every few steps, for slow links (arXiv:2311.08105).

Each island takes its share of every batch. With an outer learning rate of 1 and no momentum this is local SGD.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainers.optimizer import Optimizer, local
from trainers.strategies.base import Strategy
from trainers.strategies.islands import average_loss, hold_by_first, list_local, list_own_state


class Diloco(Strategy):
    """Islands exchange only parameters, every few steps.

    Between synchronizations each rank reports the loss of its island, and a requested stop is deferred, so that islands
    do not wait for each other.
    """

    AXES = ("island",)
    EXCHANGES_LAST = True

    def step(self, model: nn.Module, optimizer: Optimizer, loss: Tensor) -> None:
        """Update this island's parameters; synchronize when due, and after the last step of the run."""
        self._is_synchronized = False
        if self.grid.size("island") == 1:
            optimizer.step()
            return
        if not self._outer.is_begun:
            self._outer.begin(model)
        optimizer.step()
        self._is_synchronized = optimizer.is_finished or optimizer.steps_done % self.options.diloco.every_steps == 0
        if self._is_synchronized:
            asked = self.options.diloco
            self._outer.synchronize(
                model,
                group=self.grid.group("island"),
                count=self.grid.size("island"),
                learning_rate=asked.learning_rate,
                momentum=asked.momentum,
            )

    def all_reduce_loss(self, loss: Tensor, *, weight: float, is_stop_asked: bool) -> Tensor:
        """Return the loss of all islands at a synchronization, and that of this island otherwise."""
        if self._is_synchronized or self.grid.size("island") == 1:
            return super().all_reduce_loss(loss, weight=weight, is_stop_asked=is_stop_asked)
        mean = average_loss(loss, weight=weight, grid=self.grid, share=self.share)
        return torch.stack([mean, torch.zeros_like(loss)])

    def shared_state(self, model: nn.Module, optimizer: Optimizer) -> Mapping[str, Any]:
        """Return the model of the first island, and the anchor from which all islands started."""
        if self.grid.size("island") == 1:
            return super().shared_state(model, optimizer)
        self._outer = Outer(model)
        return {**hold_by_first(model, optimizer, is_first=self.grid.index("island") == 0), "diloco": self._outer}

    def own_state(self, model: nn.Module, optimizer: Optimizer) -> Mapping[str, Any]:
        """Return this island's model."""
        return list_own_state(self.grid, model, optimizer)


class Outer:
    """The outer optimizer: the common starting point of all islands, and its momentum. Equal on every island."""

    def __init__(self, model: nn.Module) -> None:
        """Allocate the state, so that a checkpoint can be read into it."""
        self.is_begun = False
        trained = {name: tensor for name, tensor in model.named_parameters() if tensor.requires_grad}
        self._anchor = {name: tensor.detach().clone() for name, tensor in trained.items()}
        self._momentum = {name: torch.zeros_like(tensor) for name, tensor in self._anchor.items()}

    def begin(self, model: nn.Module) -> None:
        """Start from the current model: a new one, or one from a checkpoint of another strategy."""
        self.is_begun = True
        torch._foreach_copy_(self._list(self._anchor), list_local(model))

    def synchronize(self, model: nn.Module, *, group: Any, count: int, learning_rate: float, momentum: float) -> None:
        """Update the anchor with the mean change of the islands as its gradient, and copy it to every island."""
        parameters, anchor, velocity = list_local(model), self._list(self._anchor), self._list(self._momentum)
        mean = torch.cat([tensor.reshape(-1) for tensor in parameters])
        dist.all_reduce(mean, group=group)
        mean /= count
        sizes = [tensor.numel() for tensor in anchor]
        ways = [at - to.view_as(at) for at, to in zip(anchor, mean.split(sizes), strict=True)]
        torch._foreach_mul_(velocity, momentum)
        torch._foreach_add_(velocity, ways)
        torch._foreach_add_(ways, velocity, alpha=momentum)  # Nesterov momentum
        torch._foreach_add_(anchor, ways, alpha=-learning_rate)
        torch._foreach_copy_(parameters, anchor)

    def state_dict(self) -> dict[str, Any]:
        """Return anchor and momentum by parameter name."""
        return {"anchor": dict(self._anchor), "momentum": dict(self._momentum)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load anchor and momentum."""
        self.is_begun = True
        for mine, theirs in ((self._anchor, state["anchor"]), (self._momentum, state["momentum"])):
            for name, value in mine.items():
                local(value).copy_(local(theirs[name]))

    @staticmethod
    def _list(tensors: dict[str, Tensor]) -> list[Tensor]:
        return [local(tensor) for tensor in tensors.values()]
