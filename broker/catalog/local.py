"""Simulated offers of the `local` cloud: slices of this machine, in three zones."""

from __future__ import annotations

from collections.abc import Sequence

from broker.types import Offer

# Simulated prices, close to those of small cloud machines, so that a rehearsal's bill has a familiar size.
ONDEMAND_USD_VCPU_HOUR = 0.05
SPOT_USD_VCPU_HOUR = {"local-a": 0.015, "local-b": 0.016, "local-c": 0.018}


def list_local_offers(vcpus: int, memory_gib: float) -> Sequence[Offer]:
    """List offers of 1, 2, 4 ... vCPUs up to the machine's own, each in every zone."""
    sizes = [size for size in (1, 2, 4, 8, 16, 32, 64) if size <= vcpus] or [1]
    return [
        Offer(
            cloud="local",
            region="local",
            zone=zone,
            instance_type=f"local-{size}x",
            vcpus=size,
            memory_gib=round(memory_gib * size / max(vcpus, size), 1),
            ondemand_usd_hour=round(ONDEMAND_USD_VCPU_HOUR * size, 4),
            spot_usd_hour=round(spot * size, 4),
            interruption_band=20,
            as_of="2026-01-01",
        )
        for size in sizes
        for zone, spot in SPOT_USD_VCPU_HOUR.items()
    ]
