"""SkyPilot's two ways to recover a managed spot job. Neither knows of deadlines, nor of on-demand.

Docs of SkyPilot 0.14, `job_recovery.strategy`: FAILOVER asks first where the job was, then anywhere; EAGER_NEXT_REGION
leaves the region that took the machines away at once, and comes back to it only when no other has any.
"""

from __future__ import annotations

from collections.abc import Sequence

from broker.spot.policies import on_demand
from broker.spot.policies.base import Candidate, Decision, JobView, Move, Stay, Wait, cheapest_open_spot


def decide_failover(view: JobView, candidates: Sequence[Candidate]) -> Decision:
    """The same place and region first."""
    return _recover(view, candidates, is_eager=False)


def decide_eager(view: JobView, candidates: Sequence[Candidate]) -> Decision:
    """Another region first."""
    return _recover(view, candidates, is_eager=True)


def _recover(view: JobView, candidates: Sequence[Candidate], *, is_eager: bool) -> Decision:
    if view.current is not None:
        return Stay(reason="runs until it is lost")
    spots = [each for each in candidates if each.is_spot]
    if not spots:
        return on_demand.decide(view, candidates)
    lost = None if view.last is None else candidates[view.last]
    if lost is not None:
        same = [each for each in spots if _region(each) == _region(lost)]
        others = [each for each in spots if _region(each) != _region(lost)]
        for group in ([], others, same) if is_eager else ([lost], same, others):
            target = cheapest_open_spot(group)
            if target is not None:
                return Move(target=target, reason="the next place in the order of recovery")
    target = cheapest_open_spot(spots)
    return Wait(reason="no spot is open") if target is None else Move(target=target, reason="spot is open")


def _region(candidate: Candidate) -> tuple[str, str]:
    return candidate.placement.offer.cloud, candidate.placement.offer.region
