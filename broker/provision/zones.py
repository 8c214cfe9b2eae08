"""Group placements of a plan that only differ in their zone, if the cloud can search several zones in one call.

All zones of a group have the same price, so the plan's order is kept. Refusals are recorded per zone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from broker.clouds.base import Cloud, SupportsZoneSearch
from broker.types import Estimate, MachineSpec, Node, Placement


def join_zones(
    estimates: Iterable[Estimate],
    clouds: Mapping[str, Cloud],
    make_spec: Callable[[Placement], MachineSpec],
) -> Iterator[Placement]:
    """Yield placements lazily in the plan's order; neighbours that only differ in their zone are joined."""
    group: list[Estimate] = []
    for estimate in estimates:
        if group and not _is_twin(group[0], estimate):
            yield from _fuse([estimate.placement for estimate in group], clouds, make_spec)
            group = []
        group.append(estimate)
    if group:
        yield from _fuse([estimate.placement for estimate in group], clouds, make_spec)


def split_zones(placement: Placement) -> Sequence[Placement]:
    """Return one placement per zone, best first."""
    offer = placement.offer
    others = (replace(placement, offer=replace(offer, zone=zone), other_zones=()) for zone in placement.other_zones)
    return [replace(placement, other_zones=()), *others] if placement.other_zones else [placement]


def unite_zones(placements: Sequence[Placement]) -> Placement:
    """Join placements that `split_zones` returned."""
    first, *others = placements
    return replace(first, other_zones=tuple(other.offer.zone or "" for other in others)) if others else first


def find_actual_placement(placement: Placement, nodes: Sequence[Node]) -> Placement:
    """Return the placement in the zone of these nodes; the whole group if there are none."""
    zones = {node.zone for node in nodes}
    return next((zone for zone in split_zones(placement) if zone.offer.zone in zones), placement)


def _is_twin(first: Estimate, second: Estimate) -> bool:
    """Return whether both have a zone, and are equal in alternative, price, hazard and all other estimates.

    Zones that a user lists as alternatives are not twins: they are requested in the user's order.
    """
    offer, other = first.placement.offer, second.placement.offer
    if offer.zone is None or other.zone is None or offer.region != other.region:
        return False
    moved = replace(first.placement, offer=replace(offer, zone=other.zone))
    return replace(first, placement=moved) == second


def _fuse(
    placements: Sequence[Placement],
    clouds: Mapping[str, Cloud],
    make_spec: Callable[[Placement], MachineSpec],
) -> Sequence[Placement]:
    if len(placements) == 1:
        return placements
    cloud = clouds.get(placements[0].offer.cloud)
    if not isinstance(cloud, SupportsZoneSearch):
        return placements
    if not cloud.is_search_worth(make_spec(placements[0]), zone_count=len(placements)):
        return placements
    return [unite_zones(placements)]
