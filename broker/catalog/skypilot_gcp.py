"""Join the two halves of SkyPilot's GCP catalog: machines and accelerators have separate rows, whose prices add up."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from broker.types import Offer

HOSTS_GCP = {  # accelerator -> the machine family with it built in
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
# Machines of these families are never sold without their accelerators, even if they have a row of their own.
FAMILIES_WITH_ACCELERATORS = ("a2-", "a3-", "a4-", "a4x-", "g2-", "g4-", "ct")
# A TPU slice is rented as a whole, including its host. Up to v5p the number in its name counts cores, two per chip.
TPU = re.compile(r"tpu-(?P<version>v\d+\w*?)(?:litepod)?-(?P<size>\d+)$", re.IGNORECASE)
TPU_NAMES = {"v2": "TPU-v2", "v3": "TPU-v3", "v4": "TPU-v4", "v5": "TPU-v5e", "v5p": "TPU-v5p", "v6e": "TPU-v6e"}
TPU_CORES = ("v2", "v3", "v4", "v5p")


def compose(machines: list[Offer], parts: list[Offer]) -> Iterator[Offer]:
    """Return machines without accelerators, and machines with accelerators at the sum of both prices."""
    by_place = {(offer.instance_type, offer.region, offer.zone): offer for offer in machines}
    composed: list[Offer] = []
    for part in parts:
        if tpu := _read_tpu(part):
            composed.append(tpu)
            continue
        built_in, attached = _list_hosts(part)
        for host_type in (*built_in, *attached):
            host = by_place.get((host_type, part.region, part.zone))
            if host is not None:
                composed.append(_join(host, part, is_built_in=host_type in built_in))
    yield from (offer for offer in machines if not offer.instance_type.startswith(FAMILIES_WITH_ACCELERATORS))
    yield from composed


def _list_hosts(part: Offer) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """List machines with it built in, and machines that it can be attached to."""
    name, count = part.accelerator or "", int(part.accelerator_count)
    if odd := HOSTS_GCP_ODD.get((name, count)):
        return odd, ()
    if name in HOSTS_GCP:
        return (HOSTS_GCP[name].format(count=count),), ()
    return (), ATTACHED_GCP.get(count, ())


def _read_tpu(part: Offer) -> Offer | None:
    """Read a TPU slice as an offer of its own, its accelerators counted in chips; None for other accelerators."""
    match = TPU.match(part.accelerator or "")
    if match is None:
        return None
    version, size = match["version"].lower(), int(match["size"])
    return replace(
        part,
        instance_type=str(part.accelerator),
        accelerator=TPU_NAMES.get(version, f"TPU-{version}"),
        accelerator_count=max(1, size // 2) if version in TPU_CORES else size,
    )


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
