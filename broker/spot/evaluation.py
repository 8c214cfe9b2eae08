"""Evaluate the options of a job on its spot markets by value functions, with one on-demand place in reserve.

The decision process of one market (`broker.spot.value_function`) represents all of them: the best place determines the
price and the hazard, the others the probability that one is open when it is lost, and the hazard of reopening. Places
are ranked by price, by hazard times the cost of a loss, and by the cost of moving there. Places with a speed other than
that of the best one are considered by their own value functions: running there changes the spare time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from broker.spot.durations import find_class
from broker.spot.forecast import SpotMarket
from broker.spot.market_values import MarketValues
from broker.spot.no_deadline import DECISION_HOURS_MAX, MOVE_GAIN
from broker.spot.policies.base import (
    EPSILON_HOURS,
    Candidate,
    Decision,
    JobView,
    Move,
    Stay,
    Wait,
    Weighed,
    find_exposed_hours,
    find_hours_after_start,
    find_idle_hours,
    find_safe_hours,
    find_spare_hours,
    is_affordable,
    is_safe_to_start,
)
from broker.spot.prior import Prior
from broker.spot.value_function import ValueFunction

# Nothing can be learned from hostile markets in time, so their cost beyond on-demand is bounded: by a share, or by a
# few failed starts if those are more expensive, since recorded markets require that tolerance.
EXCESS_SHARE_MAX, FAILURES_MAX = 0.015, 3
DECISION_HOURS_MIN = 0.02
DECISIONS_AHEAD = tuple(DECISION_HOURS_MIN * 2.0**step for step in range(6))
LOSS_BOUND = 2.0  # no loss costs more than on-demand for all the work, let alone twice as much
# Behind uniform progress, waiting must gain this many on-demand hours where several markets change together: spare
# time that is used up excludes all later starts on spot, which values at wrong hazards underrate (decision 341).
BEHIND_GAIN_HOURS = 0.03
# A move to another kind must gain this share of the cost to finish: less is within the rounding of value functions.
KIND_GAIN_SHARE = 0.01
SPOT, ONDEMAND, WAITING = "spot now", "on-demand now", "waiting"


def is_beside(one: Candidate, other: Candidate) -> bool:
    """Return whether both are in one zone: between them, no data moves."""
    here, there = one.placement.offer, other.placement.offer
    return (here.cloud, here.region, here.zone) == (there.cloud, there.region, there.zone)


@dataclass(frozen=True, kw_only=True)
class MarketEvaluation:
    """The markets of a job, and its state in one value function. Costs are in on-demand hours of work."""

    view: JobView
    fallback: Candidate
    markets: Sequence[SpotMarket]
    values: MarketValues
    best: SpotMarket  # the best open market, else the best one to wait for
    basis: SpotMarket  # the market of the value function
    spare: float
    work: float
    has_near: bool = False  # another evaluation has on-demand near the data as its fallback

    @classmethod
    def of(cls, view: JobView, fallback: Candidate, markets: Sequence[SpotMarket], prior: Prior) -> MarketEvaluation:
        """Return the evaluation by the best market's value function. `fallback` is the on-demand place in reserve."""
        opened = [each for each in markets if each.candidate.is_open] or markets
        start = fallback.start_hours
        work = view.sure_left_hours / fallback.speed
        best = opened[0]
        if len(opened) > 1:
            best = min(opened, key=lambda each: each.rate(each.hour_price * start + start, work))
        found = cls(
            view=view, fallback=fallback, markets=markets, values=MarketValues(view, fallback, markets, prior),
            best=best, basis=best, spare=max(find_spare_hours(view, fallback), 0.0), work=work,
        )  # fmt: skip
        # A rate is linear in the cost of a loss: a market that is best at both bounds is best at every cost.
        cheapest = min(opened, key=lambda each: each.rate(LOSS_BOUND * (work + start), work))
        if cheapest is not min(opened, key=lambda each: each.rate(0.0, work)):
            loss = found.loss_of(best)
            cheapest = min(opened, key=lambda each: each.rate(loss, work))
        return replace(found, best=cheapest) if cheapest is not best else found

    @property
    def value_function(self) -> ValueFunction:
        """Return the value function for the parameters of `basis`."""
        return self.values.find(self.basis)

    def find_usd(self, current: Candidate | None) -> float:
        """Return the expected cost to the end of the best option of a job that is not on spot."""
        return min(self._weigh_options(current, 0.0).values()) * self._usd_hour

    def weigh_fallback(self) -> float:
        """Return the expected cost to the end of starting at the on-demand fallback now."""
        return self._weigh_options(None, 0.0)[ONDEMAND]

    def is_fallback_cheaper(self, current: Candidate) -> bool:
        """Return whether a job that runs on spot there saves more than the move if it continues on-demand."""
        here = next(each for each in self.markets if each.candidate is current)
        away, cost = self._consider(here).weigh_fallback(), self.fallback.start_hours + self._fallback_price
        return self._weigh_run(here) - away > (MOVE_GAIN - 1) * cost

    def find_entry(self, current: Candidate | None) -> MarketEvaluation:
        """Choose the place by expected cost to the end, each by its own value function.

        The candidates are the cheap place, the calm one, the best of each speed, the one cheapest for all the work, and
        the best near the data.
        """
        if self.best is self.basis and not self._has_moves and not self._has_kinds:
            return self
        places = [self.best, self.basis, *self._list_best_of_kinds()]
        if self._has_moves:  # egress is paid once, the price for all the work
            opened = [each for each in self.markets if each.candidate.is_open] or [self.best]
            places.append(
                min(opened, key=lambda each: (each.price * self.work + each.move_price, -each.candidate.age_hours))
            )
        near = [each for each in self.markets if each.candidate.is_open and each.move_price <= 0]
        if self._has_moves and near:
            places.append(min(near, key=lambda each: (each.price, -each.candidate.age_hours)))
        evaluations = [self._consider(each) for each in {id(each): each for each in places}.values()]
        return min(evaluations, key=lambda each: each._weigh_options(current, 0.0).get(SPOT, math.inf))

    def _consider(self, market: SpotMarket) -> MarketEvaluation:
        """Return the evaluation by the value function of this market."""
        return replace(self, best=market, basis=market)

    @cached_property
    def _has_moves(self) -> bool:
        return any(each.move_price > 0 for each in self.markets)

    def choose(self, current: Candidate | None) -> Decision:
        """Choose for a job that is not on spot."""
        options = self._weigh_options(current, 0.0)
        best = min(options, key=options.__getitem__)
        weighed = tuple((name, worth * self._usd_hour) for name, worth in options.items())
        if best == SPOT:
            return self._move_to(self.best, "spot is worth its start", weighed)
        hours = self._find_change(current, best)
        if best == WAITING:
            return Wait(hours=min(self.spare, hours), reason="spot is worth waiting for", weighed=weighed)
        if current is not None:
            return Stay(hours=hours, reason="on-demand saves time for later", weighed=weighed)
        return Move(target=self.fallback, hours=hours, reason="time is worth more than waiting saves", weighed=weighed)

    def _weigh_options(self, current: Candidate | None, ahead: float) -> dict[str, float]:
        """Return the expected cost to the end of each option, `ahead` hours from now if nothing changes until then."""
        function, target, is_open = self.value_function, self.best.candidate, self.best.candidate.is_open
        begun = self.view.starting_hours if current is not None else ahead  # hours ahead without work
        idle = min(ahead, begun)
        work, spare, age_hours = self.work - (ahead - idle), self.spare - idle, self._age_hours + ahead
        age, options = find_class(age_hours), dict[str, float]()
        is_working = current is not None and begun <= idle
        lost_hours = target.start_hours - (target.overlap_hours if is_working else 0.0)
        is_safe = spare >= lost_hours + find_exposed_hours(self.view, target, self.fallback) - EPSILON_HOURS
        can_enter = is_open and is_safe and self._can_enter
        if can_enter:
            outlived = target.seen.count_reached(age_hours, age_hours + target.start_hours)
            enter_usd = function.enter_beside_usd if is_working else function.enter_usd
            options[SPOT] = enter_usd(age, work, spare, seen=outlived) + self.best.move_price
        started = begun - idle if current is not None else None
        options[ONDEMAND] = self._weigh_ondemand(function, age, self.best, work, spare, started)
        for closed, awaited in self._awaited:
            if not (can_enter and self._is_bridge(closed, is_working=current is not None)):
                age_closed = find_class(closed.candidate.age_hours + ahead)
                worth = self._weigh_ondemand(awaited, age_closed, closed, work, spare, started)
                options[ONDEMAND] = min(worth, options[ONDEMAND])
        # Running machines are not given up in order to wait, and waiting reveals nothing about an unwatched market.
        if current is None and spare > EPSILON_HOURS and (target.is_watched or not can_enter):
            options[WAITING] = function.wait_usd(age, work, spare, is_open=is_open) + self.best.move_price
        if current is None and spare > EPSILON_HOURS:
            for closed, awaited in self._awaited:
                age = find_class(closed.candidate.age_hours + ahead)
                worth = awaited.wait_usd(age, work, spare, is_open=False) + closed.move_price
                options[WAITING] = min(worth, options.get(WAITING, math.inf))
        if WAITING in options and spare < self._due_spare(work):
            options[WAITING] += BEHIND_GAIN_HOURS
        if self.has_near:  # tables know no egress; where on-demand is hardly needed, the other evaluation is cheaper
            for name in options.keys() & {SPOT, WAITING}:
                options[name] += self._fallback_price + self._find_return_price(self.best)
        return options

    def _weigh_ondemand(
        self, function: ValueFunction, age: int, place: SpotMarket, work: float, spare: float, started: float | None
    ) -> float:
        """Return the expected cost of on-demand until a return to spot at this place, if it pays.

        `started` is the rest of the start of running machines; None: nothing runs.
        """
        is_open, moved = place.candidate.is_open, 0.0
        if started is not None:  # the rest of the start is still to be paid
            worth = function.keep_usd(age, work, max(spare - started, 0.0), is_open=is_open)
        else:
            started, moved = function.parameters.start_hours, self._fallback_price
            after = spare - started
            worth = function.ondemand_usd(age, work, after, is_open=is_open) if after >= 0 else work
        return moved + started + min(worth + self._find_return_price(place), max(work, worth))

    def _is_bridge(self, closed: SpotMarket, *, is_working: bool) -> bool:
        """Return whether spot at the best place costs less than on-demand until this closed place opens."""
        best, stay = self.best, min(closed.mean_closed_hours, self.work)
        spot = best.start_price + best.move_price + (best.price + best.work_hazard * self.loss_of(best)) * stay
        return MOVE_GAIN * spot < stay + (0.0 if is_working else self.fallback.start_hours + self._fallback_price)

    def _due_spare(self, work: float) -> float:
        """Return the spare time of uniform progress with this much work left.

        0 unless several markets open and close together.
        """
        view, fallback = self.view, self.fallback
        is_common = len(self.markets) > 1 and len({each.cohort for each in self.markets}) == 1
        if not view.deadline_hours or work <= 0 or not is_common:
            return 0.0
        whole = max(view.work_hours, view.work_left_hours) / fallback.speed
        slack = view.deadline_hours - view.look_hours - whole - fallback.start_hours
        return max(slack, 0.0) * work / whole

    @cached_property
    def _move_usd_max(self) -> float:
        """Return the maximum egress cost of a failed start; it must not exclude a start near the data."""
        return max(each.candidate.move_usd for each in self.markets)

    @cached_property
    def _fallback_price(self) -> float:
        """Return the cost of moving to the on-demand fallback."""
        return self.fallback.move_usd / self._usd_hour

    def _find_return_price(self, place: SpotMarket) -> float:
        """Return the cost of moving from on-demand to this place: none within a zone."""
        if not self._has_moves:
            return 0.0
        is_near = is_beside(self.fallback, place.candidate)
        return 0.0 if is_near else max(place.move_price, self._fallback_price)

    def _find_change(self, current: Candidate | None, choice: str) -> float:
        """Return the hours for which the choice holds if nothing but time and age changes."""
        if current is not None and not self.best.candidate.is_open:
            return math.inf  # on-demand is the only option before spot opens
        hours = DECISION_HOURS_MIN
        for ahead in DECISIONS_AHEAD:
            options = self._weigh_options(current, ahead)
            if min(options, key=options.__getitem__) != choice:
                break
            hours = ahead
        return hours

    def choose_on_spot(self, current: Candidate) -> Decision:
        """Stay, or move to a place whose gain exceeds the cost of the move."""
        hours = find_safe_hours(self.view, current, self.fallback)
        here = next(each for each in self.markets if each.candidate is current)
        best = self.best
        stay = Stay(hours=min(hours, DECISION_HOURS_MAX), reason="on spot")
        if self._has_kinds:
            return self._find_better_place(here) or stay
        if best is here or not self._can_move(here, best):
            return stay
        loss = self.loss_of(here)
        stay_work = min(self.work, best.stay_work, here.stay_work)
        gain = (here.price + here.work_hazard * loss - best.price - best.work_hazard * loss) * stay_work
        start = best.candidate.start_hours
        cost = (
            start * best.hour_price
            + find_idle_hours(self.view, best.candidate) * self._usd_spare_hour()
            + best.move_price
        )
        if gain > MOVE_GAIN * cost:
            return self._move_to(best, "another location is cheaper, including the move", ())
        return stay

    def _find_better_place(self, here: SpotMarket) -> Move | None:
        """Return the move to the place of any speed that is best by its own value function; None: stay."""
        stay, gained = self._weigh_run(here), 0.0
        found: tuple[SpotMarket, float] | None = None
        for each in self._list_best_of_kinds():
            target = each.candidate
            if each is here or not self._can_move(here, each):
                continue
            function, age = self.values.find(each), target.age_hours
            outlived = target.seen.count_reached(age, age + target.start_hours)
            usd = function.enter_usd(find_class(age), self.work, self.spare, seen=outlived) + each.move_price
            cost = target.start_hours * each.hour_price + each.move_price
            gain = stay - usd - (MOVE_GAIN - 1) * cost - KIND_GAIN_SHARE * stay
            if gain > gained:
                found, gained = (each, usd), gain
        if found is None:
            return None
        weighed = (("staying", stay * self._usd_hour), (SPOT, found[1] * self._usd_hour))
        reason = "another location is cheaper, including the move"
        return self._move_to(found[0], reason, weighed)

    def _move_to(self, market: SpotMarket, reason: str, weighed: Weighed) -> Move:
        target = market.candidate
        hours = find_hours_after_start(self.view, target, self.fallback)
        return Move(target=target, hours=hours, reason=reason, weighed=weighed)

    def find_run_usd(self, current: Candidate) -> float:
        """Return the expected cost to the end of a job that runs on spot there."""
        return self._weigh_run(next(each for each in self.markets if each.candidate is current)) * self._usd_hour

    def _weigh_run(self, here: SpotMarket) -> float:
        function, begun = self.values.find(here), self.view.starting_hours
        on = function.run.read(
            find_class(here.candidate.age_hours), function.locate(self.work, max(self.spare - begun, 0.0))
        )
        return begun * here.hour_price + on

    @cached_property
    def _has_kinds(self) -> bool:
        return len({each.speed for each in self.markets}) > 1

    def _list_best_of_kinds(self) -> list[SpotMarket]:
        """List the best open place of each speed; empty if all have the same."""
        if not self._has_kinds:
            return []
        loss = self.loss_of(self.best)
        found = dict[float, SpotMarket]()
        for each in self.markets:
            best = found.get(each.speed)
            if each.candidate.is_open and (best is None or each.rate(loss, self.work) < best.rate(loss, self.work)):
                found[each.speed] = each
        return list(found.values())

    @property
    def _usd_hour(self) -> float:
        """Return the price of an on-demand hour, the unit of all costs here."""
        return self.fallback.placement.usd_hour

    def loss_of(self, market: SpotMarket) -> float:
        """Return the cost of a loss there now."""
        here = self.value_function.locate(self.work, self.spare)
        on = self.value_function.run.read(find_class(market.candidate.age_hours), here)
        return max(self.value_function.lost_usd(self.work, self.spare) - on, 0.0)

    def _usd_spare_hour(self) -> float:
        """Return the marginal value of an hour of spare time."""
        age, step = find_class(self._age_hours), max(self.value_function.parameters.start_hours, 0.1)
        low = max(self.spare - step, 0.0)
        less, more = (
            self.value_function.run.read(age, self.value_function.locate(self.work, each)) for each in (low, low + step)
        )
        return max(less - more, 0.0) / step

    @cached_property
    def _age_hours(self) -> float:
        """Return the age of the market as a whole: that of its best open place, or since the last place closed."""
        if self.best.candidate.is_open:
            return self.best.candidate.age_hours
        return min(each.candidate.age_hours for each in self.markets)

    @cached_property
    def _awaited(self) -> Sequence[tuple[SpotMarket, ValueFunction]]:
        """List closed places that are cheaper or nearer than the best open one, each with its own value function.

        They are the cheapest one and the cheapest one near the data. Each reopens at its own rate: the others' offers
        are open already, and more expensive.
        """
        best = self.best
        if not best.candidate.is_open:
            return ()
        found = dict[int, SpotMarket]()
        closed = [each for each in self.markets if not each.candidate.is_open]
        for group in (
            [each for each in closed if each.price < best.price],
            [each for each in closed if each.move_price < best.move_price],
        ):
            if group:
                cheapest = min(
                    group,
                    key=lambda each: (each.price + each.move_price / max(self.work, 0.1), each.candidate.age_hours),
                )
                found[id(cheapest)] = cheapest
        return [(each, self.values.find(each, is_alone=True)) for each in found.values()]

    @cached_property
    def _can_enter(self) -> bool:
        target = self.best.candidate
        is_safe = self.best.outlives_start and is_safe_to_start(self.view, target, self.fallback)
        return is_safe and self._is_affordable(self.view, target)

    def _can_move(self, here: SpotMarket, there: SpotMarket) -> bool:
        """Return whether a job on spot may move: prices may change again, but more than on-demand is never worth it."""
        view, target = replace(self.view, save_every_hours=0.0), there.candidate
        is_safe = target.is_open and there.outlives_start and is_safe_to_start(self.view, target, self.fallback)
        return is_safe and (here.price > 1 or self._is_affordable(view, target))

    def _is_affordable(self, view: JobView, target: Candidate) -> bool:
        most = self._move_usd_max
        return is_affordable(view, target, self.fallback, share=EXCESS_SHARE_MAX, failures=FAILURES_MAX, move_usd=most)
