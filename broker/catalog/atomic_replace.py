"""Replace clouds of the live book atomically: write a copy, then rename it; one writer at a time."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

from broker.catalog.book import Book
from broker.catalog.bundle import locate_live_book, open_live_book
from broker.catalog.schema import INDEXES
from broker.catalog.staleness import CloudFacts
from broker.catalog.writer import BookWriter
from broker.errors import StateError
from broker.locks import hold_lock
from broker.types import Offer


def replace_clouds(
    cache: Path, book: Book, clouds: Iterable[tuple[CloudFacts, Iterable[Offer]]], *, is_alone: bool = False
) -> None:
    """Replace the clouds' offers in the live book, starting from `book` if there is no live one.

    `is_alone` removes all other clouds. Readers see the old book or the new one, never a mixture. A second writer waits
    and adds to the first one's result. Raises StateError; then the old book is unchanged.
    """
    target = locate_live_book(cache)
    aside = target.with_suffix(f".{os.urandom(8).hex()}.tmp")
    try:
        with hold_lock(cache / "prices.lock"):
            try:
                _remove_remains(target)
                _write_aside(aside, open_live_book(cache) or book, clouds, is_alone=is_alone)
                aside.replace(target)
            finally:
                _remove_remains(target)
    except (sqlite3.Error, OSError) as error:
        raise StateError(
            f"cannot write the new prices to {cache}: {error}", hints=["check that the disk is not full"]
        ) from None


def _remove_remains(target: Path) -> None:
    """Remove files left by killed and failed writers; the lock is held, so none of them is being written."""
    for remains in target.parent.glob(f"{target.stem}.*.tmp*"):  # SQLite's journal of a failed write too
        remains.unlink(missing_ok=True)


def _write_aside(
    aside: Path, book: Book, clouds: Iterable[tuple[CloudFacts, Iterable[Offer]]], *, is_alone: bool
) -> None:
    os.close(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    with closing(sqlite3.connect(aside)) as database:
        book.copy_to(database)
        if is_alone:
            database.executescript("DELETE FROM offers; DELETE FROM types; DELETE FROM clouds")
        writer = BookWriter(database)
        for facts, offers in clouds:
            writer.replace_cloud(facts, offers)
        database.commit()
        database.executescript(INDEXES)
        database.execute("VACUUM")
    descriptor = os.open(aside, os.O_RDONLY)
    try:
        os.fsync(descriptor)  # after a power failure, the rename may survive without the bytes
    finally:
        os.close(descriptor)
