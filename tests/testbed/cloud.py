"""A cloud of hosts for tests of what runs on them: the four verbs, with no market and no API in between."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from broker.types import Node, NodeList, NodeRequest, NodeState
from tests.testbed.host import Host
from tests.testbed.metadata import Guest, MetadataServer

ADDRESSES = itertools.count(10)


class HostCloud:
    """Nodes are hosts. `kind` says whose metadata they see ("aws" or "gcp")."""

    settle_s: ClassVar[float] = 0.0

    def __init__(
        self, folder: Path, metadata: MetadataServer, *, kind: str = "aws", shared: Sequence[Path] = ()
    ) -> None:
        self.name = kind
        self._folder = folder
        self._metadata = metadata
        self._shared = shared
        self.hosts: dict[str, Host] = {}
        self._nodes: dict[str, Node] = {}

    async def check(self) -> None:
        pass

    async def create_nodes(self, request: NodeRequest) -> Sequence[Node]:
        known = [node for node in self._nodes.values() if node.token == request.token]
        if known:
            return known
        ranks = range(request.placement.node_count)
        return await asyncio.gather(*(asyncio.to_thread(self._make, request, rank) for rank in ranks))

    async def list_nodes(self, owner: str) -> NodeList:
        return NodeList(nodes=tuple(node for node in list(self._nodes.values()) if node.owner == owner))

    async def terminate_nodes(self, nodes: Sequence[Node]) -> None:
        ids = [node.id for node in nodes if node.id in self.hosts]
        await asyncio.gather(*(asyncio.to_thread(self.end, id, "terminated") for id in ids))

    def end(self, id: str, reason: str, *, is_silent: bool = False) -> None:
        self.hosts[id].power_off(is_silent=is_silent)
        self._note_end(id, reason)

    def give_notice(self, id: str, *, in_s: float) -> None:
        self._metadata.guests[self._nodes[id].address].give_notice(time.time() + in_s)

    def advise(self, id: str) -> None:
        """Announce EC2's rebalance recommendation."""
        self._metadata.guests[self._nodes[id].address].rebalance_s = time.time()

    def end_all(self) -> None:
        for host in self.hosts.values():
            host.power_off()

    def _make(self, request: NodeRequest, rank: int) -> Node:
        number = next(ADDRESSES)
        private, public = (f"{base}.{number >> 8}.{number & 255}" for base in ("10.20", "198.18"))
        id = f"i-{number}"
        self._metadata.guests[private] = Guest(cloud=self.name, id=id)
        self.hosts[id] = Host(
            self._folder, id, [private, public], boot=request.boot, shared=self._shared,
            on_end=lambda: self._note_end(id, "itself"),
        )  # fmt: skip
        placement = request.placement
        self._nodes[id] = node = Node(
            id=id, cloud=self.name, owner=request.owner, cluster=request.cluster, attempt=request.attempt, rank=rank,
            state=NodeState.RUNNING, address=private, region=placement.offer.region, zone=placement.offer.zone,
            token=request.token, is_spot=placement.is_spot, created_s=time.time(), handle=f"ssh://ubuntu@{public}:22",
        )  # fmt: skip
        self.hosts[id].start()
        return node

    def _note_end(self, id: str, reason: str) -> None:
        if self._nodes[id].state is not NodeState.TERMINATED:
            ended = replace(self._nodes[id], state=NodeState.TERMINATED, reason=reason, ended_s=time.time())
            self._nodes[id] = ended
