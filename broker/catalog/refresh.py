"""Refresh the book: fetch each cloud from its source, check the result, replace the cloud atomically.

A cloud whose refresh fails keeps its old prices with their dates; an implausible response never replaces a good book.
Clouds already fetched are kept if the refresh is interrupted later.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from broker.catalog.atomic_replace import replace_clouds
from broker.catalog.book import Book
from broker.catalog.history import remember_changes
from broker.catalog.sanity import check_offers
from broker.catalog.sources import SOURCES
from broker.catalog.sources.base import Get, PriceSource
from broker.catalog.staleness import CloudFacts
from broker.errors import AuthError, SourceError
from broker.frozen import frozen
from broker.types import Offer


@frozen
class CloudRefresh:
    """The result for one cloud. `error` is None if its prices were replaced; `changed` counts places."""

    cloud: str
    source: str
    offers: int = 0
    changed: int = 0
    error: str | None = None
    hints: tuple[str, ...] = ()


def load_sources(urls: Mapping[str, str] | None = None) -> Mapping[str, PriceSource]:
    """Load all sources by name; `urls` override the default addresses, e.g. with a mirror."""
    sources: dict[str, PriceSource] = {}
    for name, path in SOURCES.items():
        module, _, attribute = path.partition(":")
        make = getattr(importlib.import_module(module), attribute)
        sources[name] = make(urls[name]) if urls and name in urls else make()
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
    """Query each cloud's sources in order until one gives plausible prices, and replace that cloud in the book.

    `on_cloud(cloud, source)` is called before each source. Raises StateError if the book cannot be written.
    """
    return [_refresh_cloud(cache, book, cloud, sources, get, now_s, on_cloud) for cloud in clouds]


def _refresh_cloud(
    cache: Path,
    book: Book,
    cloud: str,
    sources: Mapping[str, PriceSource],
    get: Get,
    now_s: float,
    on_cloud: Callable[[str, str], None],
) -> CloudRefresh:
    able = {name: source for name, source in sources.items() if cloud in source.clouds}
    if not able:
        return CloudRefresh(cloud=cloud, source="", error="no source covers this cloud")
    known = book.list_offers(cloud)
    errors: list[tuple[str, SourceError | AuthError]] = []
    for name, source in able.items():
        on_cloud(cloud, name)
        try:
            offers = list(source.fetch(cloud, get, known=known, as_of_s=now_s))
            check_offers(cloud, offers, known)
        except (SourceError, AuthError) as error:
            errors.append((name, error))
            continue
        changed = _take(cache, book, cloud, name, offers, known, now_s)
        return CloudRefresh(cloud=cloud, source=name, offers=len(offers), changed=changed)
    # The last source is the general one. The error of the cloud's own source is more helpful, so both are reported.
    return CloudRefresh(
        cloud=cloud,
        source=errors[-1][0],
        error="; ".join(dict.fromkeys(error.message for _, error in errors)),
        hints=tuple(hint for _, error in errors for hint in error.hints),
    )


def _take(
    cache: Path, book: Book, cloud: str, source: str, offers: list[Offer], known: Sequence[Offer], now_s: float
) -> int:
    """Write accepted prices; return the number of places whose prices changed."""
    day = datetime.fromtimestamp(now_s, UTC).date().isoformat()
    # Kept prices have their own dates; the cloud's is the newest of each kind.
    ondemand = max((each.as_of or day for each in offers if each.ondemand_usd_hour), default=day)
    spot = max((each.spot_as_of or day for each in offers if each.spot_usd_hour), default=day)
    facts = CloudFacts(cloud=cloud, ondemand_as_of=ondemand, spot_as_of=spot, source=source)
    replace_clouds(cache, book, [(facts, offers)])
    return remember_changes(cache, offers, known, day=day)
