"""SkyPilot's hosted catalog: one CSV file per cloud. Public, no login."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import ClassVar

from broker.catalog.skypilot_csv import parse_vms
from broker.catalog.sources.base import Get
from broker.errors import SourceError
from broker.types import Offer

URL = "https://raw.githubusercontent.com/skypilot-org/skypilot-catalog/master/catalogs/v8"
FAULTS_SHARE_MAX = 0.02  # above this share of unreadable rows, the file itself is damaged


class SkyPilotSource:
    """SkyPilot's hosted catalog, one CSV file per cloud."""

    name: ClassVar[str] = "skypilot"
    clouds: ClassVar[tuple[str, ...]] = (
        "aws", "gcp", "azure", "lambda", "runpod", "oci", "nebius", "hyperbolic", "verda", "seeweb", "jarvislabs",
        "cudo", "hyperstack", "lium", "mithril", "primeintellect", "shadeform", "spheron", "vast", "yotta",
    )  # fmt: skip

    def __init__(self, url: str = URL) -> None:
        self._url = url

    def fetch(self, cloud: str, get: Get, *, known: Sequence[Offer], as_of_s: float) -> Iterator[Offer]:
        """Yield the offers of SkyPilot's hosted catalog.

        Raises SourceError if the file is cut off, or if more than FAULTS_SHARE_MAX of its rows are unreadable.
        """
        file = f"{self._url}/{cloud}/vms.csv"
        try:
            text = get(file).decode("utf-8-sig")
        except UnicodeDecodeError:
            raise SourceError(f"{file} is not text") from None
        if not text.endswith("\n"):
            raise SourceError(f"{file} ends in the middle of a line")
        offers, faults = parse_vms(text, cloud=cloud, file=f"{cloud}/vms.csv")
        if len(faults) > FAULTS_SHARE_MAX * (len(offers) + len(faults)):
            raise SourceError(f"{len(faults)} unreadable rows, such as {faults[0]}")
        bands = {(offer.instance_type, offer.region): offer.interruption_band for offer in known}
        memory = {(offer.accelerator, offer.instance_type): offer.accelerator_memory_gib for offer in known}
        for offer in offers:
            yield replace(
                offer,
                interruption_band=bands.get((offer.instance_type, offer.region)),
                accelerator_memory_gib=offer.accelerator_memory_gib
                or memory.get((offer.accelerator, offer.instance_type), 0.0),
            )
