"""A running node admits ssh from this machine's current address, which changes with its network."""

from __future__ import annotations

from dataclasses import replace

from broker.clouds.aws.policy import make_policy
from broker.clouds.base import RenewsAccess
from broker.types import Node, NodeState
from tests.clouds.aws.bed import AwsBed
from tests.clouds.contract import OWNER, make_request, wait_state
from tests.testbed.ec2_surroundings import RULES_MAX

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


def test_a_full_security_group_loses_the_oldest_address_that_was_added_later(bed: AwsBed) -> None:
    """A group has 60 rules at most; a laptop that moves between networks reaches that in weeks."""
    bed.account.policy = make_policy(OWNER)

    async def act() -> None:
        bed.cloud = move(bed, HOME)  # type: ignore[assignment]
        node = await make_node(bed)
        (group,) = bed.account.groups.values()
        own = {"IpProtocol": "tcp", "FromPort": 22, "ToPort": 22, "IpRanges": [{"CidrIp": "192.0.2.1/32"}]}
        group["rules"].append(own)  # by hand
        count = RULES_MAX - len(group["rules"])
        for number in range(count + 2):
            assert await move(bed, f"198.51.100.{number}/32").renew_access([node]) is True
            await bed.clock.sleep(60.0)
        added = [f"198.51.100.{number}/32" for number in range(2, count + 2)]
        assert list_ssh_blocks(bed) == [HOME, "192.0.2.1/32", *added]

    bed.run(act())
