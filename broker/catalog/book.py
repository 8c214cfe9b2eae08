"""The price book: what is for sale, as queries on a read-only SQLite file."""

from __future__ import annotations

import difflib
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from broker.catalog.writer import CloudFacts
from broker.errors import NoOfferError
from broker.types import AcceleratorFigures, EgressPrice, Offer, Quantity, Resources, Task

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


class Book:
    """All queries on one opened price book."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database
        self._facts: dict[str, CloudFacts] = {
            row[0]: CloudFacts(cloud=row[0], ondemand_as_of=row[1], spot_as_of=row[2], source=row[3])
            for row in database.execute("SELECT cloud, ondemand_as_of, spot_as_of, source FROM clouds ORDER BY cloud")
        }

    @property
    def as_of(self) -> str:
        """The date of the newest prices, ISO; each Offer has its own."""
        return max(max(each.ondemand_as_of, each.spot_as_of) for each in self._facts.values())

    @property
    def clouds(self) -> tuple[str, ...]:
        return tuple(self._facts)

    def get_facts(self, cloud: str) -> CloudFacts:
        return self._facts[cloud]

    def copy_to(self, database: sqlite3.Connection) -> None:
        """Everything, as it stands."""
        self._database.backup(database)

    def list_offers(self, cloud: str) -> Sequence[Offer]:
        """Everything that a cloud sells; none for one that the book doesn't know."""
        return [self._make_offer(row) for row in self._database.execute(f"{_SELECT} WHERE t.cloud = ?", (cloud,))]

    def find_prices(self, instance_type: str) -> Sequence[Offer]:
        """One machine at every place, cheapest first. Raises NoOfferError with the near miss."""
        rows = self._database.execute(
            f"{_SELECT} WHERE t.instance_type = ? ORDER BY coalesce(o.spot_usd_hour, o.ondemand_usd_hour)",
            (instance_type,),
        )
        found = [self._make_offer(row) for row in rows]
        if not found:
            self._explain("instance type", instance_type, "SELECT DISTINCT instance_type FROM types")
        return found

    def find_offers(self, task: Task) -> Sequence[Offer]:
        """Every offer that may fit one of the task's alternatives. Raises NoOfferError for an unknown accelerator."""
        found: dict[tuple[str, str, str | None, str], Offer] = {}
        for resources in task.resources:
            if resources.cloud == "local":
                continue
            offers = self._query(resources)
            if not offers:
                self._check_names(resources)
            for offer in offers:
                found[(offer.cloud, offer.region, offer.zone, offer.instance_type)] = offer
        return list(found.values())

    def resolve_accelerator(self, name: str) -> str:
        """The book's spelling of an accelerator. Raises NoOfferError with the near miss."""
        rows = self._database.execute("SELECT name FROM accelerators WHERE lower(name) = ?", (name.lower(),))
        if found := rows.fetchone():
            return str(found[0])
        self._explain("accelerator", name, "SELECT name FROM accelerators", "`broker gpus` lists all")
        raise AssertionError("the accelerators table has just been asked")

    def _check_names(self, resources: Resources) -> None:
        """Raises NoOfferError for a place or machine that the book has never heard of, with the near miss."""
        cloud = resources.cloud
        of_cloud = f"WHERE cloud = '{cloud}'" if cloud in self._facts else ""
        places = f"offers o JOIN types t ON t.id = o.type JOIN texts x ON x.id = o.{{}} {of_cloud}"
        for word, name, names in (
            ("cloud", cloud, "SELECT cloud FROM clouds"),
            ("region", resources.region, f"SELECT DISTINCT x.text FROM {places.format('region')}"),
            ("zone", resources.zone, f"SELECT DISTINCT x.text FROM {places.format('zone')}"),
            ("instance type", resources.instance_type, f"SELECT DISTINCT instance_type FROM types {of_cloud}"),
        ):
            if name:
                where = f" of {cloud}" if word != "cloud" and of_cloud else ""
                self._explain(f"{word}{where}", name, names)

    def _explain(self, word: str, name: str, names: str, more: str | None = None) -> None:
        """Raises NoOfferError unless the query `names` has the name."""
        by_lower = {str(row[0]).lower(): str(row[0]) for row in self._database.execute(names)}
        if by_lower.get(name.lower()) == name:
            return
        near = difflib.get_close_matches(name.lower(), by_lower, n=3, cutoff=0.5)
        hints = [f"did you mean {' or '.join(f'`{by_lower[each]}`' for each in near)}?"] if near else []
        raise NoOfferError(f"no {word} is called `{name}`", hints=[*hints, *([more] if more else [])])

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
        facts = self._facts[str(row[0])]
        fields: dict[str, Any] = dict(zip(_OFFER_FIELDS, row, strict=True))
        fields["is_estimated"] = bool(fields["is_estimated"])
        return Offer(**fields, as_of=min(facts.ondemand_as_of, facts.spot_as_of))

    def count_offers(self) -> Mapping[str, int]:
        """Number of offers by cloud."""
        return dict(
            self._database.execute(
                "SELECT t.cloud, count(*) FROM offers o JOIN types t ON t.id = o.type GROUP BY 1 ORDER BY 2 DESC"
            )
        )

    def count_estimated(self) -> Mapping[str, int]:
        """Number of offers whose on-demand price is an estimate, by cloud."""
        rows = "SELECT t.cloud, count(*) FROM offers o JOIN types t ON t.id = o.type WHERE o.is_estimated GROUP BY 1"
        return dict(self._database.execute(rows))

    def list_accelerators(
        self, name: str | None = None, count: float | None = None, *, cloud: str | None = None, by_region: bool = False
    ) -> Sequence[AcceleratorPrice]:
        """The cheapest place for each accelerator, count and cloud, or the cheapest zone of each region."""
        where, values = ["t.accelerator IS NOT NULL"], list[object]()
        for clause, value in (
            ("t.accelerator = ?", self.resolve_accelerator(name) if name else None),
            ("t.accelerator_count = ?", count),
            ("t.cloud = ?", cloud),
        ):
            if value:
                where.append(clause)
                values.append(value)
        rows = self._database.execute(
            f"""SELECT t.accelerator, t.accelerator_count, t.accelerator_memory_gib, t.cloud, r.text,
                       min(o.ondemand_usd_hour), min(o.spot_usd_hour),
                       min(coalesce(o.spot_usd_hour, o.ondemand_usd_hour))
                FROM types t JOIN offers o ON o.type = t.id JOIN texts r ON r.id = o.region
                WHERE {" AND ".join(where)} GROUP BY 1, 2, 4{", 5" if by_region else ""} ORDER BY 1, 2, 8""",
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
