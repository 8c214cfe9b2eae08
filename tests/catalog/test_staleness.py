"""When prices count as stale."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from broker.catalog.staleness import (
    describe_age,
    describe_dates,
    is_stale,
    measure_age_days,
    warn_if_stale,
    warn_of_stale_dates,
)
from broker.types import Offer, Placement

NOW_S = datetime(2026, 11, 21, 3, tzinfo=UTC).timestamp()


@pytest.mark.parametrize(
    ("as_of", "is_spot", "stale"),
    [
        ("2026-11-14", True, False),
        ("2026-11-13", True, True),
        ("2026-10-22", False, False),
        ("2026-10-21", False, True),
        ("2026-12-24", True, False),
    ],
)
def test_spot_prices_grow_old_in_a_week_and_list_prices_in_thirty_days(as_of: str, is_spot: bool, stale: bool) -> None:
    assert is_stale(as_of, NOW_S, is_spot=is_spot) is stale


def test_age_is_in_whole_days() -> None:
    assert measure_age_days("2026-11-20", NOW_S) == 1


@pytest.mark.parametrize(
    ("is_spot", "cloud", "warning"),
    [
        (True, "aws", "aws's spot prices are from 2026-11-11; update them with `broker catalog update --cloud aws`"),
        (False, "aws", None),
        (True, "local", None),
    ],
)
def test_a_plan_warns_about_the_age_of_the_price_it_pays(is_spot: bool, cloud: str, warning: str | None) -> None:
    offer = Offer(
        cloud=cloud, region="r", zone=None, instance_type="x", vcpus=1, memory_gib=1, ondemand_usd_hour=1.0,
        spot_usd_hour=0.5, as_of="2026-11-01", spot_as_of="2026-11-11",
    )  # fmt: skip
    assert warn_if_stale(Placement(offer=offer, is_spot=is_spot, node_count=1), NOW_S) == warning


def test_age_of_a_cloud_is_by_pricing_model() -> None:
    age = describe_age("2026-11-01", "2026-11-01", NOW_S)
    assert (age.ondemand_days, age.is_ondemand_stale, age.spot_days, age.is_spot_stale) == (20, False, 20, True)


def test_list_of_prices_names_each_cloud_whose_prices_are_old() -> None:
    old, new = "2024-01-01", datetime.fromtimestamp(NOW_S, UTC).date().isoformat()
    assert warn_of_stale_dates([("aws", False, new), ("gcp", True, new), ("local", True, old)], NOW_S) is None
    one = warn_of_stale_dates([("aws", True, old), ("aws", True, old), ("gcp", False, new)], NOW_S)
    assert (
        one is not None
        and "spot on aws (2024-01-01)" in one
        and "gcp" not in one
        and "`broker catalog update --cloud aws`" in one
    )
    dates = [("aws", True, "2024-03-01"), ("aws", True, old), ("aws", True, "2024-02-01")]
    assert f"spot on aws ({old})" in str(warn_of_stale_dates(dates, NOW_S)), "the oldest one"
    two = warn_of_stale_dates([("aws", True, old), ("gcp", False, old)], NOW_S)
    assert two is not None and "on-demand on gcp" in two and "`broker catalog update`" in two


def test_dates_of_a_list_are_its_oldest_and_newest() -> None:
    assert describe_dates(["2026-01-02", "", "2025-06-29", "2026-01-01"]) == "Prices as of 2025-06-29 to 2026-01-02"
    assert describe_dates(["2025-06-29", "2025-06-29"]) == "Prices as of 2025-06-29"
    assert describe_dates([""]) == "Prices without a date"
