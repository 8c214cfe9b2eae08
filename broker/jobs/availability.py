"""Track the spot availability that a job has observed: how long each place has been open or refusing requests. Pure.

A simulated market can be observed at any time; a real one reveals its capacity only through requests and running nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from broker.frozen import frozen
from broker.spot.durations import MET_HOURS
from broker.types import Attempt, OutcomeKind, Placement

PlaceKey = tuple[str, str, str | None, str]


@frozen
class Availability:
    """The state of one place: open or refused since `since_s`, last confirmed at `met_s`.

    `since_s` is an estimate if the change itself was not observed. `is_sure`: our own nodes ran there. Otherwise "open"
    only means that no recent request was refused, and `refused_s` is the time when the preceding refusal began.
    """

    is_open: bool
    since_s: float
    met_s: float
    is_sure: bool = False
    refused_s: float | None = None


def name_place(placement: Placement) -> PlaceKey:
    """Return the key under which observations and refusals of a placement are stored."""
    offer = placement.offer
    return (offer.cloud, offer.region, offer.zone, offer.instance_type)


def is_same_place(a: Placement, b: Placement) -> bool:
    """Return whether both are the same purchase in the same place, at any price."""
    return (name_place(a), a.is_spot, a.node_count) == (name_place(b), b.is_spot, b.node_count)


def update_availability(
    before: Mapping[PlaceKey, Availability],
    places: Iterable[tuple[PlaceKey, bool]],
    attempts: Sequence[Attempt],
    *,
    live: Attempt | None,
    now_s: float,
) -> dict[PlaceKey, Availability]:
    """Return `before` updated with `places`, pairs of a place and whether it has no active refusal."""
    lost_s = {
        name_place(attempt.placement): attempt.lost_s
        for attempt in attempts
        if attempt.lost_s is not None and attempt.outcome is not None and attempt.outcome.kind is OutcomeKind.PREEMPTED
    }
    here = name_place(live.placement) if live is not None and live.placement.is_spot else None
    updated = dict(before)
    for place, is_open in places:
        previous = _apply_preemption(before.get(place), lost_s.get(place))
        if live is not None and place == here:
            updated[place] = _apply_stay(previous, live.started_s)
        else:
            updated[place] = _apply_observation(previous, is_open=is_open, now_s=now_s)
    return updated


def _apply_preemption(previous: Availability | None, lost_s: float | None) -> Availability | None:
    """Apply a preemption: the place is refused from that time."""
    if lost_s is None or (previous is not None and previous.met_s >= lost_s):
        return previous
    return Availability(is_open=False, since_s=lost_s, met_s=lost_s)


def _apply_stay(previous: Availability | None, started_s: float) -> Availability:
    """Apply the fact that our nodes run there: the place is open, and the end of that will be observed."""
    if previous is not None and previous.is_sure and previous.met_s == started_s:
        return previous
    since_s = started_s if previous is not None and not previous.is_open else started_s - MET_HOURS * 3600
    since_s = previous.since_s if previous is not None and previous.is_open else since_s
    return Availability(is_open=True, since_s=min(since_s, started_s), met_s=started_s, is_sure=True)


def _apply_observation(previous: Availability | None, *, is_open: bool, now_s: float) -> Availability:
    if previous is None:
        return Availability(is_open=is_open, since_s=now_s - MET_HOURS * 3600, met_s=now_s)
    if previous.is_open and is_open:
        return Availability(is_open=True, since_s=previous.since_s, met_s=now_s, refused_s=previous.refused_s)
    if is_open:  # its refusal has expired: the place may be tried again
        return Availability(is_open=True, since_s=now_s, met_s=now_s, refused_s=previous.since_s)
    if not previous.is_open:
        return previous
    if previous.is_sure:
        return Availability(is_open=False, since_s=now_s, met_s=now_s)
    since_s = now_s - MET_HOURS * 3600 if previous.refused_s is None else previous.refused_s
    return Availability(is_open=False, since_s=since_s, met_s=now_s if previous.refused_s is None else since_s)
