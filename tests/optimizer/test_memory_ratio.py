"""`memory: 4x` asks for GiB by vCPU, of every offer by its own vCPUs."""

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
