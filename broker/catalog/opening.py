"""Opens the price book: the refreshed one where there is one, else the one that ships, unpacked once into the cache."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

from broker.catalog.book import Book
from broker.catalog.schema import ARCHIVE, INDEXES, SCHEMA_VERSION
from broker.errors import StateError

SHIPPED = Path(__file__).parent / "data" / ARCHIVE


def open_book(cache: Path, archive: Path = SHIPPED) -> Book:
    """A live book that does not open, or is of another version, is passed over. Raises StateError."""
    live = name_live_book(cache)
    if live.exists() and (book := _try_open(live)):
        return book
    path = cache / f"prices-{SCHEMA_VERSION}-{_fingerprint(archive)}.db"
    for _ in range(2):
        if not path.exists():
            try:
                _unpack(archive, path)
            except OSError:
                return _open_in_memory(archive)  # slower by a tenth of a second, and as good
        if book := _try_open(path):
            return book
        path.unlink(missing_ok=True)  # a damaged copy is made anew
    raise StateError(f"the price book does not open: {path}", hints=("reinstall broker",))


def name_live_book(cache: Path) -> Path:
    """Where refreshed and imported prices lie."""
    return cache / f"prices-{SCHEMA_VERSION}-live.db"


def _try_open(path: Path) -> Book | None:
    try:
        database = sqlite3.connect(f"{path.as_uri()}?mode=ro&immutable=1", uri=True)
        if database.execute("PRAGMA user_version").fetchone()[0] == SCHEMA_VERSION:
            return Book(database)
        database.close()
    except sqlite3.DatabaseError:
        pass
    return None


def _open_in_memory(archive: Path) -> Book:
    import lzma

    database = sqlite3.connect(":memory:")
    database.deserialize(lzma.decompress(archive.read_bytes()))
    return Book(database)


def _fingerprint(archive: Path) -> str:
    """Names the archive's content by size and modification time, so that no megabytes are hashed at every start."""
    facts = archive.stat()
    return f"{facts.st_size:x}-{facts.st_mtime_ns:x}"


def _unpack(archive: Path, path: Path) -> None:
    """Written aside and renamed: of two first commands at once, each reads a whole book."""
    import lzma

    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    aside = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        aside.write_bytes(lzma.decompress(archive.read_bytes()))
        database = sqlite3.connect(aside)
        database.executescript(INDEXES)
        database.close()
        aside.chmod(0o600)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
