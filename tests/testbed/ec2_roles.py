"""IAM's roles and instance profiles in the fake AWS, and the keys that a machine with a profile gets."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import quote

from tests.testbed.ec2_account import ACCOUNT, Account
from tests.testbed.ec2_policy import Target, is_allowed
from tests.testbed.ec2_wire import ApiError

Parameters = dict[str, Any]
Answer = dict[str, Any]
KEY_START = "ASIA-OF-"  # the key of a role, followed by its name


def create_role(account: Account, region: str, asked: Parameters) -> Answer:
    name = asked["RoleName"]
    if name in account.roles:
        raise ApiError("EntityAlreadyExists", name, 409)
    trust = json.loads(asked["AssumeRolePolicyDocument"])
    account.roles[name] = {"path": asked["Path"], "trust": trust, "policies": {}, "Tags": asked["Tags"]}
    return {"Role": _describe_role(account, name)}


def put_role_policy(account: Account, region: str, asked: Parameters) -> Answer:
    assert len(asked["PolicyDocument"]) <= 10_240, "IAM quotas, inline policies of a role"
    _find(account.roles, asked["RoleName"])["policies"][asked["PolicyName"]] = json.loads(asked["PolicyDocument"])
    return {}


def get_role_policy(account: Account, region: str, asked: Parameters) -> Answer:
    policies = _find(account.roles, asked["RoleName"])["policies"]
    document = quote(json.dumps(_find(policies, asked["PolicyName"])))
    return {"RoleName": asked["RoleName"], "PolicyName": asked["PolicyName"], "PolicyDocument": document}


def delete_role_policy(account: Account, region: str, asked: Parameters) -> Answer:
    if _find(account.roles, asked["RoleName"])["policies"].pop(asked["PolicyName"], None) is None:
        raise ApiError("NoSuchEntity", status=404)
    return {}


def delete_role(account: Account, region: str, asked: Parameters) -> Answer:
    if _find(account.roles, asked["RoleName"])["policies"] or asked["RoleName"] in account.profiles.values():
        raise ApiError("DeleteConflict", status=409)
    del account.roles[asked["RoleName"]]
    return {}


def create_instance_profile(account: Account, region: str, asked: Parameters) -> Answer:
    if asked["InstanceProfileName"] in account.profiles:
        raise ApiError("EntityAlreadyExists", status=409)
    account.profiles[asked["InstanceProfileName"]] = None
    return {"InstanceProfile": _describe_profile(account, asked["InstanceProfileName"])}


def get_instance_profile(account: Account, region: str, asked: Parameters) -> Answer:
    if asked["InstanceProfileName"] not in account.profiles:
        raise ApiError("NoSuchEntity", status=404)
    return {"InstanceProfile": _describe_profile(account, asked["InstanceProfileName"])}


def add_role_to_instance_profile(account: Account, region: str, asked: Parameters) -> Answer:
    _find(account.roles, asked["RoleName"])
    if account.profiles[asked["InstanceProfileName"]] is not None:
        raise ApiError("LimitExceeded", "a profile has one role", 409)
    account.profiles[asked["InstanceProfileName"]] = asked["RoleName"]
    return {}


def remove_role_from_instance_profile(account: Account, region: str, asked: Parameters) -> Answer:
    if account.profiles.get(asked["InstanceProfileName"]) != asked["RoleName"]:
        raise ApiError("NoSuchEntity", status=404)
    account.profiles[asked["InstanceProfileName"]] = None
    return {}


def delete_instance_profile(account: Account, region: str, asked: Parameters) -> Answer:
    if asked["InstanceProfileName"] not in account.profiles:
        raise ApiError("NoSuchEntity", status=404)
    if account.profiles[asked["InstanceProfileName"]] is not None:
        raise ApiError("DeleteConflict", status=409)
    del account.profiles[asked["InstanceProfileName"]]
    return {}


def _find(table: Mapping[str, Any], name: str) -> Any:
    if name not in table:
        raise ApiError("NoSuchEntity", name, 404)
    return table[name]


def _describe_role(account: Account, name: str) -> Answer:
    path = account.roles[name]["path"]
    arn = f"arn:aws:iam::{ACCOUNT}:role{path}{name}"
    return {"RoleName": name, "Path": path, "RoleId": f"AROA{name}", "Arn": arn, "CreateDate": 0}


def _describe_profile(account: Account, name: str) -> Answer:
    role = account.profiles[name]
    return {
        "InstanceProfileName": name, "Path": "/", "InstanceProfileId": f"AIPA{name}", "CreateDate": 0,
        "Arn": f"arn:aws:iam::{ACCOUNT}:instance-profile/{name}",
        "Roles": [] if role is None else [_describe_role(account, role)],
    }  # fmt: skip


def check_profile(account: Account, asked: Mapping[str, Any], policy: Mapping[str, Any] | None) -> None:
    """Check the profile of a launch: EC2 must know it, and the caller must be allowed to pass its role."""
    name = asked.get("IamInstanceProfile", {}).get("Name")
    if name is None:
        return
    role = account.profiles.get(name)
    if role is None:
        raise ApiError("InvalidParameterValue", f"Invalid IAM Instance Profile name {name}")
    arn = _describe_role(account, role)["Arn"]
    if policy is not None and not is_allowed(policy, "iam:PassRole", [Target(arn=arn)]):
        raise ApiError("UnauthorizedOperation", f"not allowed: iam:PassRole on {arn}", 403)


def find_key_policy(account: Account, key: str) -> Mapping[str, Any] | None:
    """Return the policy that limits a key; None if everything is allowed."""
    if not key.startswith(KEY_START):
        return account.policy
    policies = account.roles.get(key.removeprefix(KEY_START), {}).get("policies", {})
    return {"Statement": [statement for each in policies.values() for statement in each["Statement"]]}


def find_credentials(account: Account, profile: str) -> Answer | None:
    """Return what the metadata service has for a machine with this profile."""
    role = account.profiles.get(profile)
    if role is None:
        return None
    return {
        "Code": "Success", "Type": "AWS-HMAC", "AccessKeyId": f"{KEY_START}{role}", "SecretAccessKey": "canary-of-role",
        "Token": "token-of-role", "LastUpdated": "2026-01-01T00:00:00Z", "Expiration": "2099-01-01T00:00:00Z",
    }  # fmt: skip


ROLE_ACTIONS: dict[str, Callable[[Account, str, Parameters], Answer]] = {
    "iam:AddRoleToInstanceProfile": add_role_to_instance_profile,
    "iam:CreateInstanceProfile": create_instance_profile,
    "iam:CreateRole": create_role,
    "iam:DeleteInstanceProfile": delete_instance_profile,
    "iam:DeleteRole": delete_role,
    "iam:DeleteRolePolicy": delete_role_policy,
    "iam:GetInstanceProfile": get_instance_profile,
    "iam:GetRolePolicy": get_role_policy,
    "iam:PutRolePolicy": put_role_policy,
    "iam:RemoveRoleFromInstanceProfile": remove_role_from_instance_profile,
}
