"""Check whether a price source's result is plausible. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from broker.errors import SourceError
from broker.types import Offer

OFFERS_SHARE_MIN = 0.5  # with a smaller share of the previous offers, the result is considered truncated
RATIO_MAX = 4.0  # no refresh moves the median price by more, but a wrong unit or currency does
CHANGE_MAX = 20.0  # no on-demand price changes by this factor, but one wrong row would attract every plan
USD_HOUR_MAX = 2000.0  # above the price of any rented machine
PRICES = {"ondemand_usd_hour": "on-demand", "spot_usd_hour": "spot"}


def check_offers(cloud: str, offers: Sequence[Offer], known: Sequence[Offer]) -> None:
    """Raise SourceError if the result is implausible compared with the `known` offers."""
    if not offers or len(offers) < OFFERS_SHARE_MIN * len(known):
        raise SourceError(f"{cloud}: rejected because it has only {len(offers)} offers, down from {len(known)}")
    for offer in offers:
        _check_offer(cloud, offer)
    for field, words in PRICES.items():
        count, before = (sum(getattr(each, field) is not None for each in group) for group in (offers, known))
        if count < OFFERS_SHARE_MIN * before:
            raise SourceError(f"{cloud}: rejected because it has only {count} {words} prices, down from {before}")
        ratios = list(_measure_ratios(offers, known, field))
        ratio = statistics.median(ratio for ratio, _ in ratios) if ratios else 1.0
        if not 1 / RATIO_MAX <= ratio <= RATIO_MAX:
            raise SourceError(
                f"{cloud}: rejected because {words} prices are {ratio:.2g} times the previous ones, as in another unit "
                "or currency"
            )
        for ratio, offer in ratios if field == "ondemand_usd_hour" else ():
            if not 1 / CHANGE_MAX <= ratio <= CHANGE_MAX:
                raise SourceError(
                    f"{cloud}: rejected because {offer.instance_type} in {offer.region} costs {ratio:.2g} times its "
                    "previous price"
                )


def _check_offer(cloud: str, offer: Offer) -> None:
    if offer.cloud != cloud or not offer.instance_type or not offer.region:
        raise SourceError(f"{cloud}: rejected because an offer lacks cloud, region or instance type")
    prices = [usd for usd in (offer.ondemand_usd_hour, offer.spot_usd_hour) if usd is not None]
    if not prices:
        raise SourceError(f"{cloud}: rejected because {offer.instance_type} in {offer.region} has no price")
    for usd in prices:
        if not 0 < usd < USD_HOUR_MAX:
            raise SourceError(f"{cloud}: rejected because {offer.instance_type} in {offer.region} costs {usd} USD/h")


def _measure_ratios(offers: Sequence[Offer], known: Sequence[Offer], field: str) -> Iterator[tuple[float, Offer]]:
    """Yield new over old price by machine and region: sources differ in their names of zones."""
    old: dict[tuple[str, str], float] = {}
    for each in known:
        if usd := getattr(each, field):
            old.setdefault((each.instance_type, each.region), usd)
    for offer in offers:
        if getattr(offer, field) and (before := old.get((offer.instance_type, offer.region))):
            yield getattr(offer, field) / before, offer
