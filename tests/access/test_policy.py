"""The policy of a grant allows exactly the keys that a task needs; evaluated as AWS evaluates it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.access.base import Need
from broker.access.kept import KeptKeys, name_needs
from broker.access.needs import group_needs, list_needs
from broker.access.s3_policy import POLICY_CHARACTERS_MAX, make_policy
from broker.errors import InvalidRequestError
from broker.types import DataSet, StorageMount
from tests.access.plans import make_task
from tests.tiers import examples

needs = st.builds(
    Need,
    scheme=st.just("s3"),
    bucket=st.sampled_from(["one", "two"]),
    path=st.sampled_from(["", "data", "data/in", "runs/me-"]),
    is_open=st.booleans(),
    is_read_only=st.booleans(),
)
KEYS = ("data", "data/", "data/a", "data/in", "data/in/a", "database", "other", "runs/me-job/a", "runs/you-job/a")
WRITES = ("s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload", "s3:ListMultipartUploadParts")


def allows(policy: str, action: str, resource: str, context: Mapping[str, str]) -> bool:
    """Evaluate a policy (IAM User Guide, "Policy evaluation logic"): what no statement allows is denied."""

    def meets(condition: Mapping[str, Any]) -> bool:
        for operator, tests in condition.items():
            for name, patterns in tests.items():
                if name not in context:
                    if not operator.endswith("IfExists"):
                        return False
                elif not any(fnmatchcase(context[name], each) for each in patterns):
                    return False
        return True

    return any(
        action in each["Action"]
        and any(fnmatchcase(resource, pattern) for pattern in each["Resource"])
        and meets(each.get("Condition", {}))
        for each in json.loads(policy)["Statement"]
        if each["Effect"] == "Allow"
    )


def covers(need: Need, bucket: str, key: str) -> bool:
    """Return whether a need covers a key: the whole bucket, an object and all below it, or all keys with a prefix."""
    if need.bucket != bucket:
        return False
    return need.path == "" or (key.startswith(need.path) if need.is_open else f"{key}/".startswith(f"{need.path}/"))


@given(st.lists(needs, min_size=1, max_size=4))
@settings(max_examples=examples(200))
def test_a_policy_allows_the_keys_of_its_needs_and_no_others(found: list[Need]) -> None:
    policy = make_policy(found)
    for bucket in ("one", "two", "three"):
        mine = [each for each in found if each.bucket == bucket]
        for key in KEYS:
            arn = f"arn:aws:s3:::{bucket}/{key}"
            covering = [each for each in mine if covers(each, bucket, key)]
            assert allows(policy, "s3:GetObject", arn, {}) is bool(covering), key
            is_written = any(not each.is_read_only for each in covering)
            assert all(allows(policy, action, arn, {}) is is_written for action in WRITES), key
            listed = any(fnmatchcase(key, pattern) for each in mine for pattern in each.list_patterns())
            seen = allows(policy, "s3:ListBucket", f"arn:aws:s3:::{bucket}", {"s3:prefix": key})
            assert seen or not listed
            assert mine or not seen
            assert listed or not seen or len({each.bucket for each in found}) > 1, "all prefixes are in one statement"
            kms = {"kms:EncryptionContext:aws:s3:arn": arn}
            assert allows(policy, "kms:Decrypt", "key", kms) is bool(mine)
        assert allows(policy, "s3:GetBucketLocation", f"arn:aws:s3:::{bucket}", {}) is bool(mine)
        assert allows(policy, "s3:ListBucket", f"arn:aws:s3:::{bucket}", {}) is bool(mine), "404 instead of 403"
    assert not allows(policy, "kms:Decrypt", "key", {}), "keys of other services stay inaccessible"
    assert not any(
        allows(policy, action, "arn:aws:s3:::one", {}) for action in ("s3:DeleteBucket", "s3:PutBucketPolicy")
    )


def test_a_policy_of_the_maximum_length_is_made_and_a_longer_one_is_refused() -> None:
    def write(length: int) -> str:
        return make_policy([Need(scheme="s3", bucket="one", path="p" * length)])

    assert " " not in write(1), "AWS counts the characters between the words too"
    spare = POLICY_CHARACTERS_MAX - len(write(1))
    longest = 1 + spare // 4  # the path is written four times
    assert POLICY_CHARACTERS_MAX - 4 < len(write(longest)) <= POLICY_CHARACTERS_MAX
    with pytest.raises(InvalidRequestError, match="too many bucket paths"):
        write(longest + 1)


def test_one_path_with_several_uses_has_the_rights_of_all_of_them() -> None:
    """A path that is read and written may be written; one required use makes it required, and its field is named."""
    mounts = (StorageMount(target="/d", source=("s3://data/in",), mode="COPY"),)
    inputs, outputs = (DataSet(url="s3://data/in/", size_gib=1),), (DataSet(url="s3://data/in", size_gib=1),)
    (alone,) = list_needs(make_task(None, inputs=inputs), "me")
    assert alone.is_read_only and alone.is_optional and alone.source == "inputs: s3://data/in/"
    (both,) = list_needs(make_task(None, inputs=inputs, outputs=outputs), "me")
    assert not both.is_read_only and both.is_optional and not both.is_written
    (mounted,) = list_needs(make_task(None, inputs=inputs, storage_mounts=mounts), "me")
    assert mounted.is_read_only and not mounted.is_optional and mounted.source == "file_mounts: /d"
    (all_of_them,) = list_needs(make_task(None, inputs=inputs, outputs=outputs, storage_mounts=mounts), "me")
    assert not all_of_them.is_read_only and not all_of_them.is_optional


def test_needs_are_grouped_by_scheme() -> None:
    inputs = tuple(DataSet(url=url, size_gib=1) for url in ("s3://a", "s3://b", "https://c"))
    found = list_needs(make_task("gs://runs", inputs=inputs), "me")
    assert {scheme: [each.bucket for each in group] for scheme, group in group_needs(found).items()} == {
        "gs": ["runs"],
        "s3": ["a", "b"],
    }


def test_keys_are_shared_by_equal_needs_of_one_installation_and_account_only() -> None:
    one, two = Need(scheme="s3", bucket="b", path="p"), Need(scheme="s3", bucket="b", path="q")

    def name(needs: Sequence[Need], owner: str = "me", place: str = "account") -> str:
        return name_needs(owner, place, needs)

    assert name([one, two]) == name([two, one])
    others = [
        name([one]),
        name([one, two], owner="you"),
        name([one, two], place="other"),
        name([one, Need(scheme="s3", bucket="b", path="q", is_read_only=True)]),
        name([one, Need(scheme="s3", bucket="b", path="q", is_open=True)]),
        name([one, Need(scheme="s3", bucket="c", path="q")]),
    ]
    assert len({name([one, two]), *others}) == 7


def test_a_kept_key_is_private_and_a_damaged_one_counts_as_missing(tmp_path: Path) -> None:
    keys = KeptKeys(tmp_path, "gs")
    with keys.locked():
        assert keys.read("a") is None and keys.list_names() == []
        keys.write("a", {"issued_s": 5.0, "key": {"x": 1}})
        keys.write("b", {"issued_s": 6.0, "key": {}})
    assert keys.read("a") == {"issued_s": 5.0, "key": {"x": 1}}
    assert keys.list_names() == ["a", "b"] and KeptKeys(tmp_path, "s3").list_names() == []
    (path,) = (tmp_path / "access").glob("gs-a.json")
    assert path.stat().st_mode & 0o777 == 0o600
    for damaged in ('{"issued_s": 5, "key": {}}', '{"issued_s": 5.0, "key": 1}', '{"key": {}}', "[", "[]"):
        path.write_text(damaged)
        assert keys.read("a") is None, damaged
    keys.forget("a")
    keys.forget("a")
    assert keys.list_names() == ["b"]
