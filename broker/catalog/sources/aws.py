"""AWS: on-demand from the Price List API, spot from EC2's price history, interruption bands from the spot advisor.

GetProducts and DescribeSpotPriceHistory through boto3 (login required); the advisor's file is public:
https://spot-bid-advisor.s3.amazonaws.com/spot-advisor-data.json
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, ClassVar

from broker.catalog.sources.base import Get
from broker.errors import AuthError, SourceError
from broker.types import Offer

ADVISOR_URL = "https://spot-bid-advisor.s3.amazonaws.com/spot-advisor-data.json"
PRICING_REGION = "us-east-1"  # the Price List API serves all regions from here
BANDS = (5.0, 10.0, 15.0, 20.0, 100.0)  # upper bounds in percent per month, by the advisor's index
ONDEMAND_FILTERS = {
    "operatingSystem": "Linux",
    "tenancy": "Shared",
    "preInstalledSw": "NA",
    "capacitystatus": "Used",
    "marketoption": "OnDemand",
}
LOGIN_ERRORS = (
    "NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "TokenRetrievalError",
    "SSOTokenLoadError", "UnauthorizedSSOTokenError", "ProfileNotFound",
)  # fmt: skip
LOGIN_CODES = (
    "AuthFailure", "UnrecognizedClientException", "InvalidClientTokenId", "ExpiredToken", "ExpiredTokenException",
    "RequestExpired", "SignatureDoesNotMatch", "AccessDenied", "AccessDeniedException", "UnauthorizedOperation",
)  # fmt: skip
LOGIN_HINT = (
    "log in with `aws configure` or `aws sso login`; reading prices requires permission for ec2:DescribeRegions, "
    "ec2:DescribeSpotPriceHistory and pricing:GetProducts"
)
Key = tuple[str, str]  # instance type, region
Place = tuple[str, str]  # instance type, zone ("": none)
# USD per hour, its date ("": today), and whether it is an estimate, by instance type of one region
Ondemand = Mapping[str, tuple[float, str, bool]]
Spot = dict[Place, tuple[float | None, str]]  # USD per hour, and its date ("": today)


class AwsSource:
    """AWS's Price List API, spot price history and spot advisor."""

    name: ClassVar[str] = "aws"
    clouds: ClassVar[tuple[str, ...]] = ("aws",)

    def __init__(self, url: str = ADVISOR_URL, make_client: Callable[[str, str], Any] | None = None) -> None:
        self._advisor_url = url
        self._make_client = make_client or _make_boto3_client
        self._is_list_denied = False

    def fetch(self, cloud: str, get: Get, *, known: Sequence[Offer], as_of_s: float) -> Iterator[Offer]:
        """Fetch prices. Raises AuthError, SourceError.

        A region that is disabled in this account has no spot prices, so it keeps the last known ones with their dates.
        Likewise, a login that may not read the price list keeps the last known on-demand prices. Machines that are not
        in the book are skipped, because a price list gives no sizes.
        """
        self._is_list_denied = False
        bands = parse_advisor(get(self._advisor_url))
        enabled = self._list_regions()
        shapes = {offer.instance_type: offer for offer in known}
        for region in sorted({offer.region for offer in known}):
            here = [offer for offer in known if offer.region == region]
            ondemand = self._read_ondemand(region, here)
            spot = self._read_spot(region, as_of_s) if region in enabled else _keep_spot(here)
            for place in sorted(_list_places(here, ondemand, spot)):
                instance_type, zone = place
                shape = shapes.get(instance_type)
                if shape is None:
                    continue
                ondemand_usd_hour, as_of, is_estimated = ondemand.get(instance_type, (None, "", False))
                spot_usd_hour, spot_as_of = spot.get(place, (None, ""))
                offer = replace(
                    shape,
                    region=region,
                    zone=zone or None,
                    ondemand_usd_hour=ondemand_usd_hour,
                    spot_usd_hour=spot_usd_hour,
                    interruption_band=bands.get((instance_type, region)),
                    is_estimated=is_estimated,
                    as_of=as_of,
                    spot_as_of=spot_as_of,
                )
                if offer.ondemand_usd_hour or offer.spot_usd_hour:
                    yield offer

    def _list_regions(self) -> frozenset[str]:
        """List the regions enabled in this account."""
        answer = self._call(PRICING_REGION, "ec2", "describe_regions")
        return frozenset(str(_get(each, "RegionName")) for each in _list(answer, "Regions"))

    def _read_ondemand(self, region: str, known: Sequence[Offer]) -> Ondemand:
        if self._is_list_denied:
            return _keep_ondemand(known)
        filters = [
            {"Type": "TERM_MATCH", "Field": field, "Value": value}
            for field, value in {**ONDEMAND_FILTERS, "regionCode": region}.items()
        ]
        pages = self._list_pages("pricing", PRICING_REGION, "get_products", ServiceCode="AmazonEC2", Filters=filters)
        try:
            products = [price for page in pages for text in _list(page, "PriceList") if (price := parse_product(text))]
        except AuthError:  # spot prices need another permission, which this login has: it listed the regions
            self._is_list_denied = True
            return _keep_ondemand(known)
        return {instance_type: (usd, "", False) for instance_type, usd in products}

    def _read_spot(self, region: str, as_of_s: float) -> Spot:
        newest: dict[Place, Any] = {}
        found: Spot = {}
        now = datetime.fromtimestamp(as_of_s, UTC)  # a start time of now returns current prices only, no history
        pages = self._list_pages(
            "ec2", region, "describe_spot_price_history", ProductDescriptions=["Linux/UNIX"], StartTime=now
        )
        for page in pages:
            for entry in _list(page, "SpotPriceHistory"):
                place = (str(_get(entry, "InstanceType")), str(_get(entry, "AvailabilityZone")))
                usd, time = _to_usd(_get(entry, "SpotPrice")), str(_get(entry, "Timestamp"))
                if place[1][:-1] != region:  # a local zone (us-west-2-lax-1a) has another on-demand price
                    continue
                if usd > 0 and (place not in newest or time > newest[place]):
                    newest[place], found[place] = time, (usd, "")
        return found

    def _list_pages(self, service: str, region: str, operation: str, **arguments: Any) -> Iterator[Any]:
        try:
            yield from self._make_client(service, region).get_paginator(operation).paginate(**arguments)
        except Exception as error:
            raise _translate(error, f"{service} {operation} in {region}") from None

    def _call(self, region: str, service: str, operation: str) -> Any:
        try:
            return getattr(self._make_client(service, region), operation)()
        except Exception as error:
            raise _translate(error, f"{service} {operation} in {region}") from None


def _keep_ondemand(known: Sequence[Offer]) -> Ondemand:
    return {
        offer.instance_type: (offer.ondemand_usd_hour, offer.as_of, offer.is_estimated)
        for offer in known
        if offer.ondemand_usd_hour is not None
    }


def _keep_spot(known: Sequence[Offer]) -> Spot:
    return {
        (offer.instance_type, offer.zone or ""): (offer.spot_usd_hour, offer.spot_as_of or offer.as_of)
        for offer in known
        if offer.spot_usd_hour is not None
    }


def _list_places(known: Sequence[Offer], ondemand: Ondemand, spot: Spot) -> set[Place]:
    """List every machine that has a price, in each of its zones; without a zone if none is known."""
    zones: dict[str, set[str]] = {}
    for offer in known:
        zones.setdefault(offer.instance_type, set()).add(offer.zone or "")
    for instance_type, zone in spot:
        zones.setdefault(instance_type, set()).add(zone)
    sold = {*ondemand, *(instance_type for instance_type, _ in spot)}
    return {
        (instance_type, zone) for instance_type in sold for zone in (zones.get(instance_type, set()) - {""} or {""})
    }


def _translate(error: Exception, words: str) -> Exception:
    """Translate the SDK's errors by name and code because the SDK must not be imported here."""
    if isinstance(error, (SourceError, AuthError)):
        return error
    response = getattr(error, "response", None)
    code = str(response.get("Error", {}).get("Code", "")) if isinstance(response, dict) else ""
    if type(error).__name__ in LOGIN_ERRORS or code in LOGIN_CODES:
        return AuthError(f"no AWS login with permission to read prices: {error}", hints=[LOGIN_HINT])
    return SourceError(f"AWS {words}: {error}")


def parse_advisor(body: bytes) -> Mapping[Key, float]:
    """Return (instance type, region) -> upper bound of its interruption band, percent per month. Raises SourceError."""
    try:
        regions = json.loads(body)["spot_advisor"]
        return {
            (instance_type, region): BANDS[int(entry["r"])]
            for region, systems in regions.items()
            for instance_type, entry in systems.get("Linux", {}).items()
        }
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError, RecursionError) as error:
        raise SourceError(f"unexpected format of the AWS spot advisor: {error!r}") from None


def parse_product(text: str | Mapping[str, Any]) -> tuple[str, float] | None:
    """Return (instance type, USD per hour) of one price list entry; None if it is not priced by the hour.

    Raises SourceError.
    """
    try:
        product = json.loads(text) if isinstance(text, str) else text
        instance_type = product["product"]["attributes"]["instanceType"]
        for term in product["terms"]["OnDemand"].values():
            for dimension in term["priceDimensions"].values():
                if dimension["unit"] == "Hrs":
                    usd = _to_usd(dimension["pricePerUnit"]["USD"])
                    return (str(instance_type), usd) if usd > 0 else None
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise SourceError(f"unexpected format of the AWS price list: {error!r}") from None
    return None


def _get(page: Any, field: str) -> Any:
    try:
        return page[field]
    except (KeyError, TypeError):
        raise SourceError(f"the AWS response has no `{field}`") from None


def _list(page: Any, field: str) -> list[Any]:
    value = _get(page, field)
    if not isinstance(value, list):
        raise SourceError(f"`{field}` in the AWS response is not a list")
    return value


def _to_usd(text: Any) -> float:
    try:
        return float(text)
    except (TypeError, ValueError, OverflowError):
        raise SourceError(f"AWS returned an invalid price: {text!r}") from None


def _make_boto3_client(service: str, region: str) -> Any:
    try:
        import boto3
    except ImportError:
        raise AuthError("boto3 is not installed", hints=["`pip install 'intercloud-broker[aws]'`"]) from None
    from botocore.config import Config

    retries: Any = {"mode": "standard", "total_max_attempts": 8}  # thousands of pages, each of which may be throttled
    return boto3.client(service, region_name=region, config=Config(retries=retries, read_timeout=60))
