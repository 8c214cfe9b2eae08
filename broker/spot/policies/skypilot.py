"""SkyPilot's two recovery strategies for managed spot jobs. Neither uses deadlines or on-demand.

Documentation of SkyPilot 0.14, `job_recovery.strategy`: FAILOVER first retries the place of the job, then any other;
EAGER_NEXT_REGION leaves the region of the preemption at once, and returns to it only if no other has capacity.
"""

from __future__ import annotations

from collections.abc import Sequence

from broker.spot.policies import on_demand
from broker.spot.policies.base import Candidate, Decision, JobView, Move, Stay, Wait, find_cheapest_open_spot


def decide_failover(view: JobView, candidates: Sequence[Candidate]) -> Decision:
    """Retry the same place and region first."""
    return _recover(view, candidates, is_eager=False)


def decide_eager(view: JobView, candidates: Sequence[Candidate]) -> Decision:
    """Try another region first."""
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
            target = find_cheapest_open_spot(group)
            if target is not None:
                return Move(target=target, reason="next location in the recovery order")
    target = find_cheapest_open_spot(spots)
    return Wait(reason="spot is unavailable") if target is None else Move(target=target, reason="spot is available")


def _region(candidate: Candidate) -> tuple[str, str]:
    return candidate.placement.offer.cloud, candidate.placement.offer.region
