"""broker and a real SkyPilot API server: what it can use, dry runs, tables, refusals, a cancelled launch."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from broker.clock import SystemClock
from broker.clouds.sky.check import SkyInspector
from broker.clouds.sky.cloud import SkyCloud
from broker.clouds.sky.engine import WorkerEngine
from broker.clouds.sky.state_file import SkyStateFile
from broker.clouds.sky.task_spec import make_task
from broker.config import Config
from broker.errors import AuthError, CapacityError, InvalidRequestError, TransientError
from broker.types import MachineSpec, Node, NodeRequest, NodeState, Offer, Placement
from tests.clouds.beds import make_node
from tests.sky.conftest import PYTHON
from tests.sky.fake_lambda import FakeLambda

ROOT = Path(__file__).parent.parent.parent
OWNER = "0123456789ab"
TOKENS = itertools.count(1)
POLLS_MAX = 300


def make_request(*, node_count: int = 1, **offer: Any) -> NodeRequest:
    values = {"cloud": "lambda", "region": "us-east-1", "zone": None, "instance_type": "gpu_1x_a10"}
    figures = {"vcpus": 30, "memory_gib": 200, "accelerator": "A10", "accelerator_count": 1, "ondemand_usd_hour": 0.75}
    placement = Placement(offer=Offer(**{**values, **figures, **offer}), is_spot=False, node_count=node_count)
    return NodeRequest(owner=OWNER, cluster="train", attempt=1, token=f"{next(TOKENS):032x}", placement=placement)


@pytest.fixture
def cloud(engine: WorkerEngine, fake_lambda: FakeLambda, tmp_path: Path) -> SkyCloud:
    fake_lambda.full.clear()
    fake_lambda.refusal = None
    return SkyCloud("lambda", engine=engine, state_file=SkyStateFile(tmp_path / "sky"), clock=SystemClock())


async def wait_for(cloud: SkyCloud, token: str, is_so: Callable[[list[Node]], bool]) -> list[Node]:
    nodes: list[Node] = []
    for _ in range(POLLS_MAX):
        nodes = [node for node in await cloud.list_nodes(OWNER) if node.token == token]
        if is_so(nodes):
            return nodes
        await asyncio.sleep(1)
    raise AssertionError(f"the nodes did not reach the expected state: {nodes}")


def test_broker_check_shows_what_the_server_says(cloud: SkyCloud, tmp_path: Path) -> None:
    environment = {**os.environ, "BROKER_SKY_PYTHON": PYTHON, "BROKER_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}

    def run(*words: str, code: int = 0) -> Any:
        command = [sys.executable, "-m", "broker", "check", *words, "--json"]
        # SkyPilot's processes need the redirection, broker's need broker: the worker takes PYTHONPATH over.
        environment["PYTHONPATH"] = f"{ROOT}:{os.environ['PYTHONPATH']}"
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == code, done.stderr
        return json.loads(done.stdout)

    rows = {row["cloud"]: row for row in run()}
    assert rows["lambda"]["can_launch"] and "SkyPilot 0.14" in rows["lambda"]["note"]
    assert not rows["azure"]["can_launch"]
    azure = run("azure", code=5)[-1]
    assert not azure["is_ok"] and "az login" in azure["note"] and azure["command"] == "sky check azure"
    assert SkyStateFile(tmp_path / "sky").read_enabled() == ["lambda"]


def test_enabled_cloud_is_checked_in_detail(cloud: SkyCloud, engine: WorkerEngine, tmp_path: Path) -> None:
    config = Config(home=tmp_path, owner=OWNER)
    findings = asyncio.run(SkyInspector("lambda", engine).inspect(config, clock=SystemClock()))
    assert all(each.is_ok for each in findings), findings


def test_a_dry_run_keeps_the_given_order(cloud: SkyCloud, engine: WorkerEngine, fake_lambda: FakeLambda) -> None:
    async def act() -> None:
        request = await engine.launch("dry", make_task(make_request(node_count=2)), is_dry=True)
        await engine.fetch(request)

    asyncio.run(act())
    assert not fake_lambda.launched


@pytest.mark.parametrize("offer", [{"instance_type": "gpu_9x_z99"}, {"region": "atlantis-1"}])
def test_offers_missing_from_the_skypilot_catalog_come_from_other_sources(
    cloud: SkyCloud, engine: WorkerEngine, offer: dict[str, str]
) -> None:
    with pytest.raises(CapacityError, match=next(iter(offer.values()))):
        asyncio.run(engine.launch("wrong", make_task(make_request(**offer)), is_dry=True))


def test_a_request_that_no_place_can_serve_is_invalid(cloud: SkyCloud, engine: WorkerEngine) -> None:
    request = replace(make_request(), spec=MachineSpec(labels={"": "no name"}, disk_tier="none such"))
    with pytest.raises(InvalidRequestError):
        asyncio.run(engine.launch("wrong", make_task(request), is_dry=True))


def test_a_cloud_that_is_not_enabled_ends_the_search(cloud: SkyCloud, engine: WorkerEngine, tmp_path: Path) -> None:
    other = SkyCloud("nebius", engine=engine, state_file=SkyStateFile(tmp_path / "other"), clock=SystemClock())
    request = make_request(cloud="nebius", region="eu-north1", instance_type="cpu-e2_4vcpu-16gb")
    with pytest.raises(AuthError) as caught:
        asyncio.run(other.create_nodes(request))
    assert any("sky check" in hint for hint in caught.value.hints)


def test_a_full_region_refuses_and_leaves_nothing(cloud: SkyCloud, fake_lambda: FakeLambda) -> None:
    fake_lambda.full.add("us-east-1")

    async def act() -> None:
        with pytest.raises(CapacityError, match="us-east-1"):
            await cloud.create_nodes(make_request())
        assert not await cloud.list_nodes(OWNER)

    asyncio.run(act())
    assert not fake_lambda.launched and not fake_lambda.instances


def test_a_gang_is_seen_coming_up_and_its_launch_is_cancelled(cloud: SkyCloud, fake_lambda: FakeLambda) -> None:
    fake_lambda.launched.clear()

    async def act() -> None:
        request = make_request(node_count=2)
        nodes = await cloud.create_nodes(request)
        assert [(node.rank, node.state) for node in nodes] == [(0, NodeState.PENDING), (1, NodeState.PENDING)]
        for _ in range(POLLS_MAX):
            if len(fake_lambda.instances) == 2:
                break
            await asyncio.sleep(1)
        assert len(fake_lambda.instances) == 2
        again = await cloud.create_nodes(request)
        assert [node.id for node in again] == [node.id for node in nodes]
        assert sum(body["quantity"] for body in fake_lambda.launched) == 2
        await cloud.terminate_nodes([nodes[0]])
        gone = await wait_for(cloud, request.token, lambda nodes: all(n.state is NodeState.TERMINATED for n in nodes))
        assert {node.reason for node in gone} == {"terminated"} and len(gone) == 2
        await cloud.terminate_nodes([nodes[0]])

    asyncio.run(act())
    assert not fake_lambda.instances


def test_terminating_an_unknown_cluster_succeeds(cloud: SkyCloud, engine: WorkerEngine) -> None:
    asyncio.run(cloud.terminate_nodes([make_node(f"b-{OWNER}-lambda-{0xDEAD:032x}/0", cloud="lambda")]))
    assert asyncio.run(engine.write_ssh("b-none-lambda-00")) is None


def test_a_missing_server_is_distinguished_from_a_refusal(server: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKYPILOT_API_SERVER_ENDPOINT", "http://127.0.0.1:9")
    engine = WorkerEngine(PYTHON)
    try:
        with pytest.raises(TransientError) as caught:
            asyncio.run(engine.hello())
        assert any("sky api start" in hint for hint in caught.value.hints)
    finally:
        engine.close()
