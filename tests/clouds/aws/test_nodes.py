"""Instances as EC2 describes them, read as nodes: states, ends, ranks, addresses and prices."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import pytest

from broker.clouds.aws.errors import MESSAGE_MAX, ApiError, translate
from broker.clouds.aws.machine import USER_DATA_BYTES_MAX
from broker.clouds.aws.nodes import read_nodes
from broker.types import Node, NodeState
from tests.clouds.aws.bed import AwsBed
from tests.clouds.contract import make_request

START = datetime(2026, 3, 4, 5, 6, 7, tzinfo=UTC)


def make_instance(number: int, *, tags: Mapping[str, str] | None = None, **fields: Any) -> dict[str, Any]:
    told = {"broker-owner": "me", "broker-cluster": "c", "broker-attempt": "3", "broker-token": "t", **(tags or {})}
    return {
        "InstanceId": f"i-{number:04}",
        "State": {"Name": "running"},
        "LaunchTime": START,
        "AmiLaunchIndex": number,
        "Placement": {"AvailabilityZone": "eu-central-1b"},
        "PrivateIpAddress": f"172.31.0.{number}",
        "Tags": [{"Key": key, "Value": value} for key, value in told.items()],
        **fields,
    }


def read(*instances: Mapping[str, Any]) -> list[Node]:
    return list(read_nodes(instances, region="eu-central-1", user="ec2-user"))


def test_node_has_every_field_of_its_instance() -> None:
    tags = {"broker-usd-hour": "1.25"}
    (node,) = read(make_instance(4, tags=tags, InstanceLifecycle="spot", PublicIpAddress="198.51.100.4"))
    assert node == Node(
        id="i-0004", cloud="aws", owner="me", cluster="c", attempt=3, rank=4, state=NodeState.RUNNING,
        address="172.31.0.4", region="eu-central-1", zone="eu-central-1b", token="t", is_spot=True, usd_hour=1.25,
        created_s=START.timestamp(), handle="ssh://ec2-user@198.51.100.4:22",
    )  # fmt: skip
    (private,) = read(make_instance(4))
    assert (private.handle, private.is_spot) == ("ssh://ec2-user@172.31.0.4:22", False)
    (bare,) = read({"InstanceId": "i-1", "Tags": [{"Key": "broker-owner", "Value": "me"}]})
    assert (bare.state, bare.rank, bare.attempt, bare.usd_hour, bare.created_s) == (NodeState.PENDING, 0, 0, 0.0, 0.0)
    assert (bare.address, bare.handle, bare.zone, bare.reason, bare.ended_s) == ("", "", None, "", None)


@pytest.mark.parametrize(
    ("state", "wanted"),
    [
        ("pending", NodeState.PENDING), ("running", NodeState.RUNNING), ("stopping", NodeState.PENDING),
        ("stopped", NodeState.STOPPED), ("shutting-down", NodeState.PENDING), ("terminated", NodeState.TERMINATED),
        ("something-new", NodeState.PENDING),
    ],
)  # fmt: skip
def test_only_a_running_machine_is_reachable_and_only_one_that_is_off_has_ended(state: str, wanted: NodeState) -> None:
    reason = {"StateReason": {"Code": "Client.UserInitiatedShutdown"}, "PublicIpAddress": "198.51.100.4"}
    (node,) = read(make_instance(1, State={"Name": state}, StateTransitionReason="(2026-03-04 06:07:08 GMT)", **reason))
    assert node.state is wanted
    assert bool(node.handle) == (state == "running") and (node.ended_s is not None) == (
        state in ("stopped", "terminated")
    )
    assert node.reason == ("terminated" if state == "terminated" else "")


@pytest.mark.parametrize(
    ("code", "wanted"),
    [
        ("Server.SpotInstanceTermination", "preempted"),
        ("Server.SpotInstanceShutdown", "preempted"),
        ("Client.UserInitiatedShutdown", "terminated"),
        ("Client.InstanceInitiatedShutdown", "lease"),
        ("Server.InternalError", "Server.InternalError"),
        ("", "terminated"),
    ],
)
def test_the_reason_of_an_end_is_ec2s_code(code: str, wanted: str) -> None:
    fields = {"StateReason": {"Code": code}} if code else {}
    (node,) = read(make_instance(1, State={"Name": "terminated"}, **fields))
    assert node.reason == wanted


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("User initiated (2026-03-04 06:07:08 GMT)", 3661.0),
        ("Server.SpotInstanceTermination (2026-03-04 05:06:07 UTC)", 0.0),
        ("User initiated", None),
        ("", None),
    ],
)
def test_the_time_of_an_end_is_in_its_reason_or_nowhere(text: str, seconds: float | None) -> None:
    (node,) = read(make_instance(1, State={"Name": "terminated"}, StateTransitionReason=text))
    assert node.ended_s == (None if seconds is None else START.timestamp() + seconds)


def list_ranks(instances: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    return {node.id: node.rank for node in read(*instances)}


def test_a_fleet_is_ranked_by_its_tags_or_else_by_id_whatever_the_order_of_the_list() -> None:
    fleet = {"aws:ec2:fleet-id": "fleet-1"}
    for seed in range(5):
        draw = random.Random(seed)
        plain = [make_instance(number, tags=fleet, AmiLaunchIndex=0) for number in range(4)]
        told = [make_instance(n, tags={**fleet, "broker-rank": str(3 - n)}, AmiLaunchIndex=0) for n in range(4)]
        other = [make_instance(10 + n, tags={**fleet, "broker-token": "u"}, AmiLaunchIndex=0) for n in range(2)]
        for gang, expected in ((plain, range(4)), (told, range(3, -1, -1))):
            mixed = [*gang, *other, make_instance(20, tags={"broker-token": "v"}, AmiLaunchIndex=2)]
            draw.shuffle(mixed)
            ranks = list_ranks(mixed)
            assert [ranks[f"i-{n:04}"] for n in range(4)] == list(expected)
            assert [ranks[f"i-{n:04}"] for n in (10, 11, 20)] == [0, 1, 2], "each token has ranks of its own"
    (odd,) = read(make_instance(1, tags={"broker-rank": "first"}))
    assert odd.rank == 1


def test_a_machine_that_does_not_carry_our_tags_is_not_a_node() -> None:
    bare, foreign = make_instance(1), make_instance(2)
    del bare["Tags"]
    foreign["Tags"] = [{"Key": "Name", "Value": "web"}]
    assert [node.id for node in read(bare, foreign, make_instance(3))] == ["i-0003"]


@pytest.mark.parametrize(("length", "is_cut"), [(MESSAGE_MAX, False), (MESSAGE_MAX + 1, True)])
def test_a_message_is_cut_at_its_limit(length: int, is_cut: bool) -> None:
    error = translate(ApiError("InvalidParameter", "x" * length, operation="run_instances", region="us-east-1"))
    text = "x" * MESSAGE_MAX + ("..." if is_cut else "")
    assert error.message == f"InvalidParameter: {text} (run_instances, us-east-1)"


@pytest.mark.parametrize(("extra", "is_packed"), [(0, False), (1, True)])
def test_a_script_is_packed_only_above_the_limit(bed: AwsBed, extra: int, is_packed: bool) -> None:
    boot = "#!/bin/sh\n".ljust(USER_DATA_BYTES_MAX + extra, "#")
    bed.run(create(bed, boot))
    (instance,) = bed.account.instances.values()
    assert (instance.user_data == boot.encode()) is not is_packed and len(instance.user_data) <= USER_DATA_BYTES_MAX


async def create(bed: AwsBed, boot: str) -> None:
    await bed.cloud.create_nodes(make_request(bed, boot=boot))


def test_time_of_an_end_does_not_depend_on_the_zone_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read as local time, it would end a bill hours too early or too late."""
    instance = make_instance(1, State={"Name": "terminated"}, StateTransitionReason="(2026-03-04 06:07:08 GMT)")
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    try:
        (node,) = read(instance)
    finally:
        monkeypatch.undo()
        time.tzset()
    assert node.ended_s == datetime(2026, 3, 4, 6, 7, 8, tzinfo=UTC).timestamp()
