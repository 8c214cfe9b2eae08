"""Cost and duration of moving data from one placement to another."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import field

from broker.frozen import frozen
from broker.types import EgressPrice, Offer, Transfer

GB_PER_GIB = 2**30 / 1e9

# For a cloud without a row: the highest list price of the three large clouds to the internet (Google, premium tier; AWS
# charges 0.09 and Azure 0.087), so that an unknown price never attracts data.
ASSUMED_USD_PER_GB = 0.12

# Bandwidth of one machine. AWS limits a single flow, and all traffic that leaves the region from machines below 32
# vCPUs, to 5 Gbit/s ("Amazon EC2 instance network bandwidth", EC2 user guide); within a region twice that is common.
REGION_GBIT_S = 10.0
OUTSIDE_GBIT_S = 5.0


@frozen
class LeavingPrice:
    """USD per GB out of one region, by destination."""

    same_region: float
    other_region: float
    internet: float
    is_known: bool


@frozen
class EgressTable:
    """Prices by cloud and region; a region without a row uses the cloud's `*`."""

    rows: dict[tuple[str, str, str], float] = field(default_factory=dict)

    @classmethod
    def from_prices(cls, prices: Iterable[EgressPrice]) -> EgressTable:
        """Index prices in USD per GB by cloud, region and target."""
        return cls(rows={(price.cloud, price.from_region, price.target): price.usd_per_gb for price in prices})

    def find(self, cloud: str, region: str) -> LeavingPrice:
        """Return the price of leaving a region.

        An unknown cloud costs `ASSUMED_USD_PER_GB` out of the region, nothing within it.
        """

        def find_price(target: str) -> float | None:
            price = self.rows.get((cloud, region, target))
            return self.rows.get((cloud, "*", target)) if price is None else price

        internet = find_price("internet")
        other_region = find_price("same_cloud_other_region")
        outside = ASSUMED_USD_PER_GB if internet is None else internet
        return LeavingPrice(
            same_region=find_price("same_region") or 0.0,
            other_region=outside if other_region is None else other_region,
            internet=outside,
            is_known=internet is not None,
        )


def price_transfer(source: Offer, target: Offer, gib: float, table: EgressTable) -> Transfer:
    """Price moving `gib` from `source` to `target`. The source's cloud bills it; incoming data is free."""
    leaving = table.find(source.cloud, source.region)
    gigabytes = gib * GB_PER_GIB
    if (source.cloud, source.region) == (target.cloud, target.region):
        return Transfer(usd=gigabytes * leaving.same_region, hours=gigabytes * 8 / REGION_GBIT_S / 3600)
    usd_per_gb = leaving.other_region if source.cloud == target.cloud else leaving.internet
    return Transfer(
        usd=gigabytes * usd_per_gb,
        hours=gigabytes * 8 / OUTSIDE_GBIT_S / 3600,
        is_assumed=gib > 0 and not leaving.is_known,
    )
