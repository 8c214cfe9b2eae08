"""AWS: on-demand from the Price List API, spot from EC2's price history, interruption bands from the spot advisor.

GetProducts and DescribeSpotPriceHistory through boto3 (they need a login); the advisor's file is public:
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
PRICING_REGION = "us-east-1"  # the Price List API answers for all regions from here
BANDS = (5.0, 10.0, 15.0, 20.0, 100.0)  # upper bounds in percent a month, by the advisor's index
ONDEMAND_FILTERS = {
    "operatingSystem": "Linux",
    "tenancy": "Shared",
    "preInstalledSw": "NA",
    "capacitystatus": "Used",
    "marketoption": "OnDemand",
}
Key = tuple[str, str]  # instance type, region


class AwsSource:
    name: ClassVar[str] = "aws"
    clouds: ClassVar[tuple[str, ...]] = ("aws",)

    def __init__(self, make_client: Callable[[str, str], Any] | None = None, advisor_url: str = ADVISOR_URL) -> None:
        self._make_client = make_client or _make_boto3_client
        self._advisor_url = advisor_url

    def fetch(self, cloud: str, get: Get, *, known: Sequence[Offer], as_of_s: float) -> Iterator[Offer]:
        bands = parse_advisor(get(self._advisor_url))
        zones: dict[Key, set[str]] = {}
        for offer in known:
            zones.setdefault((offer.instance_type, offer.region), set()).update({offer.zone} if offer.zone else ())
        shapes = {offer.instance_type: offer for offer in known}
        for region in sorted({offer.region for offer in known}):
            ondemand = self._read_ondemand(region)
            spot = self._read_spot(region, as_of_s)
            for instance_type in sorted({*ondemand, *(kind for kind, _ in spot)}):
                shape = shapes.get(instance_type)
                if shape is None:
                    continue
                key = (instance_type, region)
                places = zones.get(key, set()) | {zone for kind, zone in spot if kind == instance_type}
                for zone in sorted(places) or [""]:
                    offer = replace(
                        shape,
                        region=region,
                        zone=zone or None,
                        ondemand_usd_hour=ondemand.get(instance_type),
                        spot_usd_hour=spot.get((instance_type, zone)),
                        interruption_band=bands.get(key),
                        is_estimated=False,
                    )
                    if offer.ondemand_usd_hour or offer.spot_usd_hour:
                        yield offer

    def _read_ondemand(self, region: str) -> Mapping[str, float]:
        filters = [
            {"Type": "TERM_MATCH", "Field": field, "Value": value}
            for field, value in {**ONDEMAND_FILTERS, "regionCode": region}.items()
        ]
        pages = self._list_pages("pricing", PRICING_REGION, "get_products", ServiceCode="AmazonEC2", Filters=filters)
        return dict(price for page in pages for text in _get(page, "PriceList") if (price := parse_product(text)))

    def _read_spot(self, region: str, as_of_s: float) -> Mapping[tuple[str, str], float]:
        """(instance type, zone) -> USD per hour, the newest of each."""
        newest: dict[tuple[str, str], tuple[Any, float]] = {}
        now = datetime.fromtimestamp(as_of_s, UTC)  # a start of now asks for the price in force, without its history
        pages = self._list_pages(
            "ec2", region, "describe_spot_price_history", ProductDescriptions=["Linux/UNIX"], StartTime=now
        )
        for page in pages:
            for entry in _get(page, "SpotPriceHistory"):
                key = (_get(entry, "InstanceType"), _get(entry, "AvailabilityZone"))
                usd, time = _to_usd(_get(entry, "SpotPrice")), _get(entry, "Timestamp")
                if usd > 0 and (key not in newest or time > newest[key][0]):
                    newest[key] = (time, usd)
        return {key: usd for key, (_, usd) in newest.items()}

    def _list_pages(self, service: str, region: str, operation: str, **arguments: Any) -> Iterator[Any]:
        try:
            yield from self._make_client(service, region).get_paginator(operation).paginate(**arguments)
        except (SourceError, AuthError):
            raise
        except Exception as error:  # the SDK's own tree: told apart by name, as it must not be imported here
            if type(error).__name__ in ("NoCredentialsError", "PartialCredentialsError", "TokenRetrievalError"):
                raise AuthError("AWS has no credentials here", hints=["`aws configure`, or `aws sso login`"]) from None
            raise SourceError(f"AWS {service} {operation} in {region}: {error}") from None


def parse_advisor(body: bytes) -> Mapping[Key, float]:
    """(instance type, region) -> upper bound of its interruption band, percent a month. Raises SourceError."""
    try:
        regions = json.loads(body)["spot_advisor"]
        return {
            (instance_type, region): BANDS[int(entry["r"])]
            for region, systems in regions.items()
            for instance_type, entry in systems.get("Linux", {}).items()
        }
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise SourceError(f"the AWS spot advisor has changed its form: {error!r}") from None


def parse_product(text: str | Mapping[str, Any]) -> tuple[str, float] | None:
    """(instance type, USD per hour) of one entry of the price list; None where it sells no hour. Raises SourceError."""
    try:
        product = json.loads(text) if isinstance(text, str) else text
        instance_type = product["product"]["attributes"]["instanceType"]
        for term in product["terms"]["OnDemand"].values():
            for dimension in term["priceDimensions"].values():
                if dimension["unit"] == "Hrs":
                    usd = _to_usd(dimension["pricePerUnit"]["USD"])
                    return (str(instance_type), usd) if usd > 0 else None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SourceError(f"the AWS price list has changed its form: {error!r}") from None
    return None


def _get(page: Any, field: str) -> Any:
    try:
        return page[field]
    except (KeyError, TypeError):
        raise SourceError(f"AWS answers without `{field}`") from None


def _to_usd(text: Any) -> float:
    try:
        return float(text)
    except (TypeError, ValueError):
        raise SourceError(f"AWS gives a price that is no number: {text!r}") from None


def _make_boto3_client(service: str, region: str) -> Any:
    try:
        import boto3
    except ImportError:
        raise AuthError("boto3 is not installed", hints=["`pip install 'intercloud-broker[aws]'`"]) from None
    return boto3.client(service, region_name=region)
