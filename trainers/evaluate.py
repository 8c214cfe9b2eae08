"""The loss on held-out samples. Evaluation leaves random numbers and the modes of modules as they were."""

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from trainers.config import RunConfig
from trainers.errors import TrainerError
from trainers.loop import Work, read_passes, weigh_passes
from trainers.randomness import RandomNumbers
from trainers.ranks import Ranks
from trainers.recipe import Recipe
from trainers.strategies.base import Strategy


class Evaluation:
    """Evaluates on the same samples each time, divided among all ranks."""

    def __init__(
        self,
        config: RunConfig,
        model: nn.Module,
        strategy: Strategy,
        ranks: Ranks,
        recipe: Recipe,
        precision: Callable[[], AbstractContextManager[Any]],
        random_numbers: RandomNumbers,
    ) -> None:
        """Choose the samples. Raises TrainerError if there are none, now instead of at the first evaluation."""
        self._model, self._strategy, self._ranks = model, strategy, ranks
        self._random_numbers, self._seed = random_numbers, config.train.seed + 1 + strategy.share.draw
        # The same samples for any number of shares: the loss of an elastic run must not depend on its size. Every share
        # gets at least one, because ranks that gather a model together must run equally many passes.
        samples = max(config.evaluate.samples, strategy.share.count)
        self._train = dataclasses.replace(config.train, batch=samples)
        self._work: Work | None = None
        if recipe.validation is not None:
            self._work = Work(
                samples=recipe.validation,
                loss=recipe.loss,
                precision=precision,
                forward=recipe.forward,
                count=recipe.count,
            )
        elif config.evaluate.every_steps:
            raise TrainerError(
                "no samples are left for evaluation: the data is too short for `--data.validation_share`, or it is 0"
            )

    def run(self) -> float:
        """Return the mean loss, equal on every rank."""
        assert self._work is not None
        modes = [(module, module.training) for module in self._model.modules()]
        self._model.eval()
        # A loss may draw, as in a diffusion model: each evaluation draws the same, and the next step as without it.
        drawn = self._random_numbers.copy_all()
        self._random_numbers.seed(self._seed)
        try:
            passes = read_passes(self._train, self._strategy, self._work, 0, self._ranks)
            passes = weigh_passes(passes, self._work, self._ranks)
            total = torch.zeros((), dtype=torch.float64, device=passes.device)
            with torch.no_grad():
                for micro_batch in passes.micro_batches:
                    with passes.precision():
                        outputs = passes.forward(self._model, micro_batch.inputs)
                    total += passes.loss(outputs, micro_batch.targets).double() * micro_batch.weight
        finally:
            # Not all were in training mode: frozen normalization layers are not.
            for module, is_training in modes:
                module.training = is_training
            self._random_numbers.restore_all(drawn)
        return self._ranks.sum([total.item() if self._strategy.share.is_counted else 0.0])[0]
