"""Open the price book: the refreshed one if it exists, else the bundled one, unpacked once into the cache."""

from __future__ import annotations

import os
import sqlite3
from contextlib import suppress
from pathlib import Path

from broker.catalog.book import Book
from broker.catalog.schema import ARCHIVE, INDEXES, SCHEMA_VERSION
from broker.errors import StateError

SHIPPED = Path(__file__).parent / "data" / ARCHIVE
UNPACKED_KEPT = 3  # several versions of broker may share a cache; each unpacks its own book


def open_book(cache: Path, archive: Path = SHIPPED) -> Book:
    """Return the live book, or the bundled one, which is opened in memory (slower) if the cache is not writable.

    Raises StateError if a newer broker wrote the live book, or if the bundled one is damaged.
    """
    if live := open_live_book(cache):
        return live
    try:
        return _open_cached(cache, archive)
    except (OSError, sqlite3.Error):
        return _open_in_memory(archive)


def open_live_book(cache: Path) -> Book | None:
    """Return refreshed or imported prices; None if there are none, or they are unreadable or of an older format.

    Raises StateError if a newer broker wrote them: this one cannot know what changed.
    """
    live = locate_live_book(cache)
    if not live.exists():
        return None
    version, book = _try_open(live)
    if version > SCHEMA_VERSION:
        raise StateError(
            f"{live} has format {version}, written by a newer broker; this one reads up to {SCHEMA_VERSION}",
            hints=["upgrade broker", "`broker catalog reset` restores the prices bundled with this version"],
        )
    return book


def locate_live_book(cache: Path) -> Path:
    """Return the path of refreshed and imported prices."""
    return cache / "prices-live.db"


def _open_cached(cache: Path, archive: Path) -> Book:
    path = cache / f"prices-{SCHEMA_VERSION}-{_fingerprint(archive)}.db"
    for _ in range(2):
        if not path.exists():
            _unpack(archive, path)
        _, book = _try_open(path)
        if book is not None:
            return book
        path.unlink(missing_ok=True)  # unpack a damaged copy again
    raise OSError(f"cannot open {path}")


def _try_open(path: Path) -> tuple[int, Book | None]:
    """Return the format's version, 0 if unknown, and the book if it is complete and has this broker's format."""
    try:
        if not _is_whole(path):
            return 0, None
        database = sqlite3.connect(f"{path.as_uri()}?mode=ro&immutable=1", uri=True)
        version = int(database.execute("PRAGMA user_version").fetchone()[0])
        if version == SCHEMA_VERSION:
            return version, Book(database)
        database.close()
        return version, None
    except (sqlite3.DatabaseError, OSError):
        return 0, None


def _is_whole(path: Path) -> bool:
    """Return whether the size matches the header: a full disk may truncate a copy.

    See https://www.sqlite.org/fileformat.html.
    """
    with path.open("rb") as file:
        head = file.read(100)
    page_size = int.from_bytes(head[16:18], "big")
    page_size = 65536 if page_size == 1 else page_size
    return len(head) == 100 and path.stat().st_size == page_size * int.from_bytes(head[28:32], "big")


def _open_in_memory(archive: Path) -> Book:
    import lzma

    try:
        database = sqlite3.connect(":memory:")
        database.deserialize(lzma.decompress(archive.read_bytes()))
        version = database.execute("PRAGMA user_version").fetchone()[0]
        if version == SCHEMA_VERSION:
            database.execute("PRAGMA temp_store = MEMORY")  # the disk may be full
            database.executescript(INDEXES)
            return Book(database)
        reason = f"it has format {version}, and this broker reads {SCHEMA_VERSION}"
    except (OSError, EOFError, lzma.LZMAError, sqlite3.Error) as error:
        reason = str(error)
    raise StateError(f"cannot open the price book bundled with broker: {reason}", hints=["reinstall broker"])


def _fingerprint(archive: Path) -> str:
    """Identify the archive by size and modification time, to avoid hashing megabytes at every start."""
    facts = archive.stat()
    return f"{facts.st_size:x}-{facts.st_mtime_ns:x}"


def _unpack(archive: Path, path: Path) -> None:
    """Write to a temporary file and rename it, so that two concurrent first commands each read a complete book."""
    import lzma

    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    aside = path.with_suffix(f".{os.urandom(8).hex()}.tmp")
    try:
        with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(lzma.decompress(archive.read_bytes()))
        database = sqlite3.connect(aside)
        try:
            database.executescript(INDEXES)
        finally:
            database.close()
        aside.replace(path)
    except (EOFError, lzma.LZMAError) as error:
        raise OSError(f"{archive} is damaged: {error}") from None
    finally:
        aside.unlink(missing_ok=True)
    _remove_old(path.parent)


def _remove_old(cache: Path) -> None:
    """Remove books that older versions unpacked; a process that has one open can still read it."""
    with suppress(OSError):
        books = sorted(cache.glob("prices-*-*-*.db"), key=lambda each: each.stat().st_mtime, reverse=True)
        for book in books[UNPACKED_KEPT:]:
            book.unlink(missing_ok=True)
