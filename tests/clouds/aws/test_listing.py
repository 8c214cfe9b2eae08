"""Lists cover all regions and all pages; orphans of clusters are swept, and never another owner's resources."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from broker.clouds.aws.cloud import AwsCloud
from broker.clouds.base import CanStop, CanSweep
from broker.errors import AuthError, CapacityError, CloudError, DeniedError, InvalidRequestError, TransientError
from broker.types import MachineSpec, NodeState
from tests.clouds.aws.bed import OFFER, AwsBed
from tests.clouds.contract import OWNER, count_living, make_request, settle, wait_state

WEST = replace(OFFER, region="us-west-2", zone="us-west-2a")


def test_adapter_has_the_abilities_it_claims(bed: AwsBed) -> None:
    assert isinstance(bed.cloud, CanStop) and isinstance(bed.cloud, CanSweep)


def test_nodes_of_every_region_are_listed_and_ended_by_a_process_that_made_none(bed: AwsBed) -> None:
    async def act() -> None:
        for offer in (OFFER, WEST):
            bed.offer = offer
            await bed.cloud.create_nodes(make_request(bed, node_count=2))
        await settle(bed)
        found = await bed.reopen().list_nodes(OWNER)
        assert sorted(node.region for node in found) == ["us-east-1", "us-east-1", "us-west-2", "us-west-2"]
        await bed.reopen().terminate_nodes(found)
        assert await count_living(bed) == 0

    bed.run(act())


def test_only_configured_regions_are_queried(bed: AwsBed) -> None:
    bed.settings = replace(bed.settings, regions=("us-west-2",))
    bed.cloud = bed.reopen()

    async def act() -> None:
        assert not (await bed.cloud.list_nodes(OWNER)).nodes

    bed.run(act())
    asked = [(action, region) for action, region, _ in bed.account.calls if action.startswith("ec2:")]
    assert asked == [("ec2:DescribeInstances", "us-west-2")]


def test_long_list_comes_in_pages(bed: AwsBed) -> None:
    bed.account.page_size = 2

    async def act() -> None:
        await bed.cloud.create_nodes(make_request(bed, node_count=5))
        await settle(bed)
        assert [node.rank for node in await bed.cloud.list_nodes(OWNER)] == [0, 1, 2, 3, 4]

    bed.run(act())


def test_region_that_refuses_is_named_and_hides_no_other(bed: AwsBed) -> None:
    """If a list silently omitted a region, its nodes would be considered gone."""
    bed.account.fail("DescribeInstances", "UnauthorizedOperation", status=403)

    async def act() -> None:
        listed = await bed.cloud.list_nodes(OWNER)
        (refusal,) = listed.unseen.values()
        assert isinstance(refusal, AuthError)
        assert not (await bed.cloud.list_nodes(OWNER)).unseen  # only one call failed

    bed.run(act())


def test_machine_that_is_shutting_down_is_neither_running_nor_gone(bed: AwsBed) -> None:
    async def act() -> None:
        request = make_request(bed)
        await bed.cloud.create_nodes(request)
        (node,) = await wait_state(bed, request.token, NodeState.RUNNING)
        assert node.handle == f"ssh://ubuntu@{bed.account.instances[node.id].public_address}:22"
        assert node.address == bed.account.instances[node.id].private_address
        await bed.cloud.terminate_nodes([node])
        (node,) = await bed.cloud.list_nodes(OWNER)
        assert (node.state, node.handle, node.ended_s) == (NodeState.PENDING, "", None)

    bed.run(act())


def test_ended_machine_is_forgotten_as_ec2_forgets_it(bed: AwsBed) -> None:
    async def act() -> None:
        request = make_request(bed)
        await bed.cloud.create_nodes(request)
        (node,) = await wait_state(bed, request.token, NodeState.RUNNING)
        bed.account.preempt(node.id)
        (node,) = await wait_state(bed, request.token, NodeState.TERMINATED)
        first_seen_s = bed.clock.now_s()
        assert node.ended_s == first_seen_s  # EC2 does not report it, so it is the time of our first observation
        await bed.clock.sleep(60)
        (node,) = await bed.cloud.list_nodes(OWNER)
        assert node.ended_s == first_seen_s
        await bed.clock.sleep(3700)
        assert not (await bed.cloud.list_nodes(OWNER)).nodes

    bed.run(act())


def test_spot_machine_cannot_be_stopped_and_a_full_zone_starts_none(bed: AwsBed) -> None:
    async def act() -> None:
        spot, ondemand = make_request(bed, is_spot=True), make_request(bed)
        await bed.cloud.create_nodes(spot)
        await bed.cloud.create_nodes(ondemand)
        (node,) = await wait_state(bed, spot.token, NodeState.RUNNING)
        with pytest.raises(InvalidRequestError, match="cannot stop these spot nodes") as refused:
            await bed.adapter.stop_nodes([node.id])
        assert "broker down" in refused.value.hints[0]
        (node,) = await wait_state(bed, ondemand.token, NodeState.RUNNING)
        before = node.handle
        await bed.adapter.stop_nodes([node.id])
        await wait_state(bed, ondemand.token, NodeState.STOPPED)
        bed.account.fail("StartInstances", "InsufficientInstanceCapacity", status=500)
        with pytest.raises(CapacityError) as caught:
            await bed.adapter.start_nodes([node.id])
        assert "broker down" in caught.value.hints[0]
        await bed.adapter.start_nodes([node.id])
        (node,) = await wait_state(bed, ondemand.token, NodeState.RUNNING)
        assert node.handle != before, "a started machine has another public address"

    bed.run(act())


def test_sweep_deletes_what_a_cluster_left_and_spares_living_and_foreign_things(bed: AwsBed) -> None:
    async def act() -> None:
        dead, live = make_request(bed, node_count=2, cluster="dead"), make_request(bed, node_count=2, cluster="live")
        theirs = make_request(bed, owner="somebody-else", cluster="dead")
        for request in (dead, live, theirs):
            await bed.cloud.create_nodes(request)
        nodes = await wait_state(bed, dead.token, NodeState.RUNNING, 2)
        await bed.cloud.terminate_nodes(nodes)
        # the placement group; the security group is in use until they end
        assert await bed.adapter.sweep(OWNER, ("live",)) == 1
        await wait_state(bed, dead.token, NodeState.TERMINATED, 2)
        assert await bed.adapter.sweep(OWNER, ("live",)) == 1
        assert await bed.adapter.sweep(OWNER, ("live",)) == 0
        names = {group["GroupName"] for group in bed.account.groups.values()}
        assert names == {f"broker-{OWNER}-live", "broker-somebody-else-dead"}
        assert {name for _, name in bed.account.placement_groups} == {f"broker-{OWNER}-live-us-east-1b"}
        assert len([each for each in bed.account.instances.values() if each.state == "running"]) == 3

    bed.run(act())


def test_the_network_of_a_job_group_is_deleted_with_its_last_cluster(bed: AwsBed) -> None:
    async def act() -> None:
        spec = MachineSpec(group="rl-7f3a")
        first, second = (make_request(bed, cluster=name, spec=spec, token=name * 8) for name in ("aaaa", "bbbb"))
        for request in (first, second):
            await bed.cloud.create_nodes(request)
        for request, keep, left in ((first, ("bbbb",), {"bbbb", "group-rl-7f3a"}), (second, (), set())):
            nodes = await wait_state(bed, request.token, NodeState.RUNNING)
            await bed.cloud.terminate_nodes(nodes)
            await wait_state(bed, request.token, NodeState.TERMINATED)
            await bed.adapter.sweep(OWNER, keep)
            names = {group["GroupName"].removeprefix(f"broker-{OWNER}-") for group in bed.account.groups.values()}
            assert names == left

    bed.run(act())


def test_sweep_reaches_every_region_templates_and_stray_disks(bed: AwsBed) -> None:
    for number, (region, owner, state) in enumerate(
        [("us-west-2", OWNER, "available"), ("us-west-2", OWNER, "in-use"), ("us-east-1", "somebody-else", "available")]
    ):
        bed.account.volumes[f"vol-{number}"] = {
            "region": region, "VolumeId": f"vol-{number}", "State": state,
            "Tags": [{"Key": "broker-owner", "Value": owner}, {"Key": "broker-cluster", "Value": "train"}],
        }  # fmt: skip
    bed.offer = replace(WEST, zone=None)

    async def act() -> None:
        request = make_request(bed)
        await bed.cloud.create_nodes(request)
        (node,) = await wait_state(bed, request.token, NodeState.RUNNING)
        assert await bed.adapter.sweep(OWNER, ("train",)) == 0
        await bed.cloud.terminate_nodes([node])
        await wait_state(bed, request.token, NodeState.TERMINATED)
        assert await bed.adapter.sweep(OWNER, ()) == 3  # group, template, disk

    bed.run(act())
    assert set(bed.account.volumes) == {"vol-1", "vol-2"}
    assert (bed.account.groups, bed.account.templates) == ({}, {})


def test_throttled_sweep_continues_and_a_forbidden_one_raises(bed: AwsBed) -> None:
    async def act() -> None:
        request = make_request(bed, spec=MachineSpec())
        (node,) = await bed.cloud.create_nodes(request)
        await settle(bed)
        await bed.cloud.terminate_nodes([node])
        await wait_state(bed, request.token, NodeState.TERMINATED)
        bed.account.fail("DeleteSecurityGroup", "RequestLimitExceeded", status=503)
        assert await bed.adapter.sweep(OWNER, ()) == 0
        bed.account.fail("DeleteSecurityGroup", "UnauthorizedOperation", status=403)
        with pytest.raises(AuthError):
            await bed.adapter.sweep(OWNER, ())
        assert await bed.adapter.sweep(OWNER, ()) == 1

    bed.run(act())


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        ("SecurityGroup", "DependencyViolation"),
        ("SecurityGroup", "InvalidGroup.InUse"),
        ("PlacementGroup", "InvalidPlacementGroup.InUse"),
        ("Volume", "VolumeInUse"),
    ],
)
def test_what_a_machine_still_uses_is_left_to_the_next_sweep(bed: AwsBed, kind: str, code: str) -> None:
    bed.account.volumes["vol-1"] = {
        "region": "us-east-1", "VolumeId": "vol-1", "State": "available",
        "Tags": [{"Key": "broker-owner", "Value": OWNER}, {"Key": "broker-cluster", "Value": "train"}],
    }  # fmt: skip

    async def act() -> None:
        request = make_request(bed, node_count=2)
        nodes = await bed.cloud.create_nodes(request)
        await settle(bed)
        await bed.cloud.terminate_nodes(nodes)
        await wait_state(bed, request.token, NodeState.TERMINATED, 2)
        bed.account.fail(f"Delete{kind}", code)
        assert await bed.adapter.sweep(OWNER, ()) == 2, "the others"
        assert await bed.adapter.sweep(OWNER, ()) == 1

    bed.run(act())


def test_preparing_makes_no_calls_and_the_first_call_reports_a_wrong_profile(
    bed: AwsBed, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed.adapter.prepare()
    bed.adapter.prepare()
    bed.run(bed.cloud.check())
    assert bed.account.find_actions() == {"sts:GetCallerIdentity"}
    monkeypatch.setenv("AWS_PROFILE", "nobody-wrote-this")
    wrong = AwsCloud(bed.settings, clock=bed.clock)
    wrong.prepare()

    async def act() -> None:
        with pytest.raises(AuthError, match="ProfileNotFound"):
            await wrong.check()

    bed.run(act())


def test_concurrent_calls_stay_within_a_bound(bed: AwsBed) -> None:
    async def act() -> None:
        await asyncio.gather(*(bed.cloud.list_nodes(OWNER) for _ in range(40)))

    bed.run(act())
    assert 0 < bed.aws.calls_at_once_max <= 16


def test_a_denied_region_hides_no_node_of_another(bed: AwsBed) -> None:
    """An organisation's policy often denies the regions that it does not use."""

    async def act() -> None:
        request = make_request(bed)
        await bed.cloud.create_nodes(request)
        (node,) = await wait_state(bed, request.token, NodeState.RUNNING)
        bed.account.fail("DescribeInstances", "UnauthorizedOperation", status=403, times=99, region="us-west-2")
        listed = await bed.cloud.list_nodes(OWNER)
        assert [each.id for each in listed] == [node.id]
        assert listed.unseen.keys() == {"us-west-2"} and isinstance(listed.unseen["us-west-2"], AuthError)
        assert listed.account == node.account == "123456789012"

    bed.run(act())


@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        ("UnauthorizedOperation", 403, DeniedError), ("Unavailable", 503, TransientError),
        # a session token of the global endpoint, in a region that was enabled by hand: other regions accept it
        ("AuthFailure", 401, DeniedError),
    ],
)  # fmt: skip
def test_nothing_is_created_in_a_region_that_cannot_be_listed(
    bed: AwsBed, code: str, status: int, kind: type[CloudError]
) -> None:
    async def act() -> None:
        region = make_request(bed).placement.offer.region
        bed.account.fail("DescribeInstances", code, status=status, times=4, region=region)
        with pytest.raises(kind, match=f"{code}.*{region}"):
            await bed.cloud.create_nodes(make_request(bed))
        creating = {"ec2:RunInstances", "ec2:CreateFleet", "ec2:CreateSecurityGroup"}
        assert not bed.account.find_actions() & creating
        bed.account.faults.clear()
        assert await bed.cloud.create_nodes(make_request(bed, token="later"))

    bed.run(act())


def test_a_region_is_listed_once_before_the_first_create_in_it(bed: AwsBed) -> None:
    async def act() -> None:
        await bed.cloud.create_nodes(make_request(bed, token="one"))
        names = [action for action, _, _ in bed.account.calls]
        assert names.index("ec2:DescribeInstances") < names.index("ec2:RunInstances")
        before = names.count("ec2:DescribeInstances")
        await bed.cloud.create_nodes(make_request(bed, token="two"))
        assert [action for action, _, _ in bed.account.calls].count("ec2:DescribeInstances") == before

    bed.run(act())


def test_a_node_on_record_is_terminated_though_no_list_answers(bed: AwsBed) -> None:
    """By a process that has never listed: the record names the node's region."""

    async def act() -> None:
        request = make_request(bed)
        await bed.cloud.create_nodes(request)
        (node,) = await wait_state(bed, request.token, NodeState.RUNNING)
        bed.account.fail("DescribeInstances", "InternalError", status=500, times=99)
        bed.account.fail("DescribeRegions", "InternalError", status=500, times=99)
        await bed.reopen().terminate_nodes([node])
        bed.account.faults.clear()
        await wait_state(bed, request.token, NodeState.TERMINATED)

    bed.run(act())


def test_a_region_that_refuses_to_terminate_does_not_block_others(bed: AwsBed) -> None:
    async def act() -> None:
        request = make_request(bed)
        await bed.cloud.create_nodes(request)
        (node,) = await wait_state(bed, request.token, NodeState.RUNNING)
        elsewhere = replace(node, id="i-00000000000000aaa", region="us-west-2")
        bed.account.fail("TerminateInstances", "InternalError", status=500, times=9, region="us-west-2")
        with pytest.raises(CloudError):
            await bed.cloud.terminate_nodes([elsewhere, node])
        await wait_state(bed, request.token, NodeState.TERMINATED)

    bed.run(act())


def test_a_protected_node_keeps_no_other_from_being_terminated(bed: AwsBed) -> None:
    """EC2 refuses the whole call for one machine that a user has protected from termination."""

    async def act() -> None:
        request = make_request(bed, node_count=4)
        await bed.cloud.create_nodes(request)
        nodes = await wait_state(bed, request.token, NodeState.RUNNING, 4)
        bed.account.instances[nodes[1].id].is_protected = True
        with pytest.raises(InvalidRequestError, match="OperationNotPermitted"):
            await bed.cloud.terminate_nodes(nodes)
        await bed.clock.sleep(60)
        states = {node.id: node.state for node in await bed.cloud.list_nodes(OWNER)}
        assert [states[node.id] for node in nodes].count(NodeState.TERMINATED) == 3
        assert states[nodes[1].id] is NodeState.RUNNING

    bed.run(act())
