"""The session policy that limits a grant to a task's keys. Pure.

IAM User Guide, "Session policies": a session only has permissions that both this policy and the login's policies allow.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from broker.access.base import Need
from broker.errors import InvalidRequestError

POLICY_CHARACTERS_MAX = 2048  # maximum of a session policy (STS API reference) and of a user's policies (IAM quotas)
READ = ("s3:GetObject",)
WRITE = ("s3:AbortMultipartUpload", "s3:DeleteObject", "s3:ListMultipartUploadParts", "s3:PutObject")
INSPECT = ("s3:GetBucketLocation", "s3:ListBucketMultipartUploads")


def make_policy(needs: Sequence[Need], *, partition: str = "aws") -> str:
    """Make the policy as minimal JSON. Raises InvalidRequestError if it is too long for AWS."""
    read = [need for need in needs if need.is_read_only]
    written = [need for need in needs if not need.is_read_only]
    statements = []
    if written:
        statements.append(_allow([*READ, *WRITE], _list_objects(written, partition)))
    if read:
        statements.append(_allow([*READ], _list_objects(read, partition)))
    buckets = sorted({need.bucket for need in needs})
    statements.append(_allow([*INSPECT], [f"arn:{partition}:s3:::{bucket}" for bucket in buckets]))
    whole = sorted({need.bucket for need in needs if not need.path})
    if whole:
        statements.append(_allow(["s3:ListBucket"], [f"arn:{partition}:s3:::{bucket}" for bucket in whole]))
    if parts := sorted(set(buckets) - set(whole)):
        # IfExists: S3 checks ListBucket, without a prefix, to decide whether a missing object is "404" or "403", and
        # programs depend on the 404. The drawback: names (not contents) of other keys can be listed without a prefix.
        patterns = sorted({pattern for need in needs if need.bucket in parts for pattern in need.list_patterns()})
        condition = {"StringLikeIfExists": {"s3:prefix": patterns}}
        statements.append(_allow(["s3:ListBucket"], [f"arn:{partition}:s3:::{bucket}" for bucket in parts], condition))
    # For buckets encrypted with a KMS key: only objects of that bucket (S3 User Guide, "SSE-KMS").
    contexts = [f"arn:{partition}:s3:::{bucket}*" for bucket in buckets]
    condition = {"StringLike": {"kms:EncryptionContext:aws:s3:arn": contexts}}
    statements.append(_allow(["kms:Decrypt", "kms:GenerateDataKey"], ["*"], condition))
    text = json.dumps({"Version": "2012-10-17", "Statement": statements}, separators=(",", ":"))
    if len(text) > POLICY_CHARACTERS_MAX:
        raise too_long(len(text))
    return text


def too_long(length: int) -> InvalidRequestError:
    """Return the error for a session policy of `length` characters."""
    return InvalidRequestError(
        f"the task uses too many bucket paths for one AWS policy ({length} characters, at most "
        f"{POLICY_CHARACTERS_MAX})",
        hints=("put the data below one path, or name `instance_profile` in `aws.toml`",),
    )


def _list_objects(needs: Sequence[Need], partition: str) -> list[str]:
    return sorted({f"arn:{partition}:s3:::{need.bucket}/{each}" for need in needs for each in need.list_patterns()})


def _allow(actions: list[str], resources: list[str], condition: dict[str, Any] | None = None) -> dict[str, Any]:
    statement = {"Effect": "Allow", "Action": actions, "Resource": resources}
    return statement | ({"Condition": condition} if condition else {})
