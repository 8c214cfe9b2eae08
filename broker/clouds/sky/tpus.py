"""Google Cloud: machines through its own adapter, TPU slices through SkyPilot."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, ClassVar

from broker.clock import Clock
from broker.clouds.gcp.cloud import GcpCloud
from broker.clouds.gcp.cloud import make_cloud as make_own
from broker.clouds.sky.gangs import NAME
from broker.clouds.sky.makers import make_cloud as make_behind
from broker.clouds.sky.task_spec import is_tpu
from broker.config import Config
from broker.types import Node, NodeList, NodeRequest

if TYPE_CHECKING:
    from broker.clouds.sky.cloud import SkyCloud  # 40 ms that users without SkyPilot need not spend


def make_cloud(config: Config, *, clock: Clock) -> GcpCloud | TpuCloud | None:
    """Make the cloud for the registry.

    Without SkyPilot, or if it has not enabled Google, TPUs are refused with a hint.
    """
    own = make_own(config, clock=clock)
    behind = make_behind("gcp", config, clock=clock) if own is not None else None
    return own if own is None or behind is None else TpuCloud(own, behind)


class TpuCloud:
    """Cloud, CanStop, CanPrepare, CanSweep, CanExtend, ProvidesSshHosts. A node's id shows which backend created it."""

    name: ClassVar[str] = "gcp"
    programs: ClassVar[tuple[str, ...]] = ("ssh",)
    settle_s: ClassVar[float] = 10.0  # the longer of the two
    extends_gangs: ClassVar[bool] = True

    def __init__(self, own: GcpCloud, behind: SkyCloud) -> None:
        self._own = own
        self._behind = behind

    @property
    def user(self) -> str:
        """The login user of Google's own nodes."""
        return self._own.user

    def prepare(self) -> None:
        """Start importing Google's library; SkyPilot is started only for a TPU."""
        self._own.prepare()

    async def check(self) -> None:
        """Verify Google's login; SkyPilot's is verified when a TPU is requested."""
        await self._own.check()

    async def create_nodes(self, request: NodeRequest) -> Sequence[Node]:
        """Create TPU slices through SkyPilot, and anything else directly."""
        cloud = self._behind if is_tpu(request.placement.offer) else self._own
        return await cloud.create_nodes(request)

    async def find_account(self) -> str:
        """Return Google's project."""
        return await self._own.find_account()

    async def list_nodes(self, owner: str) -> NodeList:
        """List both backends or fail: with only one of the lists, the other backend's nodes would look lost."""
        own, behind = await asyncio.gather(self._own.list_nodes(owner), self._behind.list_nodes(owner))
        return NodeList(nodes=(*own.nodes, *behind.nodes), account=own.account, unseen={**own.unseen, **behind.unseen})

    async def terminate_nodes(self, nodes: Sequence[Node]) -> None:
        """Terminate both kinds of nodes concurrently; an error of one does not stop the other."""
        behind = set(_part([node.id for node in nodes])[1])
        results = await asyncio.gather(
            self._own.terminate_nodes([node for node in nodes if node.id not in behind]),
            self._behind.terminate_nodes([node for node in nodes if node.id in behind]),
            return_exceptions=True,
        )
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def stop_nodes(self, ids: Sequence[str]) -> None:
        """Stop both kinds of nodes."""
        own, behind = _part(ids)
        await self._own.stop_nodes(own)
        await self._behind.stop_nodes(behind)

    async def start_nodes(self, ids: Sequence[str]) -> None:
        """Start both kinds of nodes."""
        own, behind = _part(ids)
        await self._own.start_nodes(own)
        await self._behind.start_nodes(behind)

    async def sweep(self, owner: str, keep: Collection[str]) -> int:
        """Delete Google's unused firewall rules; SkyPilot cleans up its own."""
        return await self._own.sweep(owner, keep)


def _part(ids: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    behind = [each for each in ids if NAME.fullmatch(each.partition("/")[0])]
    return [each for each in ids if each not in behind], behind
