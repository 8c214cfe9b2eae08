"""What a strategy is: three verbs round an ordinary model."""

from contextlib import AbstractContextManager
from typing import Protocol

from torch import nn


class Strategy(Protocol):
    """How ranks share one model's work. It has nothing to save: state is read from the model itself."""

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the module whose forward is to be called. Called once, after the model is on its device.

        The model's own parameters must stay the trained ones: the checkpoint and the optimizer use `model`.
        """
        ...

    def micro_step(self, model: nn.Module, *, last: bool) -> AbstractContextManager[None]:
        """Surround one forward and backward; after the last of a step, gradients are the mean over all ranks."""
        ...

    def clip(self, model: nn.Module, norm_max: float) -> float:
        """Scale gradients down to `norm_max` over all ranks and return their norm before."""
        ...
