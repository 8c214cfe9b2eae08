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
    cheapest_open_spot,
    find_fallback,
    hours_after_start,
    is_safe_to_start,
    safe_hours,
    spare_hours,
    take_fallback,
)


def decide(view: JobView, candidates: Sequence[Candidate]) -> Decision:
    """Decide greedily; never late where on-demand alone would not have been late."""
    fallback = find_fallback(view, candidates)
    current = None if view.current is None else candidates[view.current]
    if current is not None and not current.is_spot:
        return Stay(reason="on-demand to the end")
    if fallback is None:
        spot = cheapest_open_spot(candidates)
        if current is not None:
            return Stay(reason="only spot is offered")
        return Wait(reason="spot is unavailable") if spot is None else Move(target=spot, reason="spot is available")
    if current is not None:
        hours = safe_hours(view, current, fallback)
        if hours <= 0:
            return take_fallback(view, candidates, fallback, "a later loss of spot would miss the deadline")
        return Stay(hours=hours, reason="on spot")
    spare = spare_hours(view, fallback)
    if not any(each.is_spot for each in candidates):
        return take_fallback(view, candidates, fallback, "spot is not offered")
    spot = cheapest_open_spot(candidates)
    if spot is not None and is_safe_to_start(view, spot, fallback):
        return Move(target=spot, hours=hours_after_start(view, spot, fallback), reason="spot is available")
    if spare <= EPSILON_HOURS:
        return take_fallback(view, candidates, fallback, "the point of no return")
    return Wait(hours=spare, reason="spot is unavailable")
