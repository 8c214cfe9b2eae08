"""Places of a plan that differ in nothing but their zone, asked for as one where a cloud can look in several.

Whoever comes up in any of them pays what the plan said, so the plan's order is kept; refusals stay the zones' own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from broker.clouds.base import Cloud, SupportsZoneSearch
from broker.optimizer.asked import find_asked
from broker.types import Estimate, MachineSpec, Node, Placement, Task


def join_zones(
    estimates: Iterable[Estimate],
    task: Task,
    clouds: Mapping[str, Cloud],
    make_spec: Callable[[Placement], MachineSpec],
) -> Iterator[Placement]:
    """In the plan's order, each looked at when its turn comes; neighbours that are equal but for the zone as one."""
    group: list[Estimate] = []
    for each in estimates:
        if group and not _is_twin(group[0], each):
            yield from _fuse([one.placement for one in group], task, clouds, make_spec)
            group = []
        group.append(each)
    if group:
        yield from _fuse([one.placement for one in group], task, clouds, make_spec)


def split_zones(placement: Placement) -> Sequence[Placement]:
    """One for each zone, best first."""
    offer = placement.offer
    others = (replace(placement, offer=replace(offer, zone=zone), other_zones=()) for zone in placement.other_zones)
    return [replace(placement, other_zones=()), *others] if placement.other_zones else [placement]


def unite_zones(placements: Sequence[Placement]) -> Placement:
    """What `split_zones` took apart, or some of it."""
    first, *others = placements
    return replace(first, other_zones=tuple(each.offer.zone or "" for each in others)) if others else first


def find_actual_placement(placement: Placement, nodes: Sequence[Node]) -> Placement:
    """The one of its zones where these nodes stand."""
    zones = {node.zone for node in nodes}
    return next((each for each in split_zones(placement) if each.offer.zone in zones), placement)


def _is_twin(one: Estimate, other: Estimate) -> bool:
    """Equal in price, hazard and all that the plan expects; and each has a zone."""
    first, second = one.placement.offer, other.placement.offer
    if first.zone is None or second.zone is None or first.region != second.region:
        return False
    moved = replace(one.placement, offer=replace(first, zone=second.zone))
    return replace(one, placement=moved) == other


def _fuse(
    placements: Sequence[Placement],
    task: Task,
    clouds: Mapping[str, Cloud],
    make_spec: Callable[[Placement], MachineSpec],
) -> Sequence[Placement]:
    if len(placements) == 1:
        return placements
    cloud = clouds.get(placements[0].offer.cloud)
    # A user who lists zones one by one wants them in that order.
    is_one_wish = all(find_asked(task, each) is find_asked(task, placements[0]) for each in placements[1:])
    if not isinstance(cloud, SupportsZoneSearch) or not is_one_wish:
        return placements
    if not cloud.is_search_worth(make_spec(placements[0]), zone_count=len(placements)):
        return placements
    return [unite_zones(placements)]
