"""Writes the price book as a folder of SkyPilot catalog files (version 8), so that both read the same prices."""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from broker.catalog.book import Book
from broker.types import Offer

COLUMNS = (
    "InstanceType", "AcceleratorName", "AcceleratorCount", "vCPUs", "MemoryGiB", "GpuInfo", "Region",
    "AvailabilityZone", "Price", "SpotPrice",
)  # fmt: skip
# SkyPilot prices a Google machine and its accelerators in rows of their own. It attaches these to machines by rules
# that the book doesn't keep, so they are left out of both sides; so are TPUs, which it names in another way.
LEFT_OUT_GCP = ("T4", "V100", "P100", "P4", "RTXPRO6000")
# ours -> SkyPilot's
NAMES = {
    "aws": "AWS", "azure": "Azure", "gcp": "GCP", "lambda": "Lambda", "nebius": "Nebius", "runpod": "RunPod",
    "verda": "Verda",
}  # fmt: skip


def export_book(book: Book, folder: Path) -> int:
    """Write one file per cloud; return the number of offers."""
    count, sellers = 0, defaultdict[str, set[str]](set)
    for cloud in NAMES:
        offers = [each for each in book.list_offers(cloud) if each.ondemand_usd_hour is not None and _is_shared(each)]
        rows = list(_split_google(offers) if cloud == "gcp" else map(_make_row, offers))
        (folder / cloud).mkdir(parents=True, exist_ok=True)
        with (folder / cloud / "vms.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            # A cloud without zones must lack their column: SkyPilot takes an empty one for no region at all.
            kept = [i for i, name in enumerate(COLUMNS) if name != "AvailabilityZone" or any(row[i] for row in rows)]
            writer.writerows([row[i] for i in kept] for row in [COLUMNS, *rows])
        count += len(offers)
        for each in offers:
            if each.accelerator:
                sellers[each.accelerator].add(NAMES[cloud])
    (folder / "common").mkdir(exist_ok=True)
    with (folder / "common" / "accelerators.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(("AcceleratorName", "Clouds"))
        writer.writerows((name, str(sorted(clouds))) for name, clouds in sorted(sellers.items()))
    return count


def _is_shared(offer: Offer) -> bool:
    name = offer.accelerator or ""
    return offer.accelerator_count == int(offer.accelerator_count) and not (
        offer.cloud == "gcp" and (name in LEFT_OUT_GCP or name.startswith("TPU"))
    )


def _make_row(offer: Offer) -> Sequence[object]:
    return (
        offer.instance_type, offer.accelerator or "", offer.accelerator_count or "", offer.vcpus, offer.memory_gib,
        _describe_gpu(offer), offer.region, offer.zone or "", offer.ondemand_usd_hour, _blank(offer.spot_usd_hour),
    )  # fmt: skip


def _describe_gpu(offer: Offer) -> str:
    if not offer.accelerator:
        return ""
    size = int(offer.accelerator_memory_gib * 1024)
    gpu = {"Name": offer.accelerator, "Count": offer.accelerator_count, "MemoryInfo": {"SizeInMiB": size}}
    return str({"Gpus": [gpu], "TotalGpuMemoryInMiB": int(size * offer.accelerator_count)})


def _blank(price: float | None) -> object:
    return "" if price is None else price


def _split_google(offers: Iterable[Offer]) -> Iterable[Sequence[object]]:
    """Put half of the cheapest total in the accelerator's row, the rest in each machine's; sums are book prices."""
    attached = defaultdict[tuple[object, ...], list[Offer]](list)
    for offer in offers:
        if offer.accelerator:
            attached[(offer.accelerator, offer.accelerator_count, offer.region, offer.zone)].append(offer)
        else:
            yield _make_row(offer)
    for (name, count, region, zone), hosts in attached.items():
        part = min(each.ondemand_usd_hour or 0.0 for each in hosts) / 2
        spots = [each.spot_usd_hour for each in hosts if each.spot_usd_hour is not None]
        spot_part = min(spots) / 2 if len(spots) == len(hosts) else None
        yield "", name, count, "", "", _describe_gpu(hosts[0]), region, zone or "", part, _blank(spot_part)
        for each in hosts:
            spot = None if spot_part is None or each.spot_usd_hour is None else each.spot_usd_hour - spot_part
            price = (each.ondemand_usd_hour or 0.0) - part
            yield (each.instance_type, "", "", each.vcpus, each.memory_gib, "", region, zone or "", price, _blank(spot))
