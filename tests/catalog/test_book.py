"""The shipped price book."""

from __future__ import annotations

from pathlib import Path

import pytest

from broker.catalog.book import Book
from broker.catalog.opening import open_book
from broker.errors import NoOfferError
from broker.task.loader import load_tasks_text
from broker.types import Offer


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Book:
    return open_book(tmp_path_factory.mktemp("cache"))


def find(book: Book, resources: str) -> list[Offer]:
    (task,) = load_tasks_text(f"resources: {resources}\nrun: x", "t.yaml")
    return list(book.find_offers(task))


def test_book_holds_eleven_clouds(book: Book) -> None:
    counts = book.count_offers()
    assert len(counts) == 11
    assert sum(counts.values()) == 102_325
    assert counts["aws"] == 48_169


def test_known_price_is_found(book: Book) -> None:
    (offer,) = find(book, "{infra: verda/FIN-01, instance_type: 1A100.22V}")
    assert (offer.ondemand_usd_hour, offer.spot_usd_hour) == (1.29, 0.4515)
    assert (offer.accelerator, offer.accelerator_memory_gib, offer.vcpus) == ("A100-80GB", 80, 22)


def test_prices_are_positive_and_spot_is_cheaper(book: Book) -> None:
    for offer in find(book, "{accelerators: {A100:8, H100:8, T4:1}}"):
        prices = [price for price in (offer.spot_usd_hour, offer.ondemand_usd_hour) if price is not None]
        assert prices
        assert all(price > 0 for price in prices)
        assert prices == sorted(prices)


def test_accelerator_names_ignore_case_and_misses_are_named(book: Book) -> None:
    assert find(book, "{accelerators: a100-80gb:8}") == find(book, "{accelerators: A100-80GB:8}")
    with pytest.raises(NoOfferError, match="no accelerator is called `H1000`") as caught:
        find(book, "{accelerators: H1000:8}")
    assert "`H100`" in caught.value.hints[0]


def test_cheapest_machine_without_accelerator_is_not_lost(book: Book) -> None:
    everything = [offer for cloud in book.count_offers() for offer in find(book, f"{{infra: {cloud}, cpus: 4}}")]
    few = find(book, "{cpus: 4}")
    for price in ("ondemand_usd_hour", "spot_usd_hour"):
        prices = [[getattr(each, price) for each in offers if getattr(each, price)] for offers in (few, everything)]
        assert min(prices[0]) == min(prices[1])


def test_damaged_cache_is_made_anew(tmp_path: Path) -> None:
    open_book(tmp_path)
    (path,) = tmp_path.glob("*.db")
    path.chmod(0o600)
    path.write_bytes(b"not a database at all" * 1000)
    assert sum(open_book(tmp_path).count_offers().values()) == 102_325
    assert path.stat().st_mode & 0o777 == 0o600
