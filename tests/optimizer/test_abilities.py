"""Clouds whose machines cannot do what a task requires are no choice, however cheap they are."""

from __future__ import annotations

import pytest

from broker.errors import NoOfferError
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
