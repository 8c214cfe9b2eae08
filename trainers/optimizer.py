"""AdamW with a warmed-up cosine schedule, on torch's fused kernel.

Our own because the first use of `torch.optim` imports torch._dynamo: 1.0 s of every recovery, measured on torch 2.13.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from trainers.config import TrainConfig

# Adam's usual averaging horizons for language models (GPT-3, arXiv:2005.14165, appendix B).
BETA_FIRST, BETA_SECOND, EPSILON = 0.9, 0.95, 1e-8


class AdamW:
    """Adam with decoupled weight decay (arXiv:1711.05101). State is kept by parameter name."""

    def __init__(self, parameters: Iterable[tuple[str, Tensor]], config: TrainConfig) -> None:
        """Take named parameters; their moments are allocated now, so that a checkpoint can be read into them."""
        self._config = config
        self._parameters = dict(parameters)
        self._first = {name: torch.zeros_like(value) for name, value in self._parameters.items()}
        self._second = {name: torch.zeros_like(value) for name, value in self._parameters.items()}
        self.steps_done = 0
        self._moves_done = 0
        self._is_skipping = False

    @property
    def learning_rate(self) -> float:
        """The rate of the next step."""
        return learning_rate(self.steps_done, self._config)

    def skip_step(self) -> None:
        """Make the next step move nothing, and gradients zero for whoever else reads them before."""
        self._is_skipping = True
        with torch.no_grad():
            gradients = [local(value.grad) for value in self._parameters.values() if value.grad is not None]
            torch._foreach_zero_(gradients)

    @property
    def is_finished(self) -> bool:
        """Whether the run's last step is done."""
        return self.steps_done >= self._config.steps

    def step(self, *, schedule_step: int | None = None, rate_share: float = 1.0) -> None:
        """Move every parameter once along its gradient and drop the gradients.

        Where several moves make up one step of the run, `schedule_step` says which, and each moves by a share.
        """
        schedule_step = self.steps_done if schedule_step is None else schedule_step
        rate = rate_share * learning_rate(schedule_step, self._config)
        self.steps_done = schedule_step + 1
        if self._is_skipping:
            self._is_skipping = False
            self._drop_gradients()
            return
        self._moves_done += 1
        # Decay shapes matrices; on biases and norms it only pulls towards a meaningless zero.
        for is_matrix in (True, False):
            names = [name for name, value in self._parameters.items() if (value.dim() >= 2) == is_matrix]
            if names:
                with torch.no_grad():
                    self._move(names, rate, self._config.weight_decay if is_matrix else 0.0)
        self._drop_gradients()

    def state_dict(self) -> dict[str, Any]:
        """All that must survive; the tensors are the live ones."""
        counts = {"steps_done": self.steps_done, "moves_done": self._moves_done}
        return {"first": dict(self._first), "second": dict(self._second), **counts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state saved by `state_dict`."""
        with torch.no_grad():
            for mine, theirs in ((self._first, state["first"]), (self._second, state["second"])):
                for name, value in mine.items():
                    local(value).copy_(local(theirs[name]))
        self.steps_done, self._moves_done = state["steps_done"], state["moves_done"]

    def _drop_gradients(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None

    def _move(self, names: list[str], rate: float, decay: float) -> None:
        # Every move is by element, so a shard needs no more than itself; and torch's operations on lists do not take
        # sharded and whole tensors together.
        parameters = [local(self._parameters[name]) for name in names]
        gradients = [local(_gradient(name, self._parameters[name])) for name in names]
        first = [local(self._first[name]) for name in names]
        second = [local(self._second[name]) for name in names]
        # torch.optim's own kernel, called without torch.optim: one pass over memory where operations on lists make ten.
        moves = torch.tensor(float(self._moves_done), device=parameters[0].device)
        torch._fused_adamw_(
            parameters,
            gradients,
            first,
            second,
            [],
            [moves] * len(parameters),
            lr=rate,
            beta1=BETA_FIRST,
            beta2=BETA_SECOND,
            weight_decay=decay,
            eps=EPSILON,
            amsgrad=False,
            maximize=False,
        )


def learning_rate(step: int, config: TrainConfig) -> float:
    """The rate of a step, counted from 0: linear warmup to the peak, then half a cosine down to the minimum.

    A pure function of the step, so the schedule has no state of its own to lose.
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    share = (step - config.warmup_steps) / max(1, config.steps - 1 - config.warmup_steps)
    half_cosine = 0.5 * (1.0 + math.cos(math.pi * min(1.0, share)))
    return config.learning_rate_min + (config.learning_rate - config.learning_rate_min) * half_cosine


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that lies on this rank; it shares memory with a DTensor's shard."""
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def _gradient(name: str, parameter: Tensor) -> Tensor:
    assert parameter.grad is not None, f"{name} took no part in the loss"
    return parameter.grad
