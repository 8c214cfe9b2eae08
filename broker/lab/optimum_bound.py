"""A lower bound on the cost of all plans with foresight: each missing hour of work has a price.

With a price on work, the best way through the intervals is a shortest path. The highest bound is at the price at which
two paths cost the same, one with too little work and one with enough (M. Fisher, "The Lagrangian Relaxation Method for
Solving Integer Programming Problems", 1981). These two, joined at an interval, also give plans close to the bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter

IDLE, ONDEMAND = -2, -1  # modes: no machines, on-demand; from 0: the site that runs on spot
JOINS_MAX = 6  # joined plans to try: they are ranked by cost, and the first ones are nearly equal

# (mode, work without a start, work that a start costs, usd, usd per hour of work) of one interval.
Use = tuple[int, float, float, float, float]
ToGo = list[dict[int, float]]  # by interval and mode before it: the least remaining USD minus the value of the work


@dataclass(frozen=True, kw_only=True)
class PricedPlan:
    """A mode for each interval, with the work that it does and its cost."""

    modes: tuple[int, ...]
    work: float
    usd: float

    def total_usd(self, price: float, work_hours: float) -> float:
        """Return the cost, with the missing work at a price; excess work counts as negative."""
        return self.usd + price * (work_hours - self.work)

    def find_price(self, other: PricedPlan) -> float:
        """Return the price of work at which both plans cost the same."""
        return (other.usd - self.usd) / (other.work - self.work)


class PricedIntervals:
    """The intervals of a search. `starts` is the work that a start costs, by mode."""

    def __init__(self, uses: Sequence[Sequence[Use]], starts: Mapping[int, float]) -> None:
        self.starts = {IDLE: 0.0, **starts}
        self.uses = [{IDLE: (IDLE, 0.0, 0.0, 0.0, 0.0)} | {use[0]: use for use in each} for each in uses]

    def bound_to_go(self, price: float) -> ToGo:
        """Bound the rest of each plan from below. A mode may pause for free where its work is worth less than it costs.

        Without these pauses, excess work that is taken back later would be paid in full.
        """
        started = {mode: price * work for mode, work in self.starts.items()}
        following = dict.fromkeys(started, 0.0)
        bounds = [following]
        for uses in reversed(self.uses):
            own = {
                mode: following[mode] + (gain if (gain := usd - price * work) < 0.0 else 0.0)
                for mode, work, _, usd, _ in uses.values()
            }
            after_start = min(usd + started[mode] for mode, usd in own.items())
            following = {mode: min(after_start, own.get(mode, math.inf)) for mode in following}
            bounds.append(following)
        return bounds[::-1]

    def follow_bound(self, price: float, to_go: ToGo) -> PricedPlan:
        """Return the plan of the bound itself, without its pauses that cost less than a start."""
        started = {mode: price * work for mode, work in self.starts.items()}
        mode, modes, kept = IDLE, list[int](), list[int]()  # `kept`: the modes, pauses included
        for uses, following in zip(self.uses, to_go[1:], strict=True):
            least = math.inf
            for choice, work, _, usd, _ in uses.values():
                gain = usd - price * work
                value = following[choice] + min(gain, 0.0) + (0.0 if choice == mode else started[choice])
                if value < least - 1e-12:
                    least, chosen, runs = value, choice, gain < 0.0
            mode = chosen
            kept.append(mode)
            modes.append(mode if runs else IDLE)
        self._fill_pauses(modes, kept, price)
        return self._make_plan(modes)

    def _fill_pauses(self, modes: list[int], kept: Sequence[int], price: float) -> None:
        """Run on through each pause that costs less than a start after it."""
        paused_usd, begin = 0.0, 0
        for number, mode in enumerate(kept):
            if number and kept[number - 1] != mode:
                paused_usd, begin = 0.0, number
            if modes[number] == IDLE:
                _, work, _, usd, _ = self.uses[number][mode]
                paused_usd += usd - price * work
                continue
            if paused_usd < price * self.starts[mode] and begin < number and modes[begin] == mode:
                modes[begin:number] = [mode] * (number - begin)
            paused_usd, begin = 0.0, number

    def _make_plan(self, modes: Sequence[int]) -> PricedPlan:
        works, costs, _ = self._sum_up(modes)
        return PricedPlan(modes=tuple(modes), work=works[-1], usd=costs[-1])

    def _sum_up(self, modes: Sequence[int]) -> tuple[list[float], list[float], list[float]]:
        """Return work and cost before each interval and at the end, and the work that each start costs."""
        works, costs, owed, before = [0.0], [0.0], list[float](), IDLE
        for uses, mode in zip(self.uses, modes, strict=True):
            _, work, start, usd, _ = uses[mode]
            owed.append(start if mode != before else 0.0)
            works.append(works[-1] + work - owed[-1])
            costs.append(costs[-1] + usd)
            before = mode
        return works, costs, owed

    def join(
        self, first: PricedPlan, then: PricedPlan, work_hours: float, usd_work: float
    ) -> Iterator[tuple[int, ...]]:
        """Yield the cheapest plans with enough work that follow `first` up to an interval, and `then` after it.

        Excess work is worth `usd_work`.
        """
        works, costs, _ = self._sum_up(first.modes)
        works_then, costs_then, owed = self._sum_up(then.modes)
        found = list[tuple[float, int]]()
        for number in range(1, len(self.uses)):
            mode = then.modes[number]
            start = self.uses[number][mode][2] if mode != first.modes[number - 1] else 0.0
            work = works[number] + works_then[-1] - works_then[number] + owed[number] - start
            if work >= work_hours - 1e-9:
                usd = costs[number] + costs_then[-1] - costs_then[number]
                found.append((usd - usd_work * (work - work_hours), number))
        for _, number in sorted(found, key=itemgetter(0))[:JOINS_MAX]:
            yield first.modes[:number] + then.modes[number:]
