"""If the offer names no zone, an instant fleet finds one: for the whole gang, or for nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from broker.errors import (
    CapacityError,
    CloudError,
    InvalidRequestError,
    QuotaError,
    ThrottledError,
    TransientError,
    UnknownOutcomeError,
)
from broker.types import NodeState
from tests.clouds.aws.bed import AwsBed
from tests.clouds.contract import OWNER, count_living, list_of, make_request, wait_state

ZONES = ("us-east-1a", "us-east-1b", "us-east-1c")


@pytest.fixture
def bed(bed: AwsBed) -> AwsBed:
    bed.offer = replace(bed.offer, zone=None)
    return bed


@pytest.mark.parametrize("is_spot", [False, True], ids=["on-demand", "spot"])
def test_gang_is_placed_in_the_only_zone_with_capacity(bed: AwsBed, is_spot: bool) -> None:
    bed.account.full = {(zone, bed.offer.instance_type) for zone in ZONES[:2]}

    async def act() -> None:
        request = make_request(bed, node_count=4, is_spot=is_spot)
        created = await bed.cloud.create_nodes(request)
        assert {node.zone for node in created} == {"us-east-1c"}
        assert {node.state for node in created} == {NodeState.PENDING}
        nodes = await wait_state(bed, request.token, NodeState.RUNNING, 4)
        assert [node.rank for node in nodes] == [0, 1, 2, 3]
        assert {node.id: node.rank for node in nodes} == {node.id: node.rank for node in created}
        assert {node.is_spot for node in nodes} == {is_spot}
        assert {node.zone for node in nodes} == {"us-east-1c"}

    bed.run(act())


def test_gang_that_is_answered_in_several_groups_is_whole(bed: AwsBed) -> None:
    bed.account.fleet_group_size = 2

    async def act() -> None:
        request = make_request(bed, node_count=5)
        created = await bed.cloud.create_nodes(request)
        assert sorted(node.rank for node in created) == [0, 1, 2, 3, 4]
        assert len({node.id for node in created}) == 5
        await wait_state(bed, request.token, NodeState.RUNNING, 5)

    bed.run(act())


def test_part_of_a_gang_in_several_groups_is_ended_whole(bed: AwsBed) -> None:
    bed.account.partial_fleet, bed.account.fleet_group_size = 3, 2

    async def act() -> None:
        request = make_request(bed, node_count=4)
        with pytest.raises(CapacityError):
            await bed.cloud.create_nodes(request)
        await wait_state(bed, request.token, NodeState.TERMINATED, 3)

    bed.run(act())


def test_zone_with_the_best_score_is_tried_first_for_spot(bed: AwsBed) -> None:
    bed.account.scores = {"us-east-1a": 2, "us-east-1b": 3, "us-east-1c": 9}

    async def act() -> None:
        (node,) = await bed.cloud.create_nodes(make_request(bed, is_spot=True))
        assert node.zone == "us-east-1c"
        (node,) = await bed.cloud.create_nodes(make_request(bed, is_spot=False))
        assert node.zone == "us-east-1a"

    bed.run(act())


@pytest.mark.parametrize("code", ["RequestLimitExceeded", "MaxConfigLimitExceeded", "UnauthorizedOperation"])
def test_launch_works_without_scores(bed: AwsBed, code: str) -> None:
    bed.account.fail("GetSpotPlacementScores", code, times=9)

    async def act() -> None:
        (node,) = await bed.cloud.create_nodes(make_request(bed, is_spot=True))
        assert node.zone == "us-east-1a"

    bed.run(act())


def test_region_without_room_refuses_as_a_region_and_leaves_no_template(bed: AwsBed) -> None:
    bed.account.full = {(zone, bed.offer.instance_type) for zone in ZONES}

    async def act() -> None:
        with pytest.raises(CapacityError) as caught:
            await bed.cloud.create_nodes(make_request(bed, node_count=2))
        assert caught.value.scope == "region"
        assert await count_living(bed) == 0
        assert bed.account.templates == {}

    bed.run(act())


def test_part_of_a_gang_is_ended_and_refused(bed: AwsBed) -> None:
    bed.account.partial_fleet = 2

    async def act() -> None:
        request = make_request(bed, node_count=3)
        with pytest.raises(CapacityError):
            await bed.cloud.create_nodes(request)
        await wait_state(bed, request.token, NodeState.TERMINATED, 2)

    bed.run(act())


def test_partial_gang_that_cannot_be_terminated_is_an_unknown_outcome(bed: AwsBed) -> None:
    """A refusal would forget two machines that run."""
    bed.account.partial_fleet = 2
    bed.account.fail("TerminateInstances", "Unavailable", status=503, times=9)

    async def act() -> None:
        with pytest.raises(UnknownOutcomeError):
            await bed.cloud.create_nodes(make_request(bed, node_count=3))

    bed.run(act())


def test_fleet_without_nodes_or_reason_is_unknown(bed: AwsBed) -> None:
    bed.account.partial_fleet = 0
    bed.account.partial_is_silent = True

    async def act() -> None:
        with pytest.raises(UnknownOutcomeError):
            await bed.cloud.create_nodes(make_request(bed))

    bed.run(act())


def test_lost_answer_then_the_same_nodes_with_the_same_ranks(bed: AwsBed) -> None:
    bed.account.lose_answer("CreateFleet")

    async def act() -> None:
        request = make_request(bed, node_count=3)
        with pytest.raises(UnknownOutcomeError):
            await bed.cloud.create_nodes(request)
        adopted = await wait_state(bed, request.token, NodeState.RUNNING, 3)  # ranks were never written
        again = await bed.reopen().create_nodes(request)
        assert {node.id: node.rank for node in again} == {node.id: node.rank for node in adopted}
        assert len(await list_of(bed, request.token)) == 3

    bed.run(act())


def test_newer_image_after_a_crash_adopts_nodes_of_the_same_token(bed: AwsBed) -> None:
    """EC2 refuses a token with other parameters, and Ubuntu's image changes every few days."""

    async def act() -> None:
        request = make_request(bed, node_count=2)
        first = await bed.cloud.create_nodes(request)
        await bed.clock.sleep(bed.cloud.settle_s)
        template = next(iter(bed.account.templates))
        del bed.account.templates[template]
        bed.settings = replace(bed.settings, images={"us-east-1": "ami-newer"})
        bed.account.fail("CreateFleet", "IdempotentParameterMismatch")
        again = await bed.reopen().create_nodes(request)
        assert {node.id for node in again} == {node.id for node in first}

    bed.run(act())


@pytest.mark.parametrize(
    ("code", "wanted"),
    [
        ("VcpuLimitExceeded", QuotaError),
        ("MaxSpotInstanceCountExceeded", QuotaError),
        ("InvalidFleetConfiguration", InvalidRequestError),
        ("RequestLimitExceeded", CloudError),
        ("InternalError", TransientError),
    ],
)
def test_reason_in_the_answer_decides(bed: AwsBed, code: str, wanted: type[CloudError]) -> None:
    bed.account.fleet_errors = {zone: code for zone in ZONES}

    async def act() -> None:
        with pytest.raises(wanted):
            await bed.cloud.create_nodes(make_request(bed, node_count=2))
        assert await count_living(bed) == 0

    bed.run(act())


def test_one_zone_without_the_machine_does_not_hide_that_the_others_are_full(bed: AwsBed) -> None:
    bed.account.fleet_errors = {
        "us-east-1a": "InvalidFleetConfiguration",
        "us-east-1b": "InsufficientInstanceCapacity",
        "us-east-1c": "UnfulfillableCapacity",
    }

    async def act() -> None:
        with pytest.raises(CapacityError) as caught:
            await bed.cloud.create_nodes(make_request(bed))
        assert caught.value.scope == "region"

    bed.run(act())


def find_fleet(bed: AwsBed) -> Mapping[str, Any]:
    return next(asked for action, _, asked in reversed(bed.account.calls) if action == "ec2:CreateFleet")


WHOLE = {"SingleInstanceType": True, "SingleAvailabilityZone": True, "MinTargetCapacity": 2}


@pytest.mark.parametrize(
    ("is_spot", "scores", "key", "options", "priorities"),
    [
        (False, {"us-east-1c": 9}, "OnDemandOptions", {"AllocationStrategy": "lowest-price"}, None),
        (
            True, {}, "SpotOptions",
            {"AllocationStrategy": "price-capacity-optimized", "InstanceInterruptionBehavior": "terminate"}, None,
        ),
        (
            True, {"us-east-1c": 9, "us-east-1b": 2}, "SpotOptions",
            {"AllocationStrategy": "capacity-optimized-prioritized", "InstanceInterruptionBehavior": "terminate"},
            [("c", 0.0), ("b", 1.0), ("a", 2.0)],
        ),
    ],
    ids=["on-demand", "spot", "spot with scores"],
)  # fmt: skip
def test_fleet_is_one_gang_of_one_kind_that_ends_where_it_is_interrupted(
    bed: AwsBed, is_spot: bool, scores: dict[str, int], key: str, options: dict[str, Any], priorities: Any
) -> None:
    """A spot machine that hibernated or stopped would keep its disk, and be billed for it."""
    bed.account.scores = scores

    async def act() -> None:
        request = make_request(bed, node_count=2, is_spot=is_spot, token="t" * 32)
        await bed.cloud.create_nodes(request)

    bed.run(act())
    asked = find_fleet(bed)
    assert asked[key] == {**options, **WHOLE} and not ({"OnDemandOptions", "SpotOptions"} - {key}) & set(asked)
    assert (asked["Type"], asked["ClientToken"]) == ("instant", "t" * 32)
    assert asked["TargetCapacitySpecification"] == {
        "TotalTargetCapacity": 2, "DefaultTargetCapacityType": "spot" if is_spot else "on-demand",
    }  # fmt: skip
    (config,) = asked["LaunchTemplateConfigs"]
    assert config["LaunchTemplateSpecification"] == {"LaunchTemplateName": f"broker-{'t' * 32}", "Version": "1"}
    told = [(each["SubnetId"][-1], each["Priority"]) for each in config["Overrides"] if "Priority" in each]
    assert told == (priorities or []) and {each["SubnetId"][-1] for each in config["Overrides"]} == set("abc")
    tags = {each["ResourceType"]: each["Tags"] for each in asked["TagSpecifications"]}
    assert {each["Key"]: each["Value"] for each in tags["fleet"]} == {"broker-owner": OWNER, "broker-cluster": "train"}
    (template,) = bed.account.templates.values()
    told_tags = {each["Key"]: each["Value"] for each in template["Tags"]}
    assert told_tags == {"broker-owner": OWNER, "broker-cluster": "train", "broker-token": "t" * 32}


def test_part_of_a_gang_that_is_not_listed_yet_is_ended_at_a_later_try(bed: AwsBed) -> None:
    bed.account.partial_fleet = 2
    bed.account.fail("TerminateInstances", "InvalidInstanceID.NotFound", times=3)

    async def act() -> None:
        request = make_request(bed, node_count=3)
        started_s = bed.clock.now_s()
        with pytest.raises(CapacityError):
            await bed.cloud.create_nodes(request)
        assert bed.clock.now_s() - started_s == 1 + 2 + 4
        await wait_state(bed, request.token, NodeState.TERMINATED, 2)

    bed.run(act())
    assert bed.account.templates == {}


def test_a_refused_fleet_leaves_its_template_only_while_it_may_be_repeated(bed: AwsBed) -> None:
    async def act() -> None:
        for code, wanted, left in (
            ("InsufficientInstanceCapacity", CapacityError, 0), ("MaxSpotInstanceCountExceeded", QuotaError, 0),
            ("RequestLimitExceeded", ThrottledError, 1),
        ):  # fmt: skip
            bed.account.fail("CreateFleet", code, status=503)
            with pytest.raises(wanted):
                await bed.cloud.create_nodes(make_request(bed, token="t" * 32))
            assert len(bed.account.templates) == left, code

    bed.run(act())


def test_one_reason_of_several_zones_is_reported_once_and_a_quota_comes_first(bed: AwsBed) -> None:
    bed.account.fleet_errors = dict.fromkeys(ZONES, "InsufficientInstanceCapacity")

    async def act() -> None:
        with pytest.raises(CapacityError) as caught:
            await bed.cloud.create_nodes(make_request(bed))
        assert caught.value.message.count("InsufficientInstanceCapacity") == 1
        bed.account.fleet_errors = {**bed.account.fleet_errors, ZONES[2]: "VcpuLimitExceeded"}
        with pytest.raises(QuotaError, match="limit is 1000, and other machines run already"):
            await bed.cloud.create_nodes(make_request(bed))
        bed.account.fleet_errors = dict(
            zip(ZONES, ("InvalidParameter", "Unavailable", "InvalidParameter"), strict=True)
        )
        with pytest.raises(TransientError):
            await bed.cloud.create_nodes(make_request(bed))

    bed.run(act())
