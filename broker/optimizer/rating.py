"""Rating of offers: the cost of every placement of one task, as plain numbers.

Thousands of offers share work, hazard and recovery, so each distinct forecast is computed once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from broker.optimizer.billing import bill_recovery_s
from broker.optimizer.candidate_places import SAME_SPEED, CandidatePlaces, Fallback, Kinds, read_usd
from broker.optimizer.cost import (
    NO_PRICES,
    GangPrices,
    RunForecast,
    SpotInputs,
    add_data_usd,
    make_estimate,
    price_run,
    run_on_demand,
    run_on_spot,
)
from broker.optimizer.data_cost import NO_DATA, DataCost, has_data, measure_restore_s, price_data
from broker.optimizer.egress import EgressTable
from broker.optimizer.ranking import RankedOffer
from broker.optimizer.throughput import scale_work
from broker.spot.hazard import Observation, find_hazard_per_node_hour
from broker.spot.market_model import NOTHING, MarketEvidence
from broker.types import AcceleratorFigures, EgressPrice, Estimate, Offer, Placement, Resources, Task

# Preemptions observed by (cloud, region, zone, instance type).
History = Mapping[tuple[str, str, str | None, str], Observation]
Refused = Callable[[Placement], bool]
HOUR_VALUE_SHARE = 0.02  # share of the gang's on-demand price: 1 % of the cost of 100 h is worth half an hour
PLACE_COUNTS = (1, 2, 3, 6)  # sizes of candidate sets that are compared; 6 is the largest recorded group


class CostModel:
    """The costs of offers for one task, with caches of the terms that offers share."""

    def __init__(
        self,
        task: Task,
        figures: Mapping[str, AcceleratorFigures],
        egress: Sequence[EgressPrice],
        history: History | None,
        is_refused: Refused | None = None,
    ) -> None:
        self._task = task
        self._figures = figures
        self._history = history or {}
        self._is_refused = is_refused
        goal = task.goal
        self._has_work = goal is not None and goal.work_hours is not None
        self._deadline_hours = goal.deadline_hours if goal else None
        self._budget_usd = goal.budget_usd if goal else None
        self._egress = EgressTable.from_prices(egress) if self._has_work and has_data(task) else None
        self._work = dict[tuple[str, str], float]()
        self._recoveries = dict[str, tuple[float, float]]()
        self._ondemand = dict[tuple[float, str], RunForecast]()
        self._spot = dict[tuple[object, ...], dict[int, RunForecast]]()  # the second key is the number of places
        self._chosen = dict[int, RunForecast]()  # with the chance of the deadline, by id of one in `_spot`
        self._chances = dict[tuple[object, ...], float | None]()
        self._data = dict[tuple[str, str], DataCost]()
        self._ondemand_gangs = list[tuple[float, float]]()  # (USD to finish, USD per hour) of on-demand gangs
        self._rated = dict[int, list[RankedOffer]]()  # on-demand, by alternative
        self._kinds = dict[int, Kinds]()  # by alternative; empty: a job stays with one

    @property
    def hour_value_usd(self) -> float | None:
        """Return the value of an hour: the task's, else a share of the on-demand price of the cheapest gang so far."""
        goal = self._task.goal
        if not self._has_work or goal is None:
            return None
        if goal.hour_value_usd is not None:
            return goal.hour_value_usd
        return HOUR_VALUE_SHARE * min(self._ondemand_gangs, default=(0.0, 0.0))[1]

    def join_alternatives(self, offers: Mapping[int, Sequence[Offer]]) -> None:
        """Let forecasts count on the machines of all alternatives, between which a managed job may change.

        `offers` are those that each alternative accepts. A program that needs the ranks of its checkpoint changes only
        between alternatives with as many accelerators.
        """
        if not self._has_work:
            return
        groups = dict[float, list[int]]()
        for alternative in offers:
            resources = self._task.resources[alternative]
            ranks = resources.accelerator_count if self._task.checkpoint.is_for_same_ranks else 0.0
            groups.setdefault(ranks, []).append(alternative)
        for group in groups.values():
            if len(group) > 1:
                sold, fallbacks = list[Offer](), list[Fallback]()
                for alternative in group:
                    sold += self._list_sold(alternative, offers[alternative])
                    fallbacks += self._list_fallbacks(alternative, offers[alternative])
                kinds = Kinds(places=self._gather_places(sold), fallbacks=fallbacks)
                self._kinds.update(dict.fromkeys(group, kinds))

    def _list_sold(self, alternative: int, offers: Sequence[Offer]) -> list[Offer]:
        """List the offers on spot that an alternative accepts."""
        resources = self._task.resources[alternative]
        if True not in list_pricing_models(self._task, resources):
            return []
        limit = math.inf if resources.usd_hour_max is None else resources.usd_hour_max
        return [each for each in offers if each.spot_usd_hour is not None and each.spot_usd_hour <= limit]

    def _list_fallbacks(self, alternative: int, offers: Sequence[Offer]) -> list[Fallback]:
        """List the on-demand gangs of an alternative that are in time."""
        resources = self._task.resources[alternative]
        if self._deadline_hours is None or False not in list_pricing_models(self._task, resources):
            return []
        return self._keep_timely(self._list_on_demand(alternative, offers), resources.usd_hour_max)

    def _list_on_demand(self, alternative: int, offers: Sequence[Offer]) -> list[RankedOffer]:
        """Rate the offers that an alternative accepts, on-demand; once, as each alternative is given its own."""
        found = self._rated.get(alternative)
        if found is None:
            rated = [self._rate_on_demand(each, alternative) for each in offers if each.ondemand_usd_hour is not None]
            found = self._rated[alternative] = rated
        return found

    def _gather_places(self, sold: Sequence[Offer]) -> CandidatePlaces:
        return CandidatePlaces([(self._measure_base(each), each) for each in sold])

    def rate(self, alternative: int, offers: Sequence[Offer]) -> list[RankedOffer]:
        """Rate every offer at each pricing model for which it has a price, in no particular order."""
        task = self._task
        models = list_pricing_models(task, task.resources[alternative])
        if not self._has_work:
            return [
                _rank(offer, task.num_nodes, alternative, is_spot=is_spot)
                for offer in offers
                for is_spot in models
                if (offer.spot_usd_hour if is_spot else offer.ondemand_usd_hour) is not None
            ]
        limit = task.resources[alternative].usd_hour_max
        ondemand = self._list_on_demand(alternative, offers)
        self._ondemand_gangs += [(each.usd, each.usd_hour) for each in ondemand]
        found = [*ondemand] if False in models else []
        if True not in models:
            return found
        sold = [offer for offer in offers if offer.spot_usd_hour is not None]
        fallbacks = self._keep_timely(found, limit)
        kinds = self._kinds.get(alternative)
        places = self._gather_places(self._list_sold(alternative, sold) or sold) if kinds is None else kinds.places
        return [*found, *self._rate_on_spot(alternative, sold, places, fallbacks, kinds)]

    def _rate_on_demand(self, offer: Offer, alternative: int) -> RankedOffer:
        work, nodes = self._find_work(offer), self._task.num_nodes
        forecast, data = self._run_on_demand(work, offer.cloud), self._find_data(offer)
        prices = GangPrices(0.0, nodes * (offer.ondemand_usd_hour or 0.0))  # spot, on-demand
        return _rank(offer, nodes, alternative, forecast, prices, data, is_spot=False)

    def _run_on_demand(self, work: float, cloud: str) -> RunForecast:
        forecast = self._ondemand.get((work, cloud))
        if forecast is None:
            recovery, billed = self._find_recovery(cloud)
            forecast = self._ondemand[work, cloud] = run_on_demand(
                work, self._task.checkpoint, deadline_hours=self._deadline_hours,
                recovery_hours=recovery, recovery_billed_hours=billed,
            )  # fmt: skip
        return forecast

    def _rate_on_spot(
        self, alternative: int, sold: Sequence[Offer], places: CandidatePlaces, fallbacks: Sequence[Fallback],
        kinds: Kinds | None,
    ) -> list[RankedOffer]:  # fmt: skip
        found, known = list[RankedOffer](), dict[tuple[object, ...], tuple[RunForecast, GangPrices]]()
        cheapest = min(fallbacks, key=read_usd, default=None)
        nodes = self._task.num_nodes
        for offer in sold:
            evidence = self._gather_evidence(offer) if self._history else NOTHING
            base, data = self._measure_base(offer), self._find_data(offer)
            near = places.list_near(base, offer)
            if self._is_refused is not None and self._are_refused(offer, [each for _, each in near]):
                evidence = replace(evidence, is_open=False)
            near_usd = tuple([each for each, _ in near])
            # Zones of one region share all of these, so they share the result.
            seen = None if evidence is NOTHING else evidence
            key = (offer.cloud, offer.region, offer.instance_type, offer.interruption_band, base, seen, near_usd)
            own = known.get(key)
            if own is None:
                fallback = cheapest if kinds is None else self._choose_fallback(offer, cheapest, kinds)
                own = known[key] = self._choose_forecast(offer, base, near_usd, evidence, fallback)
            forecast, prices = own
            found.append(_rank(offer, nodes, alternative, forecast, prices, data, is_spot=True))
        return found

    def _choose_forecast(
        self,
        offer: Offer,
        base: float,
        near: Sequence[float],
        evidence: MarketEvidence,
        fallback: Fallback | None,
    ) -> tuple[RunForecast, GangPrices]:
        """Choose the number of candidate places at which the mean cost is lowest, of those that are in time.

        More places wait less but cost more: a few cheap ones may miss a deadline that more of them keep. Where none is
        in time, the most punctual is chosen. A job stays where it starts until that place closes, so half of its hours
        on spot have the price of the choice, and half the mean of all candidate places.
        """
        work, usd_hour = self._find_work(offer), self._task.num_nodes * (offer.spot_usd_hour or 0.0)
        fallback_usd_hour = 0.0 if fallback is None or work <= 0 else self._price_fallback(offer, fallback) / work
        data, best, least = self._find_data(offer), None, (math.inf, math.inf)
        has_fallback = fallback is not None
        seen = None if evidence is NOTHING else evidence  # None has a faster hash
        forecasts = self._spot.setdefault((work, seen, offer.cloud, offer.interruption_band, has_fallback), {})
        for count in PLACE_COUNTS:
            if count > 1 + len(near):
                break
            mean = (base + (base + sum(near[: count - 1])) / count) / 2
            forecast = forecasts.get(count)
            if forecast is None:
                forecast = forecasts[count] = self._run_on_spot(offer, work, count, evidence, has_fallback=has_fallback)
            # Both are USD of all the work, data included.
            more = 0.0 if work <= 0 else (mean - base) / work
            prices = GangPrices(usd_hour + more, fallback_usd_hour)  # spot, on-demand
            score = (self._find_missing_chance(forecast), price_run(forecast, prices, data, forecast.checkpoints))
            if best is None or score < least:
                best, least = (forecast, prices), score
        assert best is not None
        forecast, prices = best
        return self._add_chance(forecast), prices

    def _price_fallback(self, offer: Offer, fallback: Fallback) -> float:
        """Return the USD of all the work there, with data only as far as they cost more than at the offer.

        The data of the offer are charged to the whole run, wherever its hours are.
        """
        if self._egress is None:
            return fallback.usd
        alone = self._run_on_demand(self._find_work(offer), offer.cloud)
        own = sum(add_data_usd(alone, self._find_data(offer), alone.checkpoints))
        compute = fallback.usd_hour * fallback.hours
        return compute + max(fallback.usd - compute - own, 0.0)

    def _run_on_spot(
        self, offer: Offer, work: float, places: int, evidence: MarketEvidence, *, has_fallback: bool
    ) -> RunForecast:
        recovery, billed = self._find_recovery(offer.cloud)
        if work <= 0:
            calm = self._run_on_demand(work, offer.cloud)
            return replace(calm, spot_hours=calm.ondemand_hours, ondemand_hours=0.0)
        return run_on_spot(
            SpotInputs(
                work_hours=work, checkpoint=self._task.checkpoint, recovery_hours=recovery,
                unbilled_hours=max(recovery - billed, 0.0), places=places, evidence=evidence,
                band_hazard=self._task.num_nodes * find_hazard_per_node_hour(offer.interruption_band),
                deadline_hours=self._deadline_hours, has_fallback=has_fallback,
            )
        )  # fmt: skip

    def _add_chance(self, forecast: RunForecast) -> RunForecast:
        """Return the forecast with the chance of the deadline, which only those that are chosen need."""
        whole = self._chosen.get(id(forecast))
        if whole is None:
            whole = self._chosen[id(forecast)] = replace(forecast, deadline_chance=self._find_chance(forecast))
        return whole

    def _find_missing_chance(self, forecast: RunForecast) -> float:
        """Return how far the chance of the deadline is below the required one; 0 with a fallback, which keeps it."""
        goal, given = self._task.goal, forecast.inputs
        if goal is None or given is None or given.deadline_hours is None or given.has_fallback:
            return 0.0
        return max(goal.confidence - (self._find_chance(forecast) or 0.0), 0.0)

    def _find_chance(self, forecast: RunForecast) -> float | None:
        given = forecast.inputs
        if given is None:
            return forecast.deadline_chance
        own = (given.work_hours, given.recovery_hours, given.band_hazard, given.has_fallback)
        key = (*own, given.places, given.evidence)
        if key not in self._chances:
            self._chances[key] = given.find_deadline_chance()
        return self._chances[key]

    def _keep_timely(self, ondemand: Sequence[RankedOffer], limit: float | None) -> list[Fallback]:
        """Keep the on-demand gangs on which the job can continue if the deadline requires it."""
        if self._deadline_hours is None:
            return []
        most = math.inf if limit is None else limit * self._task.num_nodes
        return [_skip_start(each) for each in ondemand if each.hours <= self._deadline_hours and each.usd_hour <= most]

    def _choose_fallback(self, offer: Offer, own: Fallback | None, kinds: Kinds) -> Fallback | None:
        """Choose the cheapest on-demand gang of any kind; a slower one of another kind would have to begin earlier."""
        as_fast = kinds.find_fallback(self._find_work(offer) * SAME_SPEED)
        return min((each for each in (as_fast, own) if each is not None), key=read_usd, default=None)

    def _gather_evidence(self, offer: Offer) -> MarketEvidence:
        seen = self._history.get((offer.cloud, offer.region, offer.zone, offer.instance_type))
        if seen is None:
            return NOTHING
        return MarketEvidence(preemptions=seen.preemptions, gang_hours=seen.node_hours / self._task.num_nodes)

    def _are_refused(self, offer: Offer, others: Sequence[Offer]) -> bool:
        assert self._is_refused is not None
        return all(
            self._is_refused(Placement(offer=each, is_spot=True, node_count=self._task.num_nodes))
            for each in (offer, *others)
        )

    def make_estimate(self, candidate: RankedOffer) -> Estimate:
        """Return the estimate of a ranked offer, with the breakdown if the task has an amount of work."""
        placement = place(candidate, self._task.num_nodes)
        if candidate.forecast is None:
            hazard = self._task.num_nodes * find_hazard_per_node_hour(candidate.offer.interruption_band)
            return Estimate(placement=placement, preemptions_per_hour=hazard if candidate.is_spot else 0.0)
        return make_estimate(
            placement, candidate.forecast, candidate.prices, candidate.data, budget_usd=self._budget_usd
        )

    def _measure_base(self, offer: Offer) -> float:
        """Return the USD of the work on spot without faults, by which places of different machines are compared."""
        usd = self._task.num_nodes * (offer.spot_usd_hour or 0.0) * self._find_work(offer)
        if self._egress is None:
            return usd
        data = self._find_data(offer)
        return usd + data.start_usd + data.finish_usd

    def _find_recovery(self, cloud: str) -> tuple[float, float]:
        """Return the hours of a start of the gang, and the billed part of them."""
        found = self._recoveries.get(cloud)
        if found is None:
            spec = self._task.checkpoint
            restore_s = measure_restore_s(spec.size_gib)
            billed_s = bill_recovery_s(cloud, self._task.num_nodes, spec.restart_s, restore_s)
            found = self._recoveries[cloud] = ((spec.restart_s + restore_s) / 3600, billed_s / 3600)
        return found

    def _find_work(self, offer: Offer) -> float:
        kind = (offer.cloud, offer.instance_type)
        work = self._work.get(kind)
        if work is None:
            work = self._work[kind] = self._scale_work(offer)
        return work

    def _scale_work(self, offer: Offer) -> float:
        goal = self._task.goal
        measured = goal.throughput if goal else {}
        return scale_work(goal, offer, self._figures, node_count=self._task.num_nodes, measured=measured) or 0.0

    def _find_data(self, offer: Offer) -> DataCost:
        if self._egress is None:
            return NO_DATA
        key = (offer.cloud, offer.region)
        data = self._data.get(key)
        if data is None:
            data = self._data[key] = price_data(self._task, offer.cloud, offer.region, self._egress)
        return data


def _skip_start(ondemand: RankedOffer) -> Fallback:
    """Return an on-demand gang that is running already: recorded runs include the start that it takes."""
    forecast = ondemand.forecast
    assert forecast is not None
    return Fallback(
        usd=ondemand.usd - ondemand.usd_hour * forecast.recovery_billed_hours,
        usd_hour=ondemand.usd_hour,
        hours=forecast.hours - forecast.starting_hours,
    )


def _rank(
    offer: Offer,
    nodes: int,
    alternative: int,
    forecast: RunForecast | None = None,
    prices: GangPrices = NO_PRICES,
    data: DataCost = NO_DATA,
    *,
    is_spot: bool,
) -> RankedOffer:
    usd = usd_hour = nodes * ((offer.spot_usd_hour if is_spot else offer.ondemand_usd_hour) or 0.0)
    if forecast is not None:
        usd = price_run(forecast, prices, data, forecast.checkpoints)
    return RankedOffer(
        usd, usd, usd_hour, offer.cloud, offer.region, offer.zone or "", offer.instance_type, is_spot,
        offer, forecast, prices, data, alternative,
    )  # fmt: skip


def list_pricing_models(task: Task, resources: Resources) -> tuple[bool, ...]:
    """List the pricing models requested; by default on-demand, or both if the task has a goal."""
    if resources.use_spot is None:
        return (False, True) if task.goal else (False,)
    return (resources.use_spot,)


def place(candidate: RankedOffer, node_count: int) -> Placement:
    """Return the placement of `node_count` nodes on the offer of a candidate."""
    return Placement(
        offer=candidate.offer, is_spot=candidate.is_spot, node_count=node_count, alternative=candidate.alternative
    )
