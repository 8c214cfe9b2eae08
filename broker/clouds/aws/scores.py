"""Spot placement scores: AWS's estimate of a zone's capacity for spot machines, read before a launch."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from broker.clock import Clock
from broker.clouds.aws.clients import Clients
from broker.clouds.aws.errors import ApiError, find_kind
from broker.errors import CapacityError
from broker.types import Placement

KNOWN_S = 600.0  # scores change, and an account may query only a few dozen different gangs a day
# From 1, "very unlikely to succeed", to 10 (EC2 user guide, "Spot placement score").
HOPELESS, BETTER = 1, 4


class Scores:
    """Read AWS's spot placement scores, and keep them for a while."""

    def __init__(self, clients: Clients, *, clock: Clock) -> None:
        self._clients = clients
        self._clock = clock
        self._known: dict[tuple[str, str, int], tuple[float, Mapping[str, int]]] = {}
        self._doubted: dict[tuple[str, str, int], float] = {}

    async def read(self, placement: Placement) -> Mapping[str, int]:
        """Return zone -> 1 to 10; empty if AWS gives no scores."""
        offer = placement.offer
        key = (offer.region, offer.instance_type, placement.node_count)
        now_s = self._clock.now_s()
        known_s, known = self._known.get(key, (-KNOWN_S, {}))
        if now_s - known_s < KNOWN_S:
            return known
        try:
            response, names = await asyncio.gather(
                self._clients.read_once(
                    "ec2", offer.region, "get_spot_placement_scores",
                    InstanceTypes=[offer.instance_type], TargetCapacity=placement.node_count,
                    SingleAvailabilityZone=True, RegionNames=[offer.region],
                ),
                self._clients.read_once("ec2", offer.region, "describe_availability_zones"),
            )  # fmt: skip
        except ApiError as refusal:
            if find_kind(refusal.code, refusal.status) == "login":
                raise
            response, names = {}, {}
        # Zone names differ between accounts; scores are by zone id, which does not.
        by_id = {each["ZoneId"]: each["ZoneName"] for each in names.get("AvailabilityZones", ())}
        scores = {
            by_id[each["AvailabilityZoneId"]]: int(each["Score"])
            for each in response.get("SpotPlacementScores", ())
            if each.get("AvailabilityZoneId") in by_id
        }
        self._known[key] = (now_s, scores)
        return scores

    async def refuse_unlikely(self, placement: Placement) -> None:
        """Raise CapacityError for a zone with the lowest score while another zone of the region scores well.

        Machines there would soon be preempted.

        A caller that asks again has no alternative, and may try.
        """
        offer = placement.offer
        if not placement.is_spot or offer.zone is None or placement.other_zones:
            return  # a fleet that searches several zones begins with the best
        scores = await self.read(placement)
        likely = [zone for zone, score in scores.items() if score >= BETTER and zone != offer.zone]
        key = (offer.zone, offer.instance_type, placement.node_count)
        now_s = self._clock.now_s()
        is_doubted = now_s - self._doubted.get(key, -KNOWN_S) < KNOWN_S
        if scores.get(offer.zone) != HOPELESS or not likely or is_doubted:
            return
        self._doubted[key] = now_s
        best = max(likely, key=lambda zone: scores[zone])
        raise CapacityError(
            f"AWS rates the chance of {placement.node_count} x {offer.instance_type} spot in {offer.zone} at 1 of 10 "
            f"now, and in {best} at {scores[best]}",
            scope="zone",
        )
