"""The next step of a job without a deadline: spot at the lowest price of work, losses included."""

from __future__ import annotations

import math
from collections.abc import Sequence

from broker.spot.forecast import SpotMarket
from broker.spot.policies.base import Candidate, Decision, JobView, Move, Stay, Wait

DECISION_HOURS_MAX = 1.0
MOVE_GAIN = 1.15  # the expected gain of a move must exceed its cost by 15 %, as it is uncertain


def weigh_without_deadline(view: JobView, current: Candidate | None, markets: Sequence[SpotMarket]) -> Decision:
    """Choose the place with the lowest price of work, losses included: time costs nothing."""
    opened = [each for each in markets if each.candidate.is_open and each.outlives_start]
    if current is not None and not current.is_spot:
        opened = [each for each in opened if each.price < 1]
    if not opened:
        return Wait(reason="spot is unavailable") if current is None else Stay(reason="spot is unavailable")
    work = view.work_left_hours
    best = min(opened, key=lambda each: each.rate(each.start_price, work))
    here = next((each for each in markets if each.candidate is current), None)
    if here is None:
        return Move(target=best.candidate, reason="spot is available")
    stay_hours = min(work, best.stay_hours, here.stay_hours)
    gain = (here.rate(here.start_price, math.inf) - best.rate(best.start_price, math.inf)) * stay_hours
    if best is not here and gain > MOVE_GAIN * (best.start_price + best.move_price):
        return Move(target=best.candidate, reason="another location is cheaper, including the move")
    return Stay(hours=DECISION_HOURS_MAX if len(markets) > 1 else math.inf, reason="on spot")
