"""Google Compute Engine as a cloud: four verbs, and stopping.

The calls to Google are in the other files of this folder.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

from broker.clock import Clock
from broker.clouds.gcp import firewall, instances
from broker.clouds.gcp.callers import find_callers
from broker.clouds.gcp.check import inspect_project, require
from broker.clouds.gcp.launching import NodeLauncher
from broker.clouds.gcp.login import Login, find_login, is_sdk_installed
from broker.clouds.gcp.machine import check_request
from broker.clouds.gcp.names import NodeId
from broker.clouds.gcp.operations import Ending, read_endings
from broker.clouds.gcp.sdk import Clients, Sdk
from broker.clouds.gcp.settings import load_settings
from broker.clouds.gcp.state_file import KEEP_ENDED_S, GcpStateFile
from broker.clouds.tape import Listener
from broker.config import Config
from broker.errors import AuthError, CloudError, InvalidRequestError, TransientError
from broker.types import Node, NodeEnd, NodeList, NodeRequest, NodeState

log = logging.getLogger(__name__)

NO_PROJECT = "no project is configured"
PROJECT_HINT = "run `gcloud config set project PROJECT`, or set `GOOGLE_CLOUD_PROJECT`"


def make_cloud(config: Config, *, clock: Clock) -> GcpCloud | None:
    """Make the cloud for the registry."""
    login = find_login(load_settings(config.home))
    if login is None or not is_sdk_installed():
        return None
    return GcpCloud(login, state_file=GcpStateFile(config.home / "gcp"), clock=clock)


class GcpCloud:
    """Cloud, CanStop, CanPrepare, CanSweep, RenewsAccess, SetsIdentity, CanObserve.

    The names of a gang's instances derive from its token, so a repeated request finds the same instances.
    """

    name: ClassVar[str] = "gcp"
    programs: ClassVar[tuple[str, ...]] = ("ssh",)
    settle_s: ClassVar[float] = 10.0
    extends_gangs: ClassVar[bool] = True

    def __init__(
        self,
        login: Login,
        *,
        state_file: GcpStateFile,
        clock: Clock,
        callers: Callable[[Login], Sequence[str]] = find_callers,
    ) -> None:
        self._login = login
        self._state_file = state_file
        self._clock = clock
        self._sdk = Sdk(login)
        self._unseen: frozenset[str] | None = None  # regions that the newest list left out; None before the first list
        self._launcher = NodeLauncher(self._sdk, clock=clock, find_callers=callers)

    @property
    def user(self) -> str:
        """The login user that the first-boot script creates."""
        return instances.SSH_USER

    def name_console(self, node: Node) -> str:
        """Return the gcloud command for the serial port output."""
        where = NodeId.parse(node.id)
        return (
            f"gcloud compute instances get-serial-port-output {where.name} --project {where.project} "
            f"--zone {where.zone}"
        )

    def prepare(self) -> None:
        """Start importing Google's library, which takes seconds; return at once."""
        self._sdk.prepare()

    def set_identity(self, cluster: str, identity: str) -> None:
        """Give the machines of `cluster` a service account of their own, with access to all APIs that it may use."""
        self._launcher.set_identity(cluster, identity)

    def observe(self, listener: Listener) -> None:
        """Report every request and response of Google's library to `listener`."""
        self._sdk.observe(listener)

    async def check(self) -> None:
        """Verify login, project and API. Raises AuthError with the failed finding."""
        require(await inspect_project(self._sdk))

    async def create_nodes(self, request: NodeRequest) -> Sequence[Node]:
        """Wait for the operation's result; the machines boot meanwhile."""
        check_request(request)
        if not self._login.project:
            raise AuthError(NO_PROJECT, hints=(PROJECT_HINT,))
        dead = self._find_dead(request)
        if dead:
            return dead
        await self._require_listable(request)
        nodes = await self._launcher.launch(request)
        if any(node.cluster != request.cluster for node in nodes):
            raise InvalidRequestError(f"token {request.token} was used for another request")
        self._state_file.note(nodes, now_s=self._clock.now_s())
        return nodes

    async def find_account(self) -> str:
        """Return the project."""
        if not self._login.project:
            raise AuthError(NO_PROJECT, hints=(PROJECT_HINT,))
        return self._login.project

    async def list_nodes(self, owner: str) -> NodeList:
        """List nodes, and delete those that shut themselves down: only their disk is left, which is billed.

        A node that its host took down is stopped, and can be started again.
        """
        project = await self.find_account()
        found_by_google, unseen_zones = await self._list_all(owner)
        listed = {node.id: node for node in found_by_google}
        recorded = {node_id: node for node_id, node in self._state_file.read().items() if node.owner == owner}
        missing = [
            node for node in recorded.values() if node.id not in listed and node.state is not NodeState.TERMINATED
        ]
        unseen: dict[str, CloudError] = {
            zone.rpartition("-")[0]: TransientError(f"Google could not query {zone}") for zone in unseen_zones
        }
        resolved = {node.id: node for node in await self._resolve(missing, owner, unseen)} if missing else {}
        still = [node for node in listed.values() if node.state is NodeState.STOPPED and node.reason]
        listed.update((node.id, node) for node in await self._judge(still, owner))
        now_s = self._clock.now_s()
        nodes = {**recorded, **resolved, **listed}
        changed = [node for node in nodes.values() if recorded.get(node.id) != node]
        self._state_file.note(changed, now_s=now_s)
        await self._tidy(list(nodes.values()), changed)
        kept = [node for node in nodes.values() if now_s - (node.ended_s or now_s) < KEEP_ENDED_S or node.id in listed]
        return NodeList(nodes=tuple(kept), account=project, unseen=unseen)

    async def _list_all(self, owner: str) -> tuple[list[Node], frozenset[str]]:
        found, zones = await self._sdk.call(lambda clients: instances.list_all(clients, owner))
        self._unseen = frozenset(zone.rpartition("-")[0] for zone in zones)
        return found, zones

    async def _require_listable(self, request: NodeRequest) -> None:
        """Refuse to create nodes in a region that the last list did not show. Raises CloudError."""
        region = request.placement.offer.region
        if self._unseen is None or region in self._unseen:
            await self._list_all(request.owner)
        if region in (self._unseen or ()):
            raise TransientError(f"Google cannot list instances in {region} now, so none are created there")

    async def terminate_nodes(self, nodes: Sequence[Node]) -> None:
        """Delete instances concurrently; one that is gone counts as success."""
        await self._each([node.id for node in nodes], instances.delete)

    async def stop_nodes(self, ids: Sequence[str]) -> None:
        """Stop instances concurrently; one that is stopped counts as success."""
        await self._each(ids, instances.stop)

    async def start_nodes(self, ids: Sequence[str]) -> None:
        """Start instances concurrently. Raises CapacityError if a zone is full."""
        await self._each(ids, instances.start)

    async def renew_access(self, nodes: Sequence[Node]) -> bool:
        """Add this machine's current address to the rules of running gangs; return if one changed."""
        has_changed = False
        renewed: set[str] = set()
        for node in nodes:
            where = NodeId.parse(node.id)
            if where.gang in renewed:
                continue
            seen = await self._fetch_again(node)
            if seen is not None and seen.state is NodeState.RUNNING:
                renewed.add(where.gang)
                has_changed |= await self._launcher.renew_access(where, node.owner)
        return has_changed

    async def sweep(self, owner: str, keep: Collection[str]) -> int:
        """Delete firewall rules, the only resources that outlive a gang.

        Disks and addresses are deleted with their instance.
        """
        nodes = await self.list_nodes(owner)
        if nodes.unseen:
            return 0  # rules of a gang in a zone that did not respond must stay
        live = {NodeId.parse(node.id).gang for node in nodes if node.state is not NodeState.TERMINATED}
        return await self._sdk.call(lambda clients: firewall.sweep_rules(clients, owner, keep, live))

    async def _each(self, ids: Sequence[str], act: Callable[[Clients, NodeId], None]) -> None:
        """Run the calls for every node, then raise the first failure."""
        works = [self._act(act, NodeId.parse(node_id)) for node_id in ids]
        results = await asyncio.gather(*works, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def _act(self, act: Callable[[Clients, NodeId], None], where: NodeId) -> None:
        await self._sdk.call(lambda clients: act(clients, where), does_change=True)

    def _find_dead(self, request: NodeRequest) -> Sequence[Node]:
        """Return the nodes that this token has created, if all of them have ended.

        Google forgets a request after an hour, and would then create them again.
        """
        nodes = [node for node in self._state_file.read().values() if node.token == request.token]
        is_dead = nodes and all(node.state is NodeState.TERMINATED for node in nodes)
        return sorted(nodes, key=lambda node: node.rank) if is_dead else ()

    async def _resolve(self, missing: Sequence[Node], owner: str, unseen: dict[str, CloudError]) -> Sequence[Node]:
        """Resolve nodes missing from a list: query them by name, and read their end from their operations.

        A node that cannot be queried, or whose end cannot be read, keeps its state, and its region is added to
        `unseen`.
        """
        results = await asyncio.gather(*(self._fetch_again(node) for node in missing), return_exceptions=True)
        gone: list[Node] = []
        seen: list[Node] = []
        for node, look in zip(missing, results, strict=True):
            if isinstance(look, CloudError):
                unseen.setdefault(node.region, look)
                seen.append(node)
            elif isinstance(look, BaseException):
                raise look
            elif look is None:
                gone.append(node)
            else:
                seen.append(look)
        endings: dict[NodeId, Ending] = {}
        silent: set[str] = set()
        for project in {NodeId.parse(node.id).project for node in gone}:
            found, zones = await self._read_endings(project, owner)
            endings.update(found)
            silent |= zones
        now_s = self._clock.now_s()
        for node in gone:
            ending = endings.get(NodeId.parse(node.id))
            if ending is None and node.zone in silent:  # its end would be recorded without its reason, for good
                unseen.setdefault(node.region, TransientError(f"Google could not query operations in {node.zone}"))
                seen.append(node)
            else:
                seen.append(_end(node, ending, now_s))
        return seen

    async def _judge(self, still: Sequence[Node], owner: str) -> Sequence[Node]:
        """Find the reason of nodes that stopped without our request; delete those that ended themselves."""
        if not still:
            return ()
        endings, _ = await self._read_endings(self._login.project, owner)
        ended = [(node, endings.get(NodeId.parse(node.id))) for node in still]
        judged = [replace(node, reason=ending.reason) if ending else node for node, ending in ended]
        try:
            await self.terminate_nodes([node for node in judged if node.reason == NodeEnd.LEASE or node.is_spot])
        except CloudError as error:
            log.warning("the disk of a node that ended itself is kept for now: %s", error.message)
        return judged

    async def _fetch_again(self, node: Node) -> Node | None:
        """Query the nodes again; a node in a project that this login cannot access keeps its recorded state."""
        where = NodeId.parse(node.id)
        try:
            return await self._sdk.call(lambda clients: instances.fetch(clients, where))
        except AuthError as error:
            if where.project == self._login.project:
                raise
            log.warning("%s cannot be queried with this login: %s", node.id, error.message)
            return node

    async def _read_endings(self, project: str, owner: str) -> tuple[Mapping[NodeId, Ending], frozenset[str]]:
        """Read why nodes ended, and which zones did not respond.

        A refusal is only logged because the reason is informational.
        """
        try:
            return await self._sdk.call(lambda clients: read_endings(clients, project, owner))
        except AuthError as error:
            log.warning("cannot read why nodes ended: %s", error.message)
            return {}, frozenset()

    async def _tidy(self, nodes: Sequence[Node], changed: Sequence[Node]) -> None:
        """Delete the firewall rules of gangs that have just ended."""
        live = {NodeId.parse(node.id).gang for node in nodes if node.state is not NodeState.TERMINATED}
        for gang in {NodeId.parse(node.id).gang for node in changed if node.state is NodeState.TERMINATED} - live:
            await self._launcher.close_gang(gang)


def _end(node: Node, ending: Ending | None, now_s: float) -> Node:
    """Return a node that Google no longer knows, with its end."""
    reason = ending.reason if ending else node.reason
    ended_s = node.ended_s or (ending.ended_s if ending else now_s)
    return replace(node, state=NodeState.TERMINATED, ended_s=ended_s, reason=reason or "terminated")
