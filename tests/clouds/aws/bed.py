"""AWS for the contract and the adapter's own tests: the adapter over the fake, with a jumping clock."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import boto3
import botocore.session
import pytest
from botocore.loaders import Loader

from broker.clouds.aws.cloud import AwsCloud
from broker.clouds.aws.settings import Settings
from broker.clouds.aws.tags import CLUSTER, OWNER, TAGGED_AT_LAUNCH, read_tags
from broker.clouds.base import Cloud
from broker.types import Node, Offer
from tests.clouds.clock_jumps import JumpingClock
from tests.clouds.contract import Bed
from tests.testbed.ec2 import FakeAws
from tests.testbed.ec2_account import Account

START_S = 1_790_000_000.0
ZONE = "us-east-1b"
OFFER = Offer(
    cloud="aws", region="us-east-1", zone=ZONE, instance_type="p4d.24xlarge", vcpus=96, memory_gib=1152,
    accelerator="A100", accelerator_count=8, accelerator_memory_gib=40, ondemand_usd_hour=32.77, spot_usd_hour=11.5,
)  # fmt: skip


LOADER = Loader()  # keeps AWS's service models, which take a second to read, between tests


class AwsBed(Bed):
    look_s = 2.5  # below the times in which the fake boots and terminates machines

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = JumpingClock()
        self.account = Account(clock=self.clock)
        self.aws = FakeAws(self.account)
        for name, value in self.aws.environment.items():
            monkeypatch.setenv(name, value)
        self.settings = Settings(address_url=self.aws.url)
        self.cloud = self.adapter = AwsCloud(self.settings, clock=self.clock, open_session=open_session)
        self.offer = OFFER

    def reopen(self) -> Cloud:
        return AwsCloud(self.settings, clock=self.clock, open_session=open_session)

    def fill(self) -> None:
        self.account.full.add((ZONE, self.offer.instance_type))

    def exhaust_quota(self) -> None:
        for code in ("L-417A185B", "L-7212CCBC"):
            self.account.quotas["us-east-1", code] = 96.0

    def log_out(self) -> None:
        self.account.has_login = False

    def lose_next_answer(self) -> None:
        self.account.lose_answer("RunInstances")
        self.account.lose_answer("CreateFleet")

    def throttle_next_create(self) -> None:
        self.account.fail("RunInstances", "RequestLimitExceeded", status=503)

    def leave_room(self, count: int) -> None:
        self.account.room[ZONE, self.offer.instance_type] = count

    def list_orphans(self) -> list[str]:
        return [
            *self.account.groups,
            *(name for _, name in self.account.placement_groups),
            *self.account.templates,
            *self.account.volumes,
        ]

    def list_untagged(self) -> list[str]:
        kept = (self.account.groups, self.account.placement_groups, self.account.templates)
        things = {str(key): read_tags(each) for shelf in kept for key, each in shelf.items()}  # type: ignore[attr-defined]
        for each in self.account.instances.values():
            tagged = {one["ResourceType"]: read_tags(one) for one in each.parameters["TagSpecifications"]}
            things |= {f"{kind} of {each.id}": tagged.get(kind, {}) for kind in TAGGED_AT_LAUNCH}
        return [name for name, tags in things.items() if not {OWNER, CLUSTER} <= set(tags)]

    async def kill_newborn(self, node: Node) -> str:
        self.account.end(self.account.instances[node.id], "Client.VolumeLimitExceeded", "Client.VolumeLimitExceeded")
        return "Client.VolumeLimitExceeded"

    async def preempt(self, node: Node) -> None:
        self.account.preempt(node.id)

    async def end_from_inside(self, node: Node) -> None:
        self.account.end_from_inside(node.id)


def open_session() -> Any:
    core = botocore.session.Session()
    core.register_component("data_loader", LOADER)
    return boto3.Session(botocore_session=core)


def any_zone(offer: Offer) -> Offer:
    return replace(offer, zone=None)
