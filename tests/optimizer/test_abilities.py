"""Clouds whose machines cannot do what a task requires are no choice, however cheap they are."""

from __future__ import annotations

import pytest

from broker.catalog.sources.skypilot import SkyPilotSource
from broker.clouds import CLOUDS
from broker.errors import NoOfferError
from broker.optimizer.filters import PRICED_ONLY
from tests.optimizer.market import offer, plan

GANG = "resources: {accelerators: H100:8}\nnum_nodes: 2"
OFFERS = [offer("vast", "somewhere", ondemand_usd_hour=9.0), offer("nebius", "eu-north1", ondemand_usd_hour=20.0)]


@pytest.mark.parametrize(
    ("text", "cheap"),
    [
        (GANG, "vast"),
        ("resources: {accelerators: H100:8, image_id: 'docker:ubuntu:24.04'}", "verda"),
        ("resources: {accelerators: H100:8, ports: 8080}", "verda"),
        ("resources: {accelerators: H100:8, disk_tier: high}", "lambda"),
        ("resources: {accelerators: H100:8, network_tier: best}", "azure"),
        ("resources: {accelerators: H100:8, image_id: ubuntu-24}", "lambda"),
        ("resources: {accelerators: H100:8}\nfile_mounts: {/out: {source: s3://b, mode: MOUNT_CACHED}}", "runpod"),
    ],
)
def test_cloud_that_would_refuse_the_task_is_not_planned(text: str, cheap: str) -> None:
    found = plan(text, [offer(cheap, ondemand_usd_hour=9.0), offer("nebius", ondemand_usd_hour=20.0)])
    assert [each.placement.offer.cloud for each in found.estimates] == ["nebius"]


@pytest.mark.parametrize("cheap", ["azure", "oci", "nebius", "lambda"])
def test_ultra_disks_are_planned_where_they_exist(cheap: str) -> None:
    offers = [offer(cheap, ondemand_usd_hour=9.0), offer("gcp", ondemand_usd_hour=20.0)]
    found = plan("resources: {accelerators: H100:8, disk_tier: ultra}", offers)
    assert found.choice.placement.offer.cloud == "gcp"


def test_copy_of_a_bucket_is_planned_where_it_cannot_be_mounted() -> None:
    text = "resources: {accelerators: H100:8}\nfile_mounts: {/in: {source: s3://b, mode: COPY}, /code: s3://c}"
    assert plan(text, OFFERS).choice.placement.offer.cloud == "vast"


@pytest.mark.parametrize("extra", ["", ", disk_tier: best, network_tier: standard"])
def test_single_machine_with_nothing_special_is_planned_everywhere(extra: str) -> None:
    found = plan(f"resources: {{accelerators: H100:8{extra}}}", OFFERS)
    assert found.choice.placement.offer.cloud == "vast"


def test_refusal_says_that_the_cloud_has_no_gangs() -> None:
    with pytest.raises(NoOfferError, match=r"several nodes +1 offers excluded, nearest vast"):
        plan("resources: {accelerators: H100:8, infra: vast}\nnum_nodes: 2", OFFERS)


def test_cloud_on_which_no_machine_can_be_started_is_planned_only_by_name() -> None:
    offers = [offer("jarvislabs", ondemand_usd_hour=1.0), offer("nebius", ondemand_usd_hour=20.0)]
    text = "resources: {accelerators: H100:8%s}"
    assert [each.placement.offer.cloud for each in plan(text % "", offers).estimates] == ["nebius"]
    assert plan(text % ", infra: jarvislabs", offers).choice.placement.offer.cloud == "jarvislabs"


def test_priced_clouds_without_an_adapter_are_known() -> None:
    assert set(SkyPilotSource.clouds) - set(CLOUDS) == PRICED_ONLY
