"""What a job has found out about the places it may run at: since when spot is to be had there, or refused. Pure.

A simulated market is watched all the time. A real one shows what it has only to who asks, and to who runs there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from broker.nouns import noun
from broker.spot.durations import MET_HOURS
from broker.types import Attempt, OutcomeKind, Placement

PlaceKey = tuple[str, str, str | None, str]


@noun
class Availability:
    """Open or refused since `since_s`, a guess where nobody saw it begin, and known to be so since `met_s`.

    `is_sure`: our own nodes ran there. Else "open" is only that nobody was refused lately, and `refused_s` since when
    it was refused before that.
    """

    is_open: bool
    since_s: float
    met_s: float
    is_sure: bool = False
    refused_s: float | None = None


def name_place(placement: Placement) -> PlaceKey:
    offer = placement.offer
    return (offer.cloud, offer.region, offer.zone, offer.instance_type)


def update_availability(
    before: Mapping[PlaceKey, Availability],
    places: Iterable[tuple[PlaceKey, bool]],
    attempts: Sequence[Attempt],
    *,
    live: Attempt | None,
    now_s: float,
) -> dict[PlaceKey, Availability]:
    """`before`, with what is known now of `places`: (place, whether no refusal of it is known)."""
    lost_s = {
        name_place(each.placement): each.lost_s
        for each in attempts
        if each.lost_s is not None and each.outcome is not None and each.outcome.kind is OutcomeKind.PREEMPTED
    }
    here = name_place(live.placement) if live is not None and live.placement.is_spot else None
    found = dict(before)
    for place, is_open in places:
        known = _close(before.get(place), lost_s.get(place))
        if live is not None and place == here:
            found[place] = _settle(known, live.started_s)
        else:
            found[place] = _look(known, is_open=is_open, now_s=now_s)
    return found


def _close(known: Availability | None, lost_s: float | None) -> Availability | None:
    """As it was left by a preemption: refused from then on."""
    if lost_s is None or (known is not None and known.met_s >= lost_s):
        return known
    return Availability(is_open=False, since_s=lost_s, met_s=lost_s)


def _settle(known: Availability | None, started_s: float) -> Availability:
    """Our nodes run there: whatever was thought before, it is open, and it will show when that ends."""
    if known is not None and known.is_sure and known.met_s == started_s:
        return known
    since_s = started_s if known is not None and not known.is_open else started_s - MET_HOURS * 3600
    since_s = known.since_s if known is not None and known.is_open else since_s
    return Availability(is_open=True, since_s=min(since_s, started_s), met_s=started_s, is_sure=True)


def _look(known: Availability | None, *, is_open: bool, now_s: float) -> Availability:
    if known is None:
        return Availability(is_open=is_open, since_s=now_s - MET_HOURS * 3600, met_s=now_s)
    if known.is_open and is_open:
        return Availability(is_open=True, since_s=known.since_s, met_s=now_s, refused_s=known.refused_s)
    if is_open:  # its refusal has run out: it may be asked again
        return Availability(is_open=True, since_s=now_s, met_s=now_s, refused_s=known.since_s)
    if not known.is_open:
        return known
    if known.is_sure:
        return Availability(is_open=False, since_s=now_s, met_s=now_s)
    since_s = now_s - MET_HOURS * 3600 if known.refused_s is None else known.refused_s
    return Availability(is_open=False, since_s=since_s, met_s=now_s if known.refused_s is None else since_s)
