"""Google Compute Engine as a cloud: four verbs, and stopping. What each asks of Google lies in the files beside."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from broker.clock import Clock
from broker.clouds.gcp import firewall, instances
from broker.clouds.gcp.callers import find_callers
from broker.clouds.gcp.check import inspect_project, require
from broker.clouds.gcp.images import find_image
from broker.clouds.gcp.login import Login, find_login, is_sdk_installed
from broker.clouds.gcp.machine import check_request
from broker.clouds.gcp.memory import KEEP_ENDED_S, Memory
from broker.clouds.gcp.names import NodeId, gang_name, instance_names
from broker.clouds.gcp.operations import Ending, read_endings
from broker.clouds.gcp.quotas import check_quotas, read_quotas
from broker.clouds.gcp.sdk import Clients, Sdk
from broker.clouds.gcp.settings import load_settings
from broker.clouds.gcp.zones import list_zones
from broker.config import Config
from broker.errors import AuthError, CapacityError, CloudError, TransientError, UnknownOutcomeError
from broker.types import Node, NodeRequest, NodeState

log = logging.getLogger(__name__)

NO_PROJECT = "no project is named"
PROJECT_HINT = "Run `gcloud config set project PROJECT`, or set `GOOGLE_CLOUD_PROJECT`."


def make_cloud(config: Config, *, clock: Clock) -> GcpCloud | None:
    """For the registry."""
    login = find_login(load_settings(config.home))
    if login is None or not is_sdk_installed():
        return None
    return GcpCloud(login, memory=Memory(config.home / "gcp"), clock=clock)


class GcpCloud:
    """Cloud and all abilities but CanPreempt. A token gives its gang's names: asked for twice, they are found."""

    name: ClassVar[str] = "gcp"
    settle_s: ClassVar[float] = 10.0

    def __init__(
        self,
        login: Login,
        *,
        memory: Memory,
        clock: Clock,
        callers: Callable[[Login], Sequence[str]] = find_callers,
    ) -> None:
        self._login = login
        self._memory = memory
        self._clock = clock
        self._find_callers = callers
        self._sdk = Sdk(login)
        self._callers: Sequence[str] = ()

    @property
    def user(self) -> str:
        return instances.SSH_USER

    def prepare(self) -> None:
        """Begin to import Google's library, which takes seconds; returns at once."""
        self._sdk.prepare()

    async def check(self) -> None:
        require(await inspect_project(self._sdk))

    async def create_nodes(self, request: NodeRequest) -> Sequence[Node]:
        """Waits for Google's verdict, which lies in the operation; the machines start meanwhile."""
        check_request(request)
        if not self._login.project:
            raise AuthError(NO_PROJECT, hints=(PROJECT_HINT,))
        dead = self._find_dead(request)
        if dead:
            return dead
        zones = await self._sdk.call(lambda clients: list_zones(clients, request.placement.offer))
        zone = await self._find_zone(request, zones)
        if zone is None:
            zone = await self._insert(request, zones)
        else:  # our earlier call may not have come so far
            rules = await self._open_rules(request)
            await self._sdk.call(lambda clients: firewall.await_rules(clients, rules))
        nodes = await self._read_gang(request, zone)
        self._memory.note(nodes, now_s=self._clock.now_s())
        return nodes

    async def list_nodes(self, owner: str) -> Sequence[Node]:
        """Deletes on the way what has shut itself down: of such a node only its disk is left, which costs money."""
        if not self._login.project:
            raise AuthError(NO_PROJECT, hints=(PROJECT_HINT,))
        listed = {node.id: node for node in await self._sdk.call(lambda clients: instances.list_all(clients, owner))}
        known = {node_id: node for node_id, node in self._memory.read().items() if node.owner == owner}
        missing = [node for node in known.values() if node.id not in listed and node.state is not NodeState.TERMINATED]
        found = {node.id: node for node in await self._resolve(missing, owner)} if missing else {}
        left_over = [node.id for node in listed.values() if node.reason and node.state is NodeState.STOPPED]
        await self.terminate_nodes(left_over)
        now_s = self._clock.now_s()
        nodes = {**known, **found, **listed}
        changed = [node for node in nodes.values() if known.get(node.id) != node]
        self._memory.note(changed, now_s=now_s)
        await self._tidy(list(nodes.values()), changed)
        return [node for node in nodes.values() if now_s - (node.ended_s or now_s) < KEEP_ENDED_S or node.id in listed]

    async def terminate_nodes(self, ids: Sequence[str]) -> None:
        await self._each(ids, instances.delete)

    async def stop_nodes(self, ids: Sequence[str]) -> None:
        await self._each(ids, instances.stop)

    async def start_nodes(self, ids: Sequence[str]) -> None:
        await self._each(ids, instances.start)

    async def sweep(self, owner: str, keep: Collection[str]) -> int:
        """Firewall rules are all that a gang leaves behind; disks and addresses go with their instance."""
        nodes = await self.list_nodes(owner)
        live = {NodeId.parse(node.id).gang for node in nodes if node.state is not NodeState.TERMINATED}
        return await self._sdk.call(lambda clients: firewall.sweep_rules(clients, owner, keep, live))

    async def _each(self, ids: Sequence[str], act: Callable[[Clients, NodeId], None]) -> None:
        """All are asked for, whatever becomes of one; then the first failure is told."""
        works = [self._act(act, NodeId.parse(node_id)) for node_id in ids]
        results = await asyncio.gather(*works, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def _act(self, act: Callable[[Clients, NodeId], None], where: NodeId) -> None:
        await self._sdk.call(lambda clients: act(clients, where), does_change=True)

    def _find_dead(self, request: NodeRequest) -> Sequence[Node]:
        """The nodes of a token that was used up: Google has forgotten them, and would make them anew after an hour."""
        nodes = [node for node in self._memory.read().values() if node.token == request.token]
        is_dead = nodes and all(node.state is NodeState.TERMINATED for node in nodes)
        return sorted(nodes, key=lambda node: node.rank) if is_dead else ()

    async def _find_zone(self, request: NodeRequest, zones: Sequence[str]) -> str | None:
        """Where an earlier call with this token has made its nodes. By name: lists may lag."""
        name, project = instance_names(request)[0], self._login.project

        def look(zone: str) -> Callable[[Clients], Node | None]:
            return lambda clients: instances.fetch(clients, NodeId(project=project, zone=zone, name=name))

        found = await asyncio.gather(*(self._sdk.call(look(zone)) for zone in zones))
        return next((zone for zone, node in zip(zones, found, strict=True) if node is not None), None)

    async def _insert(self, request: NodeRequest, zones: Sequence[str]) -> str:
        """The zone that gave the gang. Raises what the last zone said, CapacityError only after all were asked."""
        region = request.placement.offer.region
        quotas, image = await asyncio.gather(
            self._sdk.call(lambda clients: read_quotas(clients, region)),
            self._sdk.call(lambda clients: find_image(clients, request)),
        )
        check_quotas(request, quotas, self._login.project)
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
            raise  # the nodes may be there, and will need their rules
        except CloudError:
            await self._close_gang(gang_name(request))
            raise
        await self._close_gang(gang_name(request))
        assert refusal is not None, "a region has a zone"
        raise refusal

    async def _insert_in(self, request: NodeRequest, zone: str, image: str) -> None:
        await self._sdk.call(lambda clients: instances.insert(clients, request, zone, image), does_change=True)

    async def _await_rules(self, request: NodeRequest, zone: str, rules: Sequence[Any]) -> None:
        """Nodes that nobody could reach are ended before the failure is told."""
        try:
            await self._sdk.call(lambda clients: firewall.await_rules(clients, rules))
        except CloudError:
            await self.terminate_nodes([str(where) for where in self._list_places(request, zone)])
            raise

    def _list_places(self, request: NodeRequest, zone: str) -> list[NodeId]:
        return [NodeId(project=self._login.project, zone=zone, name=name) for name in instance_names(request)]

    async def _open_rules(self, request: NodeRequest) -> Sequence[Any]:
        if not self._callers:
            self._callers = await asyncio.to_thread(self._find_callers, self._login)
        callers = self._callers
        return await self._sdk.call(lambda clients: firewall.open_rules(clients, request, callers))

    async def _read_gang(self, request: NodeRequest, zone: str) -> list[Node]:
        """Every node of the gang; one that Google does not know has ended already."""
        places = self._list_places(request, zone)

        def look(where: NodeId) -> Callable[[Clients], Node | None]:
            return lambda clients: instances.fetch(clients, where)

        found = await asyncio.gather(*(self._sdk.call(look(where)) for where in places))
        return [node or self._make_ended(request, where) for node, where in zip(found, places, strict=True)]

    def _make_ended(self, request: NodeRequest, where: NodeId) -> Node:
        now_s, placement = self._clock.now_s(), request.placement
        return Node(
            id=str(where),
            cloud=self.name,
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
            reason="missing",
        )

    async def _resolve(self, missing: Sequence[Node], owner: str) -> Sequence[Node]:
        """Nodes that a list leaves out, as they are: asked for by name, and what their operations tell of their end."""

        def look(node: Node) -> Callable[[Clients], Node | None]:
            return lambda clients: instances.fetch(clients, NodeId.parse(node.id))

        found = await asyncio.gather(*(self._sdk.call(look(node)) for node in missing))
        gone = [node for node, seen in zip(missing, found, strict=True) if seen is None]
        endings: dict[NodeId, Ending] = {}
        for project in {NodeId.parse(node.id).project for node in gone}:
            endings.update(await self._read_endings(project, owner))
        now_s = self._clock.now_s()
        ended = [_end(node, endings.get(NodeId.parse(node.id)), now_s) for node in gone]
        return [*(node for node in found if node is not None), *ended]

    async def _read_endings(self, project: str, owner: str) -> dict[NodeId, Ending]:
        return dict(await self._sdk.call(lambda clients: read_endings(clients, project, owner)))

    async def _tidy(self, nodes: Sequence[Node], changed: Sequence[Node]) -> None:
        """Close the rules of gangs that have just ended."""
        live = {NodeId.parse(node.id).gang for node in nodes if node.state is not NodeState.TERMINATED}
        for gang in {NodeId.parse(node.id).gang for node in changed if node.state is NodeState.TERMINATED} - live:
            await self._close_gang(gang)

    async def _close_gang(self, gang: str) -> None:
        """What fails here is swept later."""
        project = self._login.project
        try:
            await self._sdk.call(lambda clients: firewall.close_gang(clients, project, gang))
        except CloudError as error:
            log.warning("firewall rules of %s are left over for now: %s", gang, error.message)


def _end(node: Node, ending: Ending | None, now_s: float) -> Node:
    """A node that Google knows no more, as it ended."""
    reason = ending.reason if ending else node.reason
    ended_s = node.ended_s or (ending.ended_s if ending else now_s)
    return replace(node, state=NodeState.TERMINATED, ended_s=ended_s, reason=reason or "terminated")
