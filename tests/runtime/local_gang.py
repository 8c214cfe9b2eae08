"""Real local nodes for tests: every one is ended when the test is over, and every wait is for a condition."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from broker.clock import SystemClock
from broker.clouds import local_machine
from broker.clouds.local import LocalCloud
from broker.runtime.gang import Gang
from broker.runtime.reports import GangReport
from broker.runtime.transports.local import LocalTransport
from broker.types import Cluster, ClusterStatus, Node, NodeRequest, NodeState, Offer, Placement, Resources, Task

DEADLINE_S = 900.0  # generous: only a broken program reaches it
TOKENS = itertools.count()


async def wait_for(condition: Callable[[], Awaitable[Any]] | Callable[[], Any]) -> Any:
    give_up_s = time.monotonic() + DEADLINE_S
    while True:
        result = condition()
        if isinstance(result, Awaitable):
            result = await result
        if result:
            return result
        assert time.monotonic() < give_up_s, f"the condition was never met: {condition}"
        await asyncio.sleep(0.02)


def make_request(*, node_count: int = 1, token: str = "", cluster: str = "c", is_spot: bool = True) -> NodeRequest:
    offer = Offer(
        cloud="local",
        region="local",
        zone="local-a",
        instance_type="local-1x",
        vcpus=1,
        memory_gib=1,
        ondemand_usd_hour=0.1,
        spot_usd_hour=0.03,
    )
    placement = Placement(offer=offer, is_spot=is_spot, node_count=node_count)
    token = token or f"token-{next(TOKENS)}"
    return NodeRequest(owner="me", cluster=cluster, attempt=1, token=token, placement=placement)


def make_task(run: str | None, *, setup: str | None = None, num_nodes: int = 1, **fields: Any) -> Task:
    return Task(name="t", resources=(Resources(),), num_nodes=num_nodes, setup=setup, run=run, **fields)


class Rig:
    """A local cloud and a gang on it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.cloud = LocalCloud(root, clock=SystemClock())
        self.transport = LocalTransport()
        self.gang = Gang(self.transport, clock=SystemClock())

    async def make_cluster(self, node_count: int = 1) -> Cluster:
        request = make_request(node_count=node_count)
        nodes = tuple(await self.cloud.create_nodes(request))
        return Cluster(name="c", status=ClusterStatus.UP, placement=request.placement, attempt=1, nodes=nodes)

    async def start(self, cluster: Cluster, task: Task, run_id: int = 1, **options: Any) -> None:
        await self.gang.prepare(cluster, task)
        await self.gang.start(cluster, task, run_id=run_id, envs={}, **options)

    async def finish(self, cluster: Cluster, run_id: int = 1) -> GangReport:
        async def is_over() -> GangReport | None:
            report = await self.gang.poll(cluster, run_id)
            return report if report.status.is_terminal else None

        report: GangReport = await wait_for(is_over)
        return report

    async def finish_all(self, cluster: Cluster, run_id: int = 1) -> GangReport:
        """Finish as `finish` does, once every rank has written its own outcome too."""

        async def are_over() -> GangReport | None:
            report = await self.gang.poll(cluster, run_id)
            return report if all(status and status.is_terminal for status in report.statuses) else None

        report: GangReport = await wait_for(are_over)
        return report

    async def read_log(self, cluster: Cluster, run_id: int = 1) -> str:
        return (await self.gang.read_log(cluster, run_id, offset=0))[0].decode()

    async def wait_log(self, cluster: Cluster, text: str, run_id: int = 1) -> None:
        async def has_it() -> bool:
            return text in await self.read_log(cluster, run_id)

        await wait_for(has_it)

    async def state_of(self, node: Node) -> Node:
        return next(found for found in await self.cloud.list_nodes("me") if found.id == node.id)

    async def wait_state(self, node: Node, state: NodeState) -> Node:
        async def is_there() -> Node | None:
            found = await self.state_of(node)
            return found if found.state is state else None

        found: Node = await wait_for(is_there)
        return found

    def end_all(self) -> None:
        ids = [entry.name for entry in self.root.iterdir() if entry.is_dir()] if self.root.exists() else []
        nodes = [node for node in self.cloud._list() if node.id in ids] if ids else []
        asyncio.run(self.cloud.terminate_nodes(nodes))
        for id in ids:
            assert not list(local_machine.find_marked(str(self.root / id)))


def processes_of(node: Node) -> Sequence[int]:
    """List living processes of this node, zombies left out."""
    return [pid for pid in local_machine.find_marked(node.handle) if not local_machine.is_zombie(pid)]
