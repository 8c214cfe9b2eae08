"""SkyPilot's catalog files, `<cloud>/vms.csv` of versions 5 to 8, as offers.

Columns: InstanceType, vCPUs, MemoryGiB, AcceleratorName, AcceleratorCount, GpuInfo, Region, AvailabilityZone, Price,
SpotPrice; some clouds leave some out. On GCP an accelerator has rows of its own, without a machine: there its price is
added to that of each machine that it is attached to.
"""

from __future__ import annotations

import ast
import csv
import io
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from broker.errors import SourceError
from broker.types import Offer

NEEDED = ("Region", "Price")
HOSTS_GCP = {  # accelerator -> the machine family that has it built in
    "A100": "a2-highgpu-{count}g",
    "A100-80GB": "a2-ultragpu-{count}g",
    "H100": "a3-highgpu-{count}g",
    "H100-MEGA": "a3-megagpu-{count}g",
    "H200": "a3-ultragpu-{count}g",
    "B200": "a4-highgpu-{count}g",
}
HOSTS_GCP_ODD = {
    ("A100", 16): ("a2-megagpu-16g",),
    ("L4", 1): ("g2-standard-4", "g2-standard-8", "g2-standard-12", "g2-standard-16", "g2-standard-32"),
    ("L4", 2): ("g2-standard-24",),
    ("L4", 4): ("g2-standard-48",),
    ("L4", 8): ("g2-standard-96",),
}
ATTACHED_GCP = {
    1: ("n1-standard-8", "n1-highmem-8"),
    2: ("n1-standard-16",),
    4: ("n1-standard-32",),
    8: ("n1-standard-64",),
}
NAMES = {"H100-MEGA": "H100"}  # SkyPilot's name -> ours, where they differ
FRACTION = re.compile(r"'SizeInMiB': *(\d+)")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A row that could not be read."""

    file: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.message}"


def parse_vms(text: str, *, cloud: str, file: str) -> tuple[list[Offer], list[Fault]]:
    """All rows with a price, and the faults of the others. Raises SourceError where the file is no such catalog."""
    reader = csv.DictReader(io.StringIO(text, newline=""))
    missing = [name for name in NEEDED if name not in (reader.fieldnames or ())]
    if missing:
        raise SourceError(f"{file} is no SkyPilot catalog: it has no column {', '.join(missing)}")
    machines: list[Offer] = []
    parts: list[Offer] = []
    faults: list[Fault] = []
    for row in reader:
        try:
            offer = _read_row(row, cloud)
        except ValueError as error:
            faults.append(Fault(file=file, line=reader.line_num, message=str(error)))
            continue
        if offer is not None:
            (machines if offer.instance_type else parts).append(offer)
    return (list(_compose(machines, parts)) if parts else machines), faults


def _read_row(row: Mapping[str, str], cloud: str) -> Offer | None:
    """None for a row without a price. Raises ValueError that names the column."""
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
        raise ValueError(f"`{column}` is no number: `{text}`") from None
    if not math.isfinite(number) or number < 0:
        raise ValueError(f"`{column}` makes no sense: `{text}`")
    return number


def _read_memory_gib(info: str) -> float:
    """Of one accelerator, from a Python literal such as {'Gpus': [{'MemoryInfo': {'SizeInMiB': 16384}}]}."""
    if not info:
        return 0.0
    try:
        gpu = ast.literal_eval(info)["Gpus"][0]
        return round(float(gpu["MemoryInfo"]["SizeInMiB"]) / 1024, 3)
    except (ValueError, SyntaxError, KeyError, IndexError, TypeError):
        found = FRACTION.search(info)
        return round(int(found[1]) / 1024, 3) if found else 0.0


def _compose(machines: list[Offer], parts: list[Offer]) -> Iterator[Offer]:
    """Machines without accelerators, and each with the accelerators that go with it, at the sum of both prices."""
    by_place = {(offer.instance_type, offer.region, offer.zone): offer for offer in machines}
    hosts_only = set[str]()
    composed: list[Offer] = []
    for part in parts:
        built_in, attached = _list_hosts(part)
        hosts_only.update(built_in)
        for host_type in (*built_in, *attached):
            host = by_place.get((host_type, part.region, part.zone))
            if host is not None:
                composed.append(_join(host, part, is_built_in=host_type in built_in))
    yield from (offer for offer in machines if offer.instance_type not in hosts_only)
    yield from composed


def _list_hosts(part: Offer) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Machines that have it built in, and machines that it can be attached to."""
    name, count = part.accelerator or "", int(part.accelerator_count)
    if odd := HOSTS_GCP_ODD.get((name, count)):
        return odd, ()
    if name in HOSTS_GCP:
        return (HOSTS_GCP[name].format(count=count),), ()
    return ((), ()) if name.startswith("tpu") else ((), ATTACHED_GCP.get(count, ()))


def _join(host: Offer, part: Offer, *, is_built_in: bool) -> Offer:
    def add(one: float | None, other: float | None) -> float | None:
        return None if one is None or other is None else round(one + other, 6)

    name = part.accelerator or ""
    suffix = "" if is_built_in else f"+{part.accelerator_count:g}x{name}"
    return replace(
        host,
        instance_type=host.instance_type + suffix,
        accelerator=NAMES.get(name, name),
        accelerator_count=part.accelerator_count,
        accelerator_memory_gib=part.accelerator_memory_gib,
        ondemand_usd_hour=add(host.ondemand_usd_hour, part.ondemand_usd_hour),
        spot_usd_hour=add(host.spot_usd_hour, part.spot_usd_hour),
    )
