"""The dates of displayed prices, and a warning about outdated ones."""

from __future__ import annotations

from collections.abc import Iterable

from broker.catalog.staleness import describe_dates, warn_of_stale_dates
from broker.cli.render import print_wrapped, print_wrapped_note
from broker.types import Placement

PriceDate = tuple[str, bool, str]  # cloud, whether on spot, ISO date


def show_price_dates(dates: Iterable[PriceDate], now_s: float, *, more: str = "") -> None:
    """Print the oldest and the newest of the dates, followed by `more`, and warn of outdated prices as a plan does."""
    known = list(dates)
    print_wrapped(f"{describe_dates(as_of for _, _, as_of in known)}{more}", indent=0)
    if warning := warn_of_stale_dates(known, now_s):
        print_wrapped_note(f"note: {warning}")


def date_placement(placement: Placement) -> PriceDate:
    """Return the cloud, the pricing model and the date of the price of a placement."""
    return placement.offer.cloud, placement.is_spot, placement.as_of
