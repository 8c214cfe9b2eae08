"""Broker's own policy: least expected cost, by a Markov decision process with hazards learned online; never too late.

On-demand that is in time is the reserve of every decision. Where machines of several kinds are offered, the fast ones
leave more time to wait for spot, and the slow ones may cost less: each kind is weighed as the reserve.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from broker.spot.evaluation import SPOT, MarketEvaluation, is_beside
from broker.spot.forecast import read_market
from broker.spot.no_deadline import DECISION_HOURS_MAX, MOVE_GAIN, weigh_without_deadline
from broker.spot.policies.base import (
    EPSILON_HOURS,
    Candidate,
    Decision,
    JobView,
    Move,
    Stay,
    Wait,
    find_fallback,
    find_finish_hours,
    find_safe_hours,
    find_spare_hours,
    have_one_speed,
    is_same_speed,
    list_reserves,
    take_fallback,
)
from broker.spot.prior import MEASURED, Prior

# Counted for an hour on every place if one costs nothing, as own machines may: costs are multiples of on-demand's.
FREE_USD_HOUR = 0.01


def decide(view: JobView, candidates: Sequence[Candidate]) -> Decision:
    """Decide by expected cost; never late where on-demand alone would not have been late."""
    return weigh(view, candidates, MEASURED)


def weigh(view: JobView, candidates: Sequence[Candidate], prior: Prior) -> Decision:
    """Decide as `decide` does, with another prior.

    The value of an hour is added to the price of each candidate: the cost to the end then includes that of the time.
    """
    worth_usd = view.hour_value_usd or 0.0
    is_free = any(each.placement.usd_hour + worth_usd <= 0 for each in candidates)
    more_usd = worth_usd
    if is_free:
        more_usd, view = FREE_USD_HOUR, replace(view, hour_value_usd=None)  # waiting has its default price
    if not more_usd:
        return _weigh_all(view, candidates, prior)
    raised = [_add_price(each, more_usd) for each in candidates]
    if view.spent_usd is not None and view.deadline_hours is not None and view.time_left_hours is not None:
        passed_hours = view.deadline_hours - view.time_left_hours
        view = replace(view, spent_usd=view.spent_usd + worth_usd * passed_hours)
    decision = _weigh_all(view, raised, prior)
    return (
        replace(decision, target=candidates[raised.index(decision.target)]) if isinstance(decision, Move) else decision
    )


def _add_price(candidate: Candidate, usd_hour: float) -> Candidate:
    """Return the candidate at a price that is higher by `usd_hour` for the whole gang."""
    placement = candidate.placement
    offer, more = placement.offer, usd_hour / placement.node_count
    prices = {"spot_usd_hour": offer.spot_usd_hour, "ondemand_usd_hour": offer.ondemand_usd_hour}
    raised = {name: None if usd is None else usd + more for name, usd in prices.items()}
    offer = replace(offer, spot_usd_hour=raised["spot_usd_hour"], ondemand_usd_hour=raised["ondemand_usd_hour"])
    return replace(candidate, placement=replace(placement, offer=offer))


def _weigh_all(view: JobView, candidates: Sequence[Candidate], prior: Prior) -> Decision:
    fallback = find_fallback(view, candidates)
    if fallback is None or view.time_left_hours is None or have_one_speed(candidates, fallback):
        return _weigh(view, candidates, fallback, prior)
    reserves = list_reserves(view, candidates, fallback)
    spots = [each for each in candidates if each.is_spot]
    current = None if view.current is None else candidates[view.current]
    if current is not None and not current.is_spot:
        return _weigh_on_demand(view, candidates, current, reserves, prior)
    if len(reserves) == 1 or not spots:
        return _weigh(view, candidates, fallback, prior)
    if current is None:
        return min((_weigh(view, candidates, each, prior) for each in reserves), key=_find_least_usd)
    reserve = min(reserves, key=lambda each: _weigh_on_spot(view, current, each, spots, prior))
    return _weigh(view, candidates, reserve, prior)


def _find_least_usd(decision: Decision) -> float:
    return min((usd for _, usd in decision.weighed), default=math.inf)


def _weigh_on_spot(
    view: JobView, current: Candidate, reserve: Candidate, spots: Sequence[Candidate], prior: Prior
) -> float:
    """Return the expected USD to the end of a job on spot with this reserve, which may have to start now."""
    if find_safe_hours(view, current, reserve) <= 0:
        return reserve.move_usd + find_finish_hours(reserve, view.sure_left_hours) * reserve.placement.usd_hour
    return MarketEvaluation.of(
        view, reserve, [read_market(each, reserve, prior) for each in spots], prior
    ).find_run_usd(current)


def _weigh_on_demand(
    view: JobView, candidates: Sequence[Candidate], current: Candidate, reserves: Sequence[Candidate], prior: Prior
) -> Decision:
    """Weigh a job on on-demand: keep its machines, leave them for spot with any reserve, or change the kind.

    The kind changes if the machines would be late and others are not, or if others are cheaper, as in `_weigh`.
    """
    assert view.time_left_hours is not None
    spots = [each for each in candidates if each.is_spot]
    if _is_late(view, current):
        timely = [each for each in reserves if find_finish_hours(each, view.work_left_hours) <= view.time_left_hours]
        if not timely:
            return Stay(reason="on-demand, already late")
        return Move(target=timely[0], reason="on-demand here would be late")
    if is_same_speed(current, reserves[0]):
        kept = _weigh(view, candidates, reserves[0], prior)
    elif (
        spots
        and _may_be_cheaper_elsewhere(view, current, reserves[0])
        and _is_cheaper_elsewhere(view, current, reserves[0], spots, prior)
    ):
        return Move(target=reserves[0], reason="on-demand is cheaper elsewhere, including the move")
    elif spots:
        evaluation = MarketEvaluation.of(view, current, [read_market(each, current, prior) for each in spots], prior)
        kept = evaluation.find_entry(current).choose(current)
    else:
        kept = Stay(reason="spot is not offered")
    if not kept.weighed:
        return kept
    least, best = _find_least_usd(kept), kept
    for each in reserves:
        if each.speed > current.speed and not is_same_speed(each, current):
            evaluation = MarketEvaluation.of(view, each, [read_market(spot, each, prior) for spot in spots], prior)
            decision = evaluation.find_entry(current).choose(current)
            usd = dict(decision.weighed).get(SPOT, math.inf)
            if isinstance(decision, Move) and usd < least:
                least, best = usd, decision
    return replace(best, hours=min(best.hours, DECISION_HOURS_MAX))


def _weigh(view: JobView, candidates: Sequence[Candidate], fallback: Candidate | None, prior: Prior) -> Decision:
    """Weigh with this on-demand candidate in reserve; None: without any."""
    spots = [each for each in candidates if each.is_spot]
    current = None if view.current is None else candidates[view.current]
    if not spots:
        if current is not None:
            return Stay(reason="spot is not offered")
        return (
            Wait(reason="nothing is offered")
            if fallback is None
            else Move(target=fallback, reason="spot is not offered")
        )
    if fallback is None or view.time_left_hours is None:
        return weigh_without_deadline(view, current, [read_market(each, fallback, prior) for each in spots])
    if current is not None and current.is_spot:
        hours = find_safe_hours(view, current, fallback)
        if hours <= 0:
            return take_fallback(view, candidates, fallback, "a later loss of spot would miss the deadline")
        if len(spots) == 1 and not _is_costlier(view, current, fallback):
            return Stay(hours=hours, reason="on spot")
    elif current is not None and _is_late(view, current):
        return Stay(reason="on-demand, already late")
    markets = [read_market(each, fallback, prior) for each in spots]
    evaluation = MarketEvaluation.of(view, fallback, markets, prior)
    if current is not None and current.is_spot:
        return _choose_on_spot(evaluation, current)
    if current is not None and _may_be_cheaper_elsewhere(view, current, fallback):
        if _is_cheaper_elsewhere(view, current, fallback, spots, prior):
            return Move(target=fallback, reason="on-demand is cheaper elsewhere, including the move")
        decision = evaluation.find_entry(current).choose(current)
        return replace(decision, hours=min(decision.hours, DECISION_HOURS_MAX))
    near = _find_near_fallback(view, candidates, fallback, current)
    if near is None:
        return evaluation.find_entry(current).choose(current)
    beside = MarketEvaluation.of(view, near, [read_market(each, near, prior) for each in spots], prior)
    entries = [each.find_entry(current) for each in (beside, replace(evaluation, has_near=True))]
    return min(entries, key=lambda each: each.find_usd(current)).choose(current)


def _is_late(view: JobView, current: Candidate) -> bool:
    """Return whether running on-demand machines will miss the deadline. They lose no unsaved work."""
    assert view.time_left_hours is not None
    left = view.starting_hours + (view.work_left_hours - view.unsaved_hours) / current.speed
    return left > view.time_left_hours + EPSILON_HOURS


def _choose_on_spot(evaluation: MarketEvaluation, current: Candidate) -> Decision:
    """Stay, move to another place, or continue on-demand if spot, whose price has risen, costs more than that."""
    decision = evaluation.choose_on_spot(current)
    place = decision.target if isinstance(decision, Move) else current
    if _is_costlier(evaluation.view, place, evaluation.fallback) and evaluation.is_fallback_cheaper(current):
        return Move(target=evaluation.fallback, reason="on-demand is cheaper than spot, including the move")
    return decision


def _is_costlier(view: JobView, current: Candidate, fallback: Candidate) -> bool:
    """Return whether work on spot costs more than on-demand that has a price: own machines without one may be busy."""
    free_usd_hour = view.hour_value_usd or FREE_USD_HOUR  # `weigh` has added it
    return current.usd_work_hour > fallback.usd_work_hour and fallback.placement.usd_hour > free_usd_hour


def _find_near_fallback(
    view: JobView, candidates: Sequence[Candidate], fallback: Candidate, current: Candidate | None
) -> Candidate | None:
    """Return on-demand near the data that is in time, if nothing runs and the fallback is elsewhere.

    The fallback is the cheapest place for all the remaining work. Near the data, on-demand costs more, but the job can
    change between it and spot without egress.
    """
    if fallback.move_usd <= 0 or view.time_left_hours is None or current is not None:
        return None
    limit = view.time_left_hours - view.look_hours + EPSILON_HOURS
    near = [
        each
        for each in candidates
        if not each.is_spot and each.move_usd <= 0 and find_finish_hours(each, view.sure_left_hours) <= limit
    ]
    return min(near, key=lambda each: each.usd_work_hour, default=None)


def _may_be_cheaper_elsewhere(view: JobView, current: Candidate, there: Candidate) -> bool:
    """Return whether the cheapest on-demand saves more than the move there even if spot never opens again."""
    saving = (current.usd_work_hour - there.usd_work_hour) * view.sure_left_hours
    return (
        saving > MOVE_GAIN * _price_move(there)
        and view.starting_hours <= 0
        and find_spare_hours(view, there) > EPSILON_HOURS
    )


def _is_cheaper_elsewhere(
    view: JobView, current: Candidate, there: Candidate, spots: Sequence[Candidate], prior: Prior
) -> bool:
    """Return whether running on-demand should move to the cheapest one, as spot is not expected back soon.

    Both are weighed by their own value functions, after the move with the data there. Before, spot must have been
    closed until the higher price has cost as much as the move: value functions alone give up spot too early.
    """
    closed_hours = min(0.0 if each.is_open else each.age_hours - each.met_hours for each in spots)
    if (current.usd_work_hour - there.usd_work_hour) * closed_hours < _price_move(there):
        return False
    moved = [replace(each, move_usd=0.0 if is_beside(each, there) else there.move_usd) for each in spots]
    home = replace(there, move_usd=0.0)
    here = MarketEvaluation.of(view, current, [read_market(each, current, prior) for each in spots], prior)
    away = MarketEvaluation.of(view, home, [read_market(each, home, prior) for each in moved], prior)
    move_usd = there.move_usd + away.find_entry(None).weigh_fallback() * there.placement.usd_hour
    return here.find_entry(current).find_usd(current) - move_usd > (MOVE_GAIN - 1) * _price_move(there)


def _price_move(there: Candidate) -> float:
    return there.move_usd + there.start_hours * there.placement.usd_hour
