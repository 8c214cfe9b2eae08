"""One spot market as a policy weighs it: its price, how soon it closes and opens, and what it takes to get there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from broker.spot.policies.base import Candidate
from broker.spot.prior import OLD, Paces, Prior
from broker.spot.spells import hours_in_classes

AHEAD_HOURS = 2.0  # a market's hazard is averaged over so long
STINT_HOURS_MAX = 24.0  # nobody knows a market for longer than a day


@dataclass(frozen=True, kw_only=True, slots=True)
class Market:
    """Prices are in prices of an on-demand hour of work (USD per work-hour where there is no on-demand)."""

    candidate: Candidate
    price: float
    move_price: float
    open_paces: Paces
    closed_paces: Paces
    hazard: float  # mean rate at which it closes in the hours to come
    open_share: float  # of the time, in the long run
    turn_hours: float  # how fast it forgets whether it was open

    @property
    def stint_hours(self) -> float:
        """How long a job might stay."""
        return min(STINT_HOURS_MAX, 1 / max(self.hazard, 1e-3))

    @property
    def loss_price(self) -> float:
        """What a start costs there."""
        return self.candidate.start_hours * self.candidate.speed * self.price

    @property
    def outlives_start(self) -> bool:
        """Whether a notice leaves time for more work than its start costs."""
        closes_in = self.candidate.closes_in_hours
        return closes_in is None or closes_in > 2 * self.candidate.start_hours

    def rate(self, loss: float, work_hours: float) -> float:
        """Price of an hour of work there: what a loss costs included, the way there spread over the stay."""
        stay = max(min(self.stint_hours, work_hours), 0.1)
        closes_in = self.candidate.closes_in_hours
        hazard = self.hazard if closes_in is None else max(self.hazard, 1 / max(closes_in, 0.01))
        return self.price + hazard * loss + self.move_price / stay

    def appeal(self, best: Market) -> float:
        """How much of the best market's saving this one brings, 0 to 1."""
        saving = 1 - best.price
        return min(max((1 - self.price) / saving, 0.02), 1.0) if saving > 0 else 1.0


def read_market(candidate: Candidate, refuge: Candidate | None, prior: Prior) -> Market:
    unit = refuge.usd_work_hour if refuge is not None else 1.0
    seen, age = candidate.seen, candidate.age_hours
    watched = (candidate.met_hours, age)
    of_open, of_closed = (watched, None) if candidate.is_open else (None, watched)
    opened, closed = prior.learn_open(seen, of_open), prior.learn_closed(seen, of_closed)
    from_hours = age if candidate.is_open else 0.0
    events = sum(
        prior.open_hazards[index] * opened[index >= OLD] * hours
        for index, hours in hours_in_classes(from_hours, from_hours + AHEAD_HOURS)
    )
    mean_open = _mean_hours(seen.open_hours, seen.open_ends, of_open, prior.mean_open_hours / opened[1])
    mean_closed = _mean_hours(seen.closed_hours, seen.closed_ends, of_closed, prior.mean_closed_hours / closed[1])
    return Market(
        candidate=candidate,
        price=candidate.usd_work_hour / unit,
        move_price=candidate.move_usd / unit,
        open_paces=opened,
        closed_paces=closed,
        hazard=events / AHEAD_HOURS,
        open_share=mean_open / (mean_open + mean_closed),
        turn_hours=1 / (1 / mean_open + 1 / mean_closed),
    )


def _mean_hours(
    hours: Sequence[float], ends: Sequence[float], watched: tuple[float, float] | None, prior_hours: float
) -> float:
    lived = watched[1] - watched[0] if watched else 0.0
    return (sum(hours) + lived + prior_hours) / (sum(ends) + 1)


def expect_second_chance(markets: Sequence[Market], best: Market) -> float:
    """The chance that another market is open when the best one is lost, dear ones counting less."""
    none_open, ahead = 1.0, best.stint_hours
    for each in markets:
        if each is not best:
            memory = math.exp(-ahead / each.turn_hours)
            is_open = each.open_share + (each.candidate.is_open - each.open_share) * memory
            none_open *= 1 - is_open * each.appeal(best)
    return 1 - none_open
