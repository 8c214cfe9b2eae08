"""The role of a server's machine is created with its profile, brought up to date, and deleted without a trace."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from broker.clouds.aws.clients import Clients
from broker.clouds.aws.policy import make_policy
from broker.clouds.aws.server_role import ServerRole, ServerRoles
from broker.errors import DeniedError
from tests.clouds.aws.bed import AwsBed, open_session
from tests.clouds.contract import OWNER, make_request

NAME = f"broker-server-{OWNER}"
ROLE = ServerRole(name=NAME, created_by="laptop", owner=OWNER)
ARN = f"arn:aws:iam::123456789012:role/broker/{NAME}"


@pytest.fixture
def roles(bed: AwsBed) -> ServerRoles:
    return ServerRoles(Clients(open_session), clock=bed.clock)


def read_policy(bed: AwsBed) -> Mapping[str, Any]:
    (policy,) = bed.account.roles[NAME]["policies"].values()
    return {each["Sid"]: each for each in policy["Statement"]}


def test_role_has_what_check_policy_prints(bed: AwsBed, roles: ServerRoles) -> None:
    assert asyncio.run(roles.ensure(ROLE)) == ARN
    assert list(read_policy(bed).values()) == make_policy(OWNER)["Statement"]
    assert bed.account.profiles[NAME] == NAME
    assert bed.account.roles[NAME]["Tags"] == [{"Key": "broker-owner", "Value": "laptop"}]


def test_role_may_only_look_until_the_server_has_an_id(bed: AwsBed, roles: ServerRoles) -> None:
    asyncio.run(roles.ensure(replace(ROLE, owner=None, buckets=("runs",))))
    assert set(read_policy(bed)) == {"Look", "ReadBuckets", "UseObjects", "GrantNodes"}


def test_repeated_creation_of_the_role_updates_its_permissions(bed: AwsBed, roles: ServerRoles) -> None:
    asyncio.run(roles.ensure(ROLE))
    asyncio.run(roles.ensure(replace(ROLE, buckets=("runs",), nodes_profile="reader")))
    policy = read_policy(bed)
    assert policy["UseObjects"]["Resource"] == ["arn:aws:s3:::runs/*"]
    assert policy["GiveRole"]["Resource"] == ["arn:aws:iam::123456789012:role/reader"]
    assert policy["GrantNodes"]["Resource"] == [ARN], "for sessions that are limited to a task's paths"
    assert bed.account.roles[NAME]["trust"]["Statement"][1]["Condition"] == {"ArnEquals": {"aws:PrincipalArn": ARN}}
    asyncio.run(roles.ensure(ROLE))
    assert "UseObjects" not in read_policy(bed)


@pytest.mark.parametrize(
    "operation", ["CreateRole", "PutRolePolicy", "CreateInstanceProfile", "AddRoleToInstanceProfile"]
)
def test_interrupted_creation_of_the_role_is_completed(bed: AwsBed, roles: ServerRoles, operation: str) -> None:
    bed.account.fail(operation, "AccessDenied", status=403)
    with pytest.raises(DeniedError) as caught:
        asyncio.run(roles.ensure(ROLE))
    assert any("--role none" in hint for hint in caught.value.hints)
    asyncio.run(roles.ensure(ROLE))
    assert bed.account.profiles[NAME] == NAME and read_policy(bed)


@pytest.mark.parametrize("step_count", range(5))
def test_deleting_the_role_leaves_no_resource(bed: AwsBed, roles: ServerRoles, step_count: int) -> None:
    """Also what an interrupted deletion has left."""
    steps = ["RemoveRoleFromInstanceProfile", "DeleteInstanceProfile", "DeleteRolePolicy", "DeleteRole"]
    asyncio.run(roles.ensure(ROLE))
    for operation in steps[step_count : step_count + 1]:
        bed.account.fail(operation, "AccessDenied", status=403)
        with pytest.raises(DeniedError):
            asyncio.run(roles.delete(NAME))
    asyncio.run(roles.delete(NAME))
    asyncio.run(roles.delete(NAME))
    assert set(bed.account.roles) == set(bed.account.profiles) == {"reader"}


@pytest.mark.parametrize("zone", ["us-east-1b", None])
def test_identity_is_given_to_one_cluster(bed: AwsBed, zone: str | None) -> None:
    """By RunInstances and by a fleet."""
    bed.offer = replace(bed.offer, zone=zone)
    bed.account.profiles["server"] = "reader"

    async def act() -> None:
        bed.adapter.set_identity("mine", "server")
        await bed.cloud.create_nodes(make_request(bed, cluster="mine", token="a" * 32))
        await bed.cloud.create_nodes(make_request(bed, cluster="other", token="b" * 32))

    bed.run(act())
    mine, other = bed.account.instances.values()
    assert mine.parameters["IamInstanceProfile"] == {"Name": "server"}
    assert "IamInstanceProfile" not in other.parameters
