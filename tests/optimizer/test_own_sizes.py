"""An exact size on own machines: they have what they have, and SkyPilot places a pod or job of that size on any."""

from __future__ import annotations

from dataclasses import replace

import pytest

from broker.errors import NoOfferError
from tests.optimizer.market import offer, plan

TASK = "resources: {accelerators: H100:8, cpus: 8, memory: 64%s}"


def share(cloud: str, vcpus: float, memory_gib: float, **fields: object) -> object:
    return offer(cloud, "mine", instance_type=f"{vcpus:g}x{memory_gib:g}", vcpus=vcpus, memory_gib=memory_gib,
                 ondemand_usd_hour=0.0, spot_usd_hour=None, **fields)  # fmt: skip


@pytest.mark.parametrize("cloud", ["kubernetes", "slurm", "ssh"])
def test_exact_size_fits_a_larger_own_machine(cloud: str) -> None:
    found = plan(TASK % f", infra: {cloud}", [share(cloud, 95.5, 1007.3)])  # type: ignore[list-item]
    assert found.choice.placement.offer.vcpus == 95.5


@pytest.mark.parametrize("cloud", ["aws", "vast"])
def test_exact_size_is_exact_on_a_cloud(cloud: str) -> None:
    with pytest.raises(NoOfferError, match="cpus"):
        plan(TASK % f", infra: {cloud}", [offer(cloud, vcpus=96, memory_gib=64)])


def test_smaller_own_machine_does_not_fit() -> None:
    with pytest.raises(NoOfferError, match="cpus"):
        plan(TASK % ", infra: slurm", [share("slurm", 4, 64)])  # type: ignore[list-item]


def test_the_smallest_share_of_a_pool_is_requested() -> None:
    shares = [share("slurm", size, 4 * size, accelerator=None, accelerator_count=0, zone=zone)
              for zone in ("a", "b") for size in (64, 16, 8, 4)]  # fmt: skip
    exact = plan("resources: {cpus: 6}", shares)  # type: ignore[arg-type]
    assert [each.placement.offer.vcpus for each in exact.estimates] == [8, 8]
    assert len(plan("resources: {cpus: 6+}", shares).estimates) == 6  # type: ignore[arg-type]
    both = [*shares[:1], replace(shares[1], ondemand_usd_hour=None, spot_usd_hour=0.0)]  # type: ignore[type-var]
    assert len(plan("resources: {cpus: 6, use_spot: false}", both).estimates) == 1  # type: ignore[arg-type]
    hosts = [share("ssh", size, 4 * size, accelerator=None, accelerator_count=0) for size in (64, 16)]
    assert len(plan("resources: {cpus: 6}", hosts).estimates) == 2  # type: ignore[arg-type]
