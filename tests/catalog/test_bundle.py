"""The book's file: unpacked once, atomically, and never read in an unknown format."""

from __future__ import annotations

import lzma
import os
import resource
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from broker.catalog.bundle import SHIPPED, UNPACKED_KEPT, locate_live_book, open_book
from broker.catalog.refresh import refresh_book
from broker.catalog.schema import SCHEMA_VERSION
from broker.errors import StateError
from tests.catalog.market import NOW_S
from tests.catalog.test_refresh import Source, scale
from tests.tiers import spread

OFFERS = 102_325


def count(cache: Path, archive: Path = SHIPPED) -> int:
    return sum(open_book(cache, archive).count_offers().values())


def set_format(path: Path, version: int) -> None:
    with closing(sqlite3.connect(path)) as database:
        database.execute(f"PRAGMA user_version = {version}")


def make_live(cache: Path) -> Path:
    refresh_book(
        cache, open_book(cache), ["lambda"], sources={"fake": Source(scale(1.1))}, get=lambda *_, **__: b"", now_s=NOW_S
    )
    return locate_live_book(cache)


def test_a_book_of_a_newer_broker_is_refused_with_a_hint(tmp_path: Path) -> None:
    set_format(make_live(tmp_path), SCHEMA_VERSION + 1)
    with pytest.raises(StateError, match=f"format {SCHEMA_VERSION + 1}.*newer broker") as caught:
        open_book(tmp_path)
    assert any("broker catalog reset" in hint for hint in caught.value.hints)


def test_a_book_of_an_older_broker_gives_way_to_the_shipped_one_and_the_next_refresh_replaces_it(
    tmp_path: Path,
) -> None:
    set_format(make_live(tmp_path), SCHEMA_VERSION - 1)
    assert open_book(tmp_path).get_facts("lambda").source != "fake"
    make_live(tmp_path)
    assert open_book(tmp_path).get_facts("lambda").source == "fake"


@pytest.mark.parametrize("keep", spread([50, 0, 4096, 100_000, -4096], every=4))
def test_a_truncated_copy_is_unpacked_again(tmp_path: Path, keep: int) -> None:
    assert count(tmp_path) == OFFERS
    (path,) = tmp_path.glob("prices-*.db")
    path.write_bytes(path.read_bytes()[:keep])
    assert count(tmp_path) == OFFERS
    assert len(path.read_bytes()) > 100_000


def test_a_truncated_live_book_is_skipped(tmp_path: Path) -> None:
    live = make_live(tmp_path)
    live.write_bytes(live.read_bytes()[:-4096])
    assert count(tmp_path) == OFFERS


def test_a_cache_that_cannot_be_written_does_not_stop_a_plan(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("a file where the cache folder should be")
    assert count(blocked / "cache") == OFFERS


def test_a_disk_that_is_full_does_not_stop_a_plan(tmp_path: Path) -> None:
    """A real limit on the size of files, in a separate process: bytes and indexes fail as on a full disk."""
    program = (
        "import sys; from pathlib import Path; from broker.catalog.bundle import open_book; "
        "print(sum(open_book(Path(sys.argv[1])).count_offers().values()))"
    )
    size = len(lzma.decompress(SHIPPED.read_bytes()))
    for limit in (1_000_000, size + 100_000):  # fails while bytes are written, and while indexes are created

        def limit_files(limit: int = limit) -> None:
            import signal

            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

        cache = tmp_path / str(limit)
        done = subprocess.run(
            [sys.executable, "-c", program, str(cache)], preexec_fn=limit_files, capture_output=True, text=True
        )
        assert done.stdout.strip() == str(OFFERS), done.stderr
        assert not list(cache.glob("*")), "no part of a book is left behind"


def test_processes_that_unpack_at_once_all_read_a_whole_book(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from broker.catalog.bundle import open_book; sys.stdin.read(1); "
        "print(sum(open_book(Path(sys.argv[1])).count_offers().values()))"
    )
    running = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(4)
    ]
    answers = [each.communicate("x")[0].strip() for each in running]
    assert answers == [str(OFFERS)] * 4
    assert len(list(tmp_path.iterdir())) == 1


def test_a_damaged_archive_or_another_format_is_reported(tmp_path: Path) -> None:
    archive = tmp_path / "book.db.xz"
    archive.write_bytes(SHIPPED.read_bytes()[:1000])
    with pytest.raises(StateError, match="cannot open") as caught:
        open_book(tmp_path / "cache", archive)
    assert caught.value.hints == ("reinstall broker",)
    other = tmp_path / "other.db"
    other.write_bytes(lzma.decompress(SHIPPED.read_bytes()))
    set_format(other, SCHEMA_VERSION + 5)
    archive.write_bytes(lzma.compress(other.read_bytes(), preset=0))
    with pytest.raises(StateError, match=f"format {SCHEMA_VERSION + 5}"):
        open_book(tmp_path / "cache", archive)


def test_old_unpacked_books_are_removed_except_the_newest(tmp_path: Path) -> None:
    for number in range(6):
        old = tmp_path / f"prices-1-ab{number}-cd.db"
        old.write_bytes(b"old")
        os.utime(old, (number, number))
    assert count(tmp_path) == OFFERS
    left = sorted(each.name for each in tmp_path.glob("prices-1-*.db"))
    assert left == ["prices-1-ab4-cd.db", "prices-1-ab5-cd.db"]
    assert len(list(tmp_path.glob("prices-*.db"))) == UNPACKED_KEPT
