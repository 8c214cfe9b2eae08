"""Which results of a price source are believed, compared with the prices that are known."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from broker.catalog.sanity import CHANGE_MAX, RATIO_MAX, USD_HOUR_MAX, check_offers
from broker.errors import SourceError
from broker.types import Offer

KNOWN = [
    Offer(
        cloud="aws", region="us-east-1", zone=None, instance_type=f"m{number}", vcpus=2, memory_gib=8.0,
        ondemand_usd_hour=1.0 + number, spot_usd_hour=0.4 + number,
    )
    for number in range(10)
]  # fmt: skip


def scale(factor: float, *, spot: float | None = None) -> list[Offer]:
    return [
        replace(
            each,
            ondemand_usd_hour=factor * (each.ondemand_usd_hour or 0.0),
            spot_usd_hour=(factor if spot is None else spot) * (each.spot_usd_hour or 0.0),
        )
        for each in KNOWN
    ]


@pytest.mark.parametrize("factor", [1.0, 1 / RATIO_MAX, RATIO_MAX])
def test_prices_may_rise_and_fall_within_bounds(factor: float) -> None:
    check_offers("aws", scale(factor), KNOWN)
    check_offers("aws", KNOWN[: len(KNOWN) // 2], KNOWN)
    check_offers("aws", KNOWN, [])


@pytest.mark.parametrize("factor", [0.9 / RATIO_MAX, 1.1 * RATIO_MAX, 0.01, 100.0])
def test_another_unit_or_currency_is_recognised_in_both_directions_and_for_each_price(factor: float) -> None:
    with pytest.raises(SourceError, match=re.escape(f"{factor:.2g} times the previous ones, as in another unit")):
        check_offers("aws", scale(factor), KNOWN)
    with pytest.raises(SourceError, match="spot prices are"):
        check_offers("aws", scale(1.0, spot=factor), KNOWN)


@pytest.mark.parametrize("factor", [0.9 / CHANGE_MAX, 1.1 * CHANGE_MAX])
def test_one_wrong_price_is_enough(factor: float) -> None:
    wrong = replace(KNOWN[3], ondemand_usd_hour=factor * 4.0)
    with pytest.raises(SourceError, match="m3 in us-east-1"):
        check_offers("aws", [*KNOWN[:3], wrong, *KNOWN[4:]], KNOWN)


@pytest.mark.parametrize("usd", [0.0, -1.0, USD_HOUR_MAX, float("nan"), float("inf")])
@pytest.mark.parametrize("field", ["ondemand_usd_hour", "spot_usd_hour"])
def test_price_must_be_above_zero_and_below_that_of_any_machine(field: str, usd: float) -> None:
    with pytest.raises(SourceError, match="USD/h"):
        check_offers("aws", [*KNOWN, replace(KNOWN[0], instance_type="new", **{field: usd})], KNOWN)


@pytest.mark.parametrize("change", [{"cloud": "gcp"}, {"region": ""}, {"instance_type": ""}])
def test_offer_must_say_what_it_is_of(change: dict[str, str]) -> None:
    with pytest.raises(SourceError, match="lacks cloud, region or instance type"):
        check_offers("aws", [*KNOWN, replace(KNOWN[0], **change)], KNOWN)


def test_result_that_lacks_half_of_the_offers_or_of_the_prices_is_taken_for_truncated() -> None:
    with pytest.raises(SourceError, match="only 4 offers, down from 10"):
        check_offers("aws", KNOWN[:4], KNOWN)
    with pytest.raises(SourceError, match="only 0 offers"):
        check_offers("aws", [], [])
    few = [each if number < 4 else replace(each, spot_usd_hour=None) for number, each in enumerate(KNOWN)]
    with pytest.raises(SourceError, match="only 4 spot prices, down from 10"):
        check_offers("aws", few, KNOWN)
    few = [each if number < 4 else replace(each, ondemand_usd_hour=None) for number, each in enumerate(KNOWN)]
    with pytest.raises(SourceError, match="only 4 on-demand prices, down from 10"):
        check_offers("aws", few, KNOWN)
    with pytest.raises(SourceError, match="has no price"):
        check_offers("aws", [*KNOWN, replace(KNOWN[0], ondemand_usd_hour=None, spot_usd_hour=None)], KNOWN)
