"""When prices count as old."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from broker.catalog.age import is_stale, measure_age_days

NOW_S = datetime(2026, 11, 21, 3, tzinfo=UTC).timestamp()


@pytest.mark.parametrize(
    ("as_of", "is_spot", "stale"),
    [
        ("2026-11-14", True, False),
        ("2026-11-13", True, True),
        ("2026-11-13", False, False),
        ("2026-08-01", False, True),
        ("2026-12-24", True, False),
    ],
)
def test_spot_prices_grow_old_in_a_week_and_list_prices_in_three_months(as_of: str, is_spot: bool, stale: bool) -> None:
    assert is_stale(as_of, NOW_S, is_spot=is_spot) is stale


def test_age_is_in_whole_days() -> None:
    assert measure_age_days("2026-11-20", NOW_S) == 1
