"""A bad refresh never replaces a good book; a good one is one rename."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from broker.catalog.book import Book
from broker.catalog.history import History
from broker.catalog.importing import import_catalog
from broker.catalog.opening import name_live_book, open_book
from broker.catalog.refresh import CloudRefresh, load_sources, refresh_book
from broker.catalog.sources import SOURCES
from broker.errors import AuthError, SourceError, StateError, UsageError
from broker.types import Offer
from tests.catalog.market import NO_LOGIN, NOW_S, read

DAY_S = 86400.0


class Source:
    """A price source that sells what the book knows, changed."""

    name, clouds = "fake", ("lambda", "verda")

    def __init__(self, change: Callable[[list[Offer]], list[Offer]], error: Exception | None = None) -> None:
        self._change = change
        self._error = error

    def fetch(self, cloud: str, get: object, *, known: Sequence[Offer], as_of_s: float) -> Iterator[Offer]:
        offers = self._change(list(known))
        yield from offers[: len(offers) // 2]
        if self._error:
            raise self._error
        yield from offers[len(offers) // 2 :]


def scale(factor: float) -> Callable[[list[Offer]], list[Offer]]:
    def change(offers: list[Offer]) -> list[Offer]:
        return [replace(each, ondemand_usd_hour=(each.ondemand_usd_hour or 1.0) * factor) for each in offers]

    return change


def refresh(
    cache: Path, source: Source | Mapping[str, Any], *, now_s: float = NOW_S, clouds: Sequence[str] = ("lambda",)
) -> Sequence[CloudRefresh]:
    sources = source if isinstance(source, Mapping) else {"fake": source}
    return refresh_book(cache, open_book(cache), clouds, sources=sources, get=lambda *_, **__: b"", now_s=now_s)


def total(book: Book, cloud: str = "lambda") -> float:
    return sum(each.ondemand_usd_hour or 0.0 for each in book.list_offers(cloud))


def test_new_prices_are_used_by_the_next_command_and_dated(tmp_path: Path) -> None:
    before = open_book(tmp_path)
    (report,) = refresh(tmp_path, Source(scale(1.1)))
    after = open_book(tmp_path)
    assert report.error is None and report.changed == len(before.list_offers("lambda"))
    assert total(after) == pytest.approx(1.1 * total(before))
    assert after.get_facts("lambda").ondemand_as_of == "2026-12-01"
    assert after.get_facts("lambda").source == "fake"
    assert after.get_facts("aws") == before.get_facts("aws")
    assert after.count_offers() == before.count_offers()


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (Source(lambda offers: []), "only 0 offers"),
        (Source(lambda offers: offers[: len(offers) // 3]), "not believed"),
        (Source(scale(0.0)), "not believed"),
        (Source(scale(float("nan"))), "not believed"),
        (Source(scale(30.0)), "another unit or currency"),
        (Source(scale(1.1), SourceError("the page broke off")), "broke off"),
        (Source(scale(1.1), NO_LOGIN), "no login here"),
    ],
    ids=["empty", "cut short", "zero", "nan", "cents", "broken off", "no login"],
)
def test_a_bad_answer_leaves_the_book_as_it_was(tmp_path: Path, source: Source, words: str) -> None:
    before = total(open_book(tmp_path))
    (report,) = refresh(tmp_path, source)
    assert report.error is not None and words in report.error
    assert not name_live_book(tmp_path).exists()
    assert total(open_book(tmp_path)) == before


def test_one_cloud_that_fails_does_not_stop_another(tmp_path: Path) -> None:
    class Half(Source):
        def fetch(self, cloud: str, get: object, *, known: Sequence[Offer], as_of_s: float) -> Iterator[Offer]:
            if cloud == "verda":
                raise SourceError("down")
            yield from super().fetch(cloud, get, known=known, as_of_s=as_of_s)

    reports = refresh(tmp_path, Half(scale(1.2)), clouds=("verda", "lambda", "nowhere"))
    assert [report.error is None for report in reports] == [False, True, False]
    book = open_book(tmp_path)
    assert book.get_facts("verda").source != "fake" and book.get_facts("lambda").source == "fake"


def test_the_next_source_is_asked_where_the_first_has_no_login(tmp_path: Path) -> None:
    sources = {"first": Source(scale(1.0), AuthError("log in")), "second": Source(scale(1.3))}
    (report,) = refresh(tmp_path, sources)
    assert (report.source, report.error) == ("second", None)


def test_a_disk_that_cannot_be_written_keeps_the_old_book(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    before = total(open_book(tmp_path))
    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(StateError, match="No space left"):
        refresh(tmp_path, Source(scale(1.1)))
    monkeypatch.undo()
    assert total(open_book(tmp_path)) == before
    assert not list(tmp_path.glob("*.tmp"))


def test_a_live_book_that_is_damaged_or_of_another_version_is_passed_over(tmp_path: Path) -> None:
    before = total(open_book(tmp_path))
    name_live_book(tmp_path).write_bytes(b"SQLite format 3\0 no more")
    assert total(open_book(tmp_path)) == before


def test_a_cache_that_cannot_be_written_does_not_stop_a_plan(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("a file where the cache folder should be")
    assert open_book(blocked / "cache").count_offers()["aws"] > 40_000


def test_history_keeps_changes_only_and_begins_with_the_old_book(tmp_path: Path) -> None:
    instance_type = open_book(tmp_path).list_offers("lambda")[0].instance_type
    for day, factor in enumerate((1.1, 1.0, 1.2)):
        refresh(tmp_path, Source(scale(factor)), now_s=NOW_S + day * DAY_S)
    with closing(History(tmp_path / "history.db")) as history:
        points = history.find(instance_type)
    places = {point.region for point in points}
    one = [point for point in points if point.region == min(places)]
    assert [point.day for point in one] == ["2026-11-21", "2026-12-01", "2026-12-03"]
    first, second, third = (point.ondemand_usd_hour or 0.0 for point in one)
    assert (second, third) == (pytest.approx(first * 1.1), pytest.approx(first * 1.1 * 1.2))


def test_an_import_replaces_its_clouds_and_alone_leaves_no_other(tmp_path: Path) -> None:
    folder = tmp_path / "catalog"
    (folder / "lambda").mkdir(parents=True)
    (folder / "lambda" / "vms.csv").write_bytes(read("lambda_vms.csv"))
    cache = tmp_path / "cache"
    report = import_catalog(cache, open_book(cache), folder, now_s=NOW_S)
    assert report.offers == {"lambda": 3}
    assert open_book(cache).count_offers()["lambda"] == 3 and len(open_book(cache).clouds) == 11
    import_catalog(cache, open_book(cache), folder, now_s=NOW_S, is_alone=True)
    book = open_book(cache)
    assert book.count_offers() == {"lambda": 3}
    assert [each.instance_type for each in book.find_prices("gpu_8x_h100_sxm5")] == ["gpu_8x_h100_sxm5"]
    assert book.read_figures()["H100"].memory_gib == 80, "accelerators stay known"


def test_a_folder_without_a_catalog_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no catalog"):
        import_catalog(tmp_path, open_book(tmp_path), tmp_path / "nothing", now_s=NOW_S)


def test_every_source_of_the_registry_can_be_made() -> None:
    assert set(load_sources()) == set(SOURCES)
