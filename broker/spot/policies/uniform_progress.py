"""Uniform Progress: keep up with a straight line from nothing at submission to all the work at the deadline.

Z. Wu and others, "Can't Be Late: Optimizing Spot Instance Savings under Deadlines" (NSDI 2024). Run on spot
whenever it is open; otherwise wait while ahead of the line, and run on-demand when behind. Return from on-demand to
spot only with spare time for two starts, so that a short open period does not cost two starts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from broker.spot.policies import greedy
from broker.spot.policies.base import (
    EPSILON_HOURS,
    Candidate,
    Decision,
    JobView,
    Move,
    Stay,
    Wait,
    find_cheapest_open_spot,
    find_fallback,
    find_hours_after_start,
    find_safe_hours,
    find_spare_hours,
    is_safe_to_start,
    take_fallback,
)

STARTS_BANKED = 2.0


def decide(view: JobView, candidates: Sequence[Candidate]) -> Decision:
    """Decide by the line; never late where on-demand alone would not have been. Without a deadline: greedy."""
    return pace(view, candidates, is_choosy=False)


def decide_next_spot(view: JobView, candidates: Sequence[Candidate]) -> Decision:
    """Decide with knowledge of the length of open periods, and use only those that pay for their start."""
    return pace(view, candidates, is_choosy=True)


def pace(view: JobView, candidates: Sequence[Candidate], *, is_choosy: bool) -> Decision:
    """Use spot while the job is ahead of a straight line to the deadline, otherwise on-demand."""
    fallback = find_fallback(view, candidates)
    if fallback is None or view.time_left_hours is None or not view.deadline_hours:
        return greedy.decide(view, candidates)
    current = None if view.current is None else candidates[view.current]
    if current is not None and current.is_spot:
        hours = find_safe_hours(view, current, fallback)
        if hours <= 0:
            return take_fallback(view, candidates, fallback, "a later loss of spot would miss the deadline")
        return Stay(hours=hours, reason="on spot")
    spare = find_spare_hours(view, fallback)
    is_ondemand = current is not None
    spot = find_cheapest_open_spot(
        [each for each in candidates if not is_choosy or _pays(each, fallback, is_ondemand=is_ondemand)]
    )
    if spot is not None and is_safe_to_start(view, spot, fallback):
        banked = spare + (
            fallback.start_hours if is_ondemand else 0.0
        )  # on-demand is running: its start is already paid
        if not is_ondemand or banked >= STARTS_BANKED * spot.start_hours + view.starting_hours:
            return Move(target=spot, hours=find_hours_after_start(view, spot, fallback), reason="spot is available")
    behind = _behind_hours(view)
    if current is not None:
        # When ahead of the line again, on-demand is given up only for spot: its start has been paid.
        return Stay(reason="on-demand")
    if spare <= EPSILON_HOURS:
        return take_fallback(view, candidates, fallback, "the point of no return")
    if behind > -EPSILON_HOURS:
        return take_fallback(view, candidates, fallback, "behind uniform progress")
    return Wait(hours=min(spare, _hours_ahead(view)), reason="ahead of uniform progress")


def _behind_hours(view: JobView) -> float:
    """Return the work due by the line now, minus the work done."""
    assert view.deadline_hours and view.time_left_hours is not None
    passed = view.deadline_hours - view.time_left_hours
    done = view.work_hours - view.work_left_hours
    return view.work_hours * passed / view.deadline_hours - done


def _hours_ahead(view: JobView) -> float:
    """Return how long the job may idle before it falls to the line."""
    assert view.deadline_hours
    return max(-_behind_hours(view) * view.deadline_hours / view.work_hours, 0.0)


def _pays(spot: Candidate, fallback: Candidate, *, is_ondemand: bool) -> bool:
    """Return whether a period of known length pays for its start (and the start of on-demand after it)."""
    if spot.closes_in_hours is None or not math.isfinite(spot.closes_in_hours):
        return True
    work = (spot.closes_in_hours - spot.start_hours) * spot.speed
    paid = spot.closes_in_hours * spot.placement.usd_hour + spot.move_usd
    back = fallback.start_hours * fallback.placement.usd_hour if is_ondemand else 0.0
    return paid + back < work * fallback.usd_work_hour
