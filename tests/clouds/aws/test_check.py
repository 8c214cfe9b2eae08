"""`broker check` for AWS reports each problem with the command that fixes it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from broker.clock import SystemClock
from broker.clouds.aws.check import inspect_account
from broker.clouds.aws.clients import Clients
from broker.clouds.aws.policy import make_policy
from broker.clouds.aws.settings import Settings
from broker.clouds.findings import CheckResult
from tests.cli.conftest import Shell
from tests.clouds.aws.bed import AwsBed, open_session
from tests.clouds.contract import OWNER
from tests.testbed.ec2 import FakeAws
from tests.testbed.ec2_account import Account


def inspect(bed: AwsBed, settings: Settings | None = None) -> dict[str, CheckResult]:
    found: Sequence[CheckResult] = asyncio.run(inspect_account(Clients(open_session), settings or bed.settings, OWNER))
    return {each.name: each for each in found}


def test_all_checks_pass_and_nothing_is_created(bed: AwsBed) -> None:
    found = inspect(bed)
    assert [each.name for each in found.values() if not each.is_ok] == []
    assert found["credentials"].note == "account 123456789012, user/ada"
    assert found["regions"].note == "3 on"
    assert (bed.account.instances, bed.account.groups, bed.account.templates) == ({}, {}, {})
    assert bed.account.placement_groups == {}


def test_wrong_login_is_the_only_result(bed: AwsBed) -> None:
    bed.log_out()
    (finding,) = inspect(bed).values()
    assert (finding.name, finding.is_ok, finding.command) == ("credentials", False, "aws configure")


@pytest.mark.parametrize("partition", ["aws-cn", "aws-us-gov"])
def test_login_of_a_partition_without_prices_is_the_only_result(bed: AwsBed, partition: str) -> None:
    """Its machines would never be planned, and the policy of `check --policy` names none of its resources."""
    bed.account.partition = partition
    (finding,) = inspect(bed).values()
    assert not finding.is_ok and finding.is_needed
    assert finding.note == f"account 123456789012 is in `{partition}`, where broker starts no machines (docs/AWS.md)"


def test_profile_that_is_not_there_is_a_wrong_login(bed: AwsBed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "nobody-wrote-this")
    (finding,) = inspect(bed).values()
    assert finding.note.startswith("ProfileNotFound: ") and not finding.is_ok


def test_disabled_region_is_reported_only_if_it_was_requested(bed: AwsBed) -> None:
    bed.account.disabled_regions = {"eu-central-1"}
    assert inspect(bed)["regions"].is_ok
    assert inspect(bed)["regions"].note == "2 on, off: eu-central-1"
    wanting = inspect(bed, replace(bed.settings, regions=("us-east-1", "eu-central-1")))["regions"]
    assert not wanting.is_ok
    assert wanting.command == "aws account enable-region --region-name eu-central-1"


@pytest.mark.parametrize(
    "denied", ["RunInstances", "CreateSecurityGroup", "CreateLaunchTemplate", "CreatePlacementGroup"]
)
def test_missing_permission_is_named_with_the_policy_that_gives_it(bed: AwsBed, denied: str) -> None:
    policy = make_policy(OWNER)
    for statement in policy["Statement"]:
        statement["Action"] = [action for action in statement["Action"] if action != f"ec2:{denied}"]
    bed.account.policy = policy
    finding = inspect(bed)["permissions"]
    snake = "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in denied).strip("_")
    assert (finding.is_ok, finding.note) == (False, f"missing: {snake}")
    assert "broker check --policy aws" in finding.command and "--user-name ada" in finding.command


def test_quota_of_nothing_comes_with_the_command_that_asks_for_more(bed: AwsBed) -> None:
    bed.account.quotas = {("us-east-1", "L-417A185B"): 0.0, ("us-east-1", "L-DB2E81BA"): 64.0}
    found = inspect(bed)
    assert found["quota G (T4, A10G, L4, L40S) on-demand"].note == "us-east-1 64 vCPUs"
    none = found["quota P (V100, A100, H100, ...) on-demand"]
    assert (none.is_ok, none.is_needed, none.note) == (False, False, "0 vCPUs")
    assert none.command.startswith("aws service-quotas request-service-quota-increase --service-code ec2")
    assert "--quota-code L-417A185B --region us-east-1" in none.command


def test_quotas_of_several_regions_are_named_the_largest_first(bed: AwsBed) -> None:
    regions = ("us-east-1", "us-west-2", "eu-central-1")
    on_demand, spot = "L-DB2E81BA", "L-3819A6DF"
    bed.account.quotas = {(region, code): 0.0 for region in regions for code in (on_demand, spot)}
    bed.account.quotas |= {("us-west-2", on_demand): 128.0, ("us-east-1", on_demand): 64.0}
    found = inspect(bed, replace(bed.settings, regions=regions))
    assert found["quota G (T4, A10G, L4, L40S) on-demand"].note == "us-west-2 128 vCPUs, us-east-1 64 vCPUs"
    assert found["quota G (T4, A10G, L4, L40S) on-demand"].command == ""
    none = found["quota G (T4, A10G, L4, L40S) spot"]
    assert (none.is_ok, none.note) == (False, "0 vCPUs") and f"--quota-code {spot} --region us-west-2" in none.command
    ties = found["quota Trn on-demand"]
    assert ties.note == ", ".join(f"{region} 1000 vCPUs" for region in sorted(regions))
    assert [name.partition(" ")[2] for name in found if name.startswith("quota ")] == [
        "G (T4, A10G, L4, L40S) on-demand", "G (T4, A10G, L4, L40S) spot", "P (V100, A100, H100, ...) on-demand",
        "P (V100, A100, H100, ...) spot", "P5 (H100, H200) spot", "Trn on-demand", "Trn spot",
    ]  # fmt: skip


def test_each_read_that_is_denied_has_a_line_of_its_own(bed: AwsBed) -> None:
    bed.account.has_default_vpc = False
    missing = inspect(bed)["network"]
    assert (missing.is_ok, missing.command) == (False, "aws ec2 create-default-vpc --region us-east-1")
    assert "no default VPC" in missing.note and inspect(bed)["permissions"].is_ok
    bed.account.has_default_vpc = True
    for action, line, note in (
        ("DescribeRegions", "regions", "UnauthorizedOperation"),
        ("DescribeSubnets", "network", "UnauthorizedOperation"),
        ("ListServiceQuotas", "quotas", "AccessDeniedException"),
        ("DescribeVolumes", "permissions", "describe_volumes"),
    ):
        bed.account.fail(action, "AccessDeniedException" if line == "quotas" else "UnauthorizedOperation", status=403)
        found = inspect(bed)
        assert [name for name, each in found.items() if not each.is_ok] == [line]
        assert note in found[line].note and "broker check --policy aws" in found[line].command
        assert found[line].is_needed == (line != "quotas")


@pytest.fixture
def aws() -> Iterator[FakeAws]:
    aws = FakeAws(Account(clock=SystemClock()))
    yield aws
    aws.close()


@pytest.mark.long
def test_check_command_shows_login_quota_and_policy(aws: FakeAws, tmp_path: Path) -> None:
    shell = Shell(tmp_path)
    shell.environment |= aws.environment
    aws.account.quotas = {("us-east-1", "L-417A185B"): 0.0}
    rows = {row["cloud"]: row for row in shell.read_json("check")}
    assert rows["aws"]["can_launch"] is True
    close = shell.run("check", "aws").stdout
    assert "ok     credentials: account 123456789012, user/ada" in close
    assert "none   quota P (V100, A100, H100, ...) on-demand: 0 vCPUs\n       fix: aws service-quotas" in close
    policy = json.loads(shell.run("check", "--policy", "aws").stdout)
    assert policy == make_policy((shell.home / "owner").read_text())


def test_command_without_login_explains_how_to_log_in(aws: FakeAws, tmp_path: Path) -> None:
    shell = Shell(tmp_path)
    shell.environment = {
        name: value for name, value in shell.environment.items() if not name.startswith("AWS_")
    } | {"HOME": str(tmp_path)}  # fmt: skip
    rows = {row["cloud"]: row for row in shell.read_json("check")}
    assert rows["aws"] == {"cloud": "aws", "can_launch": False, "note": "log in with `aws configure`"}
    assert aws.account.calls == []
