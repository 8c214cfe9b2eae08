"""Google's two backends together: which one creates a node, and that neither forgets the other's nodes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from broker.clouds import CLOUDS
from broker.clouds.base import CanExtend, CanPrepare, CanStop, CanSweep, ProvidesSshHosts
from broker.clouds.gcp.cloud import GcpCloud
from broker.clouds.sky import tpus
from broker.clouds.sky.cloud import SkyCloud
from broker.clouds.sky.state_file import SkyStateFile
from broker.clouds.sky.tpus import TpuCloud
from broker.config import Config
from broker.errors import TransientError
from broker.types import Node, NodeList, NodeState
from tests.clouds.contract import OWNER, make_request

TPU = {"cloud": "gcp", "region": "us-central1", "zone": "us-central1-a", "instance_type": "tpu-v5litepod-8"}
OWN = Node(id="p/z/b-1", cloud="gcp", owner=OWNER, cluster="c", attempt=1, rank=0, state=NodeState.RUNNING)


class Own:
    """Stands for the adapter of Google's machines."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.fails = False

    async def list_nodes(self, owner: str) -> NodeList:
        if self.fails:
            raise TransientError("no answer")
        return NodeList(nodes=(OWN,))

    def __getattr__(self, verb: str) -> Any:
        async def act(*arguments: Any) -> Any:
            self.asked.append((verb, arguments[0]))
            return [OWN]

        return act


@pytest.fixture
def own() -> Own:
    return Own()


@pytest.fixture
def cloud(bed: Any, own: Any) -> TpuCloud:
    behind = SkyCloud("gcp", engine=bed.engine, state_file=SkyStateFile(bed.folder / "sky"), clock=bed.clock)
    return TpuCloud(own, behind)


def test_slices_go_through_skypilot_and_machines_do_not(bed: Any, cloud: TpuCloud, own: Own) -> None:
    from dataclasses import replace

    machine = make_request(bed)
    bed.offer = replace(bed.offer, **TPU)
    (node,) = asyncio.run(cloud.create_nodes(make_request(bed)))
    assert not own.asked and bed.engine.launched[0][1]["resources"]["accelerators"] == "tpu-v5litepod-8:1"
    asyncio.run(cloud.create_nodes(machine))
    assert [verb for verb, _ in own.asked] == ["create_nodes"] and len(bed.engine.launched) == 1
    assert {each.id for each in asyncio.run(cloud.list_nodes(OWNER))} == {OWN.id, node.id}
    for verb in ("stop_nodes", "start_nodes", "terminate_nodes"):
        own.asked.clear()
        if verb == "terminate_nodes":
            asyncio.run(cloud.terminate_nodes([OWN, node]))
            assert own.asked == [(verb, [OWN])]
        else:
            asyncio.run(getattr(cloud, verb)([OWN.id]))
            assert own.asked == [(verb, [OWN.id])]
    asyncio.run(bed.clock.sleep(60))
    states = {each.id: each.state for each in asyncio.run(cloud.list_nodes(OWNER))}
    assert states == {OWN.id: NodeState.RUNNING, node.id: NodeState.TERMINATED}


def test_partial_list_of_tpus_raises_an_error(cloud: TpuCloud, own: Own) -> None:
    own.fails = True
    with pytest.raises(TransientError):
        asyncio.run(cloud.list_nodes(OWNER))


def test_it_has_the_abilities_of_the_google_adapter(cloud: TpuCloud) -> None:
    """With SkyPilot in addition, Google's machines still boot with our script and are reached by ssh."""
    for ability in (CanExtend, CanPrepare, CanStop, CanSweep, ProvidesSshHosts):
        assert isinstance(cloud, ability), ability.__name__
    assert cloud.settle_s == max(GcpCloud.settle_s, SkyCloud.settle_s)
    assert CLOUDS["gcp"] == "broker.clouds.sky.tpus:make_cloud"


@pytest.mark.parametrize(("has_own", "has_behind", "kind"), [(0, 1, None), (1, 0, "own"), (1, 1, "both")])
def test_skypilot_is_added_if_there_is_a_login_for_google_and_it_has_google_enabled(
    bed: Any, monkeypatch: pytest.MonkeyPatch, has_own: int, has_behind: int, kind: str | None
) -> None:
    own, behind = object(), object()
    monkeypatch.setattr(tpus, "make_own", lambda config, *, clock: own if has_own else None)
    monkeypatch.setattr(tpus, "make_behind", lambda name, config, *, clock: behind if has_behind else None)
    made = tpus.make_cloud(Config(home=bed.folder, owner=OWNER), clock=bed.clock)
    assert (made is own) if kind == "own" else isinstance(made, TpuCloud) if kind else made is None
