"""The role of a server's machine: the permissions that `broker check --policy aws` prints, and the server's buckets.

IAM API reference: CreateRole, PutRolePolicy, CreateInstanceProfile, AddRoleToInstanceProfile. The role and its instance
profile have the same name. Every verb may be repeated.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from broker.clock import Clock
from broker.clouds.aws import tags
from broker.clouds.aws.clients import Clients
from broker.clouds.aws.errors import ApiError, translate
from broker.clouds.aws.policy import LOOK, make_policy
from broker.errors import DeniedError
from broker.frozen import frozen

PATH, POLICY = "/broker/", "broker"
PROPAGATION_S = 15.0  # IAM is "eventually consistent" (its User Guide): EC2 refuses a profile that it does not know yet
READ_BUCKET = ("s3:GetBucketLocation", "s3:ListBucket", "s3:ListBucketMultipartUploads")
USE_OBJECTS = (
    *("s3:AbortMultipartUpload", "s3:DeleteObject", "s3:GetObject", "s3:ListMultipartUploadParts", "s3:PutObject"),
)
DENIED_HINTS = (
    "log in as an IAM administrator, or name an existing instance profile: `--role NAME`",
    "or use no role, and log in to AWS on the server's machine: `--role none`",
)


@frozen
class ServerRole:
    """A role.

    `created_by` is the installation that creates it; `owner` is the server's own ID, which tags the machines that it
    may change: None before the server exists. `nodes_profile` is the instance profile that it may give to nodes.
    """

    name: str
    created_by: str
    owner: str | None = None
    buckets: tuple[str, ...] = ()
    nodes_profile: str | None = None


class ServerRoles:
    """Create, update and delete roles with the user's own login."""

    def __init__(self, clients: Clients, *, clock: Clock) -> None:
        self._clients = clients
        self._clock = clock

    async def ensure(self, role: ServerRole) -> str:
        """Create the role and its instance profile, or update its permissions; return its ARN. Raises CloudError."""
        names = {"RoleName": role.name, "InstanceProfileName": role.name}
        labels = tags.write_tags({tags.OWNER: role.created_by})
        with _translated():
            arn = await self.find_arn(role.name)
            passed = None if role.nodes_profile is None else await self._find_profile_role(role.nodes_profile)
            is_new = await self._create(
                "create_role", RoleName=role.name, Path=PATH, AssumeRolePolicyDocument=json.dumps(make_trust(arn)),
                Description="The machine of a broker server", Tags=labels,
            )  # fmt: skip
            is_new |= await self._write_policy(role.name, make_role_policy(role, arn, passed_role=passed))
            is_new |= await self._create(
                "create_instance_profile", InstanceProfileName=role.name, Path=PATH, Tags=labels
            )
            if await self._find_profile_role(role.name) is None:
                await self._call("add_role_to_instance_profile", **names)
        if is_new:
            await self._clock.sleep(PROPAGATION_S)
        return arn

    async def delete(self, name: str) -> None:
        """Delete the role and its instance profile; no effect if they do not exist. Raises CloudError."""
        role, profile = {"RoleName": name}, {"InstanceProfileName": name}
        steps: Mapping[str, Mapping[str, str]] = {
            "remove_role_from_instance_profile": {**role, **profile},
            "delete_instance_profile": profile,
            "delete_role_policy": {**role, "PolicyName": POLICY},
            "delete_role": role,
        }
        with _translated():
            for operation, parameters in steps.items():
                try:
                    await self._call(operation, **parameters)
                except ApiError as refusal:
                    if refusal.code != "NoSuchEntity":
                        raise

    async def find_arn(self, name: str) -> str:
        """Return the ARN of a role in the login's account, whether or not it exists. Raises CloudError."""
        with _translated():
            caller = await self._clients.read("sts", await self._clients.find_home(), "get_caller_identity")
        partition = str(caller["Arn"]).split(":")[1]
        return f"arn:{partition}:iam::{caller['Account']}:role{PATH}{name}"

    async def _write_policy(self, name: str, policy: Mapping[str, Any]) -> bool:
        """Write the role's permissions; return whether they changed."""
        place = {"RoleName": name, "PolicyName": POLICY}
        try:
            if (await self._call("get_role_policy", **place))["PolicyDocument"] == policy:
                return False
        except ApiError as refusal:
            if refusal.code != "NoSuchEntity":
                raise
        await self._call("put_role_policy", **place, PolicyDocument=json.dumps(policy))
        return True

    async def _find_profile_role(self, profile: str) -> str | None:
        """Return the ARN of the profile's role."""
        found = await self._call("get_instance_profile", InstanceProfileName=profile)
        return next((str(each["Arn"]) for each in found["InstanceProfile"]["Roles"]), None)

    async def _create(self, operation: str, **parameters: Any) -> bool:
        """Create something; return whether it did not exist."""
        try:
            await self._call(operation, **parameters)
        except ApiError as refusal:
            if refusal.code != "EntityAlreadyExists":
                raise
            return False
        return True

    async def _call(self, operation: str, **parameters: Any) -> dict[str, Any]:
        # `read` repeats a call without an answer, which every verb here permits.
        return await self._clients.read("iam", await self._clients.find_home(), operation, **parameters)


def make_trust(arn: str) -> dict[str, Any]:
    """Make the role's trust policy: EC2 gives it to machines, and the role may assume itself.

    It does so to give nodes sessions that are limited to a task's paths (docs/BUCKET_ACCESS.md, `bucket_role`). A
    principal must exist before it is named, so a condition limits the account to this role.
    """
    partition, account = arn.split(":")[1], arn.split(":")[4]
    return {
        "Version": "2012-10-17",
        "Statement": [
            {"Effect": "Allow", "Principal": {"Service": "ec2.amazonaws.com"}, "Action": "sts:AssumeRole"},
            {
                "Effect": "Allow", "Principal": {"AWS": f"arn:{partition}:iam::{account}:root"},
                "Action": "sts:AssumeRole", "Condition": {"ArnEquals": {"aws:PrincipalArn": arn}},
            },
        ],
    }  # fmt: skip


def make_role_policy(role: ServerRole, arn: str, *, passed_role: str | None) -> dict[str, Any]:
    """Make the role's permissions; `passed_role` is the ARN of the role of `role.nodes_profile`."""
    whole = make_policy(role.owner or "", instance_profile_role=passed_role)
    statements = [each for each in whole["Statement"] if role.owner is not None or each["Sid"] == LOOK]
    partition = arn.split(":")[1]
    buckets = [f"arn:{partition}:s3:::{bucket}" for bucket in role.buckets]
    added = [
        {"Sid": "ReadBuckets", "Effect": "Allow", "Action": list(READ_BUCKET), "Resource": buckets},
        {"Sid": "UseObjects", "Effect": "Allow", "Action": list(USE_OBJECTS), "Resource": [f"{b}/*" for b in buckets]},
        {"Sid": "GrantNodes", "Effect": "Allow", "Action": ["sts:AssumeRole"], "Resource": [arn]},
    ]
    return {**whole, "Statement": [*statements, *(added if buckets else ())]}


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except ApiError as refusal:
        error = translate(refusal)
        if isinstance(error, DeniedError):
            raise DeniedError(error.message, hints=DENIED_HINTS) from refusal
        raise error from refusal
