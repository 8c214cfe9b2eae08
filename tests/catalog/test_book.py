"""The shipped price book."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest

from broker.catalog.architecture import guess_architecture
from broker.catalog.book import Book
from broker.catalog.bundle import open_book
from broker.errors import NoOfferError
from broker.task.loader import load_tasks_text
from broker.types import Offer, Resources


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


def test_book_has_the_listed_price_of_a_known_machine(book: Book) -> None:
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
    with pytest.raises(NoOfferError, match="unknown accelerator `H1000`") as caught:
        find(book, "{accelerators: H1000:8}")
    assert "`H100`" in caught.value.hints[0]


def test_prices_of_an_accelerator_are_those_of_the_place_that_is_named(book: Book) -> None:
    for is_spot in (False, True):
        for price in book.list_accelerators("A100", is_spot=is_spot):
            offers = [each for each in book.list_offers(price.cloud) if each.accelerator == price.name]
            same = [each for each in offers if each.accelerator_count == price.count]
            here = [(each.ondemand_usd_hour, each.spot_usd_hour) for each in same if each.region == price.region]
            assert (price.ondemand_usd_hour, price.spot_usd_hour) in here
            if is_spot:
                assert price.spot_usd_hour == min(each.spot_usd_hour for each in same if each.spot_usd_hour)


def query(book: Book, sql: str) -> list[tuple[object, ...]]:
    return book._database.execute(sql).fetchall()


@pytest.mark.parametrize(
    ("asked", "where"),
    [
        ("cpus: 4", "t.vcpus = 4 AND t.memory_gib >= 4"),
        ("cpus: 4+, memory: 16+", "t.vcpus >= 4 AND t.memory_gib >= 16"),
        ("cpus: 96+, memory: 700+", "t.vcpus >= 96 AND t.memory_gib >= 700"),
        (
            "infra: aws/us-east-1, cpus: 8+",
            "t.cloud = 'aws' AND r.text = 'us-east-1' AND t.vcpus >= 8 AND t.memory_gib >= 4",
        ),
        ("infra: lambda", "t.cloud = 'lambda'"),
        ("cpus: 2+", "t.vcpus >= 2 AND t.memory_gib >= 4"),
        ("cpus: 2+, memory: 8x", "t.vcpus >= 2 AND t.memory_gib >= 8 * t.vcpus"),
        ("memory: 1+", "t.memory_gib >= 1"),
    ],
)
@pytest.mark.parametrize(("use_spot", "price"), [("true", "spot_usd_hour"), ("false", "ondemand_usd_hour")])
def test_machines_without_accelerator_are_the_cheapest_there_are(
    book: Book, asked: str, where: str, use_spot: str, price: str
) -> None:
    """Both query plans return the prices of a plain sort of all offers."""
    everything = query(
        book,
        f"SELECT o.{price} FROM types t JOIN offers o ON o.type = t.id JOIN texts r ON r.id = o.region WHERE "
        f"t.accelerator IS NULL AND t.arch = 'x86_64' AND {where} AND o.{price} IS NOT NULL ORDER BY 1 LIMIT 1000",
    )
    found = [getattr(each, price) for each in find(book, f"{{{asked}, use_spot: {use_spot}}}")]
    assert sorted(filter(None, found)) == [row[0] for row in everything]


def test_a_task_with_a_goal_sees_both_pricing_models(book: Book) -> None:
    (task,) = load_tasks_text("resources: {cpus: 4}\ngoal: {work: 5h}\nrun: x", "t.yaml")
    assert {each.instance_type for each in book.find_offers(task)} >= {
        each.instance_type
        for use_spot in ("true", "false")
        for each in find(book, f"{{cpus: 4, use_spot: {use_spot}}}")
    }


def test_larger_machines_may_serve_a_request_for_fewer_cards(book: Book) -> None:
    counts = {offer.accelerator_count for offer in find(book, "{accelerators: A100:4}")}
    assert min(counts) == 4 and 8 in counts


@pytest.mark.parametrize("instance_type", ["p4d.24xlarge", "g5.xlarge"])
def test_places_are_listed_cheapest_first(book: Book, instance_type: str) -> None:
    offers = book.find_prices(instance_type)
    least = [min(usd for usd in (each.spot_usd_hour, each.ondemand_usd_hour) if usd) for each in offers]
    assert least == sorted(least) and least[0] < least[-1]


def test_clouds_that_are_left_out_have_no_offers(book: Book) -> None:
    (task,) = load_tasks_text("resources: {accelerators: A100:8}\nrun: x", "t.yaml")
    clouds = {each.cloud for each in book.find_offers(task)}
    assert {each.cloud for each in book.find_offers(task, but={"aws", "gcp"})} == clouds - {"aws", "gcp"}
    (task,) = load_tasks_text("resources: {infra: aws, accelerators: A100:8}\nrun: x", "t.yaml")
    assert not book.find_offers(task, but={"aws"})


def test_estimated_prices_are_counted_apart(book: Book) -> None:
    estimated, every = book.count_estimated(), book.count_offers()
    for cloud, count in every.items():
        assert estimated.get(cloud, 0) == sum(each.is_estimated for each in book.list_offers(cloud)) <= count


def test_offers_are_as_if_made_the_usual_way(book: Book) -> None:
    for offer in find(book, "{accelerators: A100:8}"):
        made = Offer(**{field.name: getattr(offer, field.name) for field in fields(Offer)})
        assert made == offer and hash(made) == hash(offer)
        assert type(offer.is_estimated) is bool
        assert replace(offer, zone=None).zone is None


def test_each_price_has_its_own_date(book: Book) -> None:
    dates = {
        each.region: (each.as_of, each.spot_as_of) for each in find(book, "{infra: aws, instance_type: p4d.24xlarge}")
    }
    assert dates["us-east-1"] == ("2026-07-20", "2025-06-28")
    assert dates["eu-west-1"] == ("2025-04-04", "2025-06-28")


@pytest.mark.parametrize(
    ("resources", "message", "hint"),
    [
        ("{infra: vast}", "unknown cloud `vast`", "add its prices with `broker catalog update --cloud vast`"),
        ("{infra: aws/us-est-1}", "unknown region `us-est-1` in aws", "`us-east-1`"),
        ("{infra: aws/europe-west4}", "unknown region `europe-west4` in aws", "`infra: gcp/europe-west4`"),
        ("{infra: aws/us-east-1a}", "unknown region `us-east-1a` in aws", "`infra: aws/us-east-1/us-east-1a`"),
        ("{infra: aws/us-east-1/us-east-1z}", "unknown zone `us-east-1z` in aws", "`us-east-1a`"),
        (
            "{infra: aws/us-east-1/us-west-2a}",
            "unknown zone `us-west-2a` in us-east-1",
            "`infra: aws/us-west-2/us-west-2a`",
        ),
        ("{instance_type: p4d.24xlage}", "unknown instance type `p4d.24xlage`", "did you mean `p4d.24xlarge`"),
        ("{instance_type: h100}", "unknown instance type `h100`", "list its offers with `broker gpus h100`"),
        (
            "{infra: gcp, instance_type: p4d.24xlarge}",
            "unknown instance type `p4d.24xlarge` in gcp",
            "available on aws",
        ),
        ("{accelerators: H1000:8}", "unknown accelerator `H1000`", "did you mean `H100`"),
    ],
)
def test_unknown_names_are_refused_with_near_misses(book: Book, resources: str, message: str, hint: str) -> None:
    with pytest.raises(NoOfferError) as caught:
        find(book, resources)
    assert message in caught.value.message
    assert hint in " ".join(caught.value.hints)


def test_an_unknown_cloud_is_refused(book: Book) -> None:
    with pytest.raises(NoOfferError, match="unknown cloud `awz`") as caught:
        book.check_cloud("awz")
    assert "did you mean `aws`?" in caught.value.hints


def test_an_existing_place_without_a_match_is_not_an_unknown_name(book: Book) -> None:
    assert find(book, "{infra: aws/af-south-1, accelerators: H200:8}") == []
    book.check_places(Resources(cloud="aws", region="af-south-1"))


def test_names_of_accelerators_ignore_case(book: Book) -> None:
    assert find(book, "{infra: AWS/US-EAST-1, instance_type: P4D.24xlarge}") == find(
        book, "{infra: aws/us-east-1, instance_type: p4d.24xlarge}"
    )


def test_architectures_guessed_from_names_match_the_book(book: Book) -> None:
    rows = query(book, "SELECT cloud, instance_type, arch FROM types")
    assert rows
    for cloud, instance_type, arch in rows:
        assert guess_architecture(str(cloud), str(instance_type)) == arch, instance_type


def test_damaged_cache_is_rebuilt(tmp_path: Path) -> None:
    open_book(tmp_path)
    (path,) = tmp_path.glob("*.db")
    path.chmod(0o600)
    path.write_bytes(b"not a database at all" * 1000)
    assert sum(open_book(tmp_path).count_offers().values()) == 102_325
    assert path.stat().st_mode & 0o777 == 0o600
