"""A running node admits ssh from this machine's current address, which changes with its network."""

from __future__ import annotations

from dataclasses import replace

from broker.clouds.base import RenewsAccess
from broker.types import Node, NodeState
from tests.clouds.aws.bed import AwsBed
from tests.clouds.contract import make_request, wait_state

HOME, CAFE = "203.0.113.7/32", "198.51.100.9/32"


def list_ssh_blocks(bed: AwsBed) -> list[str]:
    (group,) = bed.account.groups.values()
    ssh = [rule for rule in group["rules"] if rule.get("FromPort") == 22]
    return [each["CidrIp"] for rule in ssh for each in rule["IpRanges"]]


async def make_node(bed: AwsBed) -> Node:
    request = make_request(bed)
    await bed.cloud.create_nodes(request)
    (node,) = await wait_state(bed, request.token, NodeState.RUNNING)
    return node


def move(bed: AwsBed, block: str) -> RenewsAccess:
    """Make the cloud as a process at this address would."""
    bed.settings = replace(bed.settings, ssh_from=(block,))
    cloud = bed.reopen()
    assert isinstance(cloud, RenewsAccess)
    return cloud


def test_ssh_from_a_new_address_is_admitted_once_and_the_old_one_stays(bed: AwsBed) -> None:
    async def act() -> None:
        bed.cloud = move(bed, HOME)  # type: ignore[assignment]
        node = await make_node(bed)
        assert list_ssh_blocks(bed) == [HOME]
        assert await move(bed, HOME).renew_access([node]) is False
        cloud = move(bed, CAFE)
        assert await cloud.renew_access([node]) is True
        assert list_ssh_blocks(bed) == [HOME, CAFE]
        assert await cloud.renew_access([node]) is False
        assert list_ssh_blocks(bed) == [HOME, CAFE]

    bed.run(act())


def test_stopped_nodes_admit_no_new_address(bed: AwsBed) -> None:
    async def act() -> None:
        bed.cloud = move(bed, HOME)  # type: ignore[assignment]
        node = await make_node(bed)
        await bed.cloud.terminate_nodes([node])
        await wait_state(bed, node.token, NodeState.TERMINATED)
        assert await move(bed, CAFE).renew_access([node]) is False
        assert list_ssh_blocks(bed) == [HOME]

    bed.run(act())
