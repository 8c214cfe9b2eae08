"""Keep the price history: each refresh adds changed prices to one file next to the book, bounded in days and rows."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence, Set
from contextlib import closing
from pathlib import Path

from broker.frozen import frozen
from broker.types import Offer

DAYS_KEPT = 400
ROWS_MAX = 500_000  # about 50 MB
TABLE = """
CREATE TABLE IF NOT EXISTS changes (
    cloud TEXT NOT NULL, instance_type TEXT NOT NULL, region TEXT NOT NULL, zone TEXT NOT NULL, day TEXT NOT NULL,
    ondemand_usd_hour REAL, spot_usd_hour REAL, PRIMARY KEY (instance_type, cloud, region, zone, day)
) WITHOUT ROWID
"""
Place = tuple[str, str, str, str]  # cloud, instance type, region, zone


@frozen
class PricePoint:
    """Prices of one machine at one place, valid from `day` (ISO); no price: the place no longer offers it."""

    cloud: str
    instance_type: str
    region: str
    zone: str
    day: str
    ondemand_usd_hour: float | None
    spot_usd_hour: float | None


def remember_changes(cache: Path, offers: Sequence[Offer], known: Sequence[Offer], *, day: str) -> int:
    """Record prices that differ from `known`, with their previous values; return the number of changed or new places.

    A recorded place that is missing from `offers` gets an entry without prices: its last price no longer applies. If
    the history cannot be written, nothing is recorded: that must not prevent a refresh.
    """
    before = {_name_place(each): each for each in known}
    changed = [
        offer for offer in offers if (old := before.get(_name_place(offer))) is None or _pair(old) != _pair(offer)
    ]
    olds = [before[place] for each in changed if (place := _name_place(each)) in before]
    gone = before.keys() - {_name_place(each) for each in offers}
    try:
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        with closing(sqlite3.connect(name_history(cache))) as database, database:
            database.execute(TABLE)
            _add_first(database, olds)
            _add(database, changed, day)
            _add_gone(database, gone, day)
            _forget(database, day)
    except (sqlite3.Error, OSError):
        pass
    return len(changed)


def find_points(cache: Path, instance_type: str, *, region: str | None = None) -> Sequence[PricePoint]:
    """Return all recorded prices of a machine, by place and day; empty if there is no readable history."""
    path = name_history(cache)
    if not path.exists():
        return []
    try:
        with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as database:
            rows = database.execute(
                "SELECT cloud, instance_type, region, zone, day, ondemand_usd_hour, spot_usd_hour FROM changes "
                "WHERE instance_type = ?1 AND (?2 IS NULL OR region = ?2) ORDER BY cloud, region, zone, day",
                (instance_type, region),
            ).fetchall()
    except sqlite3.Error:
        return []
    names = ("cloud", "instance_type", "region", "zone", "day", "ondemand_usd_hour", "spot_usd_hour")
    return [PricePoint(**dict(zip(names, row, strict=True))) for row in rows]


def name_history(cache: Path) -> Path:
    """Return the path of the price history in the cache folder."""
    return cache / "price-history.db"


def _name_place(offer: Offer) -> Place:
    return offer.cloud, offer.instance_type, offer.region, offer.zone or ""


def _pair(offer: Offer) -> tuple[float | None, float | None]:
    return offer.ondemand_usd_hour, offer.spot_usd_hour


def _add_first(database: sqlite3.Connection, offers: Iterable[Offer]) -> None:
    """Start the history of a new place with the price that is being replaced."""
    recorded = set(database.execute("SELECT DISTINCT cloud, instance_type, region, zone FROM changes"))
    for offer in offers:
        if _name_place(offer) not in recorded and offer.as_of:
            _add(database, [offer], offer.as_of)


def _add(database: sqlite3.Connection, offers: Iterable[Offer], day: str) -> None:
    database.executemany(
        "INSERT OR REPLACE INTO changes VALUES (?,?,?,?,?,?,?)",
        [(offer.cloud, offer.instance_type, offer.region, offer.zone or "", day, *_pair(offer)) for offer in offers],
    )


def _add_gone(database: sqlite3.Connection, gone: Set[Place], day: str) -> None:
    """End the history of places that are no longer offered. Others have no entry that could be taken for a price.

    A source that names zones in another way than the one before it would otherwise fill the history.
    """
    recorded = database.execute("SELECT DISTINCT cloud, instance_type, region, zone FROM changes").fetchall()
    database.executemany(
        "INSERT OR REPLACE INTO changes VALUES (?,?,?,?,?,NULL,NULL)",
        [(*place, day) for place in sorted(gone & set(recorded))],
    )


def _forget(database: sqlite3.Connection, day: str) -> None:
    """Delete entries that are too old, then the oldest days until the rest fits.

    The last price before the oldest day is kept, because it still applies on that day.
    """
    oldest = f"date('{day}', '-{DAYS_KEPT} days')"
    database.execute(
        f"DELETE FROM changes WHERE day < {oldest} AND EXISTS (SELECT 1 FROM changes AS later WHERE "
        "later.cloud = changes.cloud AND later.instance_type = changes.instance_type AND "
        "later.region = changes.region AND later.zone = changes.zone AND later.day > changes.day AND "
        f"later.day < {oldest})"
    )
    (count,) = database.execute("SELECT count(*) FROM changes").fetchone()
    if count > ROWS_MAX:
        days = database.execute("SELECT day, count(*) FROM changes GROUP BY 1 ORDER BY 1").fetchall()
        for each, rows in days[:-1]:
            database.execute("DELETE FROM changes WHERE day = ?", (each,))
            count -= rows
            if count <= ROWS_MAX:
                break
