"""Distribution of a plan's cost and time under the production policy, from recorded markets.

`broker.optimizer.cost` ranks thousands of placements by the closed form for one place with a constant hazard. This
module forecasts the choice alone, under realistic behaviour: when spot closes, the job moves to another candidate
place, waits, or continues on-demand. Time counts from submission to end, including the first start and all waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from broker.nouns import noun
from broker.optimizer.data_cost import NO_DATA, DataCost
from broker.optimizer.ranking import LazyEstimates, RankedOffer
from broker.optimizer.rating import History, place
from broker.spot.interval import best_interval_s
from broker.spot.market_model import MarketEvidence, RunDistribution, find_hazard, forecast_run
from broker.spot.recorded_runs import Run
from broker.types import Breakdown, CheckpointSpec, Estimate, Placement, Plan

PLACES_MAX = 6  # the largest recorded group; further places add little
NEAR_PRICE = 1.25  # places count as candidates up to this multiple of the choice's cost
SHARES = (0.1, 0.5, 0.9)


@noun
class Range:
    """The 10th, 50th and 90th percentiles."""

    p10: float
    p50: float
    p90: float


@noun
class Influence:
    """The expected cost under one changed condition."""

    change: str
    usd_mean: float


@noun
class CostForecast:
    """The forecast of a plan: USD and hours from submission to end.

    Chances are None where the task has no such limit. `places` is the number of candidate places for spot capacity;
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
    ondemand_usd: float | None  # to finish on the cheapest on-demand gang; None where the task rules it out
    has_fallback: bool  # on-demand keeps the deadline, if on-demand capacity is available
    deadline_chance: float | None = None
    budget_chance: float | None = None


@noun
class _Basis:
    """All inputs of the forecast. Prices are in USD per hour of the whole gang.

    The on-demand price is per hour of the choice's work, as the cheapest on-demand gang may have other machines.
    """

    work_hours: float
    deadline_hours: float | None
    checkpoint: CheckpointSpec
    restart_hours: float
    unbilled_hours: float
    spot_usd_hour: float
    ondemand_usd_hour: float | None
    data: DataCost
    places: int
    evidence: MarketEvidence


def forecast_plan(
    plan: Plan, history: History | None = None, *, is_refused: Callable[[Placement], bool] | None = None
) -> CostForecast | None:
    """Forecast the choice; None if no work is given or the choice runs on-demand.

    `is_refused` tells whether a placement was recently refused; if all candidate places were, spot is unavailable now.
    """
    basis = _read_basis(plan, history, is_refused)
    return None if basis is None else _forecast(plan, basis)


def list_influences(
    plan: Plan, history: History | None = None, *, is_refused: Callable[[Placement], bool] | None = None
) -> list[Influence]:
    """List changes of one condition and the expected cost under each, the largest change first."""
    basis = _read_basis(plan, history, is_refused)
    if basis is None:
        return []
    own = _forecast(plan, basis).usd_mean
    changes = [
        ("spot is available at submission", replace(basis, evidence=replace(basis.evidence, is_open=True))),
        ("spot is unavailable at submission", replace(basis, evidence=replace(basis.evidence, is_open=False))),
        ("start-up takes half as long", replace(basis, restart_hours=basis.restart_hours / 2)),
    ]
    if basis.places > 1:
        changes.append(("one candidate place", replace(basis, places=1)))
    if basis.deadline_hours is not None and basis.ondemand_usd_hour is not None:
        changes.append(("deadline 25 % later", replace(basis, deadline_hours=basis.deadline_hours * 1.25)))
    found = [Influence(change=text, usd_mean=_forecast(plan, changed).usd_mean) for text, changed in changes]
    return sorted(found, key=lambda each: -abs(each.usd_mean - own))


def _read_basis(plan: Plan, history: History | None, is_refused: Callable[[Placement], bool] | None) -> _Basis | None:
    choice = plan.choice
    parts = choice.breakdown
    if not choice.placement.is_spot or parts is None or parts.work_hours <= 0:
        return None
    placement, offer, goal = choice.placement, choice.placement.offer, plan.task.goal
    candidates = plan.estimates.candidates if isinstance(plan.estimates, LazyEstimates) else ()
    deadline = goal.deadline_hours if goal else None
    asked = plan.task.resources[candidates[0].alternative if candidates else 0]
    ondemand_usd = None
    if asked.use_spot is None:
        ondemand_usd = _find_ondemand_usd(choice, candidates, parts.work_hours)
    seen = (history or {}).get((offer.cloud, offer.region, offer.zone, offer.instance_type))
    near = _list_near(choice, candidates)
    refused = is_refused is not None and all(is_refused(place(each, placement.node_count)) for each in near)
    evidence = MarketEvidence(
        preemptions=seen.preemptions if seen else 0.0,
        gang_hours=seen.node_hours / placement.node_count if seen else 0.0,
        is_open=False if near and refused else None,
    )
    return _Basis(
        work_hours=parts.work_hours,
        deadline_hours=deadline,
        checkpoint=plan.task.checkpoint,
        restart_hours=parts.recovery_s / 3600,
        unbilled_hours=_find_unbilled(parts),
        spot_usd_hour=placement.usd_hour,
        ondemand_usd_hour=None if ondemand_usd is None else ondemand_usd / parts.work_hours,
        data=candidates[0].data if candidates else NO_DATA,
        places=min(max(len({(each.cloud, each.region, each.zone) for each in near}), 1), PLACES_MAX),
        evidence=evidence,
    )


def _find_unbilled(parts: Breakdown) -> float:
    return max(parts.recovery_s - parts.recovery_billed_s, 0.0) / 3600


def _find_ondemand_usd(choice: Estimate, candidates: Sequence[RankedOffer], work_hours: float) -> float | None:
    """Return the USD to finish on the cheapest on-demand gang, whatever its machines.

    The choice's own machines count even if a budget has filtered them out, as the policy may fall back on them.
    """
    own = choice.placement.offer.ondemand_usd_hour
    found = [each.usd for each in candidates if not each.is_spot]
    if own is not None:
        found.append(own * choice.placement.node_count * work_hours)
    return min(found, default=None)


def _list_near(choice: Estimate, candidates: Sequence[RankedOffer]) -> list[RankedOffer]:
    """List the spot placements with nearly the choice's cost to finish, including the choice."""
    most = (choice.expected_usd or 0.0) * NEAR_PRICE
    return [each for each in candidates if each.is_spot and each.usd <= most]


def _forecast(plan: Plan, basis: _Basis) -> CostForecast:
    goal = plan.task.goal
    hazard = find_hazard(basis.places, basis.evidence)
    runs, lost_hours = _forecast_runs(basis, hazard)

    def usd(run: Run) -> float:
        return _price_run(basis, run, lost_hours)

    def hours(run: Run) -> float:
        return run.hours - lost_hours

    low_usd, mid_usd, high_usd = runs.quantiles(usd, SHARES)
    low_hours, mid_hours, high_hours = runs.quantiles(hours, SHARES)
    budget = goal.budget_usd if goal else None
    return CostForecast(
        usd=Range(p10=low_usd, p50=mid_usd, p90=high_usd),
        usd_mean=runs.mean(usd),
        hours=Range(p10=low_hours, p50=mid_hours, p90=high_hours),
        hours_mean=runs.mean(hours),
        preemptions=runs.mean(lambda run: run.preemptions),
        waiting_hours=runs.mean(lambda run: max(run.hours - run.spot_hours - run.ondemand_hours, 0.0)),
        ondemand_hours=runs.mean(lambda run: run.ondemand_hours),
        hazard=hazard,
        places=basis.places,
        ondemand_usd=None if basis.ondemand_usd_hour is None else basis.ondemand_usd_hour * basis.work_hours,
        has_fallback=_has_fallback(basis),
        deadline_chance=_find_deadline_chance(basis, runs, lost_hours),
        budget_chance=None if budget is None else runs.chance(lambda run: usd(run) <= budget),
    )


def _forecast_runs(basis: _Basis, hazard: float) -> tuple[RunDistribution, float]:
    """Return the runs, and the hours by which each is too long.

    A preemption loses half a checkpoint interval of work. This is added to every start, although the first start loses
    nothing.
    """
    spec, limit = basis.checkpoint, basis.deadline_hours
    every = min((spec.every_s or best_interval_s(spec.stall_s, hazard)) / 3600, basis.work_hours)
    work = basis.work_hours * (1 + spec.stall_s / 3600 / every)
    lost = every / 2
    runs = forecast_run(
        work_hours=work,
        deadline_hours=None if limit is None or not _has_fallback(basis) else limit + lost,
        start_hours=basis.restart_hours + lost,
        places=basis.places,
        evidence=basis.evidence,
    )
    return runs, lost


def _find_deadline_chance(basis: _Basis, runs: RunDistribution, lost_hours: float) -> float | None:
    """Return the chance of the deadline; with an on-demand fallback, 1 if on-demand alone is in time, else 0."""
    limit = basis.deadline_hours
    if limit is None:
        return None
    if _has_fallback(basis):
        return float(basis.work_hours + basis.restart_hours <= limit)
    return runs.chance(lambda run: run.hours - lost_hours <= limit)


def _has_fallback(basis: _Basis) -> bool:
    return basis.ondemand_usd_hour is not None and basis.deadline_hours is not None


def _price_run(basis: _Basis, run: Run, lost_hours: float) -> float:
    data = basis.data
    usd = run.spot_hours * basis.spot_usd_hour + run.ondemand_hours * (basis.ondemand_usd_hour or 0.0)
    rate = usd / max(run.spot_hours + run.ondemand_hours, 1e-9)
    usd -= rate * (lost_hours + basis.unbilled_hours * (1 + run.preemptions))
    moves = data.start_usd * (1 + run.preemptions) + data.finish_usd + data.restore_usd * run.preemptions
    return max(usd, 0.0) + moves + data.storage_usd_hour * run.hours
