"""Write offers into a price book; the same offers in the same order give the same bytes."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from dataclasses import replace

from broker.catalog.architecture import guess_architecture
from broker.catalog.staleness import CloudFacts
from broker.types import Offer

NOMINAL_SHARE = 0.1  # a card is sold as 80 GB and reported as 79.6 GiB


class BookWriter:
    """Writes to a database with the book's tables, empty or not. The caller commits."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database
        self._texts: dict[str, int] = dict(database.execute("SELECT text, id FROM texts"))
        self._types: dict[tuple[object, ...], int] = {
            tuple(row[1:]): row[0] for row in database.execute("SELECT * FROM types")
        }
        self._next_type = max(self._types.values(), default=0) + 1
        self._nominal_gib: dict[str, float] = dict(database.execute("SELECT name, memory_gib FROM accelerators"))
        self._architectures = {(kind[0], kind[1]): str(kind[-1]) for kind in self._types}

    def replace_cloud(self, facts: CloudFacts, offers: Iterable[Offer]) -> int:
        """Replace all offers of a cloud; return their number.

        Of several offers of one machine at one place, the cheapest is kept.
        """
        self._database.execute(
            "DELETE FROM offers WHERE type IN (SELECT id FROM types WHERE cloud = ?)", (facts.cloud,)
        )
        self._database.execute("DELETE FROM types WHERE cloud = ?", (facts.cloud,))
        self._types = {kind: number for kind, number in self._types.items() if kind[0] != facts.cloud}
        cheapest: dict[tuple[str, str, str | None], Offer] = {}
        for offer in offers:
            key = (offer.instance_type, offer.region, offer.zone)
            if key not in cheapest or _find_usd(offer) < _find_usd(cheapest[key]):
                cheapest[key] = offer
        for offer in cheapest.values():
            arch = self._architectures.get((facts.cloud, offer.instance_type)) or guess_architecture(
                facts.cloud, offer.instance_type
            )
            memory_gib = self._choose_memory(offer)
            self.add_offer(replace(offer, accelerator_memory_gib=memory_gib), arch=arch, facts=facts)
        self._database.execute(
            "INSERT OR REPLACE INTO clouds VALUES (?, ?, ?, ?)",
            (facts.cloud, facts.ondemand_as_of, facts.spot_as_of, facts.source),
        )
        return len(cheapest)

    def add_offer(self, offer: Offer, *, arch: str, facts: CloudFacts) -> None:
        """Add an offer; its dates are stored if they differ from its cloud's."""
        assert offer.ondemand_usd_hour or offer.spot_usd_hour, f"no price: {offer}"
        kind = (
            offer.cloud, offer.instance_type, float(offer.vcpus), float(offer.memory_gib), offer.accelerator,
            float(offer.accelerator_count), float(offer.accelerator_memory_gib), arch,
        )  # fmt: skip
        values = (
            self._number_type(kind), self._number_text(offer.region),
            self._number_text(offer.zone) if offer.zone else None,
            offer.ondemand_usd_hour, offer.spot_usd_hour, offer.interruption_band, int(offer.is_estimated),
            offer.as_of if offer.as_of not in ("", facts.ondemand_as_of) else None,
            offer.spot_as_of if offer.spot_as_of not in ("", facts.spot_as_of) else None,
        )  # fmt: skip
        self._database.execute("INSERT INTO offers VALUES (?,?,?,?,?,?,?,?,?)", values)

    def _choose_memory(self, offer: Offer) -> float:
        """Return the memory of one accelerator: the nominal one if the source's figure is close, a total or missing."""
        nominal, memory_gib = self._nominal_gib.get(offer.accelerator or "", 0.0), offer.accelerator_memory_gib
        if not memory_gib:
            return round(nominal * min(1.0, offer.accelerator_count), 3)
        shares = (memory_gib, memory_gib / max(1.0, offer.accelerator_count))
        return nominal if any(abs(share - nominal) <= NOMINAL_SHARE * nominal for share in shares) else memory_gib

    def _number_text(self, text: str) -> int:
        if text not in self._texts:
            self._texts[text] = len(self._texts) + 1
            self._database.execute("INSERT INTO texts VALUES (?,?)", (self._texts[text], text))
        return self._texts[text]

    def _number_type(self, kind: tuple[object, ...]) -> int:
        if kind not in self._types:
            self._types[kind] = self._next_type
            self._next_type += 1
            self._database.execute("INSERT INTO types VALUES (?,?,?,?,?,?,?,?,?)", (self._types[kind], *kind))
        return self._types[kind]


def _find_usd(offer: Offer) -> float:
    return min(usd for usd in (offer.ondemand_usd_hour, offer.spot_usd_hour) if usd)
