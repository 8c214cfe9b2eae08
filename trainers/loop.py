"""The training loop: one step after another, each told to the caller.

Knows no strategy, cloud or storage. Saving, resuming and stopping happen round it.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from trainers.config import TrainConfig
from trainers.data import Samples
from trainers.errors import TrainerError
from trainers.optimizer import AdamW
from trainers.ranks import Ranks
from trainers.scaling import LossScale
from trainers.strategies.base import MicroBatch, Passes, Strategy


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What a step came to, equal on every rank."""

    step: int
    loss: float
    norm: float
    learning_rate: float
    is_skipped: bool  # its gradients were not finite, and moved nothing
    is_stop_asked: bool


@dataclass(frozen=True, kw_only=True)
class Work:
    """What is to be learnt from what, and with which arithmetic."""

    samples: Samples
    loss_of: Callable[[Tensor, Tensor], Tensor]  # outputs and targets -> mean over the samples
    precision: Callable[[], AbstractContextManager[Any]]  # surrounds forward passes


class Position:
    """How far the run has come, in steps and in samples of the data order."""

    def __init__(self, fingerprint: str) -> None:
        """Begin at the beginning of the data with this fingerprint."""
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
        """Go on from saved counters; other data than before cannot continue the same run."""
        if state["fingerprint"] != self.fingerprint:
            raise TrainerError(
                "the checkpoint was trained on other data, or data cut otherwise (`--data.*`, `--model.context`). "
                "The text shipped with Python differs by release. Name a new `$BROKER_CHECKPOINT_DIR` to begin anew"
            )
        self.steps_done, self.samples_done = state["steps_done"], state["samples_done"]


def iterate_steps(
    config: TrainConfig,
    *,
    model: nn.Module,
    strategy: Strategy,
    optimizer: AdamW,
    work: Work,
    position: Position,
    ranks: Ranks,
    is_stop_asked: Callable[[], bool],
    before_change: Callable[[], None],
    scaling: LossScale,
    changing: AbstractContextManager[Any] | None = None,
) -> Iterator[StepReport]:
    """Train from `position` to the last step, yielding after each. All state is consistent while suspended.

    `before_change` is called before parameters move: a checkpoint may still be copying them. Outside `changing` the
    state is whole, and that of the position. Whether one rank asks to
    stop travels with the loss, so that all ranks know at the same step.
    """
    skips = 0
    while position.steps_done < config.steps:
        learning_rate = optimizer.learning_rate
        passes = read_passes(config, strategy, work, position.samples_done, ranks, loss_scale=scaling.factor)
        loss_part = strategy.run_passes(model, passes)
        scaling.unscale(model.parameters())
        norm = strategy.clip(model, config.norm_max)
        is_skipped = not math.isfinite(norm)
        is_overflow = scaling.note(is_finite=not is_skipped)
        skips = skips + 1 if is_skipped and not is_overflow else 0
        if is_skipped:
            if not is_overflow:
                _check_skips(config, position.steps_done + 1, norm, skips)
            optimizer.skip_step()
        before_change()
        with changing or nullcontext():
            strategy.step(model, optimizer)
            position.advance(config.batch)
        loss, is_stopping = strategy.tally(loss_part, part=passes.part, is_stop_asked=is_stop_asked())
        yield StepReport(
            step=position.steps_done,
            loss=loss,
            norm=norm,
            learning_rate=learning_rate,
            is_skipped=is_skipped,
            is_stop_asked=is_stopping,
        )


def read_passes(
    config: TrainConfig, strategy: Strategy, work: Work, sample_first: int, ranks: Ranks, *, loss_scale: float = 1.0
) -> Passes:
    """This rank's samples of a step, in micro-batches."""
    micro_batches = []
    for samples, part in strategy.share.find_passes(sample_first, config.batch, config.micro_batch):
        batch = work.samples.read(samples.start, len(samples))
        inputs, targets = (each.to(ranks.device, non_blocking=True) for each in batch)
        micro_batches.append(MicroBatch(inputs=inputs, targets=targets, part=part))
    return Passes(
        micro_batches=micro_batches,
        loss_of=work.loss_of,
        precision=work.precision,
        share_count=strategy.share.count,
        loss_scale=loss_scale,
    )


def _check_skips(config: TrainConfig, step: int, norm: float, skips: int) -> None:
    if config.on_nan == "skip" and skips <= config.skips_max:
        return
    times = f" {skips} times in a row" if skips > 1 else ""
    raise TrainerError(
        f"the gradients of step {step} are not finite{times} (norm {norm}), so nothing more can be learnt\n\n"
        "hint: lower `--train.learning_rate`, raise `--train.warmup_steps`, or pass `--train.z_loss 1e-4`\n"
        "hint: `--train.on_nan skip` passes over single steps; the run goes on from its last checkpoint"
    )
