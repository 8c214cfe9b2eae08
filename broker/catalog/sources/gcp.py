"""GCP: the Cloud Billing Catalog API prices cores, memory and accelerators by the hour; they are summed up here.

GET /v1/services/{service}/skus: https://cloud.google.com/billing/v1/how-tos/catalog-api. Requires an API key in
`GOOGLE_API_KEY`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from broker.catalog.sources.base import Get
from broker.errors import AuthError, SourceError
from broker.types import Offer

URL = "https://cloudbilling.googleapis.com/v1"
COMPUTE_ENGINE = "services/6F81-5844-456A"
PAGES_MAX = 200  # of 5,000 prices each
# "Spot Preemptible N2D AMD Instance Core running in Zurich", "Compute optimized Ram running in ..."
PART = re.compile(
    r"(?P<spot>Spot Preemptible )?(?P<family>[A-Z]\d+[A-Z]?|Compute optimized)(?: Predefined| AMD| Arm| Instance)*"
    r" (?P<part>Core|Ram) running in ",
)
GPU = re.compile(
    r"Nvidia (?P<name>.+?)(?: GPU| \(1 gpu slice\)) (?P<spot>attached to Spot Preemptible VMs )?running in "
)
GPU_NAMES = {
    "Tesla T4": "T4", "Tesla P4": "P4", "Tesla P100": "P100", "Tesla V100": "V100", "L4": "L4", "Tesla A100": "A100",
    "Tesla A100 80GB": "A100-80GB", "H100 80GB": "H100", "H200 141GB": "H200", "B200": "B200",
    "H100 80GB Mega": "H100-MEGA", "H100 Mega 80GB": "H100-MEGA", "H100 80GB Plus": "H100-MEGA",
}  # fmt: skip
MEGA = "a3-megagpu-"  # its H100s have SKUs of their own
PRICED_SHARE_MIN = 0.5  # of the machines in the book; below this share the list's format has changed
FAMILY_NAMES = {"Compute optimized": "C2"}
SHARED_CORE = ("e2-micro", "e2-small", "e2-medium", "f1-", "g1-")  # billed by a share of their cores
Rates = dict[tuple[bool, str, str], float]  # (is spot, "N1 Core" or "T4", region) -> USD per unit and hour


class GcpSource:
    """Google's Cloud Billing Catalog API, which requires an API key."""

    name: ClassVar[str] = "gcp"
    clouds: ClassVar[tuple[str, ...]] = ("gcp",)

    def __init__(self, url: str = URL, key: str | None = None) -> None:
        self._url = url
        self._key = key

    def fetch(self, cloud: str, get: Get, *, known: Sequence[Offer], as_of_s: float) -> Iterator[Offer]:
        """Yield all known offers, each priced as the sum of its cores, memory and accelerators if the list has them.

        Raises AuthError without an API key, SourceError if the list prices fewer than half of the machines.
        """
        rates: Rates = {}
        for sku in self._list_skus(get):
            for key, usd in read_sku(sku):
                rates[key] = min(usd, rates.get(key, usd))
        count = 0
        for offer in known:
            ondemand, spot = (price_machine(offer, rates, is_spot=is_spot) for is_spot in (False, True))
            if ondemand is None:  # not priced by parts: keep its last price and date
                yield offer
                continue
            count += 1
            yield replace(
                offer, ondemand_usd_hour=ondemand, spot_usd_hour=spot, is_estimated=False, as_of="", spot_as_of=""
            )
        if count < PRICED_SHARE_MIN * len(known):
            raise SourceError(f"GCP's price list has parts for only {count} of {len(known)} machines")

    def _list_skus(self, get: Get) -> Iterator[dict[str, Any]]:
        key = self._key or os.getenv("GOOGLE_API_KEY")
        if not key:
            raise AuthError("GCP's price list requires an API key", hints=["set `GOOGLE_API_KEY`"])
        query = {"key": key, "pageSize": "5000", "currencyCode": "USD"}
        seen: set[str] = set()
        while True:
            page = _parse(get(f"{self._url}/{COMPUTE_ENGINE}/skus", query=query))
            yield from page["skus"]
            token = page.get("nextPageToken")
            if not token:
                return
            if not isinstance(token, str):
                raise SourceError("a page token of GCP's price list is not text")
            if token in seen:
                raise SourceError("GCP's price list repeats a page token")
            if len(seen) >= PAGES_MAX:
                raise SourceError(f"GCP's price list has more than {PAGES_MAX} pages")
            seen.add(token)
            query = {**query, "pageToken": token}


def read_sku(sku: Mapping[str, Any]) -> Iterator[tuple[tuple[bool, str, str], float]]:
    """Return one SKU's price by region; empty if machines are not composed of it. Raises SourceError."""
    try:
        text, usage = str(sku["description"]), sku["category"]["usageType"]
        if usage not in ("OnDemand", "Preemptible"):
            return
        if found := PART.match(text):
            family = FAMILY_NAMES.get(found["family"], found["family"])
            name = f"{family} {found['part']}"
        elif (found := GPU.match(text)) and found["name"] in GPU_NAMES:
            name = GPU_NAMES[found["name"]]
        else:
            return
        expression = sku["pricingInfo"][0]["pricingExpression"]
        price = expression["tieredRates"][-1]["unitPrice"]
        if price["currencyCode"] != "USD":
            raise SourceError(f"GCP's prices are in {price['currencyCode']}, not USD")
        usd = int(price.get("units") or 0) + int(price.get("nanos") or 0) / 1e9
        for region in sku["serviceRegions"]:
            if usd > 0:
                yield (usage == "Preemptible", name, str(region)), usd
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise SourceError(f"unexpected format of GCP's price list: {error!r} in {str(sku)[:120]}") from None


def price_machine(offer: Offer, rates: Mapping[tuple[bool, str, str], float], *, is_spot: bool) -> float | None:
    """Return USD per hour for cores, memory and accelerators; None if a part has no price."""
    if offer.instance_type.startswith(SHARED_CORE):
        return None
    family = offer.instance_type.partition("-")[0].upper()
    parts = [(f"{family} Core", offer.vcpus), (f"{family} Ram", offer.memory_gib)]
    if offer.accelerator:
        name = "H100-MEGA" if offer.instance_type.startswith(MEGA) else offer.accelerator
        parts.append((name, offer.accelerator_count))
    prices = [rates.get((is_spot, name, offer.region)) for name, _ in parts]
    if any(price is None for price in prices):
        return None
    return round(sum((price or 0.0) * amount for price, (_, amount) in zip(prices, parts, strict=True)), 6)


def _parse(body: bytes) -> dict[str, Any]:
    try:
        page = json.loads(body)
    except (ValueError, RecursionError):
        raise SourceError(f"GCP's response is not JSON: {body[:60]!r}") from None
    if not isinstance(page, dict) or not isinstance(page.get("skus"), list):
        raise SourceError("GCP's price list has no `skus`")
    return page
