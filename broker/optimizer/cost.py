"""Expected course of a run (`RunForecast`), and its price at one place.

A run on spot is the mean of recorded runs of the production policy (`broker.spot.market_model`): preemptions, waiting,
moves between the candidate places, and on-demand where a deadline requires it. Time counts from submission to end, the
first start included, on spot and on-demand. The hazard of a published interruption band is added for each node, because
recordings have no bands, and their gangs are small.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

from broker.frozen import frozen
from broker.optimizer.data_cost import NO_DATA, DataCost
from broker.spot.interval import find_best_interval_s
from broker.spot.market_model import NOTHING, MarketEvidence, RunDistribution, find_hazard, forecast_mean, forecast_run
from broker.spot.recorded_runs import START_HOURS_MAX, STARTS_HOURS, RecordedRun
from broker.types import Breakdown, CheckpointSpec, Estimate, Placement

SWITCH_SHARE_MIN = 0.01  # share of the billed hours below which on-demand is not part of the strategy
STRETCH_MAX = 50.0  # preemptions per stretch of work: beyond, spot never finishes


@frozen
class SpotInputs:
    """The inputs of a run on spot other than prices. `recovery_hours` are per start of the gang.

    `band_hazard` is the gang's preemptions per hour by the published band. With `has_fallback` the job continues
    on-demand where the deadline requires it.
    """

    work_hours: float
    checkpoint: CheckpointSpec
    recovery_hours: float
    unbilled_hours: float = 0.0
    band_hazard: float = 0.0
    deadline_hours: float | None = None
    has_fallback: bool = False
    places: int = 1
    evidence: MarketEvidence = NOTHING

    @cached_property
    def hazard(self) -> float:
        """Preemptions of the gang per hour on spot: the market model's, and those of the interruption band."""
        return find_hazard(self.places, self.evidence) + self.band_hazard

    @cached_property
    def every_hours(self) -> float:
        """Return hours of work between checkpoints: the user's, else the Young/Daly optimum, and at most the work."""
        every_s = self.checkpoint.every_s or find_best_interval_s(self.checkpoint.stall_s, self.hazard)
        return min(every_s / 3600, self.work_hours)

    @property
    def lost_hours(self) -> float:
        """Return the hours of work that a preemption loses on average: half an interval."""
        return self.every_hours / 2

    @property
    def run_terms(self) -> dict[str, float | None]:
        """Return arguments of `forecast_run`: work with checkpoints, deadline, start-up with the loss of a preemption.

        The loss is added to every start, although the first one loses nothing; `adjust` subtracts it again.
        """
        lost, limit = self.lost_hours, self.deadline_hours if self.has_fallback else None
        stall = self.checkpoint.stall_s / 3600
        work, start = self.work_hours * (1 + stall / self.every_hours), self.recovery_hours + lost
        if limit is not None:
            # The policy starts on spot only if on-demand is still in time after a loss before the first checkpoint.
            failed = self.recovery_hours + self.every_hours + stall
            has_room = limit - self.recovery_hours - work >= failed
            limit = limit + lost if has_room else min(limit + lost, work + start)
        return {"work_hours": work, "deadline_hours": limit, "start_hours": start}

    @cached_property
    def repeated_share(self) -> float:
        """Return the share by which work takes longer because preemptions strike its repetitions too.

        With x preemptions per stretch of work, a stretch takes (exp(x) - 1) / x of its time instead of 1 + x / 2.
        """
        stretch = min(self.hazard * self.every_hours, STRETCH_MAX)
        return math.expm1(stretch) / stretch / (1 + stretch / 2) - 1

    def adjust(self, run: RecordedRun) -> RecordedRun:
        """Return the run without the loss of the first start, as billed, with the terms that recorded runs lack.

        These are the preemptions by the band, start-up beyond `START_HOURS_MAX`, and repetitions of long stretches.
        """
        lost, struck = self.lost_hours, run.spot_hours * self.band_hazard
        excess = max(self.recovery_hours + lost - START_HOURS_MAX, 0.0)
        more = struck * (self.recovery_hours + lost) + run.preemptions * excess + run.spot_hours * self.repeated_share
        share = run.spot_hours / max(run.spot_hours + run.ondemand_hours, 1e-9)
        off = lost + self.unbilled_hours * (1 + run.preemptions)
        hours = run.hours - lost
        spot = max(run.spot_hours + more - off * share - self.unbilled_hours * struck, 0.0)
        ondemand = max(run.ondemand_hours - off * (1 - share), 0.0)
        limit = self.deadline_hours if self.has_fallback else None
        if limit is not None and hours + more > limit:
            ondemand = max(ondemand, self._switch_hours(hours + more, limit))
            hours = max(limit, hours)
            spot = max(min(spot, hours - ondemand), 0.0)
        else:
            hours += more
        return RecordedRun(spot_hours=spot, ondemand_hours=ondemand, hours=hours, preemptions=run.preemptions + struck)

    def _switch_hours(self, spot_hours: float, limit: float) -> float:
        """Return the hours on-demand of a run that would take `spot_hours` without it, and must end at `limit`.

        It switches as late as possible. Until then, it has done the work in proportion to the time.
        """
        speed = min(self.work_hours / spot_hours, 1.0)
        spare = max(limit - self.work_hours - self.recovery_hours, 0.0)
        left = self.work_hours - speed * spare / max(1 - speed, 1e-9)
        return max(left, 0.0) + self.recovery_hours - self.unbilled_hours

    def list_runs(self) -> RunDistribution:
        """Return the distribution whose mean `run_on_spot` prices."""
        return self._adjust_all(self._forecast_runs())

    def find_means(self) -> tuple[RecordedRun, RecordedRun]:
        """Return the mean of the recorded runs, and that of the adjusted ones."""
        if self.recovery_hours + self.lost_hours > STARTS_HOURS[-1]:  # the deadline bounds extrapolated runs one by one
            runs = self._forecast_runs()
            return runs.average(), self._adjust_all(runs).average()
        found = forecast_mean(**self.run_terms, places=self.places, evidence=self.evidence)  # type: ignore[arg-type]
        return found, self.adjust(found)

    def _forecast_runs(self) -> RunDistribution:
        return forecast_run(**self.run_terms, places=self.places, evidence=self.evidence)  # type: ignore[arg-type]

    def _adjust_all(self, runs: RunDistribution) -> RunDistribution:
        return replace(runs, runs=[self.adjust(run) for run in runs.runs])

    def find_deadline_chance(self) -> float | None:
        """Return the chance of the deadline; with a fallback 1 if on-demand alone is in time, else 0."""
        limit = self.deadline_hours
        if limit is None:
            return None
        if self.has_fallback:
            alone = run_on_demand(
                self.work_hours, self.checkpoint, deadline_hours=limit, recovery_hours=self.recovery_hours
            )
            return alone.deadline_chance
        return self.list_runs().chance(lambda run: run.hours <= limit)


@frozen
class RunForecast:
    """The expected course of a run, independent of prices. Times are in hours; `recovery_*` are per start.

    `hours` count from submission to end, the first start included.
    """

    work_hours: float
    hours: float
    stall_hours: float = 0.0
    lost_hours: float = 0.0
    starting_hours: float = 0.0
    waiting_hours: float = 0.0
    preemptions: float = 0.0
    checkpoints: float = 0.0
    recovery_hours: float = 0.0
    recovery_billed_hours: float = 0.0
    spot_hours: float = 0.0  # billed at the spot price
    ondemand_hours: float = 0.0
    deadline_chance: float | None = None
    switch_after_hours: float | None = None
    every_s: float | None = None
    hazard: float = 0.0
    inputs: SpotInputs | None = None  # None on-demand

    def scale_hours(self, scale: float) -> float:
        """Return the hours of an uninterrupted run on `scale` times the work; its single start does not scale."""
        return self.starting_hours + (self.hours - self.starting_hours) * scale


def run_on_demand(
    work_hours: float,
    checkpoint: CheckpointSpec,
    *,
    deadline_hours: float | None = None,
    recovery_hours: float = 0.0,
    recovery_billed_hours: float = 0.0,
) -> RunForecast:
    """Forecast a run without preemption; it writes checkpoints only if the user fixes their interval.

    Its only start takes as long, and is billed as much, as each start on spot. Without work left, nothing starts.
    """
    if work_hours <= 0:
        recovery_hours = recovery_billed_hours = 0.0
    is_saving = checkpoint.every_s is not None and work_hours > 0
    every_hours = min((checkpoint.every_s or 0.0) / 3600, work_hours)
    checkpoints = work_hours / every_hours if is_saving else 0.0
    stalls = checkpoints * checkpoint.stall_s / 3600
    hours = work_hours + stalls + recovery_hours
    return RunForecast(
        work_hours=work_hours,
        hours=hours,
        stall_hours=stalls,
        starting_hours=recovery_hours,
        checkpoints=checkpoints,
        recovery_hours=recovery_hours,
        recovery_billed_hours=recovery_billed_hours,
        ondemand_hours=work_hours + stalls + recovery_billed_hours,
        deadline_chance=None if deadline_hours is None else float(hours <= deadline_hours),
        every_s=checkpoint.every_s,
    )


def run_on_spot(inputs: SpotInputs) -> RunForecast:
    """Return the mean of the runs on spot; work must be above 0. The chance of the deadline is left out."""
    (found, run), every = inputs.find_means(), inputs.every_hours
    segments = inputs.work_hours / every
    stall = segments * inputs.checkpoint.stall_s / 3600
    waiting = max(found.hours - found.spot_hours - found.ondemand_hours, 0.0)
    starting = (1 + run.preemptions) * inputs.recovery_hours
    lost = max(run.hours - waiting - inputs.work_hours - stall - starting, 0.0)
    starting = max(run.hours - waiting - inputs.work_hours - stall - lost, 0.0)
    spare = None if inputs.deadline_hours is None else inputs.deadline_hours - inputs.work_hours - stall
    switches = inputs.has_fallback and run.ondemand_hours > SWITCH_SHARE_MIN * (run.spot_hours + run.ondemand_hours)
    return RunForecast(
        work_hours=inputs.work_hours,
        hours=run.hours,
        stall_hours=stall,
        lost_hours=lost,
        starting_hours=starting,
        waiting_hours=waiting,
        preemptions=run.preemptions,
        checkpoints=segments,
        recovery_hours=inputs.recovery_hours,
        recovery_billed_hours=max(inputs.recovery_hours - inputs.unbilled_hours, 0.0),
        spot_hours=run.spot_hours,
        ondemand_hours=run.ondemand_hours,
        switch_after_hours=max(spare - inputs.recovery_hours, 0.0) if switches and spare is not None else None,
        every_s=every * 3600,
        hazard=inputs.hazard,
        inputs=inputs,
    )


def add_data_usd(run: RunForecast | RecordedRun, data: DataCost, checkpoints: float) -> tuple[float, float]:
    """Return USD for moving data, and for keeping checkpoints, over a whole run."""
    moves = data.start_usd * (1 + run.preemptions) + data.finish_usd
    moves += data.checkpoint_usd * checkpoints + data.restore_usd * run.preemptions
    return moves, data.storage_usd_hour * run.hours


class GangPrices(NamedTuple):
    """USD per hour of the whole gang, by pricing model. A tuple, because a ranking creates thousands.

    On spot, it is the mean of the candidate places. On-demand, it is per hour of the choice's work, because the
    cheapest on-demand gang may have other machines.
    """

    spot_usd_hour: float = 0.0
    ondemand_usd_hour: float = 0.0


NO_PRICES = GangPrices()


def price_run(run: RunForecast | RecordedRun, prices: GangPrices, data: DataCost, checkpoints: float) -> float:
    """Return the USD of a run, data included."""
    compute = run.spot_hours * prices.spot_usd_hour + run.ondemand_hours * prices.ondemand_usd_hour
    if data is NO_DATA:
        return compute
    return compute + sum(add_data_usd(run, data, checkpoints))


def find_budget_chance(forecast: RunForecast, prices: GangPrices, data: DataCost, budget_usd: float) -> float:
    """Return P(total cost <= budget)."""
    if forecast.inputs is None:
        return float(price_run(forecast, prices, data, forecast.checkpoints) <= budget_usd)
    return forecast.inputs.list_runs().chance(
        lambda run: price_run(run, prices, data, forecast.checkpoints) <= budget_usd
    )


def make_estimate(
    placement: Placement, forecast: RunForecast, prices: GangPrices, data: DataCost, *, budget_usd: float | None
) -> Estimate:
    """Price the forecast at this placement, with every term in the breakdown."""
    egress, storage = add_data_usd(forecast, data, forecast.checkpoints)
    compute = forecast.spot_hours * prices.spot_usd_hour + forecast.ondemand_hours * prices.ondemand_usd_hour
    return Estimate(
        placement=placement,
        preemptions_per_hour=forecast.hazard,
        checkpoint_every_s=forecast.every_s,
        expected_hours=forecast.hours,
        expected_preemptions=forecast.preemptions,
        expected_usd=compute + egress + storage,
        deadline_chance=forecast.deadline_chance,
        budget_chance=None if budget_usd is None else find_budget_chance(forecast, prices, data, budget_usd),
        switch_after_hours=forecast.switch_after_hours,
        breakdown=Breakdown(
            work_hours=forecast.work_hours,
            stall_hours=forecast.stall_hours,
            lost_hours=forecast.lost_hours,
            recovery_hours=forecast.starting_hours,
            waiting_hours=forecast.waiting_hours,
            recovery_s=forecast.recovery_hours * 3600,
            recovery_billed_s=forecast.recovery_billed_hours * 3600,
            spot_hours=forecast.spot_hours,
            ondemand_hours=forecast.ondemand_hours,
            spot_usd_hour=prices.spot_usd_hour,
            ondemand_usd_hour=prices.ondemand_usd_hour,
            compute_usd=compute,
            egress_usd=egress,
            storage_usd=storage,
        ),
    )
