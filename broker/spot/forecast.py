"""A spot market as a policy evaluates it: price, hazards of closing and opening, and the cost of moving there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from broker.spot.durations import list_hours_by_class
from broker.spot.policies.base import Candidate, round_speed
from broker.spot.prior import OLD, Paces, Prior, live_through

SOON_HOURS = 2.0  # checkpoints are spaced by the mean hazard of the next two hours
COHORT_HOURS = 1e-3  # markets whose changes are closer than this change together
STAY_HOURS_MAX = 24.0  # evidence on a market says little about more than a day ahead


@dataclass(frozen=True, kw_only=True)
class SpotMarket:
    """A spot market. Prices are multiples of the on-demand price of an hour of work; in USD without on-demand.

    Work is counted in hours of on-demand, time in hours: `speed` converts them.
    """

    candidate: Candidate
    prior: Prior
    price: float
    move_price: float
    open_paces: Paces
    closed_paces: Paces
    speed: float = 1.0  # over that of on-demand, rounded

    @cached_property
    def soon_hazard(self) -> float:
        """Return the mean hazard of closing over the next `SOON_HOURS`."""
        return sum(hazard * hours for hazard, hours in self._list_hazards(SOON_HOURS)) / SOON_HOURS

    @property
    def stay_hours(self) -> float:
        """Return the expected stay of a job: the mean time until the market closes, truncated at a day."""
        return self._stay[0]

    @property
    def hazard(self) -> float:
        """Return the mean hazard of closing over the expected stay."""
        mean, alive = self._stay
        return (1 - alive) / mean

    @property
    def stay_work(self) -> float:
        """Return the work that is done in an expected stay."""
        return self.stay_hours * self.speed

    @property
    def work_hazard(self) -> float:
        """Return the mean hazard of closing per hour of work."""
        return self.hazard / self.speed

    @property
    def hour_price(self) -> float:
        """Return the price of an hour of time, such as one of a start."""
        return self.price * self.speed

    @cached_property
    def _stay(self) -> tuple[float, float]:
        """Return (mean hours open, survival probability) over the next day."""
        return live_through(self._list_hazards(STAY_HOURS_MAX))

    def _list_hazards(self, ahead_hours: float) -> list[tuple[float, float]]:
        """List (hazard of closing, hours) for each age class of the next `ahead_hours`."""
        begin = self.candidate.age_hours if self.candidate.is_open else 0.0
        return [
            (self.prior.open_hazards[index] * self.open_paces[index >= OLD], hours)
            for index, hours in list_hours_by_class(begin, begin + ahead_hours)
        ]

    @cached_property
    def mean_open_hours(self) -> float:
        """Expected length of an open period: the prior, updated with the observed periods."""
        seen, guess = self.candidate.seen, self.prior.mean_open_hours / self.open_paces[1]
        return _mean_hours(
            seen.open_hours, seen.open_ends, self.watched_hours if self.candidate.is_open else 0.0, guess
        )

    @cached_property
    def mean_closed_hours(self) -> float:
        """Expected length of a closed period: the prior, updated with the observed periods."""
        seen, guess = self.candidate.seen, self.prior.mean_closed_hours / self.closed_paces[1]
        watched = 0.0 if self.candidate.is_open else self.watched_hours
        return _mean_hours(seen.closed_hours, seen.closed_ends, watched, guess)

    @property
    def watched_hours(self) -> float:
        """Hours for which the current period has been observed, excluding its age at the first observation."""
        return self.candidate.age_hours - self.candidate.met_hours

    def expect_open(self, ahead_hours: float) -> float:
        """Return the probability of being open in `ahead_hours`, as a two-state Markov chain from the present state."""
        share = self.mean_open_hours / (self.mean_open_hours + self.mean_closed_hours)
        memory = math.exp(-ahead_hours * (1 / self.mean_open_hours + 1 / self.mean_closed_hours))
        return share + (self.candidate.is_open - share) * memory

    @property
    def start_price(self) -> float:
        """Return the cost of a start there, which every loss causes."""
        return self.candidate.start_hours * self.candidate.speed * self.price

    @property
    def outlives_start(self) -> bool:
        """Return whether the market has given no notice, or closes later than after two start-up times."""
        closes_in = self.candidate.closes_in_hours
        return closes_in is None or closes_in > 2 * self.candidate.start_hours

    def rate(self, loss: float, work_hours: float) -> float:
        """Return the price of an hour of work: spot, expected losses, and the move spread over the expected stay."""
        stay = max(min(self.stay_work, work_hours), 0.1)
        closes_in = self.candidate.closes_in_hours
        hazard = self.hazard if closes_in is None else max(self.hazard, 1 / max(closes_in, 0.01))
        return self.price + hazard / self.speed * loss + self.move_price / stay

    def rate_saving(self, best: SpotMarket, work_hours: float) -> float:
        """Return the share of the best market's saving over on-demand that this one offers after a move from that one.

        0.02 to 1, or 0 if the move costs more than a stay saves.
        """
        saving, move = 1 - best.price, self.move_from(best)
        if saving <= 0:
            return 1.0 if move <= 0 else 0.0
        if move <= 0:
            return min(max((1 - self.price) / saving, 0.02), 1.0)
        stay = max(min(self.stay_work, work_hours), 0.1)
        return min(max((1 - self.price - move / stay) / saving, 0.0), 1.0)

    @cached_property
    def cohort(self) -> int | tuple[bool, int]:
        """Return a key that markets share if they opened or closed at the same time: they probably fail together."""
        if self.candidate.met_hours > 0:
            return id(self)  # its last change was not observed
        return self.candidate.is_open, round(self.candidate.age_hours / COHORT_HOURS)

    def move_from(self, other: SpotMarket) -> float:
        """Return the cost of a move from another market to this one, of which only moves from the data are known."""
        return max(self.move_price, other.move_price) if self is not other else 0.0


def read_market(candidate: Candidate, fallback: Candidate | None, prior: Prior) -> SpotMarket:
    """Return the market of a candidate as far as it is known, with the prior for the rest."""
    work_usd, hour_usd, speed = 1.0, 1.0, 1.0
    if fallback is not None:
        work_usd, hour_usd = fallback.usd_work_hour, fallback.placement.usd_hour
        speed = round_speed(candidate.speed / fallback.speed)
    watched = (candidate.met_hours, candidate.age_hours)
    return SpotMarket(
        candidate=candidate,
        prior=prior,
        price=candidate.usd_work_hour / work_usd,
        move_price=candidate.move_usd / hour_usd,
        open_paces=prior.learn_open(candidate.seen, watched if candidate.is_open else None),
        closed_paces=prior.learn_closed(candidate.seen, None if candidate.is_open else watched),
        speed=speed,
    )


def expect_second_chance(markets: Sequence[SpotMarket], best: SpotMarket, work_hours: float) -> float:
    """Return the probability that another market is open when the best is lost; expensive and far ones count less."""
    none_open = 1.0
    for each in markets:
        if each.cohort != best.cohort:
            none_open *= 1 - each.expect_open(best.stay_hours) * each.rate_saving(best, work_hours)
    return 1 - none_open


def count_cohorts_once(markets: Sequence[SpotMarket], shares: Sequence[float]) -> list[float]:
    """Return the shares with 0 for each market that changes together with one with a larger share."""
    best = dict[int | tuple[bool, int], int]()
    for index, market in enumerate(markets):
        if shares[index] > shares[best.setdefault(market.cohort, index)]:
            best[market.cohort] = index
    return [
        share if best[market.cohort] == index else 0.0
        for index, (market, share) in enumerate(zip(markets, shares, strict=True))
    ]


def _mean_hours(hours: Sequence[float], ends: Sequence[float], watched_hours: float, guess: float) -> float:
    return (sum(hours) + watched_hours + guess) / (sum(ends) + 1)
