"""Expected time and money to finish on one placement.

Model: preemptions come at a constant rate H, a checkpoint of stall delta follows each stretch tau of work, and each
preemption costs a recovery R and the work since the last checkpoint. Then (Daly 2006, equation 13)
    E[T] = (W / tau) (1/H + R) (exp(H (tau + delta)) - 1),   and W (1 + delta / tau) as H -> 0.
"""

from __future__ import annotations

import math

from broker.spot.hazard import hazard_per_node_hour
from broker.spot.interval import best_interval_s
from broker.types import CheckpointSpec, Estimate, Goal, Placement


def estimate_cost(
    placement: Placement, *, work_hours: float | None, goal: Goal | None, checkpoint: CheckpointSpec
) -> Estimate:
    """Price per hour alone where no work is given, else hours and dollars to finish."""
    hazard = 0.0
    if placement.is_spot:
        hazard = placement.node_count * hazard_per_node_hour(placement.offer.interruption_band)
    if work_hours is None:
        return Estimate(placement=placement, preemptions_per_hour=hazard)
    every_s = checkpoint.every_s or min(best_interval_s(checkpoint.stall_s, hazard), work_hours * 3600)
    hours = expected_hours(work_hours, hazard, every_s, checkpoint.stall_s, checkpoint.restart_s)
    deadline = goal.deadline_hours if goal else None
    return Estimate(
        placement=placement,
        preemptions_per_hour=hazard,
        checkpoint_every_s=every_s if hazard or checkpoint.every_s else None,
        expected_hours=hours,
        expected_preemptions=hazard * hours,
        expected_usd=hours * placement.usd_hour,
        deadline_chance=None
        if deadline is None
        else deadline_chance(deadline, work_hours, hazard, every_s, checkpoint.stall_s, checkpoint.restart_s),
    )


def expected_hours(work_hours: float, hazard: float, every_s: float, stall_s: float, restart_s: float) -> float:
    """E[T] in hours; `hazard` in preemptions per hour of the gang."""
    tau, delta, restart = every_s / 3600, stall_s / 3600, restart_s / 3600
    if hazard * (tau + delta) < 1e-12:
        return work_hours * (1 + delta / tau)
    exponent = hazard * (tau + delta)
    if exponent > 700:
        return math.inf
    return work_hours / tau * (1 / hazard + restart) * math.expm1(exponent)


def deadline_chance(
    deadline_hours: float, work_hours: float, hazard: float, every_s: float, stall_s: float, restart_s: float
) -> float:
    """Chance to finish in time: preemptions are Poisson, and each costs a recovery and half an interval on average.

    An approximation: losses are taken at their mean, and preemptions during recovery are counted in the same rate.
    """
    tau, delta, restart = every_s / 3600, stall_s / 3600, restart_s / 3600
    slack = deadline_hours - work_hours * (1 + delta / tau)
    if slack < 0:
        return 0.0
    if hazard == 0:
        return 1.0
    loss = restart + (tau + delta) / 2
    affordable = math.floor(slack / loss) if loss > 0 else 10_000
    return _poisson_at_most(min(affordable, 10_000), hazard * deadline_hours)


def _poisson_at_most(count: int, mean: float) -> float:
    if mean > 700:  # the normal limit, with continuity correction
        return 0.5 * math.erfc((mean - count - 0.5) / math.sqrt(2 * mean))
    term = total = math.exp(-mean)
    for k in range(1, count + 1):
        term *= mean / k
        total += term
        if k > mean and term < 1e-15:
            break
    return min(total, 1.0)
