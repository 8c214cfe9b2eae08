"""Opens the price book: the refreshed one where there is one, else the one that ships, unpacked once into the cache."""

from __future__ import annotations

import os
import sqlite3
from contextlib import suppress
from pathlib import Path

from broker.catalog.book import Book
from broker.catalog.schema import ARCHIVE, INDEXES, SCHEMA_VERSION
from broker.errors import StateError

SHIPPED = Path(__file__).parent / "data" / ARCHIVE
UNPACKED_KEPT = 3  # several versions of broker may share a cache; each unpacks its own


def open_book(cache: Path, archive: Path = SHIPPED) -> Book:
    """The live book, or the shipped one. Without a cache that can be written it is read in memory: slower, as good.

    Raises StateError for a book of a newer broker, and where the shipped one is damaged.
    """
    if live := open_live_book(cache):
        return live
    try:
        return _open_cached(cache, archive)
    except (OSError, sqlite3.Error):
        return _open_in_memory(archive)


def open_live_book(cache: Path) -> Book | None:
    """Refreshed or imported prices; None where there are none, or none that can be read, or only of an older format.

    Raises StateError where a newer broker wrote them: it may have a reason that this one doesn't know.
    """
    live = locate_live_book(cache)
    if not live.exists():
        return None
    version, book = _try_open(live)
    if version > SCHEMA_VERSION:
        raise StateError(
            f"{live} is of format {version}, written by a newer broker; this one reads up to {SCHEMA_VERSION}",
            hints=["upgrade broker", "`broker catalog reset` goes back to the prices that ship with this one"],
        )
    return book


def locate_live_book(cache: Path) -> Path:
    """Where refreshed and imported prices lie."""
    return cache / "prices-live.db"


def _open_cached(cache: Path, archive: Path) -> Book:
    path = cache / f"prices-{SCHEMA_VERSION}-{_fingerprint(archive)}.db"
    for _ in range(2):
        if not path.exists():
            _unpack(archive, path)
        _, book = _try_open(path)
        if book is not None:
            return book
        path.unlink(missing_ok=True)  # a damaged copy is made anew
    raise OSError(f"{path} does not open")


def _try_open(path: Path) -> tuple[int, Book | None]:
    """The format's version, 0 where it cannot be told, and the book where it is ours and whole."""
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
    """As long as its header says (https://www.sqlite.org/fileformat.html): a copy may break off on a full disk."""
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
        reason = f"it is of format {version}, and this broker reads {SCHEMA_VERSION}"
    except (OSError, EOFError, lzma.LZMAError, sqlite3.Error) as error:
        reason = str(error)
    raise StateError(f"the price book that ships with broker does not open: {reason}", hints=["reinstall broker"])


def _fingerprint(archive: Path) -> str:
    """Names the archive's content by size and modification time, so that no megabytes are hashed at every start."""
    facts = archive.stat()
    return f"{facts.st_size:x}-{facts.st_mtime_ns:x}"


def _unpack(archive: Path, path: Path) -> None:
    """Written aside and renamed: of two first commands at once, each reads a whole book."""
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
    """Books that older versions unpacked; who has one open goes on reading it."""
    with suppress(OSError):
        books = sorted(cache.glob("prices-*-*-*.db"), key=lambda each: each.stat().st_mtime, reverse=True)
        for each in books[UNPACKED_KEPT:]:
            each.unlink(missing_ok=True)
