"""The price book: read-only SQLite, unpacked once from the archive that ships in the package."""

from __future__ import annotations

import difflib
import hashlib
import os
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from broker.catalog.schema import ARCHIVE, INDEXES, SCHEMA_VERSION
from broker.errors import NoOfferError, StateError
from broker.types import AcceleratorFigures, EgressPrice, Offer, Quantity, Resources, Task

SHIPPED = Path(__file__).parent / "data" / ARCHIVE

CHEAPEST_COUNT = 1000  # of each pricing model, where no accelerator is asked for

_SELECT = """
SELECT t.cloud, r.text, z.text, t.instance_type, t.vcpus, t.memory_gib, t.accelerator, t.accelerator_count,
       t.accelerator_memory_gib, o.ondemand_usd_hour, o.spot_usd_hour, o.interruption_band, o.is_estimated
FROM types t JOIN offers o ON o.type = t.id JOIN texts r ON r.id = o.region LEFT JOIN texts z ON z.id = o.zone
"""


@dataclass(frozen=True, kw_only=True)
class AcceleratorPrice:
    """The cheapest places for so many of one accelerator; USD per instance-hour."""

    name: str
    count: float
    memory_gib: float
    cloud: str
    region: str
    ondemand_usd_hour: float | None
    spot_usd_hour: float | None


def open_book(cache: Path, archive: Path = SHIPPED) -> Book:
    """Open the book, unpacking it into `cache` when it is not there yet or does not open. Raises StateError."""
    path = cache / f"prices-{SCHEMA_VERSION}-{_fingerprint(archive)}.db"
    for _ in range(2):
        if not path.exists():
            _unpack(archive, path)
        database = sqlite3.connect(f"{path.as_uri()}?mode=ro&immutable=1", uri=True)
        try:
            version = database.execute("PRAGMA user_version").fetchone()[0]
            if version == SCHEMA_VERSION:
                return Book(database)
        except sqlite3.DatabaseError:
            pass  # a damaged copy is thrown away and made anew from the archive
        database.close()
        path.unlink()
    raise StateError(f"the price book does not open: {path}", hints=("reinstall broker",))


def _fingerprint(archive: Path) -> str:
    """Names the archive's content by size and modification time, so that no megabytes are hashed at every start."""
    facts = archive.stat()
    return hashlib.sha256(f"{facts.st_size}:{facts.st_mtime_ns}".encode()).hexdigest()[:12]


def _unpack(archive: Path, path: Path) -> None:
    import lzma

    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    aside = path.with_suffix(f".{os.getpid()}.tmp")
    aside.write_bytes(lzma.decompress(archive.read_bytes()))
    database = sqlite3.connect(aside)
    database.executescript(INDEXES)
    database.close()
    aside.chmod(0o600)
    aside.replace(path)


class Book:
    """All queries on one opened price book."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database
        self._dates: dict[str, tuple[str, str]] = {
            cloud: (ondemand, spot) for cloud, ondemand, spot in database.execute("SELECT * FROM dates")
        }

    @property
    def as_of(self) -> str:
        """The date of the newest prices, ISO; each Offer has its own."""
        return max(max(pair) for pair in self._dates.values())

    def find_offers(self, task: Task) -> Sequence[Offer]:
        """Every offer that may fit one of the task's alternatives. Raises NoOfferError for an unknown accelerator."""
        found: dict[tuple[str, str, str | None, str], Offer] = {}
        for resources in task.resources:
            if resources.cloud == "local":
                continue
            for offer in self._query(resources):
                found[(offer.cloud, offer.region, offer.zone, offer.instance_type)] = offer
        return list(found.values())

    def resolve_accelerator(self, name: str) -> str:
        """The book's spelling of an accelerator. Raises NoOfferError with the near miss."""
        names = [row[0] for row in self._database.execute("SELECT name FROM accelerators ORDER BY name")]
        by_lower = {each.lower(): each for each in names}
        if found := by_lower.get(name.lower()):
            return str(found)
        near = difflib.get_close_matches(name.lower(), by_lower, n=3, cutoff=0.5)
        hints = [f"did you mean {' or '.join(f'`{by_lower[each]}`' for each in near)}?"] if near else []
        raise NoOfferError(f"no accelerator is called `{name}`", hints=[*hints, "`broker gpus` lists all"])

    def _query(self, resources: Resources) -> Sequence[Offer]:
        where = list[str]()
        values = list[object]()

        def need(clause: str, *given: object) -> None:
            where.append(clause)
            values.extend(given)

        if resources.accelerator:
            need("t.accelerator = ?", self.resolve_accelerator(resources.accelerator))
            need("t.accelerator_count >= ?", resources.accelerator_count)
        elif not resources.instance_type:
            need("t.accelerator IS NULL")  # as SkyPilot: nobody pays for a GPU not asked for
        for column, quantity in (("t.vcpus", resources.cpus), ("t.memory_gib", resources.memory_gib)):
            if isinstance(quantity, Quantity):
                need(f"{column} {'>=' if quantity.is_minimum else '='} ?", quantity.value)
        for column, text in (
            ("t.cloud", resources.cloud), ("r.text", resources.region), ("z.text", resources.zone),
            ("t.instance_type", resources.instance_type),
        ):  # fmt: skip
            if text:
                need(f"{column} = ?", text)
        query = f"{_SELECT} WHERE {' AND '.join(where) or '1'}"
        if resources.accelerator or resources.instance_type:
            return [self._make_offer(row) for row in self._database.execute(query, values)]
        # Tens of thousands of machines without accelerators may fit; the dear ones are not worth reading.
        rows = set[tuple[object, ...]]()
        for price in ("ondemand_usd_hour", "spot_usd_hour"):
            cheapest = f"{query} AND o.{price} IS NOT NULL ORDER BY o.{price} LIMIT {CHEAPEST_COUNT}"
            rows.update(self._database.execute(cheapest, values))
        return [self._make_offer(row) for row in rows]

    def _make_offer(self, row: tuple[object, ...]) -> Offer:
        ondemand_as_of, spot_as_of = self._dates[str(row[0])]
        fields: dict[str, Any] = dict(zip(_OFFER_FIELDS, row, strict=True))
        fields["is_estimated"] = bool(fields["is_estimated"])
        return Offer(**fields, as_of=min(ondemand_as_of, spot_as_of))

    def count_offers(self) -> Mapping[str, int]:
        """Number of offers by cloud."""
        return dict(
            self._database.execute(
                "SELECT t.cloud, count(*) FROM offers o JOIN types t ON t.id = o.type GROUP BY 1 ORDER BY 2 DESC"
            )
        )

    def list_accelerators(self, name: str | None = None, count: float | None = None) -> Sequence[AcceleratorPrice]:
        """The cheapest region for each accelerator, count and cloud."""
        where, values = "t.accelerator IS NOT NULL", list[object]()
        if name:
            where, values = where + " AND t.accelerator = ?", [self.resolve_accelerator(name)]
        if count:
            where, values = where + " AND t.accelerator_count = ?", [*values, count]
        rows = self._database.execute(
            f"""SELECT t.accelerator, t.accelerator_count, t.accelerator_memory_gib, t.cloud, r.text,
                       min(o.ondemand_usd_hour), min(o.spot_usd_hour),
                       min(coalesce(o.spot_usd_hour, o.ondemand_usd_hour))
                FROM types t JOIN offers o ON o.type = t.id JOIN texts r ON r.id = o.region
                WHERE {where} GROUP BY 1, 2, 4 ORDER BY 1, 2, 8""",
            values,
        )
        return [
            AcceleratorPrice(
                name=row[0], count=row[1], memory_gib=row[2], cloud=row[3], region=row[4],
                ondemand_usd_hour=row[5], spot_usd_hour=row[6],
            )
            for row in rows
        ]  # fmt: skip

    def read_figures(self) -> Mapping[str, AcceleratorFigures]:
        """What every accelerator can do, by name."""
        rows = self._database.execute(
            "SELECT name, memory_gib, bf16_dense_tflops, fp32_tflops, memory_bandwidth_gbs, nvlink_gbs"
            " FROM accelerators ORDER BY name"
        )
        return {
            row[0]: AcceleratorFigures(
                name=row[0], memory_gib=row[1], bf16_dense_tflops=row[2], fp32_tflops=row[3],
                memory_bandwidth_gbs=row[4], nvlink_gbs=row[5],
            )
            for row in rows
        }  # fmt: skip

    def read_egress(self) -> Sequence[EgressPrice]:
        """What leaving each cloud's regions costs."""
        rows = self._database.execute("SELECT cloud, from_region, target, usd_per_gb FROM egress ORDER BY 1, 2, 3")
        return [
            EgressPrice(cloud=cloud, from_region=region, target=target, usd_per_gb=usd)
            for cloud, region, target, usd in rows
        ]


_OFFER_FIELDS = (
    "cloud", "region", "zone", "instance_type", "vcpus", "memory_gib", "accelerator", "accelerator_count",
    "accelerator_memory_gib", "ondemand_usd_hour", "spot_usd_hour", "interruption_band", "is_estimated",
)  # fmt: skip
