"""Expected time and cost to finish: the forecast of a run (`RunForecast`), and its price at one place.

Model: preemptions strike the running gang at a constant rate H, a checkpoint of stall delta follows each stretch tau of
work, and each preemption costs the work since the last checkpoint and a recovery R during which nothing runs. Then
    E[preemptions] = (W / tau) (exp(H (tau + delta)) - 1)
    E[T]           = E[preemptions] (1/H + R),   and W (1 + delta / tau) as H -> 0.
J. T. Daly's complete model (FGCS 22, 2006) also lets preemptions strike recoveries, with exp(H R) / H in place of
1/H + R: equal to first order in H R. Here the machines for a recovery are still being requested, so none can be lost.
"""

from __future__ import annotations

import math
from dataclasses import replace

from broker.nouns import noun
from broker.optimizer.billing import bill_recovery_s
from broker.optimizer.data_cost import DataCost, measure_restore_s
from broker.spot.interval import best_interval_s
from broker.spot.lost_time import LostTime
from broker.types import Breakdown, CheckpointSpec, Estimate, Goal, Placement


@noun
class RunForecast:
    """The expected course of a run, independent of prices. Times are in hours; `recovery_*` are per recovery."""

    work_hours: float
    hours: float
    stall_hours: float = 0.0
    lost_hours: float = 0.0
    preemptions: float = 0.0
    checkpoints: float = 0.0
    recovery_hours: float = 0.0
    recovery_billed_hours: float = 0.0
    spot_hours: float = 0.0  # billed at the spot price
    ondemand_hours: float = 0.0
    deadline_chance: float | None = None
    switch_after_hours: float | None = None
    switch_chance: float | None = None
    every_s: float | None = None
    losses: LostTime | None = None  # None if preemption is impossible


@noun
class RunInputs:
    """The inputs of a forecast other than prices: work, hazard of the gang per hour, checkpoints, recovery."""

    work_hours: float
    hazard: float
    checkpoint: CheckpointSpec
    recovery_hours: float
    recovery_billed_hours: float
    deadline_hours: float | None = None

    @classmethod
    def of(
        cls,
        work_hours: float,
        hazard: float,
        checkpoint: CheckpointSpec,
        goal: Goal | None,
        cloud: str,
        node_count: int,
    ) -> RunInputs:
        restore_s = measure_restore_s(checkpoint.size_gib)
        billed_s = bill_recovery_s(cloud, node_count, checkpoint.restart_s, restore_s)
        return cls(
            work_hours=work_hours,
            hazard=hazard,
            checkpoint=checkpoint,
            recovery_hours=(checkpoint.restart_s + restore_s) / 3600,
            recovery_billed_hours=billed_s / 3600,
            deadline_hours=goal.deadline_hours if goal else None,
        )

    @property
    def every_hours(self) -> float:
        """Return tau: the user's, else the Young/Daly optimum, and at most the work."""
        every_s = self.checkpoint.every_s or best_interval_s(self.checkpoint.stall_s, self.hazard)
        return min(every_s / 3600, self.work_hours)


def run_on_demand(terms: RunInputs) -> RunForecast:
    """Forecast a run without preemption; it writes checkpoints only if the user fixes their interval."""
    is_saving = terms.checkpoint.every_s is not None and terms.work_hours > 0
    checkpoints = terms.work_hours / terms.every_hours if is_saving else 0.0
    stalls = checkpoints * terms.checkpoint.stall_s / 3600
    hours = terms.work_hours + stalls
    limit = terms.deadline_hours
    return RunForecast(
        work_hours=terms.work_hours,
        hours=hours,
        stall_hours=stalls,
        checkpoints=checkpoints,
        recovery_hours=terms.recovery_hours,
        recovery_billed_hours=terms.recovery_billed_hours,
        ondemand_hours=hours,
        deadline_chance=None if limit is None else float(hours <= limit),
        every_s=terms.checkpoint.every_s,
    )


def run_on_spot(terms: RunInputs) -> RunForecast:
    """Forecast a run on spot to the end, whatever the number of preemptions."""
    if terms.hazard <= 0 or terms.work_hours <= 0:
        calm = run_on_demand(terms)
        return replace(calm, spot_hours=calm.hours, ondemand_hours=0.0)
    every, stall = terms.every_hours, terms.checkpoint.stall_s / 3600
    segments = terms.work_hours / every
    losses = LostTime(segments=segments, stretch=every + stall, hazard=terms.hazard)
    smooth = segments * (every + stall)
    preemptions = segments * _expm1(terms.hazard * (every + stall))
    running = max(preemptions / terms.hazard, smooth)
    limit = terms.deadline_hours
    return RunForecast(
        work_hours=terms.work_hours,
        hours=running + preemptions * terms.recovery_hours,
        stall_hours=segments * stall,
        lost_hours=running - smooth,
        preemptions=preemptions,
        checkpoints=segments,
        recovery_hours=terms.recovery_hours,
        recovery_billed_hours=terms.recovery_billed_hours,
        spot_hours=running + preemptions * terms.recovery_billed_hours,
        deadline_chance=None if limit is None else losses.finish_chance(limit - smooth, terms.recovery_hours),
        every_s=every * 3600,
        losses=losses,
    )


def run_on_spot_then_on_demand(terms: RunInputs) -> RunForecast | None:
    """Forecast a run on spot until a preemption leaves too little time for another, then on-demand.

    The deadline always holds. With s = tau + delta, the slack u = D - (W / tau) s - (s + R) bounds the losses on spot.
    After the preemption that exceeds it, at most u + s + R is lost, and on-demand finishes without preemption. As the
    index k* of that preemption is independent of the progress, and successes minus failures x p / (1 - p) are a
    martingale,
        E[preemptions] = phi = E[min(K, k*)],   E[segments done on spot] = phi / (exp(H s) - 1).
    Return None without a deadline, without work or preemptions, if the slack is negative, or if H s exceeds 700.
    """
    if terms.deadline_hours is None or terms.hazard <= 0 or terms.work_hours <= 0:
        return None
    every, stall = terms.every_hours, terms.checkpoint.stall_s / 3600
    segments, stretch = terms.work_hours / every, every + stall
    if terms.hazard * stretch > 700:
        return None
    slack = terms.deadline_hours - segments * stretch - (stretch + terms.recovery_hours)
    if slack < 0:
        return None
    losses = LostTime(segments=segments, stretch=stretch, hazard=terms.hazard)
    preemptions, switch_chance = losses.expect_until(slack, terms.recovery_hours)
    done = min(preemptions / math.expm1(terms.hazard * stretch), segments)
    rest = (segments - done) * (stretch if terms.checkpoint.every_s else every)
    running = max(preemptions / terms.hazard, done * stretch)
    billed = terms.recovery_billed_hours
    stalls = done * stall + (segments - done) * (stall if terms.checkpoint.every_s else 0.0)
    return RunForecast(
        work_hours=terms.work_hours,
        hours=running + preemptions * terms.recovery_hours + rest,
        stall_hours=stalls,
        lost_hours=running - done * stretch,
        preemptions=preemptions,
        checkpoints=segments if terms.checkpoint.every_s else done,
        recovery_hours=terms.recovery_hours,
        recovery_billed_hours=billed,
        spot_hours=running + max(preemptions - switch_chance, 0.0) * billed,
        ondemand_hours=rest + switch_chance * billed,
        deadline_chance=1.0,
        switch_after_hours=slack,
        switch_chance=switch_chance,
        every_s=every * 3600,
        losses=losses,
    )


def add_data_usd(course: RunForecast, data: DataCost) -> tuple[float, float]:
    """Return USD for moving data, and for keeping checkpoints, over a whole run."""
    moves = data.start_usd * (1 + course.preemptions) + data.finish_usd
    moves += data.checkpoint_usd * course.checkpoints + data.restore_usd * course.preemptions
    return moves, data.storage_usd_hour * course.hours


def budget_chance(course: RunForecast, placement: Placement, budget_usd: float, data_usd: float) -> float:
    """Return P(total cost <= budget), with data at its expected cost.

    For a run that may switch to on-demand, return the probability of staying both within the budget and on spot.
    """
    hourly = placement.usd_hour
    if course.losses is None or hourly <= 0:
        return float(course.hours * hourly + data_usd <= budget_usd)
    smooth = course.losses.segments * course.losses.stretch
    slack = (budget_usd - data_usd) / hourly - smooth
    if course.switch_after_hours is None:
        return course.losses.finish_chance(slack, course.recovery_billed_hours)
    return course.losses.finish_chance(min(slack, course.switch_after_hours), course.recovery_hours)


def make_estimate(
    placement: Placement, course: RunForecast, data: DataCost, *, hazard: float, goal: Goal | None
) -> Estimate:
    """Price the forecast at this placement, with every term in the breakdown."""
    offer, nodes = placement.offer, placement.node_count
    compute = nodes * (
        course.spot_hours * (offer.spot_usd_hour or 0.0) + course.ondemand_hours * (offer.ondemand_usd_hour or 0.0)
    )
    egress, storage = add_data_usd(course, data)
    budget = goal.budget_usd if goal else None
    return Estimate(
        placement=placement,
        preemptions_per_hour=hazard,
        checkpoint_every_s=course.every_s,
        expected_hours=course.hours,
        expected_preemptions=course.preemptions,
        expected_usd=compute + egress + storage,
        deadline_chance=course.deadline_chance,
        budget_chance=None if budget is None else budget_chance(course, placement, budget, egress + storage),
        switch_after_hours=course.switch_after_hours,
        breakdown=Breakdown(
            work_hours=course.work_hours,
            stall_hours=course.stall_hours,
            lost_hours=course.lost_hours,
            recovery_hours=course.preemptions * course.recovery_hours,
            recovery_s=course.recovery_hours * 3600,
            recovery_billed_s=course.recovery_billed_hours * 3600,
            spot_hours=course.spot_hours,
            ondemand_hours=course.ondemand_hours,
            compute_usd=compute,
            egress_usd=egress,
            storage_usd=storage,
            switch_chance=course.switch_chance,
        ),
    )


def expected_hours(work_hours: float, hazard: float, every_s: float, stall_s: float, restart_s: float) -> float:
    """Return E[T] in hours; `hazard` is in preemptions of the gang per hour."""
    tau, delta, restart = every_s / 3600, stall_s / 3600, restart_s / 3600
    if hazard * (tau + delta) < 1e-12:
        return work_hours * (1 + delta / tau)
    return work_hours / tau * (1 / hazard + restart) * _expm1(hazard * (tau + delta))


def _expm1(exponent: float) -> float:
    return math.expm1(exponent) if exponent <= 700 else math.inf
