"""moto, an independent fake, understands our requests: a second check of the wire format, where it supports it.

It does not honour ClientToken and has no placement groups, spot placement scores or EC2 quotas: those claims are tested
with our fake.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import pytest

from broker.clock import SystemClock
from broker.clouds.aws.cloud import AwsCloud
from broker.clouds.aws.settings import Settings
from broker.errors import TransientError
from broker.types import MachineSpec, Node, NodeState
from tests.clouds.aws.bed import OFFER, open_session
from tests.clouds.contract import OWNER, Bed, make_request

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = pytest.importorskip("moto.server")
    threaded = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    threaded.start()
    host, port = threaded.get_host_and_port()
    yield f"http://{host}:{port}"
    threaded.stop()


class MotoBed(Bed):
    def __init__(self, url: str) -> None:
        self.clock = SystemClock()
        settings = Settings(ssh_from=("203.0.113.7/32",), regions=("us-east-1",), images={"us-east-1": "ami-03cf127a"})
        self.cloud = self.adapter = AwsCloud(settings, clock=self.clock, open_session=open_session)
        self.offer = OFFER


@pytest.fixture
def bed(url: str, monkeypatch: pytest.MonkeyPatch) -> MotoBed:
    for name, value in {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    return MotoBed(url)


@pytest.mark.parametrize("zone", ["us-east-1b", None], ids=["zone", "fleet"])
@pytest.mark.parametrize("is_spot", [False, True], ids=["on-demand", "spot"])
def test_moto_takes_a_gang_from_its_launch_to_the_sweep(bed: MotoBed, zone: str | None, is_spot: bool) -> None:
    bed.offer = replace(OFFER, zone=zone, instance_type="m5.large", accelerator=None, vcpus=2)
    cluster = f"c-{zone}-{is_spot}"

    async def act() -> None:
        spec = MachineSpec(disk_size_gib=50, ports=("8080",), labels={"team": "vision"})
        request = make_request(bed, cluster=cluster, node_count=2, is_spot=is_spot, spec=spec, boot="#!/bin/sh\n")
        created = await bed.cloud.create_nodes(request)
        nodes = sorted(await list_of_cluster(bed, cluster), key=lambda node: node.rank)
        assert [node.rank for node in nodes] == [0, 1]
        assert {node.id for node in nodes} == {node.id for node in created}
        for node in nodes:
            assert (node.owner, node.cluster, node.attempt, node.token) == (OWNER, cluster, 1, request.token)
            assert (node.state, node.is_spot) == (NodeState.RUNNING, is_spot)
            assert node.zone in ((zone,) if zone else ("us-east-1a", "us-east-1b", "us-east-1c"))
            assert node.address and node.handle.startswith("ssh://ubuntu@")
        if not is_spot:
            await bed.adapter.stop_nodes([node.id for node in nodes])
            assert {node.state for node in await list_of_cluster(bed, cluster)} == {NodeState.STOPPED}
            await bed.adapter.start_nodes([node.id for node in nodes])
        await bed.cloud.terminate_nodes(nodes)
        ended = await list_of_cluster(bed, cluster)
        assert {(node.state, node.reason) for node in ended} == {(NodeState.TERMINATED, "terminated")}
        assert all(node.ended_s and abs(node.ended_s - bed.clock.now_s()) < 600 for node in ended)
        with pytest.raises(TransientError, match="describe_placement_groups"):
            await bed.adapter.sweep(OWNER, ())
        client = open_session().client("ec2", region_name="us-east-1")
        filters = [{"Name": "tag:broker-owner", "Values": [OWNER]}]
        assert client.describe_security_groups(Filters=filters)["SecurityGroups"] == []
        assert client.describe_launch_templates(Filters=filters)["LaunchTemplates"] == []

    asyncio.run(act())


def test_login_is_accepted_by_moto(bed: MotoBed) -> None:
    asyncio.run(bed.cloud.check())


async def list_of_cluster(bed: MotoBed, cluster: str) -> list[Node]:
    return [node for node in await bed.cloud.list_nodes(OWNER) if node.cluster == cluster]
