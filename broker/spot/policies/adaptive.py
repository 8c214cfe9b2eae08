"""The broker's policy: least expected cost, by a Markov decision process with hazards learned online; never too late.

The decision process of one market (`broker.spot.value_function`) represents all of them: the best place determines the
price and the hazard, the others the probability that one is open when it is lost, and the hazard of reopening. Places
are ranked by price, by hazard times the cost of a loss, and by the cost of moving there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from broker.spot.durations import class_of
from broker.spot.forecast import SpotMarket, read_market
from broker.spot.outlook import Outlooks
from broker.spot.policies.base import (
    EPSILON_HOURS,
    Candidate,
    Decision,
    JobView,
    Move,
    Stay,
    Wait,
    find_fallback,
    finish_hours,
    is_affordable,
    is_safe_to_start,
    safe_hours,
    spare_hours,
    take_fallback,
)
from broker.spot.prior import MEASURED, Prior
from broker.spot.value_function import ValueFunction

# Nothing can be learned from hostile markets in time, so their cost beyond on-demand is bounded: by a share, or by a
# few failed starts if those are more expensive, since recorded markets require that tolerance.
EXCESS_SHARE_MAX, FAILURES_MAX = 0.015, 3
LOOK_HOURS_MIN, LOOK_HOURS_MAX = 0.02, 1.0
LOOKS_AHEAD = tuple(LOOK_HOURS_MIN * 2.0**step for step in range(6))
LOSS_BOUND = 2.0  # no loss costs more than on-demand for all the work, let alone twice as much
MOVE_GAIN = 1.15  # the expected gain of a move must exceed its cost by 15 %, as it is uncertain
SPOT, ONDEMAND, WAITING = "spot now", "on-demand now", "waiting"


def decide(view: JobView, candidates: Sequence[Candidate]) -> Decision:
    """Decide by expected cost; never late where on-demand alone would not have been late."""
    return weigh(view, candidates, MEASURED)


def weigh(view: JobView, candidates: Sequence[Candidate], prior: Prior) -> Decision:
    """Decide as `decide` does, with another prior."""
    fallback = find_fallback(view, candidates)
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
        return _weigh_without_deadline(view, current, [read_market(each, fallback, prior) for each in spots])
    if current is not None and current.is_spot:
        hours = safe_hours(view, current, fallback)
        if hours <= 0:
            return take_fallback(view, candidates, fallback, "a later loss of spot would miss the deadline")
        if len(spots) == 1:
            return Stay(hours=hours, reason="on spot")
    elif current is not None and view.time_left_hours < view.work_left_hours / current.speed:
        return Stay(reason="on-demand, already late")
    markets = [read_market(each, fallback, prior) for each in spots]
    scale = _Scale.of(view, fallback, markets, prior)
    if current is not None and current.is_spot:
        return scale.choose_on_spot(current)
    near = _find_near_fallback(view, candidates, fallback, current)
    if near is None:
        return scale.find_entry(current).choose(current)
    beside = _Scale.of(view, near, [read_market(each, near, prior) for each in spots], prior)
    entries = [each.find_entry(current) for each in (beside, replace(scale, has_near=True))]
    return min(entries, key=lambda each: each.find_usd(current)).choose(current)


def _find_near_fallback(
    view: JobView, candidates: Sequence[Candidate], fallback: Candidate, current: Candidate | None
) -> Candidate | None:
    """Return on-demand beside the data that is in time, if nothing runs and the fallback is elsewhere.

    The fallback is the cheapest place for all the work left. Beside the data, on-demand costs more, but the job can
    change between it and spot without egress.
    """
    if fallback.move_usd <= 0 or view.time_left_hours is None or current is not None:
        return None
    limit = view.time_left_hours - view.look_hours + EPSILON_HOURS
    near = [
        each
        for each in candidates
        if not each.is_spot and each.move_usd <= 0 and finish_hours(each, view.sure_left_hours) <= limit
    ]
    return min(near, key=lambda each: each.usd_work_hour, default=None)


@dataclass(frozen=True, kw_only=True)
class _Scale:
    """The value function and the state of the job in it. Costs are in on-demand hours of work."""

    view: JobView
    fallback: Candidate
    markets: Sequence[SpotMarket]
    outlooks: Outlooks
    best: SpotMarket  # the best open market, else the best one to wait for
    basis: SpotMarket  # the market of the value function
    spare: float
    work: float
    has_near: bool = False  # another scale has on-demand beside the data as its fallback

    @classmethod
    def of(cls, view: JobView, fallback: Candidate, markets: Sequence[SpotMarket], prior: Prior) -> _Scale:
        opened = [each for each in markets if each.candidate.is_open] or markets
        start = fallback.start_hours
        work = view.sure_left_hours / fallback.speed
        best = opened[0]
        if len(opened) > 1:
            best = min(opened, key=lambda each: each.rate(each.price * start + start, work))
        found = cls(
            view=view,
            fallback=fallback,
            markets=markets,
            outlooks=Outlooks(view, fallback, markets, prior),
            best=best,
            basis=best,
            spare=max(spare_hours(view, fallback), 0.0),
            work=work,
        )
        # A rate is linear in the cost of a loss: a market that is best at both bounds is best at every cost.
        dear = min(opened, key=lambda each: each.rate(LOSS_BOUND * (work + start), work))
        if dear is not min(opened, key=lambda each: each.rate(0.0, work)):
            loss = found.loss_of(best)
            dear = min(opened, key=lambda each: each.rate(loss, work))
        return replace(found, best=dear) if dear is not best else found

    @property
    def outlook(self) -> ValueFunction:
        """Return the value function for the terms of `basis`."""
        return self.outlooks.find(self.basis)

    def find_usd(self, current: Candidate | None) -> float:
        """Return the expected cost to the end of the best option of a job that is not on spot."""
        return min(self._weigh_options(current, 0.0).values()) * self.fallback.usd_work_hour

    def find_entry(self, current: Candidate | None) -> _Scale:
        """Choose the place by expected cost to the end, each by its own value function.

        In question are the cheap place, the calm one, the one cheapest for all the work, and the best beside the data.
        """
        if self.best is self.basis and not self._has_moves:
            return self
        places = [self.best, self.basis]
        if self._has_moves:  # egress is paid once, the price for all the work
            opened = [each for each in self.markets if each.candidate.is_open] or [self.best]
            places.append(
                min(opened, key=lambda each: (each.price * self.work + each.move_price, -each.candidate.age_hours))
            )
        near = [each for each in self.markets if each.candidate.is_open and each.move_price <= 0]
        if self._has_moves and near:
            places.append(min(near, key=lambda each: (each.price, -each.candidate.age_hours)))
        scales = [self._consider(each) for each in {id(each): each for each in places}.values()]
        return min(scales, key=lambda each: each._weigh_options(current, 0.0).get(SPOT, math.inf))

    def _consider(self, market: SpotMarket) -> _Scale:
        """Return the scale by the value function of this market."""
        return replace(self, best=market, basis=market)

    @cached_property
    def _has_moves(self) -> bool:
        return any(each.move_price > 0 for each in self.markets)

    def choose(self, current: Candidate | None) -> Decision:
        """Choose for a job that is not on spot."""
        options = self._weigh_options(current, 0.0)
        best = min(options, key=options.__getitem__)
        weighed = tuple((name, worth * self.fallback.usd_work_hour) for name, worth in options.items())
        if best == SPOT:
            return Move(target=self.best.candidate, reason="spot is worth its start", weighed=weighed)
        hours = self._find_change(current, best)
        if best == WAITING:
            return Wait(hours=min(self.spare, hours), reason="spot is worth waiting for", weighed=weighed)
        if current is not None:
            return Stay(hours=hours, reason="on-demand saves time for later", weighed=weighed)
        return Move(target=self.fallback, hours=hours, reason="time is worth more than waiting saves", weighed=weighed)

    def _weigh_options(self, current: Candidate | None, ahead: float) -> dict[str, float]:
        """Return the expected cost to the end of each option, `ahead` hours from now if nothing changes until then."""
        outlook, target, is_open = self.outlook, self.best.candidate, self.best.candidate.is_open
        begun = self.view.starting_hours if current is not None else ahead  # hours ahead without work
        idle = min(ahead, begun)
        work, spare, age_hours = self.work - (ahead - idle), self.spare - idle, self._age_hours + ahead
        age, options = class_of(age_hours), dict[str, float]()
        is_safe = spare >= target.start_hours + self.view.exposed_hours - EPSILON_HOURS
        can_enter = is_open and is_safe and self._can_enter
        if can_enter:
            outlived = target.seen.count_reached(age_hours, age_hours + target.start_hours)
            options[SPOT] = outlook.enter_usd(age, work, spare, seen=outlived) + self.best.move_price
        if current is not None:  # the rest of an unfinished start is still to be paid
            rest = begun - idle
            table = outlook.keep_open if is_open else outlook.keep_closed
            worth = table.read(age, outlook.locate(work, max(spare - rest, 0.0)))
            options[ONDEMAND] = rest + min(worth + self._return_price, max(work, worth))
        else:
            start = outlook.terms.start_hours
            table, after = outlook.ondemand_open if is_open else outlook.ondemand_closed, spare - start
            worth = table.read(age, outlook.locate(work, after)) if after >= 0 else work
            options[ONDEMAND] = self._fallback_price + start + min(worth + self._return_price, max(work, worth))
        # Running machines are not given up in order to wait, and waiting reveals nothing about an unwatched market.
        if current is None and spare > EPSILON_HOURS and (target.is_watched or not can_enter):
            table = outlook.wait_open if is_open else outlook.wait_closed
            options[WAITING] = table.read(age, outlook.locate(work, spare)) + self.best.move_price
        if current is None and spare > EPSILON_HOURS:
            for closed, awaited in self._awaited:
                age = class_of(closed.candidate.age_hours + ahead)
                worth = awaited.wait_closed.read(age, awaited.locate(work, spare)) + closed.move_price
                options[WAITING] = min(worth, options.get(WAITING, math.inf))
        if self.has_near:  # tables know no egress; where on-demand is hardly needed, the other scale is cheaper
            for name in options.keys() & {SPOT, WAITING}:
                options[name] += self._fallback_price + self._return_price
        return options

    @cached_property
    def _move_usd_max(self) -> float:
        """Return the maximum egress cost of a failed start; it must not exclude a start near the data."""
        return max(each.candidate.move_usd for each in self.markets)

    @cached_property
    def _fallback_price(self) -> float:
        """Return the cost of moving to the on-demand fallback."""
        return self.fallback.move_usd / self.fallback.usd_work_hour

    @cached_property
    def _return_price(self) -> float:
        """Return the cost of moving from on-demand to the best place: none within a zone."""
        if not self._has_moves:
            return 0.0
        here, there = self.fallback.placement.offer, self.best.candidate.placement.offer
        is_near = (here.cloud, here.region, here.zone) == (there.cloud, there.region, there.zone)
        return 0.0 if is_near else max(self.best.move_price, self._fallback_price)

    def _find_change(self, current: Candidate | None, choice: str) -> float:
        """Return the hours for which the choice holds if nothing but time and age changes."""
        if current is not None and not self.best.candidate.is_open:
            return math.inf  # on-demand is the only option before spot opens
        hours = LOOK_HOURS_MIN
        for ahead in LOOKS_AHEAD:
            options = self._weigh_options(current, ahead)
            if min(options, key=options.__getitem__) != choice:
                break
            hours = ahead
        return hours

    def choose_on_spot(self, current: Candidate) -> Decision:
        """Stay, or move to a place whose gain exceeds the cost of the move."""
        hours = safe_hours(self.view, current, self.fallback)
        here = next(each for each in self.markets if each.candidate is current)
        best = self.best
        stay = Stay(hours=min(hours, LOOK_HOURS_MAX), reason="on spot")
        if best is here or not best.candidate.is_open or not best.outlives_start:
            return stay
        if not is_safe_to_start(self.view, best.candidate, self.fallback):
            return stay
        loss = self.loss_of(here)
        stint = min(self.work, best.stint_hours, here.stint_hours)
        gain = (here.price + here.hazard * loss - best.price - best.hazard * loss) * stint
        start = best.candidate.start_hours
        cost = start * (best.price + self._usd_spare_hour()) + best.move_price
        if gain > MOVE_GAIN * cost:
            return Move(target=best.candidate, reason="another location is cheaper, including the move")
        return stay

    def loss_of(self, market: SpotMarket) -> float:
        """Return the cost of a loss there now."""
        here = self.outlook.locate(self.work, self.spare)
        on = self.outlook.run.read(class_of(market.candidate.age_hours), here)
        return max(self.outlook.lost_usd(self.work, self.spare) - on, 0.0)

    def _usd_spare_hour(self) -> float:
        """Return the marginal value of an hour of spare time."""
        age, step = class_of(self._age_hours), max(self.outlook.terms.start_hours, 0.1)
        low = max(self.spare - step, 0.0)
        less, more = (self.outlook.run.read(age, self.outlook.locate(self.work, each)) for each in (low, low + step))
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

        They are the cheapest one and the cheapest one beside the data. Each reopens at its own rate: what the others
        offer is open already, and dearer.
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
        return [(each, self.outlooks.find(each, is_alone=True)) for each in found.values()]

    @cached_property
    def _can_enter(self) -> bool:
        view, target, fallback = self.view, self.best.candidate, self.fallback
        return (
            self.best.outlives_start
            and is_safe_to_start(view, target, fallback)
            and is_affordable(
                view, target, fallback, share=EXCESS_SHARE_MAX, failures=FAILURES_MAX, move_usd=self._move_usd_max
            )
        )


def _weigh_without_deadline(view: JobView, current: Candidate | None, markets: Sequence[SpotMarket]) -> Decision:
    """Choose the place with the lowest price of work, losses included: time costs nothing."""
    opened = [each for each in markets if each.candidate.is_open and each.outlives_start]
    if current is not None and not current.is_spot:
        opened = [each for each in opened if each.price < 1]
    if not opened:
        return Wait(reason="spot is unavailable") if current is None else Stay(reason="spot is unavailable")
    work = view.work_left_hours
    best = min(opened, key=lambda each: each.rate(each.loss_price, work))
    here = next((each for each in markets if each.candidate is current), None)
    if here is None:
        return Move(target=best.candidate, reason="spot is available")
    stint = min(work, best.stint_hours, here.stint_hours)
    gain = (here.rate(here.loss_price, math.inf) - best.rate(best.loss_price, math.inf)) * stint
    if best is not here and gain > MOVE_GAIN * (best.loss_price + best.move_price):
        return Move(target=best.candidate, reason="another location is cheaper, including the move")
    return Stay(hours=LOOK_HOURS_MAX if len(markets) > 1 else math.inf, reason="on spot")
