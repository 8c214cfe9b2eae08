"""The local cloud fulfils the contract, with real processes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from broker.clock import SystemClock
from broker.clouds.base import Cloud
from broker.clouds.local import LocalCloud
from broker.types import Node, Offer
from tests.clouds.beds import make_node
from tests.clouds.contract import Bed, CloudContract


class LocalBed(Bed):
    def __init__(self, root: Path) -> None:
        self.root = root
        self.clock = SystemClock()
        self.cloud = self.local = LocalCloud(root, clock=self.clock)
        self.offer = Offer(
            cloud="local", region="local", zone="local-a", instance_type="local-1x", vcpus=1, memory_gib=1,
            ondemand_usd_hour=0.1, spot_usd_hour=0.03,
        )  # fmt: skip

    def reopen(self) -> Cloud:
        return LocalCloud(self.root, clock=self.clock)

    def fill(self) -> None:
        self.root.mkdir()
        (self.root / "faults.json").write_text(json.dumps({"zones": {"local-a": "capacity"}}))

    async def preempt(self, node: Node) -> None:
        await self.local.preempt_nodes([node.id], notice_s=0)

    async def end_from_inside(self, node: Node) -> None:
        (Path(node.handle) / "home/.broker/shutdown").write_text("lease")


@pytest.fixture
def bed(tmp_path: Path) -> Iterator[Bed]:
    bed = LocalBed(tmp_path / "nodes")
    yield bed
    ids = [entry.name for entry in bed.root.iterdir() if entry.is_dir()] if bed.root.exists() else []
    asyncio.run(bed.local.terminate_nodes([make_node(each, cloud="local") for each in ids]))


class TestLocal(CloudContract):
    pass
