"""The price book on the command line, with its sources on a loopback server."""

from __future__ import annotations

import csv
import io
import os
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from broker.catalog.bundle import open_book
from broker.types import Offer
from tests.cli.conftest import Shell

COLUMNS = (
    "InstanceType", "AcceleratorName", "AcceleratorCount", "vCPUs", "MemoryGiB", "Price", "Region",
    "AvailabilityZone", "GpuInfo", "SpotPrice",
)  # fmt: skip
OLD_S = 1_790_000_000  # 2026-09-21


class Mirror(ThreadingHTTPServer):
    """Responses by the last parts of the path; 404 for everything else."""

    pages: dict[str, tuple[int, str]]
    asked: list[str]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        server = self.server
        assert isinstance(server, Mirror)
        server.asked.append(self.path)
        status, text = server.pages.get(self.path.partition("?")[0], (404, "not here"))
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def mirror() -> Iterator[Mirror]:
    server = Mirror(("127.0.0.1", 0), Handler)
    server.pages, server.asked = {}, []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


class Market:
    """A terminal with its own cache, whose sources are the mirror."""

    def __init__(self, folder: Path, mirror: Mirror) -> None:
        self.shell = Shell(folder)
        self.mirror = mirror
        for name in ("AWS", "GCP", "AZURE", "SKYPILOT"):
            self.shell.environment[f"BROKER_PRICES_URL_{name}"] = f"{mirror.url}/{name.lower()}"
        self.shell.environment["XDG_CACHE_HOME"] = str(folder)
        self.offers = open_book(folder / "broker").list_offers("lambda")

    def sell(self, factor: float) -> None:
        """Set the mirror's prices for Lambda: the bundled prices times a factor."""
        self.mirror.pages["/skypilot/lambda/vms.csv"] = (200, write_vms(self.offers, factor))

    def import_old(self, factor: float, *options: str, more: str = "") -> Any:
        """Make a catalog folder written on 2026-09-21."""
        folder = self.shell.folder / "catalog" / "lambda"
        folder.mkdir(parents=True)
        (folder / "vms.csv").write_text(write_vms(self.offers, factor) + more)
        (folder / "images.csv").write_text("not,a,price\n")
        os.utime(folder / "vms.csv", (OLD_S, OLD_S))
        return self.shell.run("catalog", "import", str(folder.parent), *options)

    def info(self) -> dict[str, Any]:
        return {row["cloud"]: row for row in self.shell.read_json("catalog", "info")}


@pytest.fixture
def market(tmp_path: Path, mirror: Mirror) -> Market:
    return Market(tmp_path, mirror)


def write_vms(offers: Any, factor: float) -> str:
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(COLUMNS)
    each: Offer
    for each in offers:
        count = each.accelerator_count or ""
        prices = [round(usd * factor, 6) if usd else "" for usd in (each.ondemand_usd_hour, each.spot_usd_hour)]
        writer.writerow(
            [each.instance_type, each.accelerator or "", count, each.vcpus, each.memory_gib, prices[0], each.region,
             each.zone or "", "", prices[1]]
        )  # fmt: skip
    return text.getvalue()


def test_an_update_is_reported_used_by_plans_and_reset(market: Market) -> None:
    asked = ("gpus", "H100:8", "--cloud", "lambda", "--json")
    before = market.shell.read_json(*asked[:-1])
    market.sell(1.25)
    done = market.shell.run("catalog", "update", "--cloud", "lambda")
    assert re.search(r"lambda: 391 offers from skypilot, 391 prices changed", done.stdout)
    after = market.shell.read_json(*asked[:-1])
    assert after[0]["ondemand_usd_hour"] == pytest.approx(before[0]["ondemand_usd_hour"] * 1.25)
    assert after[0]["memory_gib"] == before[0]["memory_gib"] == 80
    row = market.info()["lambda"]
    assert (row["source"], row["ondemand_days"], row["is_spot_stale"]) == ("skypilot", 0, False)
    assert "Reset to" in market.shell.run("catalog", "reset").stdout
    assert market.shell.read_json(*asked[:-1]) == before


def test_history_draws_how_a_price_moved(market: Market) -> None:
    market.import_old(1.0)
    market.sell(1.25)
    market.shell.run("catalog", "update", "--cloud", "lambda")
    instance_type = market.offers[0].instance_type
    points = market.shell.read_json("history", instance_type)
    first = [each for each in points if each["region"] == points[0]["region"]]
    assert [each["ondemand_usd_hour"] / first[0]["ondemand_usd_hour"] for each in first] == pytest.approx([1, 1.25])
    assert first[0]["day"] == "2026-09-21"
    assert "▁█" in market.shell.run("history", instance_type).stdout


def test_a_failed_cloud_keeps_its_prices_and_the_command_reports_it(market: Market) -> None:
    market.sell(1.1)
    market.mirror.pages["/azure"] = (200, "<html>down for maintenance</html>")
    done = market.shell.run("catalog", "update", "--cloud", "azure", "--cloud", "lambda", code=1)
    assert "lambda: 391 offers from skypilot" in done.stdout
    assert "azure: not updated: " in done.stdout and "is not JSON" in done.stdout
    assert "error: could not update 1 of 2 clouds" in done.stderr
    info = market.info()
    assert (info["azure"]["source"], info["azure"]["offers"]) == ("shipped with broker", 31_742)
    assert info["lambda"]["source"] == "skypilot"


def test_prices_in_another_unit_are_not_believed(market: Market) -> None:
    market.sell(100)
    done = market.shell.run("catalog", "update", "--cloud", "lambda", "--json", code=1)
    assert "rejected" in done.stdout or "another unit" in done.stdout
    assert market.info()["lambda"]["source"] == "shipped with broker"


def test_a_missing_login_gives_a_hint(market: Market) -> None:
    market.shell.environment.pop("GOOGLE_API_KEY", None)
    done = market.shell.run("catalog", "update", "--cloud", "gcp", "--source", "gcp", code=1)
    assert "hint: set `GOOGLE_API_KEY`" in done.stderr
    assert not market.mirror.asked


def test_a_cloud_of_skypilots_that_the_book_does_not_have_is_added_and_planned(market: Market) -> None:
    text = (
        "InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,GpuInfo,Price,SpotPrice,Region\n"
        "1x-RTX_4090,RTX4090,1,32,64.0,\"{'Gpus': [{'MemoryInfo': {'SizeInMiB': 24564}}]}\",0.40,0.00,\"Texas, US\"\n"
    )
    market.mirror.pages["/skypilot/vast/vms.csv"] = (200, text)
    assert "update --cloud vast" in market.shell.run("gpus", "--cloud", "vast", code=3).stderr
    market.shell.run("catalog", "update", "--cloud", "vast")
    (found,) = market.shell.read_json("gpus", "rtx4090")
    assert (found["name"], found["cloud"], found["region"]) == ("RTX4090", "vast", "Texas, US")
    task = market.shell.write("t.yaml", "resources: {accelerators: RTX4090}\nrun: x\n")
    assert "1x-RTX_4090" in market.shell.run("plan", task).stdout


def test_an_exclusive_import_is_the_only_source_of_plans(market: Market) -> None:
    done = market.import_old(0.5, "--only", more="broken,H100,8,1,1,cheap,us-east-1,,,\n")
    assert "lambda: 391 offers" in done.stdout
    assert re.search(r"vms\.csv:393: `Price` is not a number: `cheap`", done.stderr)
    info = market.info()
    assert list(info) == ["lambda"]
    assert info["lambda"]["ondemand_as_of"] == "2026-09-21", "prices are as old as their file"
    assert info["lambda"]["source"].startswith("imported from ")


def test_prices_of_a_misspelt_machine_and_history_of_nothing(market: Market) -> None:
    refused = market.shell.run("prices", "p4d.24xlage", code=3)
    assert "did you mean `p4d.24xlarge`" in refused.stderr
    done = market.shell.run("history", "p4d.24xlarge")
    assert "the catalog has prices from 2025-04-04 and 2025-06-28 and 2026-07-20" in done.stdout


def test_every_table_fits_a_terminal_and_names_ignore_case(market: Market) -> None:
    for arguments in (["catalog", "info"], ["prices", "P4D.24xlarge"], ["gpus", "--all-regions", "h100:8"], ["gpus"]):
        shown = market.shell.run(*arguments).stdout
        assert shown and max(map(len, shown.splitlines())) <= 80, arguments


@pytest.mark.parametrize("load", [(), ("--serve", "--rps", "5")])
def test_advice_states_the_dates_of_its_own_prices(market: Market, load: tuple[str, ...]) -> None:
    """Not that of the newest price in the book, which may be of another cloud."""
    wish = ("advise", "--params", "7B", "--infra", "aws", "--gpus", "A100", "--spot", *load)
    done = market.shell.run(*wish, *(() if load else ("--tokens", "20B")))
    assert "Prices as of 2025-06-28;" in " ".join(done.stdout.split())
    told = " ".join(done.stderr.split())
    assert "note: outdated prices: spot on aws (2025-06-28" in told and "broker catalog update --cloud aws" in told


def test_a_plan_with_stale_prices_explains_how_to_update_them(market: Market) -> None:
    task = market.shell.write("t.yaml", "resources: {infra: aws, accelerators: A100:8, use_spot: true}\nrun: x\n")
    done = market.shell.run("plan", task)
    assert "Prices as of 2025-06-28" in done.stdout, "the date of the spot price, which is the one that is paid"
    note = r"note: aws's spot prices are from 2025-06-28; update them with `broker catalog update --cloud aws`"
    assert re.search(note, done.stderr)


@pytest.mark.parametrize("arguments", [("gpus",), ("gpus", "A100:8"), ("prices", "p4d.24xlarge")])
def test_lists_of_old_prices_warn_as_a_plan_does(market: Market, arguments: tuple[str, ...]) -> None:
    done = market.shell.run(*arguments)
    assert "note: outdated prices:" in done.stderr and "spot on aws (2025-06-28" in " ".join(done.stderr.split())
    assert "update them with `broker catalog update" in done.stderr
