"""The printed policy is enough for all of broker's calls, and permits no changes to other resources."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from broker.clouds.aws.check import inspect_account
from broker.clouds.aws.clients import Clients
from broker.clouds.aws.cloud import AwsCloud
from broker.clouds.aws.policy import make_policy
from broker.errors import AuthError
from broker.types import MachineSpec, NodeState
from tests.clouds.aws.bed import AwsBed, open_session
from tests.clouds.contract import OWNER, CloudContract, make_request, wait_state
from tests.testbed.ec2_surroundings import RULES_MAX


class TestWithPolicyOnly(CloudContract):
    """The whole contract, with everything else denied."""

    @pytest.fixture(autouse=True)
    def deny_all_else(self, bed: AwsBed) -> None:
        bed.account.policy = allow(OWNER, "somebody-else")  # the contract simulates two installations


def allow(*owners: str) -> dict[str, object]:
    statements = [statement for owner in owners for statement in make_policy(owner)["Statement"]]
    return {"Version": "2012-10-17", "Statement": statements}


def test_policy_suffices_for_fleets_efa_and_the_sweep(bed: AwsBed) -> None:
    bed.account.policy = allow(OWNER)
    bed.account.scores = {"us-east-1c": 9}
    bed.offer = replace(bed.offer, zone=None)

    async def act() -> None:
        spec = MachineSpec(network_tier="best", ports=("8080",))
        request = make_request(bed, node_count=2, is_spot=True, spec=spec)
        await bed.cloud.create_nodes(request)
        nodes = await wait_state(bed, request.token, NodeState.RUNNING, 2)
        await bed.cloud.terminate_nodes(nodes)
        await wait_state(bed, request.token, NodeState.TERMINATED, 2)
        assert await bed.adapter.sweep(OWNER, ()) == 3

    bed.run(act())


def test_policy_allows_nothing_that_is_not_used(bed: AwsBed) -> None:
    """Every listed action is called, so that none remains after the code that required it."""
    bed.account.policy = allow(OWNER)
    bed.account.volumes["vol-1"] = {
        "region": "us-east-1", "VolumeId": "vol-1", "State": "available",
        "Tags": [{"Key": "broker-owner", "Value": OWNER}],
    }  # fmt: skip

    async def act() -> None:
        findings = await inspect_account(Clients(open_session), bed.settings, OWNER)
        assert [each.name for each in findings if not each.is_ok] == []
        for zone, is_spot in (("us-east-1b", False), (None, True)):
            bed.offer = replace(bed.offer, zone=zone)
            bed.account.scores = {"us-east-1c": 9}
            request = make_request(bed, node_count=2, is_spot=is_spot, spec=MachineSpec(network_tier="best"))
            await bed.cloud.create_nodes(request)
            nodes = await wait_state(bed, request.token, NodeState.RUNNING, 2)
            ids = [node.id for node in nodes]
            if not is_spot:
                await bed.adapter.stop_nodes(ids)
                await wait_state(bed, request.token, NodeState.STOPPED, 2)
                await bed.adapter.start_nodes(ids)
                nodes = await wait_state(bed, request.token, NodeState.RUNNING, 2)
                for group in bed.account.groups.values():  # one of its rules is for egress
                    group["rules"] += [{"IpProtocol": "icmp"}] * (RULES_MAX - len(group["rules"]))
                for number in (1, 2):  # in a full group, the second one takes the place of the first one
                    bed.settings = replace(bed.settings, ssh_from=(f"198.51.100.{number}/32",))
                    assert await AwsCloud(bed.settings, clock=bed.clock, open_session=open_session).renew_access(nodes)
            await bed.cloud.terminate_nodes(nodes)
            await wait_state(bed, request.token, NodeState.TERMINATED, 2)
        assert await bed.adapter.sweep(OWNER, ()) == 5

    bed.run(act())
    listed = {action for statement in make_policy(OWNER)["Statement"] for action in statement["Action"]}
    needed_once_by_amazon = {"iam:CreateServiceLinkedRole"}
    assert listed - needed_once_by_amazon == bed.account.find_actions() - {"sts:GetCallerIdentity"}


def test_policy_protects_machines_of_other_owners(bed: AwsBed) -> None:
    async def act() -> None:
        theirs = make_request(bed, owner="somebody-else")
        (node,) = await bed.cloud.create_nodes(theirs)
        await bed.clock.sleep(bed.cloud.settle_s)
        bed.account.policy = allow(OWNER)
        for refused in (bed.cloud.terminate_nodes([node]), bed.adapter.stop_nodes([node.id])):
            with pytest.raises(AuthError) as caught:
                await refused
            assert any("broker check --policy aws" in hint for hint in caught.value.hints)
        with pytest.raises(AuthError):
            await bed.cloud.create_nodes(theirs)

    bed.run(act())


def test_policy_fits_into_an_inline_policy() -> None:
    assert len(json.dumps(make_policy(OWNER), separators=(",", ":"))) < 6144  # limit of a managed policy, IAM quotas
