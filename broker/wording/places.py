"""Format places, and turn placements into the data of events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from broker.types.market import Placement

Place = Mapping[str, Any]


def make_place(placement: Placement) -> dict[str, object]:
    """Return a placement as event data."""
    offer = placement.offer
    return {
        "cloud": offer.cloud,
        "region": offer.region,
        "zones": [offer.zone or offer.region, *placement.other_zones],
        "instance_type": offer.instance_type,
        "is_spot": placement.is_spot,
        "node_count": placement.node_count,
    }


def describe_place(place: Place) -> str:
    """Format as `2 x g5.xlarge spot in us-east-1a,b (aws)`, where any of the zones may be used."""
    pricing = "spot" if place["is_spot"] else "on-demand"
    zones = name_zones(place["zones"], place["region"])
    return f"{place['node_count']} x {place['instance_type']} {pricing} in {zones} ({place['cloud']})"


def name_zones(zones: Sequence[str], region: str) -> str:
    """Format as `us-east-1a,b,c`."""
    return ",".join([zones[0], *(zone.removeprefix(region) for zone in zones[1:])])
