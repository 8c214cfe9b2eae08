"""Fuzz target for price lists and catalog files from the network: the result is offers or SourceError."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from broker.catalog.skypilot_csv import parse_vms
from broker.catalog.sources.aws import parse_advisor, parse_product
from broker.catalog.sources.azure import AzureSource
from broker.catalog.sources.gcp import GcpSource
from broker.catalog.sources.skypilot import SkyPilotSource
from broker.errors import AuthError, SourceError
from tests.catalog.market import KNOWN, NOW_S
from tests.fuzz.registry import Target

_DATA = Path(__file__).parent.parent / "data" / "catalog"


def fuzz_catalog(data: bytes) -> None:
    """Fuzz the catalog. ¶ The first byte picks the source; the rest is its answer to every request."""
    kind, body = (data[0] if data else 0) % 6, data[1:]
    asked = 0

    def get(url: str, *, query: Mapping[str, str] | None = None) -> bytes:
        nonlocal asked
        asked += 1
        assert asked < 10_000, "asked without end"
        return body

    try:
        if kind == 0:
            parse_vms(body.decode("utf-8", "replace"), cloud="gcp", file="vms.csv")
        elif kind == 1:
            parse_advisor(body)
        elif kind == 2:
            parse_product(body.decode("utf-8", "replace"))
        elif kind == 3:
            list(AzureSource().fetch("azure", get, known=KNOWN["azure"], as_of_s=NOW_S))
        elif kind == 4:
            list(GcpSource(key="k").fetch("gcp", get, known=KNOWN["gcp"], as_of_s=NOW_S))
        else:
            list(SkyPilotSource().fetch("lambda", get, known=KNOWN["lambda"], as_of_s=NOW_S))
    except (SourceError, AuthError):
        pass


FUZZ_TARGETS: dict[str, Target] = {"catalog": fuzz_catalog}
_FILES = (
    "gcp_vms.csv",
    "aws_advisor.json",
    "aws_products.json",
    "azure_page_1.json",
    "gcp_page_1.json",
    "lambda_vms.csv",
)
SEEDS = {"catalog": [bytes([kind]) + (_DATA / name).read_bytes()[:60_000] for kind, name in enumerate(_FILES)]}
