"""How a place is shown to people, and the token by which a cloud knows a try. Pure."""

from __future__ import annotations

import hashlib

from broker.types import Placement
from broker.wording import describe_place, make_place


def make_token(owner: str, cluster: str, attempt: int, placement: Placement, serial: int) -> str:
    """The same try gives the same token, before and after a crash. `serial` counts this name's settled tries:

    a cloud answers a token whose nodes have ended with those dead nodes, so a later try needs another."""
    offer = placement.offer
    place = (offer.cloud, offer.region, offer.zone or "", offer.instance_type, placement.is_spot, placement.node_count)
    text = "\0".join(str(part) for part in (owner, cluster, attempt, *place, *placement.other_zones, serial))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def describe(placement: Placement) -> str:
    return describe_place(make_place(placement))
