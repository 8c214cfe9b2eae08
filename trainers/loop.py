"""The training loop: one step after another, each told to the caller.

Knows no strategy, cloud or storage. Saving, resuming and stopping happen round it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainers.config import TrainConfig
from trainers.data import Corpus
from trainers.errors import TrainerError
from trainers.optimizer import AdamW
from trainers.ranks import Ranks
from trainers.strategies.base import MicroBatch, Passes, Strategy


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What a step came to, equal on every rank."""

    step: int
    loss: float
    norm: float
    is_stop_asked: bool


class Position:
    """How far the run has come, in steps and in samples of the data order."""

    def __init__(self, fingerprint: str) -> None:
        """Begin at the beginning of the text with this fingerprint."""
        self.fingerprint = fingerprint
        self.steps_done = 0
        self.samples_done = 0

    def advance(self, samples: int) -> None:
        """Count one step."""
        self.steps_done += 1
        self.samples_done += samples

    def state_dict(self) -> dict[str, Any]:
        """All counters."""
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from saved counters; another text than before cannot continue the same run."""
        if state["fingerprint"] != self.fingerprint:
            raise TrainerError(
                "the checkpoint was trained on another text (the one shipped with Python differs by release)"
            )
        self.steps_done, self.samples_done = state["steps_done"], state["samples_done"]


def iterate_steps(
    config: TrainConfig,
    *,
    model: nn.Module,
    strategy: Strategy,
    optimizer: AdamW,
    corpus: Corpus,
    position: Position,
    ranks: Ranks,
    is_stop_asked: Callable[[], bool],
) -> Iterator[StepReport]:
    """Train from `position` to the last step, yielding after each. All state is consistent while suspended.

    Whether one rank asks to stop travels with the loss, so that all ranks know at the same step.
    """
    while position.steps_done < config.steps:
        loss_part = strategy.run_passes(model, _read_passes(config, strategy, corpus, position, ranks))
        norm = strategy.clip(model, config.norm_max)
        strategy.step(model, optimizer)
        position.advance(config.batch)
        loss, is_stopping = strategy.tally(loss_part, is_stop_asked=is_stop_asked())
        yield StepReport(step=position.steps_done, loss=loss, norm=norm, is_stop_asked=is_stopping)


def _read_passes(config: TrainConfig, strategy: Strategy, corpus: Corpus, position: Position, ranks: Ranks) -> Passes:
    """This rank's samples of the step, in micro-batches."""
    samples = strategy.share.find_samples(position.samples_done, config.batch)
    micro_batches = []
    for first in range(samples.start, samples.stop, config.micro_batch):
        count = min(config.micro_batch, samples.stop - first)
        windows = corpus.windows(first, count).to(ranks.device)
        micro_batches.append(MicroBatch(inputs=windows[:, :-1], targets=windows[:, 1:], part=count / config.batch))
    is_mixed = config.precision == "bfloat16"
    return Passes(
        micro_batches=micro_batches,
        loss_of=_mean_loss,
        precision=lambda: torch.autocast(ranks.device.type, dtype=torch.bfloat16, enabled=is_mixed),
        share_count=strategy.share.count,
    )


def _mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    loss: Tensor = functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
    return loss
