"""Simulated offers of this machine."""

from __future__ import annotations

import pytest

from broker.catalog.local import list_local_offers


def test_offers_are_slices_of_the_machine_in_three_zones_at_prices_that_differ_by_zone() -> None:
    offers = list_local_offers(12, 24.0)
    assert {(each.vcpus, each.memory_gib) for each in offers} == {(1, 2.0), (2, 4.0), (4, 8.0), (8, 16.0)}
    of_four = {each.zone: each for each in offers if each.vcpus == 4}
    assert [of_four[zone].spot_usd_hour for zone in sorted(map(str, of_four))] == [0.06, 0.064, 0.072]
    assert {each.ondemand_usd_hour for each in of_four.values()} == {0.2}


@pytest.mark.parametrize("vcpus", [1, 2, 64, 200])
def test_no_offer_is_larger_than_the_machine(vcpus: int) -> None:
    offers = list_local_offers(vcpus, 8.0)
    assert max(each.vcpus for each in offers) == min(vcpus, 64) and max(each.memory_gib for each in offers) <= 8.0
