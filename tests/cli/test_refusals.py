"""A launch that clouds refuse: the output names what happened where, why, and what to do next."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from broker.clock import SystemClock
from tests.testbed.ec2 import FakeAws
from tests.testbed.ec2_account import Account
from tests.testbed.gce import FakeGce
from tests.testbed.gce_server import serve
from tests.tiers import long

LAUNCHES = ("ec2:RunInstances", "ec2:CreateFleet")
ASK = ("launch", "-y", "-c", "train", "--use-spot", "--hedge", "1")
ON_AWS = (*ASK, "--infra", "aws/us-east-1", "-t", "g5.xlarge", "true")
ON_GCP = (*ASK, "--infra", "gcp/us-central1", "-t", "e2-standard-4", "true")


@pytest.fixture
def account(shell: Any, tmp_path: Path) -> Iterator[Account]:
    account = Account(clock=SystemClock())
    aws = FakeAws(account)
    shell.environment |= aws.environment
    shell.home.mkdir()
    (shell.home / "aws.toml").write_text('ssh_from = ["203.0.113.7/32"]\nregions = ["us-east-1"]\n')
    yield account
    aws.close()


def count_launches(account: Account) -> int:
    return sum(action in LAUNCHES for action, _, _ in account.calls)


def find_hints(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("hint: ")]


def test_full_region_is_reported_once_with_all_its_zones(shell: Any, account: Account) -> None:
    account.full = {(f"us-east-1{letter}", "g5.xlarge") for letter in "abc"}
    error = shell.run(*ON_AWS, code=5).stderr.partition("error: ")[2]
    details = [line for line in error.splitlines() if line.startswith("  ")]
    assert len(details) == 1 and "1 x g5.xlarge spot in us-east-1a, us-east-1b, us-east-1c" in details[0]
    assert "InsufficientInstanceCapacity" in details[0] or "UnfulfillableCapacity" in details[0]
    assert [action for action, _, _ in account.calls if action in LAUNCHES] == ["ec2:CreateFleet"]


def test_each_refusal_of_aws_is_reported_once_with_reason_and_remedy(shell: Any, account: Account) -> None:
    places = "".join(f"    - {{infra: aws/us-east-1/us-east-1{letter}}}\n" for letter in "abc")
    task = shell.write("ordered.yaml", f"resources:\n  instance_type: g5.xlarge\n  ordered:\n{places}run: echo hi\n")
    ordered = (*ASK, task)
    account.fail("RunInstances", "InsufficientInstanceCapacity", status=500)
    account.fail("RunInstances", "Unsupported", status=400)
    account.fail("RunInstances", "MaxSpotInstanceCountExceeded")
    done = shell.run(*ordered, code=5)
    error = done.stderr.partition("error: ")[2]
    first, *details = error.partition("\n\nhint: ")[0].splitlines()
    assert first == "no placement has capacity for train now"
    assert "  1 x g5.xlarge spot in us-east-1a (aws): InsufficientInstanceCapacity: " in details[0]
    assert "  1 x g5.xlarge spot in us-east-1b (aws): Unsupported: " in details[1]
    assert "us-east-1c" in details[2] and "quota of us-east-1: 1 x g5.xlarge spot requires 4 vCPUs" in details[2]
    assert len(details) == 3, "zones that the quota covers share its line"
    assert error.count("--quota-code L-3819A6DF --region us-east-1 --desired-value 1004") == 1
    assert "describe-instance-type-offerings" in error
    assert count_launches(account) == 3 and account.instances == {}
    again = shell.run(*ordered, code=5).stderr
    assert count_launches(account) == 3, "refusals of a moment ago are remembered by the next command"
    assert again.count("(earlier refusal, not retried yet)") == 3
    assert set(find_hints(again)) == set(find_hints(error)), "the remedy is remembered as well"


@pytest.mark.parametrize(
    ("code", "status", "hint"),
    [
        ("UnauthorizedOperation", 403, "`broker check --policy aws` prints the required permissions."),
        ("ExpiredToken", 400, "log in with `aws configure` or `aws sso login`, then run `broker check`"),
    ],
)
def test_aws_is_not_called_again_after_a_login_failure(
    shell: Any, account: Account, code: str, status: int, hint: str
) -> None:
    account.fail("CreateFleet", code, status=status, times=9)
    done = shell.run(*ON_AWS, code=5)
    assert f"error: {code}: " in done.stderr and f"\nhint: {hint}\n" in done.stderr
    assert count_launches(account) == 1
    assert shell.read_json("status")["clusters"] == []


@long
def test_each_refusal_of_google_is_reported_once_with_reason_and_remedy(shell: Any) -> None:
    gce = FakeGce()
    gce.fail("POST", "instances", code="ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS")
    gce.fail("POST", "instances", code="QUOTA_EXCEEDED")
    with serve(gce) as url:
        shell.environment |= {"BROKER_GCP_ENDPOINT": url, "GOOGLE_CLOUD_PROJECT": gce.project}
        error = shell.run(*ON_GCP, code=5).stderr.partition("error: ")[2]
    first, *details = error.partition("\n\nhint: ")[0].splitlines()
    assert first == "no placement has capacity for train now"
    assert "us-central1-a (gcp): injected ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS" in details[0]
    assert "us-central1-b" in details[1] and "us-central1-c" in details[1] and "QUOTA_EXCEEDED" in details[1]
    assert len(details) == 2 and url not in error
    assert "hint: request more: https://console.cloud.google.com/iam-admin/quotas" in error
    assert gce.list_names() == [] and [name for name in gce.firewalls if not name.endswith("-shut")] == []
