"""Commands and the daemon use a transport that renews a node's firewall before it gives up."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from broker.app.container import Context
from broker.runtime.base import AsksForAccess
from broker.types import Node, NodeState

NODE = Node(
    id="i-1", cloud="cloud", owner="me", cluster="c", attempt=1, rank=0, state=NodeState.RUNNING, token="t",
    handle="ssh://ubuntu@192.0.2.1:22",
)  # fmt: skip


def test_the_transport_of_a_host_requests_access_from_its_own_cloud(tmp_path: Path) -> None:
    class Cloud:
        asked: Sequence[Node] = ()

        async def renew_access(self, nodes: Sequence[Node]) -> bool:
            self.asked = nodes
            return True

    cloud: Any = Cloud()
    context = Context(tmp_path)
    vars(context)["clouds"] = {"cloud": cloud}
    way = context.transport._choose(NODE)  # type: ignore[attr-defined]
    assert isinstance(way, AsksForAccess)
    assert asyncio.run(way.renew_access(NODE)) is True  # type: ignore[arg-type]
    assert cloud.asked == [NODE]
