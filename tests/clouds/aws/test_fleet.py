"""If the offer names no zone, an instant fleet finds one: for the whole gang, or for nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from broker.errors import (
    CapacityError,
    CloudError,
    InvalidRequestError,
    QuotaError,
    TransientError,
    UnknownOutcomeError,
)
from broker.types import NodeState
from tests.clouds.aws.bed import AwsBed
from tests.clouds.contract import count_living, list_of, make_request, wait_state

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
