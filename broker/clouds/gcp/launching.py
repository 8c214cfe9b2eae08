"""Creating a gang: find the zone that already has it, else check quotas, image and firewall rules, and insert."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from broker.clock import Clock
from broker.clouds.gcp import firewall, instances
from broker.clouds.gcp.images import find_image
from broker.clouds.gcp.login import Login
from broker.clouds.gcp.names import NodeId, gang_name, instance_names
from broker.clouds.gcp.quotas import (
    check_quotas,
    list_needs,
    list_project_needs,
    read_project_quotas,
    read_quotas,
)
from broker.clouds.gcp.sdk import Clients, Sdk
from broker.clouds.gcp.zones import list_zones
from broker.errors import CapacityError, CloudError, ThrottledError, TransientError, UnknownOutcomeError
from broker.types import Node, NodeEnd, NodeRequest, NodeState

RETRIED = (ThrottledError, TransientError)  # after other refusals, a token is not used again
CALLERS_KNOWN_S = 60.0  # several gangs in a row share one lookup

log = logging.getLogger(__name__)


class NodeLauncher:
    """Launch gangs on Compute Engine, with their firewall rules."""

    def __init__(self, sdk: Sdk, *, clock: Clock, find_callers: Callable[[Login], Sequence[str]]) -> None:
        self._sdk = sdk
        self._login = sdk.login
        self._clock = clock
        self._find_callers = find_callers
        self._callers: tuple[float, Sequence[str]] = (0.0, ())  # when they were determined
        self._identities: dict[str, str] = {}  # cluster -> service account
        self._failed_counts: Counter[tuple[str, str]] = Counter()  # failed creations by token and zone

    def set_identity(self, cluster: str, service_account: str) -> None:
        """Give the machines of `cluster` another service account than that of the settings."""
        self._identities[cluster] = service_account

    async def launch(self, request: NodeRequest) -> list[Node]:
        """Return every node of the gang by rank, created now or by an earlier call.

        Raises the errors of `Cloud.create_nodes`.
        """
        zones = await self._sdk.call(lambda clients: list_zones(clients, request.placement.offer))
        zone = await self._find_zone(request, zones)
        if zone is None:
            zone = await self._insert(request, zones)
        else:  # our earlier call may have failed before this step
            rules = await self._open_rules(request)
            await self._sdk.call(lambda clients: firewall.await_rules(clients, rules))
        try:
            return await self._read_gang(request, zone)
        except CloudError as error:  # even a refusal, as of a login that has just expired: the nodes exist
            raise UnknownOutcomeError(
                f"the gang was created in {zone}, but cannot be queried: {error.message}"
            ) from error

    async def renew_access(self, where: NodeId, owner: str) -> bool:
        """Admit ssh from this machine's current address; return whether it was not admitted before."""
        callers = await self._find_callers_now(known_s_max=0.0)
        return await self._sdk.call(
            lambda clients: firewall.admit(clients, where.project, owner, where.gang, callers), does_change=True
        )

    async def _find_callers_now(self, *, known_s_max: float) -> Sequence[str]:
        """Determine our addresses again: a process may outlive an address by days."""
        now_s = self._clock.now_s()
        known_s, callers = self._callers
        if not callers or not 0.0 <= now_s - known_s < known_s_max:
            callers = await asyncio.to_thread(self._find_callers, self._login)
            self._callers = (now_s, callers)
        return callers

    async def close_gang(self, gang: str) -> None:
        """Delete a gang's firewall rules; a failure is left to the next sweep."""
        project = self._login.project
        try:
            await self._sdk.call(lambda clients: firewall.close_gang(clients, project, gang))
        except CloudError as error:
            log.warning("firewall rules of %s are kept for now: %s", gang, error.message)

    async def _find_zone(self, request: NodeRequest, zones: Sequence[str]) -> str | None:
        """Find the zone in which an earlier call with this token created its nodes. By name, as lists may lag."""
        name, project = instance_names(request)[0], self._login.project

        gangs = await self._fetch_all([NodeId(project=project, zone=zone, name=name) for zone in zones])
        return next((zone for zone, node in zip(zones, gangs, strict=True) if node is not None), None)

    async def _insert(self, request: NodeRequest, zones: Sequence[str]) -> str:
        """Return the zone that took the gang.

        Raises the last zone's error, and CapacityError only after all zones were tried.
        """
        image, _ = await asyncio.gather(
            self._sdk.call(lambda clients: find_image(clients, request)), self._check_quotas(request)
        )
        rules = await self._open_rules(request)
        refusal: CapacityError | None = None
        try:
            for zone in zones:
                try:
                    await self._insert_in(request, zone, image)
                    await self._await_rules(request, zone, rules)
                    return zone
                except CapacityError as error:
                    refusal = error
        except (UnknownOutcomeError, TransientError):
            raise  # the nodes may exist, and need their rules
        except CloudError:
            await self.close_gang(gang_name(request))
            raise
        await self.close_gang(gang_name(request))
        assert refusal is not None, "a region has a zone"
        raise refusal

    async def _check_quotas(self, request: NodeRequest) -> None:
        """Raise QuotaError before any create call."""
        region, project, needs = request.placement.offer.region, self._login.project, list_project_needs(request)
        works = [self._sdk.call(lambda clients: read_quotas(clients, region))]
        works += [self._sdk.call(read_project_quotas)] if needs else []
        quotas, *of_project = await asyncio.gather(*works)
        check_quotas(list_needs(request), quotas, project=project, region=region)
        for found in of_project:
            check_quotas(needs, found, project=project)

    async def _insert_in(self, request: NodeRequest, zone: str, image: str) -> None:
        identity, key = self._identities.get(request.cluster, ""), (request.token, zone)
        failed_count = self._failed_counts[key]
        try:
            await self._sdk.call(
                lambda clients: instances.insert(
                    clients, request, zone, image, identity=identity, failed_count=failed_count
                ),
                does_change=True,
            )
        except UnknownOutcomeError:
            raise
        except CloudError as error:
            if isinstance(error, RETRIED):
                self._failed_counts[key] += 1
            if isinstance(error, TransientError):
                raise
            await self._delete_rest(request, zone, error)
            raise

    async def _delete_rest(self, request: NodeRequest, zone: str, refusal: CloudError) -> None:
        """Delete the nodes of a refused gang that Google did not remove: its own rollback may fail.

        Raises UnknownOutcomeError if they cannot be queried or deleted, so that the caller terminates them.
        """
        if request.placement.node_count == 1:
            return
        try:
            found = await self._fetch_all(self._list_places(request, zone))
            if rest := [NodeId.parse(node.id) for node in found if node is not None]:
                log.warning("Google refused a gang in %s but kept %s of its nodes; deleting them", zone, len(rest))
                await self._delete(rest)
        except CloudError as error:
            raise UnknownOutcomeError(
                f"{refusal.message}; a part of the gang may remain in {zone}: {error.message}"
            ) from error

    async def _await_rules(self, request: NodeRequest, zone: str, rules: Sequence[Any]) -> None:
        """Wait for the rules; if one fails, delete the unreachable nodes before raising."""
        try:
            await self._sdk.call(lambda clients: firewall.await_rules(clients, rules))
        except CloudError:
            await self._delete(self._list_places(request, zone))
            raise

    async def _delete(self, places: Sequence[NodeId]) -> None:
        def end(where: NodeId) -> Callable[[Clients], None]:
            return lambda clients: instances.delete(clients, where)

        await asyncio.gather(*(self._sdk.call(end(where), does_change=True) for where in places))

    def _list_places(self, request: NodeRequest, zone: str) -> list[NodeId]:
        return [NodeId(project=self._login.project, zone=zone, name=name) for name in instance_names(request)]

    async def _open_rules(self, request: NodeRequest) -> Sequence[Any]:
        callers = await self._find_callers_now(known_s_max=CALLERS_KNOWN_S)
        return await self._sdk.call(lambda clients: firewall.open_rules(clients, request, callers))

    async def _read_gang(self, request: NodeRequest, zone: str) -> list[Node]:
        """Return every node of the gang; a node that Google does not know has ended already."""
        places = self._list_places(request, zone)
        nodes = await self._fetch_all(places)
        return [node or self._make_ended(request, where) for node, where in zip(nodes, places, strict=True)]

    async def _fetch_all(self, places: Sequence[NodeId]) -> Sequence[Node | None]:
        def fetch_from(where: NodeId) -> Callable[[Clients], Node | None]:
            return lambda clients: instances.fetch(clients, where)

        return await asyncio.gather(*(self._sdk.call(fetch_from(where)) for where in places))

    def _make_ended(self, request: NodeRequest, where: NodeId) -> Node:
        now_s, placement = self._clock.now_s(), request.placement
        return Node(
            id=str(where),
            cloud="gcp",
            owner=request.owner,
            cluster=request.cluster,
            attempt=request.attempt,
            rank=where.rank,
            state=NodeState.TERMINATED,
            region=placement.offer.region,
            zone=where.zone,
            token=request.token,
            is_spot=placement.is_spot,
            usd_hour=placement.usd_hour / placement.node_count,
            created_s=now_s,
            ended_s=now_s,
            reason=NodeEnd.TERMINATED,  # not MISSING, which would mean that only lists say so
        )
