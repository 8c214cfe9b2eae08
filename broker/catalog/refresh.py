"""Brings the book up to date: each cloud from its source, checked before it counts, exchanged in one rename.

A cloud whose refresh fails keeps its old prices with their old date; a bad answer never replaces a good book.
"""

from __future__ import annotations

import importlib
import os
import sqlite3
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from broker.catalog.book import Book
from broker.catalog.history import History
from broker.catalog.opening import name_live_book
from broker.catalog.schema import INDEXES
from broker.catalog.sources import SOURCES
from broker.catalog.sources.base import Get, PriceSource
from broker.catalog.writer import BookWriter, CloudFacts
from broker.errors import AuthError, SourceError, StateError
from broker.types import Offer

OFFERS_SHARE_MIN = 0.5  # fewer than this share of what was for sale: the answer was cut short
RATIO_MAX = 4.0  # the median price moves less in any refresh; a wrong unit or currency moves it more
USD_HOUR_MAX = 2000.0  # no machine for rent costs more


@dataclass(frozen=True, kw_only=True)
class CloudRefresh:
    """How one cloud fared. `error` None: it has new prices."""

    cloud: str
    source: str
    offers: int = 0
    changed: int = 0
    error: str | None = None
    hints: tuple[str, ...] = ()


def load_sources() -> Mapping[str, PriceSource]:
    """Every source, made with its defaults."""
    sources: dict[str, PriceSource] = {}
    for name, path in SOURCES.items():
        module, _, attribute = path.partition(":")
        sources[name] = getattr(importlib.import_module(module), attribute)()
    return sources


def refresh_book(
    cache: Path,
    book: Book,
    clouds: Sequence[str],
    *,
    sources: Mapping[str, PriceSource],
    get: Get,
    now_s: float,
    on_cloud: Callable[[str, str], None] = lambda cloud, source: None,
) -> Sequence[CloudRefresh]:
    """Ask each cloud's sources in their order until one is believed, and exchange the book if any was.

    `on_cloud(cloud, source)` is told before each source is asked. Raises StateError when the book cannot be written.
    """
    day = datetime.fromtimestamp(now_s, UTC).date().isoformat()
    fetched: dict[str, tuple[str, list[Offer]]] = {}
    reports: list[CloudRefresh] = []
    for cloud in clouds:
        report = CloudRefresh(cloud=cloud, source="", error="no source knows this cloud")
        for name, source in sources.items():
            if cloud not in source.clouds:
                continue
            on_cloud(cloud, name)
            known = book.list_offers(cloud)
            try:
                offers = list(source.fetch(cloud, get, known=known, as_of_s=now_s))
                check_offers(cloud, offers, known)
            except (SourceError, AuthError) as error:
                report = CloudRefresh(cloud=cloud, source=name, error=error.message, hints=error.hints)
                continue
            fetched[cloud] = (name, offers)
            report = CloudRefresh(cloud=cloud, source=name, offers=len(offers))
            break
        reports.append(report)
    if not fetched:
        return reports
    facts = [CloudFacts(cloud=cloud, ondemand_as_of=day, spot_as_of=day, source=fetched[cloud][0]) for cloud in fetched]
    exchange_book(cache, book, [(each, fetched[each.cloud][1]) for each in facts])
    changed = _remember(cache, book, fetched, day)
    return [
        CloudRefresh(cloud=each.cloud, source=each.source, offers=each.offers, changed=changed.get(each.cloud, 0))
        if each.error is None
        else each
        for each in reports
    ]


def check_offers(cloud: str, offers: Sequence[Offer], known: Sequence[Offer]) -> None:
    """Raises SourceError for an answer that cannot be the whole truth."""
    if not offers or len(offers) < OFFERS_SHARE_MIN * len(known):
        raise SourceError(f"{cloud}: only {len(offers)} offers where {len(known)} were known: not believed")
    for offer in offers:
        for usd in (offer.ondemand_usd_hour, offer.spot_usd_hour):
            if usd is not None and not 0 < usd < USD_HOUR_MAX:
                raise SourceError(f"{cloud}: {offer.instance_type} in {offer.region} at {usd} USD/h: not believed")
    for field in ("ondemand_usd_hour", "spot_usd_hour"):
        ratio = _measure_ratio(offers, known, field)
        if ratio is not None and not 1 / RATIO_MAX <= ratio <= RATIO_MAX:
            raise SourceError(f"{cloud}: prices are {ratio:.2g} times what they were: another unit or currency?")


def _measure_ratio(offers: Sequence[Offer], known: Sequence[Offer], field: str) -> float | None:
    """Median of new over old price where both are known."""
    old = {(each.instance_type, each.region, each.zone): getattr(each, field) for each in known}
    ratios = [
        getattr(each, field) / before
        for each in offers
        if getattr(each, field) and (before := old.get((each.instance_type, each.region, each.zone)))
    ]
    return statistics.median(ratios) if ratios else None


def exchange_book(
    cache: Path, book: Book, clouds: Iterable[tuple[CloudFacts, Iterable[Offer]]], *, is_alone: bool = False
) -> None:
    """Write a copy with the clouds' new offers aside, then rename it over the live book. Raises StateError.

    `is_alone` empties the copy of all other clouds first.
    """
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    target = name_live_book(cache)
    aside = target.with_suffix(f".{os.getpid()}.tmp")
    try:
        with closing(sqlite3.connect(aside)) as database:
            book.copy_to(database)
            if is_alone:
                database.executescript("DELETE FROM offers; DELETE FROM types; DELETE FROM clouds")
            writer = BookWriter(database)
            for facts, offers in clouds:
                writer.replace_cloud(facts, offers)
            database.commit()
            database.executescript(INDEXES.replace("CREATE INDEX", "CREATE INDEX IF NOT EXISTS"))
            database.execute("VACUUM")
        aside.chmod(0o600)
        aside.replace(target)
    except (sqlite3.Error, OSError) as error:
        raise StateError(f"the new prices cannot be written to {cache}: {error}", hints=["is the disk full?"]) from None
    finally:
        aside.unlink(missing_ok=True)


def _remember(cache: Path, book: Book, fetched: Mapping[str, tuple[str, list[Offer]]], day: str) -> Mapping[str, int]:
    """Price changes by cloud; the old book's prices are where its history begins."""
    with closing(History(cache / "history.db")) as history:
        changed: dict[str, int] = {}
        for cloud, (_, offers) in fetched.items():
            if known := book.list_offers(cloud):
                history.add(known, day=book.get_facts(cloud).ondemand_as_of)
            changed[cloud] = history.add(offers, day=day)
    return changed
