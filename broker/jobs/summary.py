"""Summarize a job: steps, losses, recoveries, time and money. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from broker.frozen import frozen
from broker.state.jobs import StepRange
from broker.types import Attempt, Job


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
    lost = sum(count_lost_steps(steps.get(old.number), steps.get(new.number)) for old, new in pairwise(attempts))
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
