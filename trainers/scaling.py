"""Loss scaling for float16, which keeps small gradients from underflow (arXiv:1710.03740, section 3.2)."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from trainers.optimizer import local

FACTOR_FIRST, FACTOR_MAX = 2.0**16, 2.0**24
STEPS_TO_GROW = 2000  # steps without overflow until the factor doubles, as in torch's GradScaler


class LossScale:
    """The factor on the loss before the backward pass; always 1 except for float16."""

    def __init__(self, dtype: str) -> None:
        self.is_on = dtype == "float16"
        self.factor = FACTOR_FIRST if self.is_on else 1.0
        self._good_steps = 0

    def unscale(self, parameters: Iterable[Tensor]) -> None:
        """Divide all gradients by the factor, in place."""
        if self.is_on:
            with torch.no_grad():
                gradients = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
                torch._foreach_mul_(gradients, 1.0 / self.factor)

    def note(self, *, is_finite: bool) -> bool:
        """Choose the factor of the next step; return whether non-finite gradients may be due to the factor."""
        if not self.is_on:
            return False
        if is_finite:
            self._good_steps += 1
            if self._good_steps % STEPS_TO_GROW == 0:
                self.factor = min(2.0 * self.factor, FACTOR_MAX)
            return False
        self._good_steps = 0
        was_scaled = self.factor > 1.0
        self.factor = max(0.5 * self.factor, 1.0)
        return was_scaled

    def state_dict(self) -> dict[str, Any]:
        """Return the factor and the number of steps without overflow, for a checkpoint."""
        return {"factor": self.factor, "good_steps": self._good_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved state, so that a resumed run scales its loss identically."""
        self.factor, self._good_steps = state["factor"], state["good_steps"]
