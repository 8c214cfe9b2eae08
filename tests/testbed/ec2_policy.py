"""As much of IAM as an identity policy of ours needs: allow statements, resources, and conditions on tags."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Target:
    """An object that an action touches: each must be allowed on its own, as EC2 does it."""

    arn: str
    request_tags: Mapping[str, str] = field(default_factory=dict)
    resource_tags: Mapping[str, str] = field(default_factory=dict)
    create_action: str = ""


def is_allowed(policy: Mapping[str, Any], action: str, targets: Sequence[Target]) -> bool:
    return all(any(_grants(statement, action, target) for statement in policy["Statement"]) for target in targets)


def _grants(statement: Mapping[str, Any], action: str, target: Target) -> bool:
    assert statement["Effect"] == "Allow", "only what these policies use"
    return (
        any(fnmatchcase(action, pattern) for pattern in _list(statement["Action"]))
        and any(fnmatchcase(target.arn, pattern) for pattern in _list(statement["Resource"]))
        and all(
            _holds(operator, key, _list(values), target)
            for operator, pairs in statement.get("Condition", {}).items()
            for key, values in pairs.items()
        )
    )


def _holds(operator: str, key: str, wanted: Sequence[str], target: Target) -> bool:
    found = _find(key, target)
    if operator == "StringEquals":
        return found in wanted
    if operator == "StringLike":
        return found is not None and any(fnmatchcase(found, pattern) for pattern in wanted)
    raise AssertionError(f"this IAM knows no {operator}")


def _find(key: str, target: Target) -> str | None:
    name, _, tag = key.partition("/")
    if name == "aws:RequestTag":
        return target.request_tags.get(tag)
    if name in ("ec2:ResourceTag", "aws:ResourceTag"):
        return target.resource_tags.get(tag)
    if name == "ec2:CreateAction":
        return target.create_action or None
    if name == "iam:AWSServiceName":
        return None
    raise AssertionError(f"this IAM knows no {key}")


def _list(value: Any) -> Sequence[str]:
    return [value] if isinstance(value, str) else value
