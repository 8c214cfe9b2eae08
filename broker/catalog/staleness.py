"""The age of prices, and the limits above which a plan warns. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, date, datetime

from broker.frozen import frozen
from broker.types import Placement

# Spot prices move within days; list prices change a few times a year, and new machines appear within weeks.
SPOT_DAYS_MAX = 7
ONDEMAND_DAYS_MAX = 30


@frozen
class CloudFacts:
    """Default dates of one cloud's on-demand and spot prices (ISO), and their source.

    An offer may have its own dates.
    """

    cloud: str
    ondemand_as_of: str
    spot_as_of: str
    source: str


@frozen
class PriceAge:
    """Age of one cloud's prices: ISO dates, whole days since, and whether they are stale."""

    ondemand_as_of: str
    spot_as_of: str
    ondemand_days: int
    spot_days: int
    is_ondemand_stale: bool
    is_spot_stale: bool


def describe_age(ondemand_as_of: str, spot_as_of: str, now_s: float) -> PriceAge:
    """Return the age of two ISO dates at `now_s`."""
    return PriceAge(
        ondemand_as_of=ondemand_as_of,
        spot_as_of=spot_as_of,
        ondemand_days=measure_age_days(ondemand_as_of, now_s),
        spot_days=measure_age_days(spot_as_of, now_s),
        is_ondemand_stale=is_stale(ondemand_as_of, now_s, is_spot=False),
        is_spot_stale=is_stale(spot_as_of, now_s, is_spot=True),
    )


def warn_if_stale(placement: Placement, now_s: float) -> str | None:
    """Return a one-line warning if the price to be paid is stale; None if it is fresh or simulated."""
    as_of, cloud = placement.as_of, placement.offer.cloud
    if not as_of or cloud == "local" or not is_stale(as_of, now_s, is_spot=placement.is_spot):
        return None
    model = "spot" if placement.is_spot else "on-demand"
    return f"{cloud}'s {model} prices are from {as_of}; update them with `broker catalog update --cloud {cloud}`"


def warn_of_stale_dates(dates: Iterable[tuple[str, bool, str]], now_s: float) -> str | None:
    """Return a warning about the stale ones of (cloud, is spot, ISO date): two lines, the dates and the remedy.

    None if no price is stale.
    """
    oldest: dict[tuple[bool, str], str] = {}
    for cloud, is_spot, as_of in dates:
        if as_of and cloud != "local" and is_stale(as_of, now_s, is_spot=is_spot):
            oldest[is_spot, cloud] = min(oldest.get((is_spot, cloud), as_of), as_of)
    parts = []
    for is_spot, model in ((False, "on-demand"), (True, "spot")):
        if found := [f"{cloud} ({oldest[kind, cloud]})" for kind, cloud in sorted(oldest) if kind is is_spot]:
            parts.append(f"{model} on {', '.join(found)}")
    clouds = sorted({cloud for _, cloud in oldest})
    only = f" --cloud {clouds[0]}" if len(clouds) == 1 else ""
    return f"outdated prices: {'; '.join(parts)}\nupdate them with `broker catalog update{only}`" if parts else None


def describe_dates(dates: Iterable[str]) -> str:
    """Return `Prices as of 2026-08-03`, or the oldest and the newest of several ISO dates; empty texts are skipped."""
    known = sorted({each for each in dates if each})
    if not known:
        return "Prices without a date"
    return f"Prices as of {known[0]}" if len(known) == 1 else f"Prices as of {known[0]} to {known[-1]}"


def measure_age_days(as_of: str, now_s: float) -> int:
    """Return whole days since an ISO date; a future date counts as today."""
    return max(0, (datetime.fromtimestamp(now_s, UTC).date() - date.fromisoformat(as_of)).days)


def is_stale(as_of: str, now_s: float, *, is_spot: bool) -> bool:
    """Return whether a price of that date is too old: spot prices age faster than on-demand prices."""
    return measure_age_days(as_of, now_s) > (SPOT_DAYS_MAX if is_spot else ONDEMAND_DAYS_MAX)
