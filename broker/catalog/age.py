"""How old prices may grow before a plan says so. Pure."""

from __future__ import annotations

from datetime import UTC, date, datetime

# Spot prices move within days; list prices change a few times a year.
SPOT_DAYS_MAX = 7
ONDEMAND_DAYS_MAX = 90


def measure_age_days(as_of: str, now_s: float) -> int:
    """Whole days since an ISO date; a date to come counts as today."""
    return max(0, (datetime.fromtimestamp(now_s, UTC).date() - date.fromisoformat(as_of)).days)


def is_stale(as_of: str, now_s: float, *, is_spot: bool) -> bool:
    return measure_age_days(as_of, now_s) > (SPOT_DAYS_MAX if is_spot else ONDEMAND_DAYS_MAX)
