"""Writes offers into a price book; the same offers in the same order give the same bytes."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass

from broker.types import Offer


@dataclass(frozen=True, kw_only=True)
class CloudFacts:
    """Of one cloud: the date of its oldest on-demand and spot figure, ISO, and where they are from."""

    cloud: str
    ondemand_as_of: str
    spot_as_of: str
    source: str


class BookWriter:
    """Works on a database that has the book's tables, empty or full. The caller commits."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database
        self._texts: dict[str, int] = dict(database.execute("SELECT text, id FROM texts"))
        self._types: dict[tuple[object, ...], int] = {
            tuple(row[1:]): row[0] for row in database.execute("SELECT * FROM types")
        }
        self._architectures = {(kind[0], kind[1]): str(kind[-1]) for kind in self._types}

    def replace_cloud(self, facts: CloudFacts, offers: Iterable[Offer], *, arch: str = "x86_64") -> int:
        """Exchange everything that is known of a cloud; returns how many offers it has now."""
        self._database.execute(
            "DELETE FROM offers WHERE type IN (SELECT id FROM types WHERE cloud = ?)", (facts.cloud,)
        )
        count = 0
        for offer in offers:
            self.add_offer(offer, arch=arch)
            count += 1
        self._database.execute(
            "INSERT OR REPLACE INTO clouds VALUES (?, ?, ?, ?)",
            (facts.cloud, facts.ondemand_as_of, facts.spot_as_of, facts.source),
        )
        return count

    def add_offer(self, offer: Offer, *, arch: str) -> None:
        assert offer.ondemand_usd_hour or offer.spot_usd_hour, f"no price: {offer}"
        kind = (
            offer.cloud, offer.instance_type, float(offer.vcpus), float(offer.memory_gib), offer.accelerator,
            float(offer.accelerator_count), float(offer.accelerator_memory_gib), arch,
        )  # fmt: skip
        values = (
            self._number_type(kind), self._number_text(offer.region),
            self._number_text(offer.zone) if offer.zone else None,
            offer.ondemand_usd_hour, offer.spot_usd_hour, offer.interruption_band, int(offer.is_estimated),
        )  # fmt: skip
        self._database.execute("INSERT INTO offers VALUES (?,?,?,?,?,?,?)", values)

    def _number_text(self, text: str) -> int:
        if text not in self._texts:
            self._texts[text] = len(self._texts) + 1
            self._database.execute("INSERT INTO texts VALUES (?,?)", (self._texts[text], text))
        return self._texts[text]

    def _number_type(self, kind: tuple[object, ...]) -> int:
        if kind not in self._types:
            self._types[kind] = len(self._types) + 1
            self._database.execute("INSERT INTO types VALUES (?,?,?,?,?,?,?,?,?)", (self._types[kind], *kind))
        return self._types[kind]
