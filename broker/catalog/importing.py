"""Takes a folder of SkyPilot catalog files into the book."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from broker.catalog.book import Book
from broker.catalog.refresh import exchange_book
from broker.catalog.skypilot_csv import Fault, parse_vms
from broker.catalog.writer import CloudFacts
from broker.errors import UsageError
from broker.types import Offer


@dataclass(frozen=True, kw_only=True)
class ImportReport:
    offers: Mapping[str, int]  # by cloud
    faults: Sequence[Fault]


def import_catalog(
    cache: Path,
    book: Book,
    folder: Path,
    *,
    now_s: float,
    is_alone: bool = False,
    on_cloud: Callable[[str], None] = lambda cloud: None,
) -> ImportReport:
    """Each cloud found replaces what the book had of it; `is_alone` leaves no other cloud. All or nothing.

    Raises UsageError where the folder holds no catalog, SourceError for a file that is none, StateError when the book
    cannot be written.
    """
    files = sorted(folder.glob("*/vms.csv"))
    if not files:
        raise UsageError(f"{folder} holds no catalog", hints=["it should have files such as `aws/vms.csv`"])
    day = datetime.fromtimestamp(now_s, UTC).date().isoformat()
    read: list[tuple[CloudFacts, list[Offer]]] = []
    faults: list[Fault] = []
    for file in files:
        cloud = file.parent.name
        on_cloud(cloud)
        try:
            text = file.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"cannot read {file}: {error}") from None
        offers, bad = parse_vms(text, cloud=cloud, file=str(file))
        faults.extend(bad)
        facts = CloudFacts(cloud=cloud, ondemand_as_of=day, spot_as_of=day, source=f"imported from {folder}")
        read.append((facts, offers))
    exchange_book(cache, book, read, is_alone=is_alone)
    return ImportReport(offers={facts.cloud: len(offers) for facts, offers in read}, faults=faults)
