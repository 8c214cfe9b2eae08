"""Import a folder of SkyPilot catalog files into the book."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from broker.catalog.atomic_replace import replace_clouds
from broker.catalog.book import Book
from broker.catalog.skypilot_csv import RowIssue, parse_vms
from broker.catalog.staleness import CloudFacts
from broker.errors import SourceError, UsageError
from broker.frozen import frozen
from broker.types import Offer


@frozen
class ImportReport:
    """Number of imported offers by cloud, and the rows that were rejected."""

    offers: Mapping[str, int]  # by cloud
    faults: Sequence[RowIssue]


def import_catalog(
    cache: Path,
    book: Book,
    folder: Path,
    *,
    now_s: float,
    is_alone: bool = False,
    on_cloud: Callable[[str], None] = lambda cloud: None,
) -> ImportReport:
    """Replace the prices of each cloud in the folder; `is_alone` removes all other clouds. All or nothing.

    Prices get their file's date: SkyPilot's files do not date them, and they are at least as old.

    Raises UsageError if the folder contains no catalog, SourceError for an invalid file, StateError if the book cannot
    be written.
    """
    files = sorted(folder.glob("*/vms.csv"))
    if not files:
        raise UsageError(f"no catalog in {folder}", hints=["the folder must contain files such as `aws/vms.csv`"])
    read: list[tuple[CloudFacts, list[Offer]]] = []
    faults: list[RowIssue] = []
    for file in files:
        cloud = file.parent.name
        on_cloud(cloud)
        try:
            text = file.read_text(encoding="utf-8-sig")
            day = datetime.fromtimestamp(min(now_s, file.stat().st_mtime), UTC).date().isoformat()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"cannot read {file}: {error}") from None
        offers, bad = parse_vms(text, cloud=cloud, file=str(file))
        faults.extend(bad)
        if not offers:
            raise SourceError(f"{file} has no row with a price", hints=[str(fault) for fault in bad[:1]])
        facts = CloudFacts(cloud=cloud, ondemand_as_of=day, spot_as_of=day, source=f"imported from {folder}")
        read.append((facts, offers))
    replace_clouds(cache, book, read, is_alone=is_alone)
    return ImportReport(offers={facts.cloud: len(offers) for facts, offers in read}, faults=faults)
