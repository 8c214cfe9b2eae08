"""An IAM user for a task's keys, for logins that are a role: sessions created by a role end within an hour.

The user has the permissions of its single policy, until the time in the policy. Each renewal moves that time; without
renewals by broker, access expires.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

from broker.access.s3_policy import POLICY_CHARACTERS_MAX, too_long

PATH, POLICY = "/broker/", "buckets"
LIFE_S = 129_600.0  # the same as a federation session


def ensure_user(iam: Any, name: str, *, owner: str, policy: str, end_s: float) -> bool:
    """Create the user; return whether it did not exist.

    Idempotent: an existing user gets the policy with the new expiry.
    """
    from botocore.exceptions import ClientError

    is_new = False
    try:
        iam.create_user(UserName=name, Path=PATH, Tags=[{"Key": "broker-owner", "Value": owner}])
        is_new = True
    except ClientError as error:
        if error.response["Error"]["Code"] != "EntityAlreadyExists":
            raise
    iam.put_user_policy(UserName=name, PolicyName=POLICY, PolicyDocument=limit_policy(policy, end_s=end_s))
    return is_new


def limit_policy(policy: str, *, end_s: float) -> str:
    """Add a statement that denies everything from `end_s` (IAM User Guide, "Access based on date and time")."""
    end = datetime.fromtimestamp(end_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    condition = {"DateGreaterThan": {"aws:CurrentTime": end}}
    refusal = {"Effect": "Deny", "Action": "*", "Resource": "*", "Condition": condition}
    whole = json.loads(policy)
    text = json.dumps({**whole, "Statement": [*whole["Statement"], refusal]}, separators=(",", ":"))
    if len(text) > POLICY_CHARACTERS_MAX:
        raise too_long(len(text))
    return text


def make_key(iam: Any, name: str) -> dict[str, str]:
    """Create a key, and delete older keys of this user.

    Their secrets were lost with the state folder, and a user can have at most two keys.
    """
    for key in iam.list_access_keys(UserName=name)["AccessKeyMetadata"]:
        iam.delete_access_key(UserName=name, AccessKeyId=key["AccessKeyId"])
    made = iam.create_access_key(UserName=name)["AccessKey"]
    return {"AccessKeyId": made["AccessKeyId"], "SecretAccessKey": made["SecretAccessKey"]}


def delete_user(iam: Any, name: str) -> None:
    """Delete the user; no effect if it does not exist."""
    from botocore.exceptions import ClientError

    try:
        for key in iam.list_access_keys(UserName=name)["AccessKeyMetadata"]:
            iam.delete_access_key(UserName=name, AccessKeyId=key["AccessKeyId"])
        iam.delete_user_policy(UserName=name, PolicyName=POLICY)
    except ClientError as error:
        if error.response["Error"]["Code"] != "NoSuchEntity":
            raise
    try:
        iam.delete_user(UserName=name)
    except ClientError as error:
        if error.response["Error"]["Code"] != "NoSuchEntity":
            raise
