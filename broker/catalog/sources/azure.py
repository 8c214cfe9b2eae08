"""Azure's retail prices API: public, no login.

https://learn.microsoft.com/rest/api/cost-management/retail-prices/azure-retail-prices
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar
from urllib.parse import urlsplit

from broker.catalog.sources.base import Get
from broker.errors import SourceError
from broker.types import Offer

URL = "https://prices.azure.com/api/retail/prices"
VERSION = "2023-01-01-preview"
PAGES_MAX = 5000  # of at most 1,000 prices; in 2026, the list has about 1,500 pages
Key = tuple[str, str]  # instance type, region


class AzureSource:
    """Azure's Retail Prices API, which requires no login."""

    name: ClassVar[str] = "azure"
    clouds: ClassVar[tuple[str, ...]] = ("azure",)

    def __init__(self, url: str = URL) -> None:
        self._url = url

    def fetch(self, cloud: str, get: Get, *, known: Sequence[Offer], as_of_s: float) -> Iterator[Offer]:
        """Yield offers from the Retail Prices API, page by page. Raises SourceError."""
        ondemand: dict[Key, float] = {}
        spot: dict[Key, float] = {}
        for item in self._list_items(get):
            price = read_price(item)
            if price is None:
                continue
            is_spot, key, usd = price
            prices = spot if is_spot else ondemand
            prices[key] = min(usd, prices.get(key, usd))
        shapes = {offer.instance_type: offer for offer in known}
        bands = {(offer.instance_type, offer.region): offer.interruption_band for offer in known}
        for key in sorted({*ondemand, *spot}):
            shape = shapes.get(key[0])
            if shape is None:
                continue  # the price list gives no sizes: a machine that is not in the book is skipped
            yield replace(
                shape,
                region=key[1],
                zone=None,
                ondemand_usd_hour=ondemand.get(key),
                spot_usd_hour=spot.get(key),
                interruption_band=bands.get(key),
                is_estimated=False,
                as_of="",
                spot_as_of="",
            )

    def _list_items(self, get: Get) -> Iterator[dict[str, Any]]:
        query = {"api-version": VERSION, "$filter": "serviceName eq 'Virtual Machines' and priceType eq 'Consumption'"}
        body = get(self._url, query=query)
        seen: set[str] = set()
        while True:
            page = _parse(body)
            yield from page["Items"]
            following = page.get("NextPageLink")
            if not following:
                return
            if not self._is_ours(following):
                raise SourceError(f"Azure's price list continues on another host: {str(following)[:80]!r}")
            if following in seen:
                raise SourceError(f"Azure's price list repeats a page: {following[:80]!r}")
            if len(seen) >= PAGES_MAX:
                raise SourceError(f"Azure's price list has more than {PAGES_MAX:,} pages")
            seen.add(following)
            body = get(following)

    def _is_ours(self, address: object) -> bool:
        """Return whether this is an address on the price list's host."""
        try:
            return isinstance(address, str) and urlsplit(address).hostname == urlsplit(self._url).hostname
        except ValueError:  # an IPv6 address with an unclosed bracket
            return False


def read_price(item: dict[str, Any]) -> tuple[bool, Key, float] | None:
    """Return (is spot, key, USD per hour) of a Linux machine; None for all other entries. Raises SourceError."""
    try:
        name, sku = str(item["productName"]), str(item["skuName"])
        if "Windows" in name or "Low Priority" in sku or "Cloud Services" in name or item["unitOfMeasure"] != "1 Hour":
            return None
        if item["currencyCode"] != "USD":
            raise SourceError(f"Azure's prices are in {item['currencyCode']}, not USD")
        usd, key = float(item["retailPrice"]), (str(item["armSkuName"]), str(item["armRegionName"]))
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise SourceError(f"unexpected format of Azure's price list: {error!r} in {str(item)[:120]}") from None
    return ("Spot" in sku, key, usd) if usd > 0 and all(key) else None


def _parse(body: bytes) -> dict[str, Any]:
    try:
        page = json.loads(body)
    except (ValueError, RecursionError):
        raise SourceError(f"Azure's response is not JSON: {body[:60]!r}") from None
    if not isinstance(page, dict) or not isinstance(page.get("Items"), list):
        raise SourceError("Azure's price list has no `Items`")
    return page
