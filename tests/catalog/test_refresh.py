"""A bad refresh never replaces a good book; a good one is a single rename."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from broker.catalog import history
from broker.catalog.atomic_replace import replace_clouds
from broker.catalog.book import Book
from broker.catalog.bundle import locate_live_book, open_book
from broker.catalog.history import find_points, name_history, remember_changes
from broker.catalog.importing import import_catalog
from broker.catalog.refresh import CloudRefresh, load_sources, refresh_book
from broker.catalog.sources import SOURCES
from broker.catalog.staleness import CloudFacts
from broker.errors import AuthError, NoOfferError, SourceError, StateError, UsageError
from broker.locks import is_locked
from broker.task.loader import load_tasks_text
from broker.types import Offer
from tests.catalog.market import NO_LOGIN, NOW_S, read
from tests.tiers import spread

DAY_S = 86400.0


class Source:
    """A price source that returns the book's offers, changed."""

    name, clouds = "fake", ("lambda", "verda")

    def __init__(self, change: Callable[[list[Offer]], list[Offer]], error: Exception | None = None) -> None:
        self._change = change
        self._error = error

    def fetch(self, cloud: str, get: object, *, known: Sequence[Offer], as_of_s: float) -> Iterator[Offer]:
        offers = self._change([replace(each, as_of="", spot_as_of="") for each in known])  # all of today
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
    spread(
        [
            (Source(lambda offers: []), "only 0 offers"),
            (Source(lambda offers: offers[: len(offers) // 3]), "rejected"),
            (Source(scale(0.0)), "rejected"),
            (Source(scale(float("nan"))), "rejected"),
            (Source(scale(30.0)), "another unit or currency"),
            (
                Source(lambda offers: [replace(each, zone="other", ondemand_usd_hour=40.0) for each in offers]),
                "currency",
            ),
            (Source(lambda offers: [replace(each, region="") for each in offers]), "lacks cloud, region"),
            (Source(lambda offers: [replace(each, instance_type="") for each in offers]), "lacks cloud, region"),
            (Source(lambda offers: [replace(each, cloud="aws") for each in offers]), "lacks cloud, region"),
            (Source(lambda offers: [replace(offers[0], ondemand_usd_hour=0.001), *offers[1:]]), "its previous price"),
            (Source(lambda offers: [replace(each, ondemand_usd_hour=None) for each in offers]), "has no price"),
            (Source(scale(1.1), SourceError("the page broke off")), "broke off"),
            (Source(scale(1.1), NO_LOGIN), "no login here"),
        ],
        every=3,
    ),
    ids=[
        "empty",
        "cut short",
        "zero",
        "nan",
        "cents",
        "cents elsewhere",
        "no region",
        "no type",
        "other cloud",
        "one wrong price",
        "no price",
        "broken off",
        "no login",
    ],
)
def test_a_bad_answer_leaves_the_book_as_it_was(tmp_path: Path, source: Source, words: str) -> None:
    before = total(open_book(tmp_path))
    (report,) = refresh(tmp_path, source)
    assert report.error is not None and words in report.error
    assert not locate_live_book(tmp_path).exists()
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


def test_the_next_source_is_queried_if_the_first_has_no_login(tmp_path: Path) -> None:
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


def test_spot_prices_that_all_went_missing_are_not_believed(tmp_path: Path) -> None:
    source = Source(lambda offers: [replace(each, spot_usd_hour=None) for each in offers if each.ondemand_usd_hour])
    (report,) = refresh(tmp_path, source, clouds=("verda",))
    assert report.error is not None and "0 spot prices" in report.error


def test_date_of_a_cloud_is_that_of_its_newest_prices(tmp_path: Path) -> None:
    """A source may keep the prices of places that it does not list, with their dates."""

    def keep_one(offers: list[Offer]) -> list[Offer]:
        return [replace(offers[0], as_of="2025-01-01", spot_as_of="2025-01-02"), *offers[1:]]

    kept, *_ = open_book(tmp_path).list_offers("verda")
    refresh(tmp_path, Source(keep_one), clouds=("verda",))
    book = open_book(tmp_path)
    facts = book.get_facts("verda")
    assert (facts.ondemand_as_of, facts.spot_as_of) == ("2026-12-01", "2026-12-01")
    (found,) = [
        each
        for each in book.list_offers("verda")
        if (each.instance_type, each.region, each.zone) == (kept.instance_type, kept.region, kept.zone)
    ]
    assert (found.as_of, found.spot_as_of) == ("2025-01-01", "2025-01-02")


def read_back(cache: Path, *offers: Offer) -> Offer:
    """Return the one offer of a cloud whose book is replaced by these."""
    facts = CloudFacts(cloud="lambda", ondemand_as_of="2026-01-05", spot_as_of="2026-01-02", source="fake")
    replace_clouds(cache, open_book(cache), [(facts, offers)])
    (found,) = open_book(cache).list_offers("lambda")
    return found


def test_price_keeps_its_date_even_if_it_is_that_of_the_other_price(tmp_path: Path) -> None:
    offer = replace(open_book(tmp_path).list_offers("lambda")[0], spot_usd_hour=0.5)
    found = read_back(tmp_path, replace(offer, as_of="2026-01-02", spot_as_of="2026-01-05"))
    assert (found.as_of, found.spot_as_of) == ("2026-01-02", "2026-01-05")


def test_of_two_prices_at_one_place_the_cheapest_counts_whichever_it_is(tmp_path: Path) -> None:
    offer = open_book(tmp_path).list_offers("lambda")[0]
    cheap = replace(offer, ondemand_usd_hour=3.0, spot_usd_hour=1.0)
    plain = replace(offer, ondemand_usd_hour=2.0, spot_usd_hour=None)
    for offers in ((cheap, plain), (plain, cheap)):
        assert read_back(tmp_path, *offers).spot_usd_hour == 1.0


@pytest.mark.parametrize(("count", "told_gib", "gib"), [(1, 79.6, 80), (8, 636.8, 80), (1, 40.0, 40), (1, 0.0, 80)])
def test_memory_of_a_card_is_its_nominal_one_if_the_source_means_that(
    tmp_path: Path, count: int, told_gib: float, gib: float
) -> None:
    """Sources tell GB, GiB, that of all cards together, or nothing."""
    offer = replace(
        open_book(tmp_path).list_offers("lambda")[0], accelerator="A100-80GB", accelerator_count=count,
        accelerator_memory_gib=told_gib,
    )  # fmt: skip
    assert read_back(tmp_path, offer).accelerator_memory_gib == gib


def test_history_keeps_the_changes_of_400_days_and_the_price_that_applied_before(tmp_path: Path) -> None:
    first = open_book(tmp_path).list_offers("lambda")[0]
    known = replace(first, as_of="2024-12-01")
    for usd, day in enumerate(("2025-01-01", "2025-03-01", "2025-12-01", "2026-06-01"), start=101):
        newer = replace(first, ondemand_usd_hour=float(usd))
        remember_changes(tmp_path, [newer], [known], day=day)
        known = newer
    found = [point for point in find_points(tmp_path, first.instance_type, region=first.region)]
    assert [point.day for point in found] == ["2025-03-01", "2025-12-01", "2026-06-01"]
    assert [point.ondemand_usd_hour for point in found] == [102.0, 103.0, 104.0]


def test_history_keeps_changes_only_and_begins_with_the_old_book(tmp_path: Path) -> None:
    instance_type = open_book(tmp_path).list_offers("lambda")[0].instance_type
    for day, factor in enumerate((1.1, 1.0, 1.2)):
        refresh(tmp_path, Source(scale(factor)), now_s=NOW_S + day * DAY_S)
    points = find_points(tmp_path, instance_type)
    places = {point.region for point in points}
    one = [point for point in points if point.region == min(places)]
    assert [point.day for point in one] == ["2026-11-21", "2026-12-01", "2026-12-03"]
    first, second, third = (point.ondemand_usd_hour or 0.0 for point in one)
    assert (second, third) == (pytest.approx(first * 1.1), pytest.approx(first * 1.1 * 1.2))


def test_history_holds_nothing_of_prices_that_never_moved(tmp_path: Path) -> None:
    def raise_one(offers: list[Offer]) -> list[Offer]:
        return [replace(offers[0], ondemand_usd_hour=(offers[0].ondemand_usd_hour or 1.0) * 2), *offers[1:]]

    offers = open_book(tmp_path).list_offers("lambda")
    (report,) = refresh(tmp_path, Source(raise_one))
    assert report.changed == 1
    names = {each.instance_type for each in offers}
    assert sum(len(find_points(tmp_path, name)) for name in names) == 2


def test_history_of_a_place_that_no_longer_offers_a_machine_ends(tmp_path: Path) -> None:
    offers = open_book(tmp_path).list_offers("lambda")[:3]
    dearer = [replace(each, ondemand_usd_hour=99.0) for each in offers[:2]]
    remember_changes(tmp_path, [*dearer, offers[2]], offers, day="2026-12-01")
    remember_changes(tmp_path, dearer[:1], [*dearer, offers[2]], day="2026-12-02")  # two places are gone
    remember_changes(tmp_path, dearer, dearer[:1], day="2026-12-03")  # one is back, at the price that it had
    prices = [
        [
            (point.day, point.ondemand_usd_hour)
            for point in find_points(tmp_path, each.instance_type, region=each.region)
            if point.zone == (each.zone or "") and point.day >= "2026-12"
        ]
        for each in offers
    ]
    assert prices[0] == [("2026-12-01", 99.0)]
    assert prices[1] == [("2026-12-01", 99.0), ("2026-12-02", None), ("2026-12-03", 99.0)]
    assert prices[2] == [], "its price never changed, so nothing claims that it still has one"


def test_history_forgets_the_oldest_days_when_it_grows_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "ROWS_MAX", 10)
    offers = [each for each in open_book(tmp_path).list_offers("verda")][:4]
    for number in range(6):
        newer = [replace(each, ondemand_usd_hour=1.0 + number) for each in offers]
        remember_changes(tmp_path, newer, offers, day=f"2026-12-0{number + 1}")
    days = {each.day for offer in offers for each in find_points(tmp_path, offer.instance_type)}
    assert days == {"2026-12-05", "2026-12-06"}


def test_a_history_that_is_damaged_does_not_stop_a_refresh(tmp_path: Path) -> None:
    instance_type = open_book(tmp_path).list_offers("lambda")[0].instance_type
    name_history(tmp_path).write_bytes(b"no database" * 500)
    (report,) = refresh(tmp_path, Source(scale(1.1)))
    assert report.error is None and report.changed > 0
    assert find_points(tmp_path, instance_type) == []


def test_two_refreshes_at_once_keep_what_each_brought(tmp_path: Path) -> None:
    """Both opened the book before either wrote: the first one's prices must survive the second."""
    book = open_book(tmp_path)
    for cloud in ("lambda", "verda"):
        facts = CloudFacts(cloud=cloud, ondemand_as_of="2026-12-01", spot_as_of="2026-12-01", source="test")
        replace_clouds(tmp_path, book, [(facts, scale(1.5)(list(book.list_offers(cloud))))])
    after = open_book(tmp_path)
    assert {cloud: after.get_facts(cloud).source for cloud in ("lambda", "verda")} == {
        "lambda": "test",
        "verda": "test",
    }


def test_a_refresh_that_is_interrupted_keeps_the_clouds_that_were_done(tmp_path: Path) -> None:
    class Interrupted(Source):
        def fetch(self, cloud: str, get: object, *, known: Sequence[Offer], as_of_s: float) -> Iterator[Offer]:
            if cloud == "verda":
                raise KeyboardInterrupt
            yield from super().fetch(cloud, get, known=known, as_of_s=as_of_s)

    with pytest.raises(KeyboardInterrupt):
        refresh(tmp_path, Interrupted(scale(1.2)), clouds=("lambda", "verda"))
    assert open_book(tmp_path).get_facts("lambda").source == "fake"


def test_processors_and_memory_outlive_a_refresh(tmp_path: Path) -> None:
    def forget(offers: list[Offer]) -> list[Offer]:
        known = [replace(each, accelerator_memory_gib=0.0) for each in offers]
        return [*known, replace(known[0], instance_type="gpu_2x_gh200", accelerator=None, accelerator_count=0)]

    before = open_book(tmp_path).list_offers("lambda")
    refresh(tmp_path, Source(forget))
    after = open_book(tmp_path)
    memory = {(each.instance_type, each.region): each.accelerator_memory_gib for each in after.list_offers("lambda")}
    assert all(memory[each.instance_type, each.region] == each.accelerator_memory_gib for each in before)
    (task,) = load_tasks_text("resources: {infra: lambda}\nrun: x", "t.yaml")
    assert "gpu_2x_gh200" not in {each.instance_type for each in after.find_offers(task)}, "it has Arm processors"


def test_of_two_offers_of_one_machine_at_one_place_the_cheapest_stays(tmp_path: Path) -> None:
    def double(offers: list[Offer]) -> list[Offer]:
        return [*scale(1.2)(offers), *offers, *scale(1.1)(offers)]

    before = open_book(tmp_path)
    refresh(tmp_path, Source(double))
    assert total(open_book(tmp_path)) == pytest.approx(total(before))
    assert open_book(tmp_path).count_offers() == before.count_offers()


def test_a_discontinued_machine_is_dropped(tmp_path: Path) -> None:
    gone = open_book(tmp_path).list_offers("lambda")[0].instance_type
    refresh(tmp_path, Source(lambda offers: [each for each in offers if each.instance_type != gone]))
    with pytest.raises(NoOfferError, match=gone):
        open_book(tmp_path).find_prices(gone)


def test_an_import_replaces_its_clouds_and_an_exclusive_one_removes_all_others(tmp_path: Path) -> None:
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


def test_imported_prices_have_the_date_of_their_file_and_never_one_of_the_future(tmp_path: Path) -> None:
    folder = tmp_path / "catalog"
    file = folder / "lambda" / "vms.csv"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"\xef\xbb\xbf" + read("lambda_vms.csv"))  # as spreadsheets save it
    for days, date in ((-40, "2026-10-22"), (40, "2026-12-01")):
        os.utime(file, (NOW_S + days * 86400, NOW_S + days * 86400))
        report = import_catalog(tmp_path / "cache", open_book(tmp_path / "cache"), folder, now_s=NOW_S)
        assert report.offers == {"lambda": 3} and not report.faults
        facts = open_book(tmp_path / "cache").get_facts("lambda")
        assert (facts.ondemand_as_of, facts.spot_as_of) == (date, date)


def test_new_book_is_on_the_disk_before_it_takes_the_place_of_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []

    def fail(descriptor: int) -> None:
        synced.append(os.fstat(descriptor).st_size)
        raise OSError("no space left")

    before = open_book(tmp_path)
    monkeypatch.setattr(os, "fsync", fail)
    facts = CloudFacts(cloud="lambda", ondemand_as_of="2026-12-01", spot_as_of="2026-12-01", source="test")
    with pytest.raises(StateError, match="cannot write the new prices"):
        replace_clouds(tmp_path, before, [(facts, scale(1.5)(list(before.list_offers("lambda"))))])
    assert synced and synced[0] > 1_000_000
    assert total(open_book(tmp_path)) == total(before) and not list(tmp_path.glob("*.tmp*"))


def test_book_is_locked_while_it_is_copied_and_written(tmp_path: Path) -> None:
    """Otherwise two writers would copy the old book, and the prices of one of them would be lost."""
    book, locked = open_book(tmp_path), list[bool]()

    def give() -> Iterator[tuple[CloudFacts, list[Offer]]]:
        locked.append(is_locked(tmp_path / "prices.lock"))
        facts = CloudFacts(cloud="lambda", ondemand_as_of="2026-12-01", spot_as_of="2026-12-01", source="test")
        yield facts, list(book.list_offers("lambda"))

    replace_clouds(tmp_path, book, give())
    assert locked == [True] and not is_locked(tmp_path / "prices.lock")


def test_a_folder_without_a_catalog_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no catalog in"):
        import_catalog(tmp_path, open_book(tmp_path), tmp_path / "nothing", now_s=NOW_S)


def test_every_source_of_the_registry_can_be_made() -> None:
    assert set(load_sources()) == set(SOURCES)
