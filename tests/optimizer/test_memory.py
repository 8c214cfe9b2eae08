"""`memory: 4x` requests GiB per vCPU of each offer; without `memory`, machines have an ordinary amount."""

from __future__ import annotations

import pytest

from broker.errors import NoOfferError
from tests.optimizer.market import offer, plan


def test_ratio_of_memory_is_checked_against_the_vcpus_of_each_offer() -> None:
    sizes = {"small-fits": (4, 16), "small-lacks": (4, 15.9), "large-fits": (16, 64), "large-lacks": (16, 32)}
    offers = [offer(instance_type=name, vcpus=vcpus, memory_gib=gib) for name, (vcpus, gib) in sizes.items()]
    found = plan("resources: {accelerators: H100:8, cpus: 4+, memory: 4x}", offers)
    assert {each.placement.offer.instance_type for each in found.estimates} == {"small-fits", "large-fits"}


def test_ratio_that_no_offer_has_is_named() -> None:
    with pytest.raises(NoOfferError, match=r"2\.5\+ GiB per vCPU"):
        plan("resources: {accelerators: H100:8, memory: 2.5x}", [offer(vcpus=96, memory_gib=96)])


@pytest.mark.parametrize(
    ("resources", "chosen"),
    [
        ("{}", "large"),
        ("{cpus: 2+}", "large"),
        ("{cpus: 2}", "tiny"),  # the large one has 4 vCPUs: nothing else fits
        ("{memory: 0.5+}", "tiny"),
        ("{memory: 0.25x}", "tiny"),
        ("{instance_type: tiny}", "tiny"),
        ("{infra: ssh}", "own"),
    ],
)
def test_machine_has_an_ordinary_amount_of_memory_unless_the_task_says_otherwise(resources: str, chosen: str) -> None:
    """The cheapest machine of AWS has 0.5 GiB, on which an ordinary `pip install` is killed."""
    offers = [
        offer(instance_type=name, cloud=cloud, accelerator=None, accelerator_count=0, vcpus=vcpus, memory_gib=gib,
              ondemand_usd_hour=usd, spot_usd_hour=None)
        for name, cloud, vcpus, gib, usd in (
            ("tiny", "aws", 2, 0.5, 0.004), ("large", "aws", 4, 4, 0.02), ("own", "ssh", 8, 0, 0.01)
        )
        if resources == "{infra: ssh}" or cloud != "ssh"
    ]  # fmt: skip
    assert plan(f"resources: {resources}", offers).choice.placement.offer.instance_type == chosen
