"""Greedy policy: spot whenever available, else wait; on-demand from the point of no return."""

from __future__ import annotations

from collections.abc import Sequence

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


def decide(view: JobView, candidates: Sequence[Candidate]) -> Decision:
    """Decide greedily; never late where on-demand alone would not have been late."""
    fallback = find_fallback(view, candidates)
    current = None if view.current is None else candidates[view.current]
    if current is not None and not current.is_spot:
        return Stay(reason="on-demand to the end")
    if fallback is None:
        spot = find_cheapest_open_spot(candidates)
        if current is not None:
            return Stay(reason="only spot is offered")
        return Wait(reason="spot is unavailable") if spot is None else Move(target=spot, reason="spot is available")
    if current is not None:
        hours = find_safe_hours(view, current, fallback)
        if hours <= 0:
            return take_fallback(view, candidates, fallback, "a later loss of spot would miss the deadline")
        return Stay(hours=hours, reason="on spot")
    spare = find_spare_hours(view, fallback)
    if not any(each.is_spot for each in candidates):
        return take_fallback(view, candidates, fallback, "spot is not offered")
    spot = find_cheapest_open_spot(candidates)
    if spot is not None and is_safe_to_start(view, spot, fallback):
        return Move(target=spot, hours=find_hours_after_start(view, spot, fallback), reason="spot is available")
    if spare <= EPSILON_HOURS:
        return take_fallback(view, candidates, fallback, "the point of no return")
    return Wait(hours=spare, reason="spot is unavailable")
