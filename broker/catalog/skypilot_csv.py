"""Read SkyPilot's catalog files, `<cloud>/vms.csv` of versions 5 to 8, as offers.

Columns: InstanceType, vCPUs, MemoryGiB, AcceleratorName, AcceleratorCount, GpuInfo, Region, AvailabilityZone, Price,
SpotPrice; some clouds omit some. On GCP an accelerator has rows of its own, without a machine: `skypilot_gcp` joins the
two.
"""

from __future__ import annotations

import ast
import csv
import io
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache

from broker.catalog.skypilot_gcp import compose
from broker.errors import SourceError
from broker.frozen import frozen
from broker.types import Offer

NEEDED = ("Region", "Price")
FRACTION = re.compile(r"'SizeInMiB': *(\d+)")
MIB_MIN = 300.0
MEMORY_GIB_MAX = 300.0  # the largest accelerator of 2026 has 288
SAME_SHARE = 0.05


@frozen
class RowIssue:
    """An unreadable row of a file."""

    file: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.message}"


def parse_vms(text: str, *, cloud: str, file: str) -> tuple[list[Offer], list[RowIssue]]:
    """Return all rows with a price, and the issues of unreadable ones.

    Raises SourceError if the file is not a SkyPilot catalog.
    """
    reader = csv.DictReader(io.StringIO(text, newline=""))
    missing = [name for name in NEEDED if name not in (reader.fieldnames or ())]
    if missing:
        raise SourceError(f"{file} is not a SkyPilot catalog: missing column {', '.join(missing)}")
    machines: list[Offer] = []
    parts: list[Offer] = []
    faults: list[RowIssue] = []
    for row in reader:
        try:
            offer = _read_row(row, cloud)
        except ValueError as error:
            faults.append(RowIssue(file=file, line=reader.line_num, message=str(error)))
            continue
        if offer is not None:
            (machines if offer.instance_type else parts).append(offer)
    offers = list(compose(machines, parts)) if parts or cloud == "gcp" else machines
    return list(_convert_memory(offers)), faults


def _read_row(row: Mapping[str, str], cloud: str) -> Offer | None:
    """Read a row; None without a price. Raises ValueError that names the column."""
    price, spot = _read_number(row, "Price"), _read_number(row, "SpotPrice")
    if not price and not spot:
        return None
    if not row.get("Region"):
        raise ValueError("no `Region`")
    name = row.get("AcceleratorName") or None
    instance_type = row.get("InstanceType") or ""
    if not name and not instance_type:
        raise ValueError("neither `InstanceType` nor `AcceleratorName`")
    count = _read_number(row, "AcceleratorCount") or 0.0
    return Offer(
        cloud=cloud,
        region=row["Region"],
        zone=row.get("AvailabilityZone") or None,
        instance_type=instance_type,
        vcpus=_read_number(row, "vCPUs") or 0.0,
        memory_gib=_read_number(row, "MemoryGiB") or 0.0,
        accelerator=name,
        accelerator_count=count if name else 0.0,
        accelerator_memory_gib=_read_memory_gib(row.get("GpuInfo") or ""),
        ondemand_usd_hour=price or None,
        spot_usd_hour=spot or None,
    )


def _read_number(row: Mapping[str, str], column: str) -> float | None:
    text = row.get(column) or ""
    if not text:
        return None
    try:
        number = float(text)
    except ValueError:
        raise ValueError(f"`{column}` is not a number: `{text}`") from None
    if not math.isfinite(number) or number < 0:
        raise ValueError(f"`{column}` is out of range: `{text}`")
    return number


@lru_cache(maxsize=4096)  # tens of thousands of rows share a few hundred texts
def _read_memory_gib(info: str) -> float:
    """Parse a Python literal such as {'Gpus': [{'MemoryInfo': {'SizeInMiB': 16384}}]}; 0 if it gives no memory."""
    try:
        size = float(ast.literal_eval(info)["Gpus"][0]["MemoryInfo"]["SizeInMiB"]) if info else 0.0
    except (ValueError, SyntaxError, KeyError, IndexError, TypeError, MemoryError, RecursionError):
        match = FRACTION.search(info)
        size = float(match[1]) if match else 0.0
    if not math.isfinite(size) or size < 0:
        return 0.0
    # Some clouds' files give GiB in the field for MiB: no accelerator has that few MiB.
    return round(size if size < MIB_MIN else size / 1024, 3)


def _convert_memory(offers: Iterable[Offer]) -> Iterator[Offer]:
    """Convert to memory per accelerator: some clouds' files give the memory of all accelerators of a machine.

    Offers with a single accelerator show which figure it is.
    """
    offers = list(offers)
    single: dict[str | None, float] = {}
    for offer in offers:
        if offer.accelerator_count == 1 and offer.accelerator_memory_gib:
            single[offer.accelerator] = min(
                offer.accelerator_memory_gib, single.get(offer.accelerator, offer.accelerator_memory_gib)
            )
    for offer in offers:
        share = offer.accelerator_memory_gib / max(offer.accelerator_count, 1)
        one = single.get(offer.accelerator, 0.0)
        is_total = math.isclose(share, one, rel_tol=SAME_SHARE) or offer.accelerator_memory_gib > MEMORY_GIB_MAX
        if offer.accelerator_count > 1 and is_total:
            offer = replace(offer, accelerator_memory_gib=round(share, 3))
        yield offer
