"""The shipped book is rebuilt from fetched facts, and the same facts give the same bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest

from broker.catalog import rebuild
from broker.catalog.atomic_replace import replace_clouds
from broker.catalog.book import Book
from broker.catalog.bundle import open_book
from broker.errors import SourceError
from broker.types import Offer
from tests.catalog.market import NOW_S


class Dearer:
    """A source of two clouds, one of which it cannot reach."""

    name: ClassVar[str] = "dearer"
    clouds: ClassVar[tuple[str, ...]] = ("lambda", "verda")

    def fetch(self, cloud: str, get: object, *, known: Sequence[Offer], as_of_s: float) -> Iterator[Offer]:
        if cloud == "verda":
            raise SourceError("down")
        for each in known:
            usd = each.ondemand_usd_hour
            yield replace(each, ondemand_usd_hour=usd and usd * 1.5, as_of="", spot_as_of="")


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Book:
    """The shipped book, with two clouds only: compressing all of it takes a minute."""
    cache = tmp_path / "cache"
    shipped = open_book(cache)
    clouds = [(shipped.get_facts(each), shipped.list_offers(each)) for each in ("lambda", "verda")]
    replace_clouds(cache, shipped, clouds, is_alone=True)
    book = open_book(cache)
    monkeypatch.setattr(rebuild, "open_book", lambda folder: book if not list(folder.iterdir()) else open_book(folder))
    return book


def read_offers(book: Book, cloud: str) -> list[Offer]:
    return sorted(book.list_offers(cloud), key=repr)


def test_a_rebuilt_book_has_the_fetched_prices_dates_and_origins(tmp_path: Path, small: Book) -> None:
    facts, output = tmp_path / "facts", tmp_path / "book.db.xz"
    reports = rebuild.fetch_facts(
        facts, {"dearer": Dearer()}, lambda *_, **__: b"", now_s=NOW_S, note=lambda text: None
    )
    assert [(each.cloud, each.error) for each in reports] == [("lambda", None), ("verda", "down")]
    assert rebuild.main([str(facts), "--cached", "--output", str(output)]) == 0
    book = open_book(tmp_path / "new", output)
    before, after = read_offers(small, "lambda"), read_offers(book, "lambda")
    assert sum(each.ondemand_usd_hour or 0 for each in after) == pytest.approx(
        1.5 * sum(each.ondemand_usd_hour or 0 for each in before)
    )
    assert {each.as_of for each in after} == {"2026-12-01"}
    assert read_offers(book, "verda") == read_offers(small, "verda"), "kept, with its dates"
    assert (book.read_figures(), book.read_egress()) == (small.read_figures(), small.read_egress())
    origins = (tmp_path / "ORIGINS.md").read_text()
    checksum = hashlib.sha256((facts / "offers_lambda.csv").read_bytes()).hexdigest()
    assert f"| lambda | dearer | 2026-12-01 | 2026-12-01 | {len(after)} | `{checksum}` |" in origins


def test_the_same_facts_give_the_same_bytes(tmp_path: Path, small: Book) -> None:
    facts, again = tmp_path / "facts", tmp_path / "again"
    rebuild.write_facts(small, facts)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        assert rebuild.main([str(facts), "--cached", "--output", str(tmp_path / name / "book.db.xz")]) == 0
    assert (tmp_path / "one/book.db.xz").read_bytes() == (tmp_path / "two/book.db.xz").read_bytes()
    rebuild.write_facts(open_book(tmp_path / "new", tmp_path / "one/book.db.xz"), again)
    for file in facts.glob("offers_*.csv"):
        assert (again / file.name).read_bytes() == file.read_bytes(), "a book contains exactly its facts"
