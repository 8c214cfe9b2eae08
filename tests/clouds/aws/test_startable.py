"""`broker check aws --types` lists which accelerators would start today, and what prevents the others."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from broker.clock import SystemClock
from broker.clouds.aws.clients import Clients
from broker.clouds.aws.startable import judge_types
from broker.clouds.findings import TypeCheckResult, group_offers
from broker.types import Offer
from tests.cli.conftest import Shell
from tests.clouds.aws.bed import OFFER, AwsBed, open_session
from tests.testbed.ec2 import FakeAws
from tests.testbed.ec2_account import Account


def make_offer(instance_type: str, accelerator: str, count: int, *, vcpus: int = 8, **changes: object) -> Offer:
    fields = {"instance_type": instance_type, "accelerator": accelerator, "accelerator_count": count, "vcpus": vcpus}
    return replace(OFFER, spot_usd_hour=0.5, ondemand_usd_hour=1.0, **{**fields, **changes})  # type: ignore[arg-type]


def judge(bed: AwsBed, *offers: Offer) -> dict[str, TypeCheckResult]:
    found = asyncio.run(judge_types(Clients(open_session), bed.settings, offers, clock=SystemClock()))
    assert not bed.account.find_actions() & {"ec2:RunInstances", "ec2:CreateSecurityGroup", "ec2:CreateFleet"}
    return {each.accelerator: each for each in found}


def test_image_region_quota_and_network_are_distinguished(bed: AwsBed) -> None:
    bed.account.quotas = {("us-east-1", "L-417A185B"): 96.0, ("us-east-1", "L-C4BD4855"): 0.0}
    found = judge(
        bed,
        make_offer("p3.2xlarge", "V100", 1),
        make_offer("p5.48xlarge", "H100", 8, vcpus=192),
        make_offer("p4d.24xlarge", "A100", 8, vcpus=96),
        make_offer("g6.xlarge", "L4", 1, vcpus=4),
        make_offer("g5.xlarge", "A10G", 1, vcpus=4, region="ap-south-2", zone=None),
    )
    assert found["V100:1"].ways == () and found["V100:1"].why.startswith("image: Volta requires")
    assert found["H100:8"].ways == () and found["H100:8"].why == "quota: on-demand 96 of 192 vCPUs, spot 0 of 192 vCPUs"
    assert "--quota-code L-417A185B --region us-east-1 --desired-value 192" in found["H100:8"].command
    assert found["A100:8"].ways == ("on-demand", "spot") and "uses_private_addresses" in found["A100:8"].why
    assert found["L4:1"].ways == ("on-demand", "spot") and found["L4:1"].why == ""
    assert found["A10G:1"].ways == () and found["A10G:1"].why.startswith("region: sold in ap-south-2")


def test_the_region_is_chosen_that_lets_it_start(bed: AwsBed) -> None:
    bed.account.quotas = {("us-east-1", "L-DB2E81BA"): 0.0, ("us-east-1", "L-3819A6DF"): 4.0}
    cheap = make_offer("g6.xlarge", "L4", 1, vcpus=4)
    west = replace(cheap, region="us-west-2", zone=None, spot_usd_hour=0.7)
    assert (found := judge(bed, cheap)["L4:1"]).ways == ("spot",) and found.why == "quota: on-demand 0 of 4 vCPUs"
    assert (found := judge(bed, cheap, west)["L4:1"]).region == "us-west-2" and found.ways == ("on-demand", "spot")


def test_each_count_is_checked_with_its_smallest_machine_once_per_region() -> None:
    small, large = make_offer("g6.xlarge", "L4", 1, vcpus=4), make_offer("g6.4xlarge", "L4", 1, vcpus=16)
    other_zone = replace(small, zone="us-east-1c", spot_usd_hour=0.4)
    groups = group_offers([large, small, other_zone, replace(small, accelerator=None)])
    assert groups == {"L4:1": [other_zone]}


@pytest.fixture
def aws() -> Iterator[FakeAws]:
    aws = FakeAws(Account(clock=SystemClock()))
    yield aws
    aws.close()


@pytest.mark.long
def test_command_lists_them_within_80_columns_and_as_data(aws: FakeAws, tmp_path: Path) -> None:
    shell = Shell(tmp_path)
    shell.environment |= aws.environment
    rows = {row["accelerator"]: row for row in shell.read_json("check", "aws", "--types")}
    assert rows["V100:1"]["ways"] == [] and "proprietary driver" in rows["V100:1"]["why"]
    assert rows["T4:1"]["ways"] == ["on-demand", "spot"] and rows["T4:1"]["instance_type"] == "g4dn.xlarge"
    text = shell.run("check", "aws", "--types").stdout
    assert max(map(len, text.splitlines())) <= 80
    assert any(
        line.startswith("V100:1 ") and line.split()[2:] == ["no", rows["V100:1"]["region"], "image"]
        for line in text.splitlines()
    )
    sentence = "image: Volta requires NVIDIA's proprietary driver, R580 or older (V100:1, V100:4,"
    assert sentence in " ".join(text.split())
    refused = shell.run("check", "azure", "--types", code=2)
    assert "`--types` is not supported for `azure`" in refused.stderr
