"""Distribution of a plan's cost and time under the production policy, from recorded markets.

The ranking uses the means of the same runs (`broker.optimizer.cost`). When spot closes, the job moves to another
candidate place, waits, or continues on-demand. Time counts from submission to end, including the first start and all
waiting.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

from broker.frozen import frozen
from broker.optimizer.cost import GangPrices, SpotInputs, price_run, run_on_spot
from broker.optimizer.data_cost import DataCost
from broker.optimizer.ranking import SAME_SCORE, LazyEstimates
from broker.spot.recorded_runs import RecordedRun
from broker.types import Estimate, Plan
from broker.types.forecasts import NOT_BEGUN, QUANTILES, BegunStart, ForecastRecord, Range

SHARES = (0.1, 0.5, 0.9)


@frozen
class Influence:
    """The expected cost under one changed condition."""

    change: str
    usd_mean: float


@frozen
class CostForecast:
    """The forecast of a plan: USD and hours from submission to end.

    Chances are None if the task has no such limit. `places` is the number of candidate places for spot capacity;
    `hazard` is preemptions per hour on spot.
    """

    usd: Range
    usd_mean: float
    hours: Range
    hours_mean: float
    preemptions: float
    waiting_hours: float
    ondemand_hours: float
    hazard: float
    places: int
    ondemand_usd: float | None  # to finish on the cheapest on-demand gang; None if none was ranked
    ondemand_hours_alone: float | None  # to finish there
    has_fallback: bool  # on-demand keeps the deadline, if on-demand capacity is available
    deadline_chance: float | None = None
    budget_chance: float | None = None

    def is_costlier_than_on_demand(self, hour_value_usd: float) -> bool:
        """Return whether on-demand costs less, time included, beyond the range within which the faster is chosen."""
        if self.ondemand_usd is None or self.ondemand_hours_alone is None:
            return False
        other = self.ondemand_usd + hour_value_usd * self.ondemand_hours_alone
        return other * SAME_SCORE < self.usd_mean + hour_value_usd * self.hours_mean


class ForecastEstimates(tuple[Estimate, ...]):
    """The ranking of a plan that was made in another process, with its forecast."""

    forecast: CostForecast | None = None


@frozen
class _Choice:
    """The terms of the choice that its forecast depends on."""

    inputs: SpotInputs
    prices: GangPrices
    data: DataCost


def forecast_plan(plan: Plan) -> CostForecast | None:
    """Forecast the choice; None if no work is given or the choice runs on-demand."""
    if isinstance(plan.estimates, ForecastEstimates):
        return plan.estimates.forecast
    choice = _read_choice(plan)
    return None if choice is None else _forecast(plan, choice)


def record_forecast(plan: Plan) -> ForecastRecord | None:
    """Return the forecast to keep with the job, never widened; None as for `forecast_plan`."""
    choice = _read_choice(plan)
    if choice is None:
        return None
    course, runs = run_on_spot(choice.inputs), choice.inputs.list_runs()

    def usd(run: RecordedRun) -> float:
        return price_run(run, choice.prices, choice.data, course.checkpoints)

    return ForecastRecord(
        usd=tuple(runs.quantiles(usd, QUANTILES)),
        hours=tuple(runs.quantiles(lambda run: run.hours, QUANTILES)),
        usd_mean=price_run(course, choice.prices, choice.data, course.checkpoints),
        hours_mean=course.hours,
        deadline_hours=choice.inputs.deadline_hours,
        deadline_chance=choice.inputs.find_deadline_chance(),
    )


def find_deadline_chances(
    plan: Plan, *, work_hours: float, deadline_hours: float, begun: BegunStart = NOT_BEGUN
) -> tuple[float, float | None]:
    """Return the chance to finish other work by another deadline on the choice, and that of staying on spot.

    Hours of work are those of the task's goal, of which `plan` must list all placements: it is made without a budget.
    `begun` is the part of the first start that running machines, of one pricing model, have completed.
    The second is None if the choice runs on-demand.
    """
    assert isinstance(plan.estimates, LazyEstimates)
    goal, course = plan.task.goal, plan.estimates.candidates[0].forecast
    assert goal is not None and goal.work_hours and course is not None
    if deadline_hours <= 0 or work_hours <= 0:
        is_met = float(deadline_hours > 0)
        return is_met, is_met if course.inputs is not None else None
    scale = work_hours / goal.work_hours
    sure_hours, spot_hours = (
        deadline_hours + (begun.hours if begun.is_spot is each else 0.0) for each in (False, True)
    )
    if course.inputs is None:
        return float(course.scale_hours(scale) <= sure_hours), None
    on_demand = [each.forecast for each in plan.estimates.candidates if not each.is_spot and each.forecast is not None]
    soonest = min((each.scale_hours(scale) for each in on_demand), default=math.inf)
    has_fallback = soonest <= sure_hours  # as at the time, not as now
    given = replace(
        course.inputs, work_hours=course.inputs.work_hours * scale, deadline_hours=spot_hours, has_fallback=False
    )
    spot_chance = _find_chance(given)
    return 1.0 if has_fallback else spot_chance, spot_chance


@lru_cache(maxsize=4096)
def _find_chance(given: SpotInputs) -> float:
    chance = given.find_deadline_chance()
    assert chance is not None
    return chance


def list_influences(plan: Plan) -> list[Influence]:
    """List changes of one condition and the expected cost under each, the largest change first."""
    choice = _read_choice(plan)
    if choice is None:
        return []
    own, given = _find_mean_usd(choice), choice.inputs
    changes = [
        ("spot is available at submission", replace(given, evidence=replace(given.evidence, is_open=True))),
        ("spot is unavailable at submission", replace(given, evidence=replace(given.evidence, is_open=False))),
        ("start-up takes half as long", replace(given, recovery_hours=given.recovery_hours / 2)),
    ]
    if given.places > 1:
        changes.append(("one candidate location", replace(given, places=1)))
    if given.deadline_hours is not None and given.has_fallback:
        changes.append(("deadline 25 % later", replace(given, deadline_hours=given.deadline_hours * 1.25)))
    found = [
        Influence(change=text, usd_mean=_find_mean_usd(replace(choice, inputs=changed))) for text, changed in changes
    ]
    return sorted(found, key=lambda each: -abs(each.usd_mean - own))


def _read_choice(plan: Plan) -> _Choice | None:
    if not isinstance(plan.estimates, LazyEstimates):
        return None
    candidate = plan.estimates.candidates[0]
    if candidate.forecast is None or candidate.forecast.inputs is None:
        return None
    return _Choice(inputs=candidate.forecast.inputs, prices=candidate.prices, data=candidate.data)


def _find_mean_usd(choice: _Choice) -> float:
    course = run_on_spot(choice.inputs)
    return price_run(course, choice.prices, choice.data, course.checkpoints)


def _forecast(plan: Plan, choice: _Choice) -> CostForecast:
    goal, given = plan.task.goal, choice.inputs
    course, runs = run_on_spot(given), given.list_runs()

    def usd(run: RecordedRun) -> float:
        return price_run(run, choice.prices, choice.data, course.checkpoints)

    low_usd, mid_usd, high_usd = runs.quantiles(usd, SHARES)
    low_hours, mid_hours, high_hours = runs.quantiles(lambda run: run.hours, SHARES)
    budget = goal.budget_usd if goal else None
    assert isinstance(plan.estimates, LazyEstimates)
    alone = next((each for each in plan.estimates.candidates if not each.is_spot), None)
    return CostForecast(
        usd=_widen(low_usd, mid_usd, high_usd, plan.interval_factor),
        usd_mean=price_run(course, choice.prices, choice.data, course.checkpoints),
        hours=_widen(low_hours, mid_hours, high_hours, plan.interval_factor),
        hours_mean=course.hours,
        preemptions=course.preemptions,
        waiting_hours=course.waiting_hours,
        ondemand_hours=course.ondemand_hours,
        hazard=course.hazard,
        places=given.places,
        ondemand_usd=alone.usd if alone else None,
        ondemand_hours_alone=alone.hours if alone else None,
        has_fallback=given.has_fallback,
        deadline_chance=given.find_deadline_chance(),
        budget_chance=None if budget is None else runs.chance(lambda run: usd(run) <= budget),
    )


def _widen(p10: float, p50: float, p90: float, factor: float) -> Range:
    return Range(p10=max(p50 - factor * (p50 - p10), 0.0), p50=p50, p90=p50 + factor * (p90 - p50))
