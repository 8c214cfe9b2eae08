"""A model whose optimizer waits for all ranks in the middle of its update; there, once, the last rank is killed."""

import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainers import train

KILLED_IN = 7
KILLED = Path("killed")
NOW = {"step": 0}


class Points(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Points and a function of them."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        point = torch.randn(8, generator=torch.Generator().manual_seed(index), dtype=torch.float64)
        return point, point.sum().sin()


class JointUpdate(torch.optim.SGD):
    """Gradient descent of one half of the parameters, a message between all ranks, and the other half."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters."""
        (group,) = self.param_groups
        parameters = group["params"]
        for place, parameter in enumerate(parameters):
            if place == len(parameters) // 2 and dist.is_initialized():
                if dist.get_rank() and NOW["step"] == KILLED_IN and not KILLED.exists():
                    KILLED.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                dist.all_reduce(torch.zeros(1))
            parameter.sub_(group["lr"] * parameter.grad)


def note(step: int) -> float:
    """Note the step and leave the learning rate as it is."""
    NOW["step"] = step
    return 1.0


def make_model() -> nn.Module:
    """Return a model in float64: runs with different numbers of ranks differ by less than any fault would cause."""
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1), nn.Flatten(0)).double()


if __name__ == "__main__":
    train(
        model=make_model,
        samples=Points(),
        loss=nn.functional.mse_loss,
        optimizer=lambda named: JointUpdate(named, lr=0.1),
        schedule=note,
    )
