"""On-demand from start to end: the baseline of every comparison."""

from __future__ import annotations

from collections.abc import Sequence

from broker.spot.policies.base import Candidate, Decision, JobView, Move, Stay, find_finish_hours


def decide(view: JobView, candidates: Sequence[Candidate]) -> Decision:
    """Choose the cheapest on-demand location that is in time, else the fastest; spot if there is no other offer."""
    if view.current is not None:
        return Stay(reason="runs on-demand")
    ondemand = [each for each in candidates if not each.is_spot] or list(candidates)
    work, limit = view.work_left_hours, view.time_left_hours
    timely = [each for each in ondemand if limit is None or find_finish_hours(each, work) <= limit]
    if not timely:
        return Move(
            target=min(ondemand, key=lambda each: find_finish_hours(each, work)),
            reason="the fastest on-demand location",
        )
    best = min(timely, key=lambda each: each.usd_work_hour * work + each.move_usd)
    return Move(target=best, reason="the cheapest on-demand location")
