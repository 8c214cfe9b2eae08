"""Rating of offers: the cost of every placement of one task, as plain numbers.

Thousands of offers share work, hazard and recovery, so each distinct forecast is computed once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from broker.optimizer.cost import (
    RunForecast,
    RunInputs,
    add_data_usd,
    make_estimate,
    run_on_demand,
    run_on_spot,
    run_on_spot_then_on_demand,
)
from broker.optimizer.data_cost import NO_DATA, DataCost, has_data, price_data
from broker.optimizer.egress import EgressTable
from broker.optimizer.ranking import RankedOffer
from broker.optimizer.throughput import scale_work
from broker.spot.hazard import Observation, hazard_per_node_hour, mix_hazard
from broker.types import AcceleratorFigures, EgressPrice, Estimate, Offer, Placement, Resources, Task

# Preemptions observed by (cloud, region, zone, instance type).
History = Mapping[tuple[str, str, str | None, str], Observation]


class CostModel:
    """The costs of offers for one task, with caches of the terms that offers share."""

    def __init__(
        self,
        task: Task,
        figures: Mapping[str, AcceleratorFigures],
        egress: Sequence[EgressPrice],
        history: History | None,
    ) -> None:
        self._task = task
        self._figures = figures
        self._history = history or {}
        self._has_work = task.goal is not None and task.goal.work_hours is not None
        self._egress = EgressTable.from_prices(egress) if self._has_work and has_data(task) else None
        self._work = dict[tuple[str, str], float]()
        self._hazards = dict[float | None, float]()
        self._forecasts = dict[tuple[float, float, str, bool], RunForecast]()
        self._data = dict[tuple[str, str], DataCost]()

    def rate(self, alternative: int, offers: Iterable[Offer]) -> list[RankedOffer]:
        """Rate every offer at each pricing model for which it has a price, in no particular order."""
        task, nodes = self._task, self._task.num_nodes
        models = list_pricing_models(task, task.resources[alternative])
        may_switch = len(models) == 2
        candidates = list[RankedOffer]()
        for offer in offers:
            for is_spot in models:
                price = offer.spot_usd_hour if is_spot else offer.ondemand_usd_hour
                if price is None:
                    continue
                usd = usd_hour = price * nodes
                hazard = nodes * self._find_hazard(offer) if is_spot else 0.0
                forecast, data = None, NO_DATA
                if self._has_work:
                    forecast = self._find_forecast(offer, hazard, may_switch and offer.ondemand_usd_hour is not None)
                    usd = usd_hour * (forecast.spot_hours if is_spot else forecast.ondemand_hours)
                    if is_spot and forecast.ondemand_hours and offer.ondemand_usd_hour is not None:
                        usd += nodes * forecast.ondemand_hours * offer.ondemand_usd_hour
                    if self._egress is not None:
                        data = self._find_data(offer, self._egress)
                        usd += sum(add_data_usd(forecast, data))
                candidates.append(
                    RankedOffer(
                        usd, usd_hour, offer.cloud, offer.region, offer.zone or "", offer.instance_type, is_spot,
                        offer, forecast, data, hazard, alternative,
                    )
                )  # fmt: skip
        return candidates

    def make_estimate(self, candidate: RankedOffer) -> Estimate:
        placement = place(candidate, self._task.num_nodes)
        if candidate.forecast is None:
            return Estimate(placement=placement, preemptions_per_hour=candidate.hazard)
        return make_estimate(
            placement, candidate.forecast, candidate.data, hazard=candidate.hazard, goal=self._task.goal
        )

    def _find_hazard(self, offer: Offer) -> float:
        """Return preemptions per node-hour, from the interruption band and observations."""
        band = offer.interruption_band
        hazard = self._hazards.get(band)
        if hazard is None:
            hazard = self._hazards[band] = hazard_per_node_hour(band)
        if not self._history:
            return hazard
        return mix_hazard(hazard, self._history.get((offer.cloud, offer.region, offer.zone, offer.instance_type)))

    def _find_forecast(self, offer: Offer, hazard: float, may_switch: bool) -> RunForecast:
        task = self._task
        kind = (offer.cloud, offer.instance_type)
        work = self._work.get(kind)
        if work is None:
            work = self._work[kind] = self._scale_work(offer)
        key = (work, hazard, offer.cloud, may_switch)
        forecast = self._forecasts.get(key)
        if forecast is None:
            terms = RunInputs.of(work, hazard, task.checkpoint, task.goal, offer.cloud, task.num_nodes)
            confidence = task.goal.confidence if task.goal else 0.0
            forecast = self._forecasts[key] = choose_forecast(terms, confidence, may_switch=may_switch)
        return forecast

    def _scale_work(self, offer: Offer) -> float:
        goal = self._task.goal
        measured = goal.throughput if goal else {}
        return scale_work(goal, offer, self._figures, node_count=self._task.num_nodes, measured=measured) or 0.0

    def _find_data(self, offer: Offer, egress: EgressTable) -> DataCost:
        key = (offer.cloud, offer.region)
        data = self._data.get(key)
        if data is None:
            data = self._data[key] = price_data(self._task, offer.cloud, offer.region, egress)
        return data


def choose_forecast(terms: RunInputs, confidence: float, *, may_switch: bool) -> RunForecast:
    """Choose spot to the end if it meets the deadline with this confidence, else spot that may switch to on-demand.

    If both are feasible, an on-demand phase would only add cost. If switching is infeasible, choose spot to the end.
    """
    if terms.hazard <= 0:
        return run_on_demand(terms)
    alone = run_on_spot(terms)
    if may_switch and alone.deadline_chance is not None and alone.deadline_chance < confidence:
        return run_on_spot_then_on_demand(terms) or alone
    return alone


def list_pricing_models(task: Task, resources: Resources) -> tuple[bool, ...]:
    """List the pricing models requested; by default on-demand, or both if the task has a goal."""
    if resources.use_spot is None:
        return (False, True) if task.goal else (False,)
    return (resources.use_spot,)


def place(candidate: RankedOffer, node_count: int) -> Placement:
    return Placement(
        offer=candidate.offer, is_spot=candidate.is_spot, node_count=node_count, alternative=candidate.alternative
    )
