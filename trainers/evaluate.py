"""The loss on samples that are not trained on. Draws no random numbers: training goes on as if nothing had been."""

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from trainers.config import RunConfig
from trainers.errors import TrainerError
from trainers.loop import Work, read_passes
from trainers.ranks import Ranks
from trainers.strategies.base import Strategy
from trainers.study import Study


class Evaluation:
    """The same samples each time, shared by all ranks."""

    def __init__(
        self,
        config: RunConfig,
        model: nn.Module,
        strategy: Strategy,
        ranks: Ranks,
        study: Study,
        precision: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        """Asked for without samples kept for it, evaluation is a TrainerError now rather than at step 1000."""
        self._model, self._strategy, self._ranks = model, strategy, ranks
        # The same samples for any number of shares: the loss of an elastic run must not move with its size. A share
        # without any would make no pass, while ranks that gather a model together must run it equally often.
        samples = max(config.evaluate.samples, strategy.share.count)
        self._train = dataclasses.replace(config.train, batch=samples)
        self._work: Work | None = None
        if study.validation is not None:
            self._work = Work(samples=study.validation, loss_of=study.loss_of, precision=precision)
        elif config.evaluate.every_steps:
            raise TrainerError(
                "there is nothing to evaluate on: the data is too short for `--data.validation_share`, or that is 0"
            )

    def run(self) -> float:
        """The mean loss, equal on every rank."""
        assert self._work is not None
        self._model.eval()
        try:
            passes = read_passes(self._train, self._strategy, self._work, 0, self._ranks)
            loss_part = self._strategy.evaluate(self._model, passes)
        finally:
            self._model.train()
        return self._ranks.sum([loss_part if self._strategy.share.is_counted else 0.0])[0]
