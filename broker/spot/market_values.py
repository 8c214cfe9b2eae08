"""The value functions of the markets of a job, shared by all decisions with similar parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

from broker.spot.forecast import SpotMarket, count_cohorts_once, expect_second_chance
from broker.spot.policies.base import Candidate, JobView
from broker.spot.prior import Paces, Prior, scale_hazards
from broker.spot.value_function import ValueFunction
from broker.spot.value_tables import WAIT_PRICE, ValueParameters

PACE_STEP = math.log(2)  # paces are rounded, so that tables can be reused
# Bounds on the steps: a pace of closed periods below the prior's was measured to cost 0.001 to 0.006 of the optimum.
OPEN_STEPS, CLOSED_STEPS = (-1, 4), (0, 4)
CHANCES = (0.0, 0.25, 0.5, 0.75, 0.9, 0.97)
PRICE_STEP, WAIT_STEP = 0.02, 0.005
TABLES_MAX = 512


class MarketValues:
    """The value function of each market in one state of the job, solved when it is first requested."""

    def __init__(self, view: JobView, fallback: Candidate, markets: Sequence[SpotMarket], prior: Prior) -> None:
        assert view.time_left_hours is not None
        self._markets, self._prior = markets, prior
        self._left = view.work_left_hours / fallback.speed
        work = max(view.work_hours, view.work_left_hours) / fallback.speed
        spare = max((view.deadline_hours or 0.0) - work, view.time_left_hours - self._left, 0.1)
        self._work, self._spare = _round_up(work), _round_up(spare)
        self._wait = WAIT_PRICE
        if view.hour_value_usd is not None:  # prices include it
            self._wait = round(view.hour_value_usd / fallback.placement.usd_hour / WAIT_STEP) * WAIT_STEP
        self._found = dict[tuple[int, bool], ValueFunction]()

    def find(self, market: SpotMarket, *, is_alone: bool = False) -> ValueFunction:
        """Return the value function of a market; alone, it reopens at its own rate."""
        key = id(market), is_alone
        if key not in self._found:
            self._found[key] = self._find(market, is_alone=is_alone)
        return self._found[key]

    def _find(self, best: SpotMarket, *, is_alone: bool) -> ValueFunction:
        markets, left = self._markets, self._left
        chance = expect_second_chance(markets, best, left)
        shares = [float(each is best) if is_alone else each.rate_saving(best, left) for each in markets]
        if not is_alone:
            shares = count_cohorts_once(markets, shares)
        reopening = tuple(
            sum(each.closed_paces[half] * share for each, share in zip(markets, shares, strict=True)) for half in (0, 1)
        )
        return _solve(
            self._prior,
            _round_paces(best.open_paces, OPEN_STEPS),
            _round_paces((reopening[0], reopening[1]), CLOSED_STEPS),
            max(each for each in CHANCES if each <= chance + 0.02),
            round(best.price / PRICE_STEP) * PRICE_STEP,
            best.speed,
            round(max(best.candidate.start_hours, 0.005), 4),
            round(min(best.candidate.overlap_hours, best.candidate.start_hours), 4),
            self._work,
            self._spare,
            self._wait,
        )


def _round_paces(paces: Paces, bounds: tuple[int, int]) -> tuple[int, int]:
    young, old = (max(bounds[0], min(round(math.log(each) / PACE_STEP), bounds[1])) for each in paces)
    return young, old


def _round_up(hours: float) -> float:
    """Round up to a grid of eight steps per octave."""
    return math.exp2(math.ceil(math.log2(max(hours, 0.1)) * 8 - 1e-9) / 8)


@lru_cache(maxsize=TABLES_MAX)
def _solve(
    prior: Prior,
    opened: tuple[int, int],
    closed: tuple[int, int],
    chance: float,
    price: float,
    speed: float,
    start: float,
    overlap: float,
    work: float,
    spare: float,
    wait: float,
) -> ValueFunction:
    def restore(steps: tuple[int, int]) -> Paces:
        return math.exp(steps[0] * PACE_STEP), math.exp(steps[1] * PACE_STEP)

    return ValueFunction(
        ValueParameters(
            open_hazards=scale_hazards(prior.open_hazards, restore(opened)),
            closed_hazards=scale_hazards(prior.closed_hazards, restore(closed)),
            spot_price=price,
            spot_speed=speed,
            start_hours=start,
            overlap_hours=overlap,
            work_hours=work,
            spare_hours=spare,
            second_chance=chance,
            wait_price=wait,
        )
    )
