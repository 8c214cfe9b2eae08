"""Make errors with suggestions for unknown names: clouds, regions, zones, instance types, accelerators."""

from __future__ import annotations

import difflib
import sqlite3
from collections.abc import Iterable, Sequence

from broker.errors import UnknownNameError
from broker.formatting import join_choices
from broker.types import Resources

NEAR_COUNT = 3
# Accelerators that the shipped prices lack, and clouds that offer them: SkyPilot's catalog, version 8.
SELLERS: dict[str, tuple[str, ...]] = {
    "A40": ("runpod", "vast", "cudo"), "RTX3060": ("vast",), "RTX3070": ("vast",), "RTX3080": ("cudo", "vast"),
    "RTX3090": ("runpod", "vast"), "RTX4000-Ada": ("runpod", "vast"), "RTX4060": ("vast",), "RTX4070": ("vast",),
    "RTX4080": ("vast",), "RTX4090": ("runpod", "vast", "hyperbolic"), "RTX5000-Ada": ("vast",), "RTX5060": ("vast",),
    "RTX5070": ("vast",), "RTX5080": ("vast",), "RTX5090": ("runpod", "vast"), "RTXA4000": ("runpod", "vast", "cudo"),
    "RTXA4500": ("runpod", "cudo"), "RTXA5000": ("runpod", "vast", "cudo"),
}  # fmt: skip
PLACES = "offers o JOIN types t ON t.id = o.type JOIN texts x ON x.id = o."


class Suggestions:
    """Queries the book only when needed: each check reads whole columns."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database

    def check(self, resources: Resources) -> None:
        """Raise UnknownNameError for the first name that is unknown, or unknown in the requested place."""
        cloud = resources.cloud.lower() if resources.cloud else None
        if cloud and cloud not in (clouds := self._list("SELECT cloud FROM clouds")):
            raise _explain("cloud", cloud, clouds, _hint_cloud(cloud))
        of_cloud = f" of {cloud}" if cloud else ""
        for kind, name in (("region", resources.region), ("zone", resources.zone)):
            if not name:
                continue
            names = self._list(f"SELECT DISTINCT x.text FROM {PLACES}{kind} WHERE ?1 IS NULL OR t.cloud = ?1", cloud)
            if not _has(names, name):
                raise _explain(f"{kind}{of_cloud}", name, names, self._locate(name))
        if resources.region and resources.zone:
            inside = (
                f"SELECT DISTINCT x.text FROM {PLACES}zone JOIN texts r ON r.id = o.region "
                "WHERE (?1 IS NULL OR t.cloud = ?1) AND r.text = ?2 COLLATE NOCASE"
            )
            names = self._list(inside, cloud, resources.region)
            if not _has(names, resources.zone):
                raise _explain(f"zone of {resources.region}", resources.zone, names, self._locate(resources.zone))
        if resources.instance_type:
            types = "SELECT DISTINCT instance_type FROM types WHERE ?1 IS NULL OR cloud = ?1"
            self.check_instance_type(resources.instance_type, self._list(types, cloud), of_cloud)

    def check_instance_type(self, name: str, known: Iterable[str] | None = None, of_cloud: str = "") -> None:
        """Raise UnknownNameError for an instance type that is not in `known`, by default all in the book."""
        known = self._list("SELECT DISTINCT instance_type FROM types") if known is None else known
        if not _has(known, name):
            rows = self._list("SELECT DISTINCT cloud FROM types WHERE instance_type = ?1 COLLATE NOCASE", name)
            hints = [f"available on {cloud}" for cloud in sorted(rows)]
            accelerators = self._list(
                "SELECT name FROM accelerators WHERE name = ?1 COLLATE NOCASE", name.split(":")[0]
            )
            hints += [f"`{each}` is an accelerator: list its offers with `broker gpus {name}`" for each in accelerators]
            raise _explain(f"instance type{of_cloud}", name, known, hints)

    def check_cloud(self, name: str) -> None:
        """Raise UnknownNameError for a cloud without prices."""
        self.check(Resources(cloud=name))

    def explain_accelerator(self, name: str) -> UnknownNameError:
        """Make the error for an unknown accelerator, or for one offered only by clouds that the book lacks."""
        if sellers := next((clouds for each, clouds in SELLERS.items() if each.lower() == name.lower()), ()):
            hint = f"add prices with `broker catalog update --cloud {sellers[0]}`"
            return UnknownNameError(f"the catalog has no offers of `{name}`", hints=[hint])
        names = self._list("SELECT name FROM accelerators UNION SELECT accelerator FROM types WHERE accelerator != ''")
        return _explain("accelerator", name, names, ["list all with `broker gpus`"])

    def _locate(self, name: str) -> Sequence[str]:
        """Return where a region or zone of this name is, and how to write it."""
        hints = []
        for kind in ("region", "zone"):
            rows = self._database.execute(
                f"SELECT DISTINCT t.cloud, r.text, x.text FROM {PLACES}{kind} JOIN texts r ON r.id = o.region "
                "WHERE x.text = ? COLLATE NOCASE ORDER BY 1, 2, 3",
                (name,),
            )
            for cloud, region, text in rows:
                path = f"{cloud}/{region}" if kind == "region" else f"{cloud}/{region}/{text}"
                hints.append(f"`{text}` is a {kind} of {cloud}: `infra: {path}`")
        return hints[:NEAR_COUNT]

    def _list(self, query: str, *values: object) -> frozenset[str]:
        return frozenset(str(row[0]) for row in self._database.execute(query, values))


def _has(known: Iterable[str], name: str) -> bool:
    return name.lower() in {each.lower() for each in known}


def _explain(word: str, name: str, known: Iterable[str], more: Sequence[str] = ()) -> UnknownNameError:
    by_lower = {each.lower(): each for each in sorted(known)}
    close = difflib.get_close_matches(name.lower(), by_lower, n=20, cutoff=0.6)
    # Ties, such as zones of one region, are broken alphabetically.
    near = sorted(close, key=lambda each: (-difflib.SequenceMatcher(None, each, name.lower()).ratio(), each))
    near = near[:NEAR_COUNT]
    hints = [f"did you mean {join_choices([f'`{by_lower[each]}`' for each in near])}?"] if near else []
    kind, _, place = word.partition(" of ")
    where = f" in {place}" if place else ""
    return UnknownNameError(f"unknown {kind} `{name}`{where}", hints=[*hints, *more])


def _hint_cloud(cloud: str) -> Sequence[str]:
    from broker.catalog.sources.skypilot import SkyPilotSource

    if cloud in SkyPilotSource.clouds:
        return [f"add its prices with `broker catalog update --cloud {cloud}`"]
    return ["`broker catalog info` lists the clouds with prices"]
