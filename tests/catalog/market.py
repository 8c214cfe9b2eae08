"""Offers as a book has them before a refresh, and responses in the sources' documented formats."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from broker.errors import AuthError
from broker.types import Offer

ANSWERS = Path(__file__).parent.parent / "data" / "catalog"
NOW_S = 1_796_123_200.0  # 2026-12-01


def make_known(cloud: str, instance_type: str, region: str, zone: str | None = None, **changes: Any) -> Offer:
    fields: dict[str, Any] = {
        "cloud": cloud, "instance_type": instance_type, "region": region, "zone": zone, "vcpus": 8, "memory_gib": 30,
        "ondemand_usd_hour": 1.0, "spot_usd_hour": 0.4, "interruption_band": 5.0, "as_of": "2026-01-01",
        "spot_as_of": "2026-01-02",
    }  # fmt: skip
    return Offer(**{**fields, **changes})


KNOWN: dict[str, list[Offer]] = {
    "azure": [
        make_known("azure", "Standard_NC24ads_A100_v4", "eastus", accelerator="A100-80GB", accelerator_count=1,
                   ondemand_usd_hour=3.6, spot_usd_hour=1.0),
        make_known("azure", "Standard_NC4as_T4_v3", "eastus", accelerator="T4", accelerator_count=1,
                   ondemand_usd_hour=0.53, spot_usd_hour=0.1),
    ],
    "aws": [
        make_known("aws", "p4d.24xlarge", "us-east-1", "us-east-1a", accelerator="A100", accelerator_count=8,
                   ondemand_usd_hour=21.9, spot_usd_hour=9.0, is_estimated=True),
        make_known("aws", "p4d.24xlarge", "us-east-1", "us-east-1b", accelerator="A100", accelerator_count=8,
                   ondemand_usd_hour=21.9, spot_usd_hour=9.0),
        make_known("aws", "m5.large", "us-east-1", "us-east-1a", ondemand_usd_hour=0.1, spot_usd_hour=0.04),
        make_known("aws", "m5.large", "af-south-1", "af-south-1a", ondemand_usd_hour=0.1, spot_usd_hour=0.05),
    ],
    "gcp": [
        make_known("gcp", "n1-standard-8+1xT4", "us-central1", "us-central1-a", accelerator="T4", accelerator_count=1),
        make_known("gcp", "n1-standard-8", "us-east1", "us-east1-b"),
        make_known("gcp", "ct5lp-hightpu-4t", "us-central1", "us-central1-a", accelerator="TPU-v5e",
                   accelerator_count=4),
    ],
    "lambda": [
        make_known("lambda", "gpu_1x_a10", "us-west-1", ondemand_usd_hour=0.75, spot_usd_hour=None),
        make_known("lambda", "cpu_4x_general", "us-west-1", ondemand_usd_hour=0.2, spot_usd_hour=None),
    ],
}  # fmt: skip


def read(name: str) -> bytes:
    return (ANSWERS / name).read_bytes()


class FakeWeb:
    """A Get whose pages are bytes by a part of their URL; `change` corrupts them."""

    def __init__(self, pages: Mapping[str, bytes], change: Callable[[bytes], bytes] = lambda body: body) -> None:
        self._pages = pages
        self._change = change
        self.asked: list[str] = []

    def __call__(self, url: str, *, query: Mapping[str, str] | None = None) -> bytes:
        whole = url + json.dumps(dict(query or {}))
        self.asked.append(whole)
        assert len(self.asked) < 100, "a source that never stops asking"
        return self._change(next(body for part, body in reversed(self._pages.items()) if part in whole))


class FakeAws:
    """Fake boto3: clients with paginators over recorded pages."""

    def __init__(self, change: Callable[[Any], Any] = lambda page: page, error: Exception | None = None) -> None:
        self._change = change
        self._error = error

    def __call__(self, service: str, region: str) -> FakeAws:
        return self

    def describe_regions(self) -> Any:
        if self._error:
            raise self._error
        regions = [{"RegionName": "us-east-1", "Endpoint": "ec2.us-east-1.amazonaws.com", "OptInStatus": "opted-in"}]
        return self._change({"Regions": regions})

    def get_paginator(self, operation: str) -> FakeAws:
        self._operation = operation
        return self

    def paginate(self, **arguments: Any) -> Iterator[Any]:
        if self._error:
            raise self._error
        name = {"get_products": "aws_products.json", "describe_spot_price_history": "aws_spot.json"}[self._operation]
        for page in json.loads(read(name)):
            yield self._change(page)


def make_source(name: str, *, change: Callable[[bytes], bytes] = lambda body: body) -> tuple[Any, str, FakeWeb]:
    """Make a source by its name in the registry, a cloud to query it for, and its web."""
    from broker.catalog.sources.aws import AwsSource
    from broker.catalog.sources.azure import AzureSource
    from broker.catalog.sources.gcp import GcpSource
    from broker.catalog.sources.skypilot import SkyPilotSource

    pages = {
        "azure": {"prices.azure.com": read("azure_page_1.json"), "page=2": read("azure_page_2.json")},
        "gcp": {"skus": read("gcp_page_1.json"), '"pageToken": "p2"': read("gcp_page_2.json")},
        "aws": {"advisor": read("aws_advisor.json")},
        "skypilot": {"lambda/vms.csv": read("lambda_vms.csv")},
    }[name]
    source = {
        "azure": AzureSource,
        "gcp": lambda: GcpSource(key="k"),
        "aws": lambda: AwsSource(make_client=FakeAws(lambda page: json.loads(change(json.dumps(page).encode())))),
        "skypilot": SkyPilotSource,
    }[name]()
    return source, "lambda" if name == "skypilot" else name, FakeWeb(pages, change)


NO_LOGIN = AuthError("no login here", hints=["log in"])
