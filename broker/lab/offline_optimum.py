"""Optimal cost of a job with perfect foresight: the lower bound for every policy.

This is an exact dynamic program over the times at which any market changes. A label is a partial plan: work done,
dollars, and the running mode. Nothing changes within an interval, so a plan uses each interval completely or not at
all, with one exception: of two partially used intervals, the more expensive one could be shortened and the other
lengthened. Excess work is therefore taken back at the end, from the last stretch, which ends with the work, or from the
most expensive earlier stretch that begins a run. A plan is dropped if another one dominates it, or if it cannot beat
the best one by the Lagrangian bound, which prices each missing hour of work at one fixed rate
(`broker.lab.optimum_bound`).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from broker.lab.markets import Site
from broker.lab.optimum_bound import IDLE, ONDEMAND, PricedIntervals, PricedPlan, Use

# The search ignores improvements below this share. Of plans whose work differs by less, it keeps the cheapest by the
# bound's price and the longest.
TOLERANCE = 2e-4
PRICE_STEPS = 24
PRICES = (2.0, 8.0, 32.0, 64.0)  # prices of work, tried until the plan has enough work; in prices of on-demand work


@dataclass(frozen=True, kw_only=True)
class MarketInterval:
    """The time between two changes, with (site, USD per hour) of the open sites, by site."""

    from_hours: float
    to_hours: float
    open_sites: tuple[tuple[int, float], ...]


# (work, usd, work that may be taken back, its usd per hour). A start is charged at once, by subtracting its time from
# the work done.
Label = tuple[float, float, float, float]
START: Label = (0.0, 0.0, 0.0, 0.0)


def find_optimum(
    sites: Sequence[Site],
    *,
    work_hours: float,
    deadline_hours: float,
    from_hour: float = 0.0,
    tolerance: float = TOLERANCE,
) -> float:
    """Return the least USD to finish in time from `from_hour` of the recordings without egress; infinite if impossible.

    With machines of several speeds, a plan uses on-demand of one kind only, the best one; spot of all kinds. The result
    exceeds the optimum by at most about the share `tolerance`: ten times the tolerance takes a tenth of the
    time or less.
    """
    intervals = list_intervals(sites, from_hour, deadline_hours)
    return min(
        _Search(sites, each, intervals, work_hours, deadline_hours, tolerance).run() for each in _list_reserves(sites)
    )


def _list_reserves(sites: Sequence[Site]) -> list[Site]:
    """Return the site with the cheapest on-demand work of each speed, without those both slower and more expensive."""
    found = list[Site]()
    for site in sorted(sites, key=lambda each: (_price_work(each), -each.ondemand_speed)):
        if all(site.ondemand_speed > each.ondemand_speed for each in found):
            found.append(site)
    return found


def _price_work(site: Site) -> float:
    return site.ondemand.usd_hour / site.ondemand_speed


def list_intervals(sites: Sequence[Site], from_hour: float, hours: float) -> list[MarketInterval]:
    """Split the recordings, from one hour on, at every change of any site."""
    steps = [site.find_step(from_hour) for site in sites]
    cuts, intervals = 0.0, list[MarketInterval]()
    while cuts < hours - 1e-9:
        following = [site.read_step(step + 1)[0] - from_hour for site, step in zip(sites, steps, strict=True)]
        until = min([*following, hours])
        now = [site.read_step(step) for site, step in zip(sites, steps, strict=True)]
        opened = tuple((index, placement.usd_hour) for index, (_, is_open, placement) in enumerate(now) if is_open)
        if intervals and intervals[-1].open_sites == opened:
            intervals[-1] = MarketInterval(from_hours=intervals[-1].from_hours, to_hours=until, open_sites=opened)
        else:
            intervals.append(MarketInterval(from_hours=cuts, to_hours=until, open_sites=opened))
        steps = [step + (after <= until + 1e-9) for step, after in zip(steps, following, strict=True)]
        cuts = until
    return intervals


class _Search:
    def __init__(
        self,
        sites: Sequence[Site],
        reserve: Site,
        intervals: Sequence[MarketInterval],
        work_hours: float,
        deadline_hours: float,
        tolerance: float,
    ) -> None:
        self.work, self.deadline, self.intervals = work_hours, deadline_hours, intervals
        self.speeds = [site.spot_speed for site in sites]
        self.starts = [site.start_hours * site.spot_speed for site in sites]
        self.ondemand_usd, self.ondemand_speed = reserve.ondemand.usd_hour, reserve.ondemand_speed
        self.ondemand_start = reserve.start_hours
        self.usd_work = _price_work(reserve)
        self.fastest = max(*self.speeds, self.ondemand_speed)
        rates = {usd / self.speeds[index] for interval in intervals for index, usd in interval.open_sites}
        self.least_rate = min(rates, default=math.inf)  # work at this price is never taken back, as it is the cheapest
        self.best = math.inf
        self.tolerance, self.bucket = tolerance, work_hours * tolerance
        self.uses = [self._list_uses(interval) for interval in intervals]
        starts = {ONDEMAND: self.ondemand_start * self.ondemand_speed, **dict(enumerate(self.starts))}
        self.priced = PricedIntervals(self.uses, starts)
        self.walked = [set[tuple[int, Label]]() for _ in intervals]

    def run(self) -> float:
        self._choose_price()
        labels: dict[int, list[Label]] = {IDLE: [START]}
        for number, interval in enumerate(self.intervals):
            for mode, plans in labels.items():
                self._try_sure_to_the_end(mode, plans, self.deadline - interval.from_hours)
            labels = self._advance(labels, number)
            self._improve(labels, number + 1)
            left = self.deadline - interval.to_hours
            labels = {
                mode: kept
                for mode, plans in labels.items()
                if (kept := self._prune(plans, left * self.fastest, self.to_go[number + 1], mode))
            }
        for mode, plans in labels.items():
            self._try_sure_to_the_end(mode, plans, 0.0)
        return self.best

    def _list_uses(self, interval: MarketInterval) -> list[Use]:
        """List the ways to run during an interval: on-demand, then spot at each open site."""
        hours = interval.to_hours - interval.from_hours
        ondemand = (
            ONDEMAND,
            hours * self.ondemand_speed,
            self.ondemand_start * self.ondemand_speed,
            hours * self.ondemand_usd,
            self.usd_work,
        )
        return [ondemand] + [
            (index, hours * self.speeds[index], self.starts[index], hours * usd_hour, usd_hour / self.speeds[index])
            for index, usd_hour in interval.open_sites
        ]

    def _improve(self, labels: dict[int, list[Label]], number: int) -> None:
        """Complete the most promising plan of each mode with the bound's plan: a good incumbent prunes more."""
        for mode, plans in labels.items():
            to_go = self.to_go[number][mode]
            ranked = sorted(plans, key=lambda label: self._bound(label, to_go))
            for label in ranked[:: max(1, len(ranked) // 4)][:4]:
                self._complete(label, mode, number)

    def _complete(self, label: Label, mode: int, begin: int) -> None:
        """Walk as far as the plan may still beat the best one and has not been walked before."""
        bound = self._bound(label, self.to_go[begin][mode])
        for number in range(begin, len(self.intervals)):
            walked = self.walked[number]
            if bound >= self.best or (mode, label) in walked:
                return
            walked.add((mode, label))
            following = self._step(label, mode, number)
            if following is None:
                return
            mode, label, bound = following

    def _choose_price(self) -> None:
        """Find the price of missing work with the highest bound."""
        less = PricedPlan(modes=(IDLE,) * len(self.intervals), work=0.0, usd=0.0)
        more, guesses, best_usd = None, iter(PRICES), math.inf
        for _ in range(PRICE_STEPS):
            if more is None:
                guess = next(guesses, None)
                if guess is None:
                    return  # no price buys enough work
                self.price = guess * self.usd_work
            else:
                self.price = less.find_price(more)
                best_usd = less.total_usd(self.price, self.work)
            self.to_go = self.priced.bound_to_go(self.price)
            self._walk()
            if self._is_settled:
                return  # no other plan is better by more than the tolerance
            plan = self.priced.follow_bound(self.price, self.to_go)
            is_last = plan.total_usd(self.price, self.work) >= best_usd - 1e-9
            if plan.work < self.work:
                less = plan
            else:
                more = plan
            if is_last:
                break
        if more is not None:
            self._join(less, more)

    @property
    def _is_settled(self) -> bool:
        return self.best * (1 - self.tolerance) <= self._bound(START, self.to_go[0][IDLE])

    def _join(self, less: PricedPlan, more: PricedPlan) -> None:
        """Try plans that follow one of the two up to some interval, and the other one after it."""
        usd_work = min(self.least_rate, self.price)
        for first, then in ((less, more), (more, less)):
            for modes in self.priced.join(first, then, self.work, usd_work):
                self._follow(modes)

    def _follow(self, modes: Sequence[int]) -> None:
        """Price the plan with these modes; it may finish before the last interval."""
        label, before = START, IDLE
        for number, mode in enumerate(modes):
            self._try_sure_to_the_end(before, (label,), self.deadline - self.intervals[number].from_hours)
            if mode != IDLE:
                _, gain, owed, usd, rate = self.priced.uses[number][mode]
                left = self._finish(self._use([(before, label)], mode, gain, owed, usd, rate), rate)
                if not left:
                    return
                label = left[0]
            before = mode

    def _walk(self) -> None:
        """Follow the bound's own plan; keep its cost as the best if it is in time."""
        mode, label = IDLE, START
        for number in range(len(self.intervals)):
            following = self._step(label, mode, number)
            if following is None:
                return
            mode, label, _ = following

    def _step(self, label: Label, mode: int, number: int) -> tuple[int, Label, float] | None:
        """Return mode, label and bound after an interval by the bound's plan; None if spot can finish within it.

        Does what `_advance` does, for one label: most of the time of a search is spent here.
        """
        self._try_sure_to_the_end(mode, (label,), self.deadline - self.intervals[number].from_hours)
        work, usd, taken, rate = label
        goal, price, to_go = self.work, self.price, self.to_go[number + 1]
        limit = rate if taken > 0.0 else self.least_rate
        chosen, kept, is_finished = IDLE, label, False
        least = self._bound(label, to_go[IDLE])
        for choice, gain, owed, more_usd, own_rate in self.uses[number]:
            fresh, own = (gain if mode == choice else gain - owed), 0.0
            if choice == ONDEMAND and rate <= own_rate:
                after = (work + fresh, usd + more_usd, (taken if rate == own_rate else 0.0) + fresh, own_rate)
            elif mode != choice and own_rate > limit:
                after = (work + fresh, usd + more_usd, gain, own_rate)
            else:
                after, own = (work + fresh, usd + more_usd, taken, rate), gain
            if after[0] - goal >= -1e-9:
                left = self._finish([(after, own)], own_rate)
                if not left:
                    is_finished = is_finished or choice != ONDEMAND
                    continue
                after = left[0]
            bound = after[1] + price * (goal - after[0]) + to_go[choice]
            if after[3] > price and after[2] > 0.0:
                bound -= (after[3] - price) * after[2]
            if bound < least:
                chosen, kept, least = choice, after, bound
        return None if is_finished else (chosen, kept, least)

    def _bound(self, label: Label, to_go: float) -> float:
        """Return a lower bound for the cost of all plans that continue from this label."""
        work, usd, taken, rate = label
        bound = usd + self.price * (self.work - work) + to_go
        return bound - (rate - self.price) * taken if rate > self.price and taken > 0.0 else bound

    def _try_sure_to_the_end(self, mode: int, labels: Iterable[Label], left: float) -> None:
        start = 0.0 if mode == ONDEMAND else self.ondemand_start
        for work, usd, _, _ in labels:
            hours = (self.work - work if work < self.work else 0.0) / self.ondemand_speed + start
            if hours <= left + 1e-9 and usd + hours * self.ondemand_usd < self.best:
                self.best = usd + hours * self.ondemand_usd

    def _advance(self, labels: dict[int, list[Label]], number: int) -> dict[int, list[Label]]:
        """Return all plans after one more interval; plans that finish within it are priced and dropped."""
        every = [(mode, label) for mode, plans in labels.items() for label in plans]
        following: dict[int, list[Label]] = {IDLE: [label for _, label in every]}
        for choice, gain, owed, more_usd, rate in self.uses[number]:
            following[choice] = self._finish(self._use(every, choice, gain, owed, more_usd, rate), rate)
        return following

    def _use(
        self, every: Iterable[tuple[int, Label]], own: int, gain: float, owed: float, more_usd: float, own_rate: float
    ) -> Iterator[tuple[Label, float]]:
        """Yield each label after an interval in mode `own`, and the interval's work that is not in `taken`.

        On-demand hours are interchangeable and add up.
        """
        is_ondemand = own == ONDEMAND
        for mode, (work, usd, taken, rate) in every:
            fresh = gain if mode == own else gain - owed
            if is_ondemand and rate <= own_rate:
                yield (work + fresh, usd + more_usd, (taken if rate == own_rate else 0.0) + fresh, own_rate), 0.0
            elif mode != own and own_rate > (rate if taken > 0.0 else self.least_rate):
                yield (work + fresh, usd + more_usd, gain, own_rate), 0.0
            else:
                yield (work + fresh, usd + more_usd, taken, rate), gain

    def _finish(self, labels: Iterable[tuple[Label, float]], usd_work: float) -> list[Label]:
        """Price finished plans; keep unfinished ones, and finished ones that may still become cheaper.

        The last interval is shortened by at most the work done in it: earlier excess work was paid at another price.
        """
        left = []
        for label, own in labels:
            work, usd, taken, rate = label
            excess = work - self.work
            if excess < -1e-9:
                left.append(label)
                continue
            is_costliest = rate >= usd_work
            back = min(max(excess, 0.0), max(taken, 0.0)) if is_costliest else 0.0
            self.best = min(self.best, usd - back * rate - min(excess - back, own) * usd_work)
            if taken > back:  # finished with expensive hours that cheaper ones may still replace
                left.append((self.work, usd - back * rate, taken - back, rate) if is_costliest else label)
        return left

    def _prune(self, labels: list[Label], most_work: float, to_go: dict[int, float], mode: int) -> list[Label]:
        """Drop labels that cannot finish in time, cannot beat the best, or are dominated by another."""
        limit = self.best * (1 - self.tolerance)
        labels = [
            label
            for label in labels
            if self.work - label[0] <= most_work + 1e-9 and self._bound(label, to_go[mode]) < limit
        ]
        labels.sort(key=lambda label: (-label[0], label[1]))
        kept, last, least, least_bound = list[Label](), -1, 0.0, 0.0
        fronts = dict[float, _ParetoFront]()  # by the price of the work that may be taken back
        for work, usd, taken, rate in labels:
            base = usd - rate * max(taken, 0.0)
            if any(price >= rate and front.dominates(usd, base) for price, front in fronts.items()):
                continue
            bucket, value = int((self.work - work) / self.bucket), usd - self.price * work
            bound = value - max(0.0, rate - self.price) * max(taken, 0.0)
            if bucket != last:
                last, least, least_bound = bucket, math.inf, math.inf
            if value >= least - 1e-12 and bound >= least_bound - 1e-12:
                continue
            least, least_bound = min(least, value), min(least_bound, bound)
            kept.append((work, usd, taken, rate))
            fronts.setdefault(rate, _ParetoFront()).add(usd, base)
        return kept


class _ParetoFront:
    """Plans that do not dominate each other: costs, ascending, and costs less all returnable work, descending."""

    def __init__(self) -> None:
        self._costs: list[float] = []
        self._bases: list[float] = []

    def dominates(self, usd: float, base: float) -> bool:
        """Return whether one of these costs no more, both as it is and less all returnable work."""
        place = bisect_left(self._costs, usd + 1e-12)
        return bool(place) and self._bases[place - 1] <= base + 1e-12

    def add(self, usd: float, base: float) -> None:
        place = bisect_left(self._costs, usd + 1e-12)
        while place < len(self._costs) and self._bases[place] >= base:
            del self._costs[place], self._bases[place]
        self._costs.insert(place, usd)
        self._bases.insert(place, base)
