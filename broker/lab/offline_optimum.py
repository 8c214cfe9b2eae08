"""What a job would have cost with the future known: the bound that no policy can pass.

Exact dynamic programme over the moments at which any market changes. A label is a plan so far: work done, dollars, and
what runs. Between two moments nothing changes, so a plan uses an interval whole or not at all, but for one: of two that
are used in part, the dearer could be shortened and the other one lengthened. So what was done too much is taken back
at the end, from the last stretch, which ends with the work, or from the dearest stretch before it that begins a run.
Plans are dropped that another one beats in every respect, and plans that cannot
beat the best found: by the Lagrangian bound, in which an hour of work still missing is bought at one fixed price.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from broker.lab.markets import Site

IDLE, SURE = -2, -1  # modes; 0 and up: the site that runs on spot
# Plans that would be better by less than this share are not looked for; and of plans whose work lies this close, the
# cheapest by the bound's price and the longest are kept.
TOLERANCE = 2e-4
PRICE_STEPS = 24


@dataclass(frozen=True, kw_only=True)
class Interval:
    """Between two changes: (site, USD per hour) of the open ones, by site."""

    from_hours: float
    to_hours: float
    open_sites: tuple[tuple[int, float], ...]


# (work, usd, work that may be taken back, usd that an hour of it cost); a start is owed at once, as work below what
# was done
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
    """Least USD to finish in time from `from_hour` of the recordings, egress not counted; infinite where none can.

    The plan found costs at most about a share of `tolerance` more than the best: ten times the tolerance takes a tenth
    of the time or less.
    """
    intervals = list_intervals(sites, from_hour, deadline_hours)
    return _Search(sites, intervals, work_hours, deadline_hours, tolerance).run()


def list_intervals(sites: Sequence[Site], from_hour: float, hours: float) -> list[Interval]:
    """The recordings from one hour on, cut at every change of any site."""
    steps = [site.find_step(from_hour) for site in sites]
    cuts, found = 0.0, list[Interval]()
    while cuts < hours - 1e-9:
        following = [site.read_step(step + 1)[0] - from_hour for site, step in zip(sites, steps, strict=True)]
        until = min([*following, hours])
        now = [site.read_step(step) for site, step in zip(sites, steps, strict=True)]
        opened = tuple((index, each[2].usd_hour) for index, each in enumerate(now) if each[1])
        if found and found[-1].open_sites == opened:
            found[-1] = Interval(from_hours=found[-1].from_hours, to_hours=until, open_sites=opened)
        else:
            found.append(Interval(from_hours=cuts, to_hours=until, open_sites=opened))
        steps = [step + (after <= until + 1e-9) for step, after in zip(steps, following, strict=True)]
        cuts = until
    return found


class _Search:
    def __init__(
        self,
        sites: Sequence[Site],
        intervals: Sequence[Interval],
        work_hours: float,
        deadline_hours: float,
        tolerance: float,
    ) -> None:
        self.work, self.deadline, self.intervals = work_hours, deadline_hours, intervals
        self.speeds = [site.spot_speed for site in sites]
        self.starts = [site.start_hours * site.spot_speed for site in sites]
        sure = min(sites, key=lambda site: site.ondemand.usd_hour / site.ondemand_speed)
        self.sure_usd, self.sure_speed = sure.ondemand.usd_hour, sure.ondemand_speed
        self.sure_start = sure.start_hours
        self.usd_work = self.sure_usd / self.sure_speed
        self.fastest = max(*self.speeds, self.sure_speed)
        rates = {usd / self.speeds[index] for each in intervals for index, usd in each.open_sites}
        self.least_rate = min(rates, default=math.inf)  # work at this price need not be taken back: no other is cheaper
        self.best = math.inf
        self.tolerance, self.bucket = tolerance, work_hours * tolerance

    def run(self) -> float:
        self._choose_price()
        labels: dict[int, list[Label]] = {IDLE: [START]}
        for number, interval in enumerate(self.intervals):
            for mode, found in labels.items():
                self._try_sure_to_the_end(mode, found, self.deadline - interval.from_hours)
            labels = self._advance(labels, interval)
            self._improve(labels, number + 1)
            left = self.deadline - interval.to_hours
            labels = {
                mode: kept
                for mode, found in labels.items()
                if (kept := self._prune(found, left * self.fastest, self.to_go[number + 1], mode))
            }
        for mode, found in labels.items():
            self._try_sure_to_the_end(mode, found, 0.0)
        return self.best

    def _improve(self, labels: dict[int, list[Label]], number: int) -> None:
        """Finish the most promising plan of each mode by the bound's plan: a good best cuts the search short."""
        for mode, found in labels.items():
            if found:
                ranked = sorted(found, key=lambda label: self._bound(label, self.to_go[number][mode]))
                for label in ranked[:: max(1, len(ranked) // 4)][:4]:
                    self._walk(label, mode, number)

    def _choose_price(self) -> None:
        """The price of missing work that makes the bound highest: the bound is concave in it."""
        low, high = 0.0, self.usd_work * 64
        for _ in range(PRICE_STEPS):
            self.price = (low + high) / 2
            self.to_go = self._bound_to_go()
            work = self._walk()
            if self.best * (1 - self.tolerance) <= self._bound(START, self.to_go[0][IDLE]):
                return  # no other plan is better by more
            if work < self.work:
                low = self.price
            else:
                high = self.price

    def _bound_to_go(self) -> list[dict[int, float]]:
        """For each interval and mode before it: least USD from there on, less the worth of the work done."""
        worth = self.price
        following = dict.fromkeys((IDLE, SURE, *range(len(self.speeds))), 0.0)
        found = [following]
        for interval in reversed(self.intervals):
            hours = interval.to_hours - interval.from_hours
            own = {
                IDLE: following[IDLE],
                SURE: following[SURE] + min(0.0, self.sure_usd - worth * self.sure_speed) * hours,
            }
            for index, usd_hour in interval.open_sites:
                own[index] = following[index] + min(0.0, usd_hour - worth * self.speeds[index]) * hours
            after_start = min(usd + self._start_usd(mode) for mode, usd in own.items())
            following = {mode: min(after_start, own.get(mode, math.inf)) for mode in following}
            found.append(following)
        return found[::-1]

    def _start_usd(self, mode: int) -> float:
        if mode == IDLE:
            return 0.0
        return self.price * (self.sure_start * self.sure_speed if mode == SURE else self.starts[mode])

    def _walk(self, label: Label = START, mode: int = IDLE, begin: int = 0) -> float:
        """Follow the bound's own plan, and keep its price as the best where it is in time. Its work."""
        for number, interval in enumerate(self.intervals[begin:], start=begin):
            self._try_sure_to_the_end(mode, [label], self.deadline - interval.from_hours)
            choices = self._advance({mode: [label]}, interval)
            if any(not found for each, found in choices.items() if each != SURE):
                return self.work
            to_go = self.to_go[number + 1]
            mode, label = min(
                ((each, found[0]) for each, found in choices.items() if found),
                key=lambda choice: self._bound(choice[1], to_go[choice[0]]),
            )
        return label[0]

    def _bound(self, label: Label, to_go: float) -> float:
        """No plan that goes on from this label costs less."""
        work, usd, taken, rate = label
        return usd + self.price * (self.work - work) + to_go - max(0.0, rate - self.price) * max(taken, 0.0)

    def _try_sure_to_the_end(self, mode: int, labels: Iterable[Label], left: float) -> None:
        start = 0.0 if mode == SURE else self.sure_start
        for work, usd, _, _ in labels:
            hours = max(self.work - work, 0.0) / self.sure_speed + start
            if hours <= left + 1e-9:
                self.best = min(self.best, usd + hours * self.sure_usd)

    def _advance(self, labels: dict[int, list[Label]], interval: Interval) -> dict[int, list[Label]]:
        """All plans after one more interval; what finishes within it is priced and dropped."""
        hours = interval.to_hours - interval.from_hours
        every = [(mode, label) for mode, found in labels.items() for label in found]
        following: dict[int, list[Label]] = {IDLE: [label for _, label in every]}
        owed = self.sure_start * self.sure_speed
        gain = hours * self.sure_speed
        used = self._use(every, SURE, gain, owed, hours * self.sure_usd, self.usd_work)
        following[SURE] = self._finish(used, self.usd_work)
        for index, usd_hour in interval.open_sites:
            rate, gain = usd_hour / self.speeds[index], hours * self.speeds[index]
            used = self._use(every, index, gain, self.starts[index], hours * usd_hour, rate)
            following[index] = self._finish(used, rate)
        return following

    def _use(
        self, every: Iterable[tuple[int, Label]], own: int, gain: float, owed: float, more_usd: float, own_rate: float
    ) -> Iterator[tuple[Label, float]]:
        """Each label after an interval in mode `own`, and the work of that interval that is not in `taken`. On-demand
        hours are alike wherever they lie, and add up."""
        is_sure = own == SURE
        for mode, (work, usd, taken, rate) in every:
            fresh = gain if mode == own else gain - owed
            if is_sure and rate <= own_rate:
                yield (work + fresh, usd + more_usd, (taken if rate == own_rate else 0.0) + fresh, own_rate), 0.0
            elif mode != own and own_rate > (rate if taken > 0.0 else self.least_rate):
                yield (work + fresh, usd + more_usd, gain, own_rate), 0.0
            else:
                yield (work + fresh, usd + more_usd, taken, rate), gain

    def _finish(self, labels: Iterable[tuple[Label, float]], usd_work: float) -> list[Label]:
        """Price what is done, and keep what may still become cheaper.

        Of the interval that finishes the work no more is left out than was done in it: work done too much before it
        was paid at another price.
        """
        left = []
        for label, own in labels:
            work, usd, taken, rate = label
            excess = work - self.work
            if excess < -1e-9:
                left.append(label)
                continue
            is_dearest = rate >= usd_work
            back = min(max(excess, 0.0), max(taken, 0.0)) if is_dearest else 0.0
            self.best = min(self.best, usd - back * rate - min(excess - back, own) * usd_work)
            if taken > back:  # done with dear hours that cheaper ones may still replace
                left.append((self.work, usd - back * rate, taken - back, rate) if is_dearest else label)
        return left

    def _prune(self, labels: list[Label], most_work: float, to_go: dict[int, float], mode: int) -> list[Label]:
        """Without those that cannot be in time, cannot beat the best, or are beaten by another in every respect."""
        limit = self.best * (1 - self.tolerance)
        labels = [
            label
            for label in labels
            if self.work - label[0] <= most_work + 1e-9 and self._bound(label, to_go[mode]) < limit
        ]
        labels.sort(key=lambda label: (-label[0], label[1]))
        kept, last, least, least_bound = list[Label](), -1, 0.0, 0.0
        stairs = dict[float, _Stairs]()  # by the price of what may be taken back
        for work, usd, taken, rate in labels:
            base = usd - rate * max(taken, 0.0)
            if any(price >= rate and each.beats(usd, base) for price, each in stairs.items()):
                continue
            bucket, value = int((self.work - work) / self.bucket), usd - self.price * work
            bound = value - max(0.0, rate - self.price) * max(taken, 0.0)
            if bucket != last:
                last, least, least_bound = bucket, math.inf, math.inf
            if value >= least - 1e-12 and bound >= least_bound - 1e-12:
                continue
            least, least_bound = min(least, value), min(least_bound, bound)
            kept.append((work, usd, taken, rate))
            stairs.setdefault(rate, _Stairs()).add(usd, base)
        return kept


class _Stairs:
    """Plans of which none beats another: what they cost as they are, rising, and with all taken back, falling."""

    def __init__(self) -> None:
        self._costs: list[float] = []
        self._bases: list[float] = []

    def beats(self, usd: float, base: float) -> bool:
        """Whether one of these costs no more, as it is and with all taken back."""
        place = bisect_left(self._costs, usd + 1e-12)
        return bool(place) and self._bases[place - 1] <= base + 1e-12

    def add(self, usd: float, base: float) -> None:
        place = bisect_left(self._costs, usd + 1e-12)
        while place < len(self._costs) and self._bases[place] >= base:
            del self._costs[place], self._bases[place]
        self._costs.insert(place, usd)
        self._bases.insert(place, base)
