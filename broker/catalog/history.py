"""What prices were: each refresh adds those that changed. One small file beside the book, bounded in time."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from broker.types import Offer

DAYS_KEPT = 400
TABLE = """
CREATE TABLE IF NOT EXISTS changes (
    cloud TEXT NOT NULL, instance_type TEXT NOT NULL, region TEXT NOT NULL, zone TEXT NOT NULL, day TEXT NOT NULL,
    ondemand_usd_hour REAL, spot_usd_hour REAL, PRIMARY KEY (cloud, instance_type, region, zone, day)
) WITHOUT ROWID
"""


@dataclass(frozen=True, kw_only=True)
class PricePoint:
    """Prices of one machine at one place from `day` (ISO) on."""

    cloud: str
    instance_type: str
    region: str
    zone: str
    day: str
    ondemand_usd_hour: float | None
    spot_usd_hour: float | None


class History:
    def __init__(self, path: Path) -> None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._database = sqlite3.connect(path)
        self._database.execute(TABLE)

    def close(self) -> None:
        self._database.close()

    def add(self, offers: Iterable[Offer], *, day: str) -> int:
        """Remember what differs from the last day known; returns how many prices did."""
        newest = {
            row[:4]: row[4:]
            for row in self._database.execute(
                "SELECT cloud, instance_type, region, zone, ondemand_usd_hour, spot_usd_hour, max(day) FROM changes "
                "GROUP BY 1, 2, 3, 4"
            )
        }
        count = 0
        with self._database:
            for offer in offers:
                key = (offer.cloud, offer.instance_type, offer.region, offer.zone or "")
                prices = (offer.ondemand_usd_hour, offer.spot_usd_hour)
                if newest.get(key, ())[:2] != prices:
                    self._database.execute(
                        "INSERT OR REPLACE INTO changes VALUES (?,?,?,?,?,?,?)", (*key, day, *prices)
                    )
                    count += 1
            oldest = f"date('{day}', '-{DAYS_KEPT} days')"
            # The last price before the bound stays: it still holds.
            self._database.execute(
                f"DELETE FROM changes WHERE day < {oldest} AND EXISTS (SELECT 1 FROM changes AS later WHERE "
                "later.cloud = changes.cloud AND later.instance_type = changes.instance_type AND "
                "later.region = changes.region AND later.zone = changes.zone AND later.day > changes.day AND "
                f"later.day < {oldest})"
            )
        return count

    def find(self, instance_type: str, *, region: str | None = None) -> Sequence[PricePoint]:
        rows = self._database.execute(
            "SELECT cloud, instance_type, region, zone, day, ondemand_usd_hour, spot_usd_hour FROM changes "
            "WHERE instance_type = ?1 AND (?2 IS NULL OR region = ?2) ORDER BY cloud, region, zone, day",
            (instance_type, region),
        )
        names = ("cloud", "instance_type", "region", "zone", "day", "ondemand_usd_hour", "spot_usd_hour")
        return [PricePoint(**dict(zip(names, row, strict=True))) for row in rows]
