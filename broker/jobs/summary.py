"""Summarize a job: steps, losses, recoveries, time and money. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise, zip_longest

from broker.frozen import frozen
from broker.state.history import AttemptWork, StepRange
from broker.types import Attempt, Job


@frozen
class AttemptSteps:
    """The steps that one attempt reported; those lost are missing from what the next attempt resumed from."""

    number: int
    first_step: int
    last_step: int
    checkpoint_step: int | None
    steps_lost: int


@frozen
class RunSummary:
    """Steps, times and costs of a job over all attempts; times in seconds, costs in USD."""

    steps: int
    steps_total: int | None
    steps_lost: int  # completed, but missing from the checkpoint that the next attempt resumed from
    recoveries: int
    recovery_s: float  # from each loss to the next attempt's first step, summed
    total_s: float  # from submission to the end, or to now
    useful_s: float  # running time without the share of repeated steps
    paid_usd: float
    ondemand_usd: float  # the same node-hours at the on-demand price
    attempts: tuple[AttemptSteps, ...] = ()  # those that reported steps


def summarize(
    job: Job,
    attempts: Sequence[Attempt],
    steps: Mapping[int, StepRange],
    *,
    paid_usd: float,
    ondemand_usd: float,
    now_s: float,
) -> RunSummary:
    """Summarize a job; pass the store's `list_steps(job.id)`, `spend_usd` and `ondemand_since_usd` of the job."""
    newest = job.progress.step if job.progress else 0
    reached = tuple(_list_steps(attempts, steps))
    lost = sum(each.steps_lost for each in reached)
    end_s = job.ended_s if job.ended_s is not None else now_s
    running_s = sum(
        min(attempt.ended_s or end_s, end_s) - attempt.running_s
        for attempt in attempts
        if attempt.running_s is not None
    )
    started = [attempt for attempt in attempts if attempt.running_s is not None]
    return RunSummary(
        steps=newest,
        steps_total=job.progress.total if job.progress else None,
        steps_lost=lost,
        recoveries=max(0, len(started) - 1),
        recovery_s=sum(_measure_recovery_s(old, new) for old, new in pairwise(started)),
        total_s=end_s - job.submitted_s,
        useful_s=running_s * (newest / (newest + lost) if newest else 1.0),
        paid_usd=paid_usd,
        ondemand_usd=ondemand_usd,
        attempts=reached,
    )


def _list_steps(attempts: Sequence[Attempt], steps: Mapping[int, StepRange]) -> Iterator[AttemptSteps]:
    for attempt, after in zip_longest(attempts, attempts[1:]):
        if (found := steps.get(attempt.number)) is not None:
            lost = 0 if after is None else count_lost_steps(found, steps.get(after.number))
            yield AttemptSteps(
                number=attempt.number,
                first_step=found.first_step,
                last_step=found.last_step,
                checkpoint_step=found.checkpoint_step,
                steps_lost=lost,
            )


def _measure_recovery_s(old: Attempt, new: Attempt) -> float:
    """Return the recovery time in seconds; a program that reports no steps counts as recovered when it started."""
    since_s = old.lost_s if old.lost_s is not None else old.ended_s
    until_s = new.resumed_s if new.resumed_s is not None else new.running_s
    return max(0.0, until_s - since_s) if since_s is not None and until_s is not None else 0.0


def count_lost_steps(old: StepRange | None, new: StepRange | None) -> int:
    """Return the lost steps: exact with a reported checkpoint, else from the next attempt's first reported step."""
    if old is None:
        return 0
    if old.checkpoint_step is not None:
        return max(0, old.last_step - old.checkpoint_step)
    return max(0, old.last_step - new.first_step + 1) if new else 0


def measure_step_s(attempt: Attempt | AttemptWork, reached: StepRange, saved: int) -> float:
    """Return the mean duration of an attempt's steps after its first report, or after its start if it has only one.

    `saved`: the step that the attempt began at.
    """
    end_s = attempt.lost_s or attempt.ended_s
    has_two = attempt.resumed_s is not None and reached.last_step > reached.first_step
    begin_s, step = (attempt.resumed_s, reached.first_step) if has_two else (attempt.running_s, saved)
    if begin_s is None or end_s is None:
        return 0.0
    return max(0.0, end_s - begin_s) / max(1, reached.last_step - step)


def measure_lost_s(attempts: Sequence[tuple[Attempt | AttemptWork, StepRange]]) -> float:
    """Return for how long a job worked on steps that were lost; `attempts` are those that reported steps. Pure.

    Steps 1 to 100 in 1,000 s with a checkpoint at 80, then steps from 81: 20 steps of 10 s.
    """
    lost_s, saved = 0.0, 0
    for (attempt, reached), (_, after) in pairwise(attempts):
        lost_s += count_lost_steps(reached, after) * measure_step_s(attempt, reached, saved)
        saved = reached.checkpoint_step or saved
    return lost_s
