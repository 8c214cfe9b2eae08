"""Every source, on responses in its documented format, valid and corrupted."""

from __future__ import annotations

import collections
import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from broker.catalog.atomic_replace import replace_clouds
from broker.catalog.bundle import open_book
from broker.catalog.refresh import check_offers, refresh_book
from broker.catalog.sources import SOURCES, azure
from broker.catalog.sources.aws import AwsSource
from broker.catalog.sources.azure import AzureSource
from broker.catalog.sources.gcp import GcpSource, price_machine
from broker.catalog.staleness import CloudFacts
from broker.errors import AuthError, SourceError
from broker.types import Offer
from tests.catalog.market import KNOWN, NOW_S, FakeAws, FakeWeb, make_known, make_source, read


def fetch(name: str, change: Callable[[bytes], bytes] = lambda body: body) -> list[Offer]:
    source, cloud, get = make_source(name, change=change)
    return list(source.fetch(cloud, get, known=KNOWN[cloud], as_of_s=NOW_S))


def show(offers: list[Offer]) -> dict[tuple[str, str | None], tuple[float | None, float | None]]:
    return {
        (each.instance_type, each.zone or each.region): (each.ondemand_usd_hour, each.spot_usd_hour) for each in offers
    }


@pytest.mark.parametrize("name", SOURCES)
def test_every_source_gives_offers_that_are_believed(name: str) -> None:
    source, cloud, get = make_source(name)
    assert cloud in source.clouds and source.name == name
    offers = list(source.fetch(cloud, get, known=KNOWN[cloud], as_of_s=NOW_S))
    check_offers(cloud, offers, KNOWN[cloud])
    assert {offer.cloud for offer in offers} == {cloud}
    assert all(offer.vcpus > 0 for offer in offers)


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize(
    "change",
    [
        lambda body: b"<html><body>Service unavailable</body></html>",
        lambda body: body[: len(body) // 2],
        lambda body: b"",
        lambda body: b'{"Error": "internal"}',
        lambda body: b"\xff\xfe\x00\x01",
    ],
    ids=["html", "truncated", "empty", "error object", "binary"],
)
def test_a_corrupted_answer_is_an_error_or_ignored(name: str, change: Callable[[bytes], bytes]) -> None:
    _, cloud, _ = make_source(name)
    with pytest.raises((SourceError, ValueError)) as caught:  # a FakeAws page that is not JSON fails in the fake itself
        check_offers(cloud, fetch(name, change), KNOWN[cloud])
    assert isinstance(caught.value, SourceError) or name == "aws"


def test_azure_takes_linux_prices_of_machines_it_knows_and_skips_the_free_ones() -> None:
    assert show(fetch("azure")) == {
        ("Standard_NC24ads_A100_v4", "eastus"): (3.673, 0.9),
        ("Standard_NC24ads_A100_v4", "westeurope"): (4.1, None),
        ("Standard_NC4as_T4_v3", "westeurope"): (0.61, 0.12),
    }


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (b'"currencyCode": "USD"', b'"currencyCode": "EUR"', "EUR, not USD"),
        (b'"retailPrice"', b'"retail_price"', "unexpected format"),
        (b"retail/prices?page=2", b"retail/prices?page=1", "repeats a page"),
        (b"https://prices.azure.com", b"https://prices.example.com", "continues on another host"),
        (b"https://prices.azure.com", b"https://[prices.azure.com", "continues on another host"),
    ],
)
def test_azure_error_names_the_cause(old: bytes, new: bytes, words: str) -> None:
    with pytest.raises(SourceError, match=words):
        fetch("azure", lambda body: body.replace(old, new) if b"page_2" not in body else body)


def test_endless_azure_pages_end_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(azure, "PAGES_MAX", 20)
    asked = 0

    def get(url: str, *, query: Mapping[str, str] | None = None) -> bytes:
        nonlocal asked
        asked += 1
        return json.dumps({"Items": [], "NextPageLink": f"https://prices.azure.com:443/p?skip={asked}"}).encode()

    with pytest.raises(SourceError, match="more than 20 pages"):
        list(AzureSource().fetch("azure", get, known=KNOWN["azure"], as_of_s=NOW_S))
    assert asked == 21


JUNK: tuple[Any, ...] = (None, [], {}, "", "x", -1, 1e999, True, [None], {"USD": None}, "NaN", 10**400)


def spoil(value: Any, draw: random.Random) -> Any:
    """Corrupt the JSON: remove one value, or replace it."""
    if isinstance(value, (dict, list)) and value and draw.random() < 0.93:
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        key = draw.choice(keys)
        copy: Any = dict(value) if isinstance(value, dict) else list(value)
        if draw.random() < 0.15:
            del copy[key]
        else:
            copy[key] = spoil(value[key], draw)
        return copy
    if isinstance(value, str) and value.startswith("{"):
        return json.dumps(spoil(json.loads(value), draw))
    return draw.choice(JUNK)


@pytest.mark.parametrize("name", ["aws", "gcp", "azure"])
def test_corrupted_answers_yield_offers_or_a_source_error(name: str) -> None:
    outcomes = collections.Counter[str]()
    for seed in range(300):
        draw = random.Random(seed)

        def change(body: bytes, draw: random.Random = draw) -> bytes:
            return json.dumps(spoil(json.loads(body), draw)).encode()

        source, cloud, get = make_source(name, change=change)
        try:
            offers = list(source.fetch(cloud, get, known=KNOWN[cloud], as_of_s=NOW_S))
            check_offers(cloud, offers, KNOWN[cloud])
            outcomes["believed"] += 1
        except SourceError:
            outcomes["refused"] += 1
    assert outcomes["believed"] > 10 and outcomes["refused"] > 10, "both kinds occurred"


def test_aws_joins_list_prices_spot_history_and_bands() -> None:
    offers = fetch("aws")
    assert show(offers) == {
        ("p4d.24xlarge", "us-east-1a"): (21.957642, 9.5),  # the newest of two
        ("p4d.24xlarge", "us-east-1b"): (21.957642, None),
        ("p4d.24xlarge", "us-east-1c"): (21.957642, 7.25),  # a zone that is not in the book
        ("m5.large", "us-east-1a"): (0.096, 0.038),
        ("m5.large", "af-south-1a"): (0.096, 0.05),  # a region that is disabled in this account: its last spot price
        ("p4d.24xlarge", "af-south-1"): (21.957642, None),
    }
    bands = {each.instance_type: each.interruption_band for each in offers if each.region == "us-east-1"}
    assert bands == {"p4d.24xlarge": 100.0, "m5.large": 5.0}
    assert {(each.region, each.as_of, each.spot_as_of) for each in offers if each.spot_usd_hour} == {
        ("us-east-1", "", ""),
        ("af-south-1", "", "2026-01-02"),
    }
    assert not any(each.is_estimated for each in offers)


def test_of_several_spot_prices_of_a_place_the_newest_counts_whatever_their_order() -> None:
    def quote(zone: str, time: str, usd: str) -> dict[str, str]:
        zone = f"us-east-1{zone}"
        return {"InstanceType": "p5.48xlarge", "AvailabilityZone": zone, "Timestamp": time, "SpotPrice": usd}

    pages = [
        [quote("a", "2026-11-02", "0.3"), quote("a", "2026-11-01", "9"), quote("b", "2026-11-01", "9")],
        [quote("b", "2026-11-02", "0.2"), quote("b", "2026-11-03", "0"), quote("c", "2026-11-01", "0")],
        [quote("a", "2026-11-02", "7"), quote("-bos-1a", "2026-11-02", "0.1")],
    ]

    class Pages(FakeAws):
        def paginate(self, **arguments: Any) -> Iterator[Any]:
            yield from ({"SpotPriceHistory": page} for page in pages)

    found = AwsSource(make_client=Pages())._read_spot("us-east-1", NOW_S)
    places = {zone: usd for (_, zone), (usd, _) in found.items()}
    assert places == {"us-east-1a": 0.3, "us-east-1b": 0.2}, "0 is not a price, and a local zone none of the region's"


def test_aws_without_a_login_raises_an_auth_error() -> None:
    error = type("NoCredentialsError", (Exception,), {})("Unable to locate credentials")
    source = AwsSource(make_client=FakeAws(error=error))
    with pytest.raises(AuthError) as caught:
        list(source.fetch("aws", FakeWeb({"": read("aws_advisor.json")}), known=KNOWN["aws"], as_of_s=NOW_S))
    assert "aws configure" in caught.value.hints[0]


@pytest.mark.parametrize("code", ["AuthFailure", "ExpiredToken", "AccessDeniedException", "UnauthorizedOperation"])
def test_aws_login_without_permission_names_the_permission(code: str) -> None:
    error = type("ClientError", (Exception,), {"response": {"Error": {"Code": code}}})(code)
    source = AwsSource(make_client=FakeAws(error=error))
    with pytest.raises(AuthError) as caught:
        list(source.fetch("aws", FakeWeb({"": read("aws_advisor.json")}), known=KNOWN["aws"], as_of_s=NOW_S))
    assert "pricing:GetProducts" in caught.value.hints[0]


def test_aws_throttled_after_all_retries_is_a_source_error() -> None:
    error = type("ClientError", (Exception,), {})("RequestLimitExceeded")
    source = AwsSource(make_client=FakeAws(error=error))
    with pytest.raises(SourceError, match="RequestLimitExceeded"):
        list(source.fetch("aws", FakeWeb({"": read("aws_advisor.json")}), known=KNOWN["aws"], as_of_s=NOW_S))


def test_gcp_puts_machines_together_from_cores_memory_and_accelerators() -> None:
    offers = fetch("gcp")
    found = show(offers)
    ondemand, spot = found["n1-standard-8+1xT4", "us-central1-a"]
    assert ondemand == pytest.approx(8 * 0.031611 + 30 * 0.004237 + 0.35)
    assert spot == pytest.approx(8 * 0.006655 + 30 * 0.000892 + 0.11)
    assert found["n1-standard-8", "us-east1-b"] == (pytest.approx(8 * 0.031611 + 30 * 0.004237), None)
    (tpu,) = [each for each in offers if each.accelerator == "TPU-v5e"]
    assert (tpu.ondemand_usd_hour, tpu.as_of) == (1.0, "2026-01-01"), "its last price is kept, with its date"
    assert {each.as_of for each in offers if each is not tpu} == {""}


def test_gcp_with_renamed_parts_is_an_error_and_does_not_keep_old_prices() -> None:
    with pytest.raises(SourceError, match="only 0 of 3 machines"):
        fetch("gcp", lambda body: body.replace(b"Instance Core", b"Instance Thread"))


def test_gcp_sells_mega_accelerators_under_another_name() -> None:
    rates = {(False, "A3 Core", "r"): 0.03, (False, "A3 Ram", "r"): 0.003, (False, "H100", "r"): 10.0}
    offer = make_known("gcp", "a3-megagpu-8g", "r", accelerator="H100", accelerator_count=8, vcpus=208, memory_gib=1872)
    assert price_machine(offer, rates, is_spot=False) is None
    mega = {**rates, (False, "H100-MEGA", "r"): 9.0}
    assert price_machine(offer, mega, is_spot=False) == pytest.approx(208 * 0.03 + 1872 * 0.003 + 8 * 9.0)


def test_gcp_without_a_key_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GOOGLE_API_KEY", raising=False)
    with pytest.raises(AuthError) as caught:
        list(GcpSource().fetch("gcp", FakeWeb({}), known=KNOWN["gcp"], as_of_s=NOW_S))
    assert "GOOGLE_API_KEY" in caught.value.hints[0]


def test_gcp_repeated_page_token_is_refused() -> None:
    again = json.dumps({"skus": [], "nextPageToken": "p2"}).encode()
    with pytest.raises(SourceError, match="repeats a page token"):
        list(GcpSource(key="k").fetch("gcp", FakeWeb({"": again}), known=KNOWN["gcp"], as_of_s=NOW_S))


def test_skypilots_rows_keep_other_facts_of_the_book() -> None:
    found = {each.instance_type: each for each in fetch("skypilot")}
    assert found["gpu_8x_h100_sxm5"].accelerator_memory_gib == 80
    assert found["gpu_1x_a10"].interruption_band == 5.0
    assert found["cpu_4x_general"].accelerator is None


def test_an_aws_login_that_may_read_only_spot_prices_renews_those(tmp_path: Path) -> None:
    class OnlySpot(FakeAws):
        def paginate(self, **arguments: Any) -> Iterator[Any]:
            if self._operation == "get_products":
                raise type("ClientError", (Exception,), {"response": {"Error": {"Code": "AccessDeniedException"}}})(
                    "no"
                )
            return super().paginate(**arguments)

    web = FakeWeb({"advisor": read("aws_advisor.json")})
    source = AwsSource(make_client=OnlySpot())
    known = [replace(each, is_estimated=each.instance_type.startswith("p4d")) for each in KNOWN["aws"]]
    offers = list(source.fetch("aws", web, known=known, as_of_s=NOW_S))
    old = {(each.instance_type, each.region): each for each in known}
    fresh = [each for each in offers if each.spot_usd_hour and not each.spot_as_of]
    assert fresh and {each.zone for each in fresh} >= {"us-east-1a"}
    for each in fresh:
        before = old[each.instance_type, each.region]
        assert each.spot_usd_hour != before.spot_usd_hour
        assert (each.ondemand_usd_hour, each.as_of) == (before.ondemand_usd_hour, "2026-01-01")
    assert any(each.is_estimated for each in fresh), "a price that is kept is still an estimate"
    book_of = CloudFacts(cloud="aws", ondemand_as_of="2026-01-01", spot_as_of="2026-01-02", source="before")
    replace_clouds(tmp_path, open_book(tmp_path), [(book_of, known)], is_alone=True)
    (report,) = refresh_book(tmp_path, open_book(tmp_path), ["aws"], sources={"aws": source}, get=web, now_s=NOW_S)
    facts = open_book(tmp_path).get_facts("aws")
    assert report.error is None and (facts.ondemand_as_of, facts.spot_as_of) == ("2026-01-01", "2026-12-01")
