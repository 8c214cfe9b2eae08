"""The price book: queries on a read-only SQLite file of offers."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import fields

from broker.catalog.staleness import CloudFacts, PriceAge, describe_age
from broker.catalog.suggestions import Suggestions
from broker.frozen import frozen
from broker.types import ORDINARY_GIB, AcceleratorFigures, EgressPrice, Offer, Quantity, Resources, Task

CHEAPEST_COUNT = 1000  # of each pricing model, if neither an accelerator nor an instance type is requested
# If more than this share of all machine types fits, walking along the prices until enough fit is faster than sorting
# all that fit: measured with tests/bench/bench_catalog.py.
WALK_SHARE = 0.05

_FIELDS = """
SELECT t.cloud, r.text, z.text, t.instance_type, t.vcpus, t.memory_gib, t.accelerator, t.accelerator_count,
       t.accelerator_memory_gib, o.ondemand_usd_hour, o.spot_usd_hour, o.interruption_band, o.is_estimated,
       coalesce(o.ondemand_as_of, f.ondemand_as_of), coalesce(o.spot_as_of, f.spot_as_of)
"""
_TEXTS = """
JOIN texts r ON r.id = o.region LEFT JOIN texts z ON z.id = o.zone JOIN clouds f ON f.cloud = t.cloud
"""
_SELECT = f"{_FIELDS} FROM types t JOIN offers o ON o.type = t.id {_TEXTS}"
_CHEAPEST = "coalesce(min(o.spot_usd_hour, o.ondemand_usd_hour), o.spot_usd_hour, o.ondemand_usd_hour)"
_PRICES = ("ondemand_usd_hour", "spot_usd_hour")
_OFFER_FIELDS = tuple(field.name for field in fields(Offer))  # in the order of the columns above


@frozen
class AcceleratorPrice:
    """The cheapest place for a number of one accelerator, and the prices there; USD per instance-hour."""

    name: str
    count: float
    memory_gib: float
    cloud: str
    region: str
    ondemand_usd_hour: float | None
    spot_usd_hour: float | None


class Book:
    """All queries on an open price book."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database
        self._facts: dict[str, CloudFacts] = {
            row[0]: CloudFacts(cloud=row[0], ondemand_as_of=row[1], spot_as_of=row[2], source=row[3])
            for row in database.execute("SELECT cloud, ondemand_as_of, spot_as_of, source FROM clouds ORDER BY cloud")
        }
        self._places = Suggestions(database)

    @property
    def as_of(self) -> str:
        """Return the date of the newest prices, ISO; each Offer has its own."""
        return max(max(each.ondemand_as_of, each.spot_as_of) for each in self._facts.values())

    @property
    def clouds(self) -> tuple[str, ...]:
        """Return the names of all clouds in the book."""
        return tuple(self._facts)

    def get_facts(self, cloud: str) -> CloudFacts:
        """Return the source and dates of a cloud's prices. Raises KeyError for a cloud that is not in the book."""
        return self._facts[cloud]

    def describe_age(self, cloud: str, now_s: float) -> PriceAge:
        """Return the age of a cloud's prices, and whether they are stale.

        Raises UnknownNameError for a cloud without prices.
        """
        self._places.check_cloud(cloud)
        facts = self._facts[cloud]
        return describe_age(facts.ondemand_as_of, facts.spot_as_of, now_s)

    def copy_to(self, database: sqlite3.Connection) -> None:
        """Copy the whole book."""
        self._database.backup(database)

    def list_offers(self, cloud: str) -> Sequence[Offer]:
        """List all offers of a cloud; empty for an unknown cloud."""
        return [_make_offer(row) for row in self._database.execute(f"{_SELECT} WHERE t.cloud = ?", (cloud,))]

    def find_prices(self, instance_type: str) -> Sequence[Offer]:
        """List an instance type's offers at every place, cheapest first. Raises UnknownNameError with near misses."""
        name = self._find_name("types", "instance_type", instance_type) or instance_type
        rows = self._database.execute(f"{_SELECT} WHERE t.instance_type = ? ORDER BY {_CHEAPEST}, 1, 2, 3", (name,))
        offers = [_make_offer(row) for row in rows]
        if not offers:
            self._places.check_instance_type(instance_type)
        return offers

    def find_offers(
        self,
        task: Task,
        *,
        but: Collection[str] = (),
        find_reachable: Callable[[Resources], frozenset[str]] | None = None,
    ) -> Sequence[Offer]:
        """Return every offer that may fit one of the task's alternatives, except those of the clouds `but`.

        If neither an accelerator nor an instance type is requested, return only the cheapest offers of each pricing
        model that the task can use: of all clouds, and of those that `find_reachable` returns for an alternative.
        Raises UnknownNameError, a NoOfferError, for an unknown name.
        """
        found: dict[tuple[str, str, str | None, str], Offer] = {}
        for resources in task.resources:
            if resources.cloud in ("local", *but):
                continue
            reachable = find_reachable(resources) if find_reachable else None
            offers = self._query(resources, has_goal=task.goal is not None, reachable=reachable)
            if not offers:
                self.check_places(resources)
            for offer in offers:
                if offer.cloud in but:
                    continue
                found[(offer.cloud, offer.region, offer.zone, offer.instance_type)] = offer
        return list(found.values())

    def check_places(self, resources: Resources) -> None:
        """Raise UnknownNameError for an unknown cloud, region, zone or instance type, or one that the place lacks.

        The error names near misses.
        """
        self._places.check(resources)

    def check_cloud(self, cloud: str) -> None:
        """Raise UnknownNameError with near misses for a cloud without prices."""
        self._places.check_cloud(cloud)

    def resolve_accelerator(self, name: str) -> str:
        """Return the book's spelling of an accelerator. Raises UnknownNameError with near misses."""
        for table, column in (("accelerators", "name"), ("types", "accelerator")):
            if found := self._find_name(table, column, name):
                return found
        raise self._places.explain_accelerator(name)

    def _find_name(self, table: str, column: str, name: str) -> str | None:
        """Return the book's spelling: an exact match by index, else a case-insensitive search."""
        for collation in ("", " COLLATE NOCASE"):
            row = self._database.execute(
                f"SELECT {column} FROM {table} WHERE {column} = ?{collation} LIMIT 1", (name,)
            ).fetchone()
            if row is not None:
                return str(row[0])
        return None

    def _query(
        self, resources: Resources, *, has_goal: bool, reachable: frozenset[str] | None = None
    ) -> Sequence[Offer]:
        machine, place = self._describe_machine(resources), _describe_place(resources)
        if resources.accelerator or resources.instance_type:
            where = _Where.join(machine, place)
            return [_make_offer(row) for row in self._database.execute(f"{_SELECT} WHERE {where}", where.values)]
        within = frozenset(self._facts) if reachable is None else reachable.intersection(self._facts)
        rows = set[tuple[object, ...]]()
        for number, (choice, prices) in enumerate(_list_choices(resources, _list_prices(resources, has_goal=has_goal))):
            wanted = _Where.join(machine, choice)
            rows.update(self._list_reachable(prices, wanted, place, within, is_only=number > 0))
            if not within or any(row[0] in within for row in rows):
                break
        return [_make_offer(row) for row in rows]

    def _describe_machine(self, resources: Resources) -> _Where:
        machine = _Where()
        if resources.accelerator:
            machine.need("t.accelerator = ?", self.resolve_accelerator(resources.accelerator))
            machine.need("t.accelerator_count >= ?", resources.accelerator_count)
        for column, quantity in (("t.vcpus", resources.cpus), ("t.memory_gib", resources.memory_gib)):
            if isinstance(quantity, Quantity):
                machine.need(f"{column} {'>=' if quantity.is_minimum else '='} ?", quantity.value)
        if resources.memory_gib_per_vcpu:
            machine.need("t.memory_gib >= ? * t.vcpus", resources.memory_gib_per_vcpu)
        if resources.cloud:
            machine.need("t.cloud = ?", resources.cloud.lower())
        if resources.instance_type:
            name = self._find_name("types", "instance_type", resources.instance_type)
            name = name or resources.instance_type
            if resources.accelerator:  # the host of attached cards may be named alone: `n1-standard-4+1xT4`
                machine.need("(t.instance_type = ? OR t.instance_type LIKE ?)", name, f"{name}+%")
            else:
                machine.need("t.instance_type = ?", name)
        return machine

    def _list_reachable(
        self, prices: Sequence[str], machine: _Where, place: _Where, clouds: frozenset[str], *, is_only: bool
    ) -> Iterator[tuple[object, ...]]:
        """Yield the cheapest offers of `clouds`, and unless `is_only`, those of all clouds, which may all cost less."""
        within = _Where.join(machine)
        within.need(f"t.cloud IN ({', '.join('?' * len(clouds))})", *sorted(clouds))
        for price in prices:
            rows = () if is_only else self._list_cheapest(price, machine, place)
            yield from rows
            if is_only or (len(rows) == CHEAPEST_COUNT and 0 < len(clouds) < len(self._facts)):
                yield from self._list_cheapest(price, within, place)

    def _list_cheapest(self, price: str, machine: _Where, place: _Where) -> Sequence[tuple[object, ...]]:
        """List only the cheapest offers: tens of thousands of machines may fit, and expensive ones are not needed."""
        where = _Where.join(machine, place)
        count, fitting = self._database.execute(
            f"SELECT count(*), count(*) FILTER (WHERE {machine}) FROM types t", machine.values
        ).fetchone()
        # A CROSS JOIN keeps SQLite to the written order: https://www.sqlite.org/optoverview.html#crossjoin
        if not place.values and fitting > WALK_SHARE * count:
            chosen = f"offers o CROSS JOIN types t ON t.id = o.type WHERE {where} AND o.{price} > 0 ORDER BY o.{price}"
        else:  # the plus signs prevent a walk along the price index
            chosen = (
                f"types t CROSS JOIN offers o ON o.type = t.id WHERE {where} AND +o.{price} > 0 ORDER BY +o.{price}"
            )
        query = (
            f"WITH chosen AS MATERIALIZED (SELECT o.rowid AS number FROM {chosen} LIMIT {CHEAPEST_COUNT}) {_FIELDS} "
            f"FROM chosen JOIN offers o ON o.rowid = chosen.number JOIN types t ON t.id = o.type {_TEXTS}"
        )
        return self._database.execute(query, where.values).fetchall()

    def count_offers(self) -> Mapping[str, int]:
        """Return the number of offers by cloud."""
        return dict(
            self._database.execute(
                "SELECT t.cloud, count(*) FROM offers o JOIN types t ON t.id = o.type GROUP BY 1 ORDER BY 2 DESC"
            )
        )

    def count_estimated(self) -> Mapping[str, int]:
        """Return the number of offers with an estimated on-demand price, by cloud."""
        rows = "SELECT t.cloud, count(*) FROM offers o JOIN types t ON t.id = o.type WHERE o.is_estimated GROUP BY 1"
        return dict(self._database.execute(rows))

    def list_accelerators(
        self,
        name: str | None = None,
        count: float | None = None,
        *,
        cloud: str | None = None,
        by_region: bool = False,
        is_spot: bool = False,
    ) -> Sequence[AcceleratorPrice]:
        """List the cheapest place for each accelerator, count and cloud, or of each region, with the prices there.

        `is_spot` compares spot prices only. Raises UnknownNameError for an unknown accelerator.
        """
        price = "o.spot_usd_hour" if is_spot else _CHEAPEST
        where, values = ["t.accelerator IS NOT NULL", f"{price} IS NOT NULL"], list[object]()
        for clause, value in (
            ("t.accelerator = ?", self.resolve_accelerator(name) if name else None),
            ("t.accelerator_count = ?", count),
            ("t.cloud = ?", cloud),
        ):
            if value:
                where.append(clause)
                values.append(value)
        rows = self._database.execute(
            f"""SELECT name, count, gib, cloud, region, ondemand, spot FROM (
                    SELECT t.accelerator AS name, t.accelerator_count AS count, t.accelerator_memory_gib AS gib,
                           t.cloud, r.text AS region, o.ondemand_usd_hour AS ondemand, o.spot_usd_hour AS spot,
                           {price} AS price,
                           row_number() OVER (
                               PARTITION BY t.accelerator, t.accelerator_count, t.cloud{", r.text" if by_region else ""}
                               ORDER BY {price}, o.ondemand_usd_hour IS NULL, o.ondemand_usd_hour, r.text
                           ) AS place
                    FROM types t JOIN offers o ON o.type = t.id JOIN texts r ON r.id = o.region
                    WHERE {" AND ".join(where)}
                ) WHERE place = 1 ORDER BY name, count, price, cloud, region""",
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
        """Return the performance figures of every accelerator, by name."""
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

    def list_accelerator_names(self) -> Sequence[str]:
        """List the accelerators of all offers, including those without performance figures."""
        rows = self._database.execute("SELECT DISTINCT accelerator FROM types WHERE accelerator != '' ORDER BY 1")
        return [str(row[0]) for row in rows]

    def read_egress(self) -> Sequence[EgressPrice]:
        """Return the egress prices of each cloud's regions."""
        rows = self._database.execute("SELECT cloud, from_region, target, usd_per_gb FROM egress ORDER BY 1, 2, 3")
        return [
            EgressPrice(cloud=cloud, from_region=region, target=target, usd_per_gb=usd)
            for cloud, region, target, usd in rows
        ]


class _Where:
    """SQL conditions and their values, in the same order."""

    def __init__(self) -> None:
        self._clauses: list[str] = []
        self.values: list[object] = []

    def need(self, clause: str, *values: object) -> None:
        self._clauses.append(clause)
        self.values.extend(values)

    @staticmethod
    def join(*parts: _Where) -> _Where:
        whole = _Where()
        for part in parts:
            whole._clauses += part._clauses
            whole.values += part.values
        return whole

    def __str__(self) -> str:
        return " AND ".join(self._clauses) or "1"


def _describe_place(resources: Resources) -> _Where:
    place = _Where()
    for column, text in (("o.region", resources.region), ("o.zone", resources.zone)):
        if text:
            place.need(f"{column} IN (SELECT id FROM texts WHERE text = ? COLLATE NOCASE)", text)
    return place


def _list_choices(resources: Resources, prices: Sequence[str]) -> Iterator[tuple[_Where, Sequence[str]]]:
    """Yield conditions on a machine whose accelerator was left open, and prices, the most preferred first.

    As in SkyPilot, a GPU that was not requested is not paid for, unless no other machine has the size: some clouds sell
    only machines with GPUs. Most programs are built for x86.
    """
    plain = _Where()
    plain.need("t.accelerator IS NULL AND t.arch = 'x86_64'")
    if resources.has_ordinary_memory:
        ordinary = _Where.join(plain)
        ordinary.need("t.memory_gib >= ?", ORDINARY_GIB)
        yield ordinary, prices
    yield plain, prices
    yield plain, _PRICES  # the error then names the other pricing model
    with_gpu = _Where()
    with_gpu.need("t.accelerator IS NOT NULL AND t.arch = 'x86_64'")
    yield with_gpu, prices


def _list_prices(resources: Resources, *, has_goal: bool) -> Sequence[str]:
    """List the price columns that these resources can use; see Resources.use_spot."""
    if resources.use_spot is None:
        return _PRICES if has_goal else _PRICES[:1]
    return ("spot_usd_hour",) if resources.use_spot else ("ondemand_usd_hour",)


def _make_offer(row: tuple[object, ...]) -> Offer:
    """Make an offer without its `__init__`: that takes a third of the time, which counts for thousands of offers."""
    offer = object.__new__(Offer)
    values = offer.__dict__
    values.update(zip(_OFFER_FIELDS, row, strict=True))
    values["is_estimated"] = bool(values["is_estimated"])
    return offer
