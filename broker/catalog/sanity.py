"""Whether the answer of a price source can be believed. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from broker.errors import SourceError
from broker.types import Offer

OFFERS_SHARE_MIN = 0.5  # fewer than this share of what was for sale: the answer was cut short
RATIO_MAX = 4.0  # the median price moves less in any refresh; a wrong unit or currency moves it more
USD_HOUR_MAX = 2000.0  # no machine for rent costs more
PRICES = {"ondemand_usd_hour": "on-demand", "spot_usd_hour": "spot"}


def check_offers(cloud: str, offers: Sequence[Offer], known: Sequence[Offer]) -> None:
    """Raises SourceError for an answer that cannot be the whole truth, given the offers that were `known`."""
    if not offers or len(offers) < OFFERS_SHARE_MIN * len(known):
        raise SourceError(f"{cloud}: only {len(offers)} offers where {len(known)} were known: not believed")
    for offer in offers:
        _check_offer(cloud, offer)
    for field, words in PRICES.items():
        count, before = (sum(getattr(each, field) is not None for each in group) for group in (offers, known))
        if count < OFFERS_SHARE_MIN * before:
            raise SourceError(f"{cloud}: only {count} {words} prices where {before} were known: not believed")
        ratio = _measure_ratio(offers, known, field)
        if ratio is not None and not 1 / RATIO_MAX <= ratio <= RATIO_MAX:
            raise SourceError(f"{cloud}: prices are {ratio:.2g} times what they were: another unit or currency?")


def _check_offer(cloud: str, offer: Offer) -> None:
    if offer.cloud != cloud or not offer.instance_type or not offer.region:
        raise SourceError(f"{cloud}: an offer without cloud, region or instance type: not believed")
    prices = [usd for usd in (offer.ondemand_usd_hour, offer.spot_usd_hour) if usd is not None]
    if not prices:
        raise SourceError(f"{cloud}: {offer.instance_type} in {offer.region} has no price: not believed")
    for usd in prices:
        if not 0 < usd < USD_HOUR_MAX:
            raise SourceError(f"{cloud}: {offer.instance_type} in {offer.region} at {usd} USD/h: not believed")


def _measure_ratio(offers: Sequence[Offer], known: Sequence[Offer], field: str) -> float | None:
    """Median of new over old price, by machine and region: sources don't agree on the names of zones."""
    old: dict[tuple[str, str], float] = {}
    for each in known:
        if usd := getattr(each, field):
            old.setdefault((each.instance_type, each.region), usd)
    ratios = [
        getattr(each, field) / before
        for each in offers
        if getattr(each, field) and (before := old.get((each.instance_type, each.region)))
    ]
    return statistics.median(ratios) if ratios else None
