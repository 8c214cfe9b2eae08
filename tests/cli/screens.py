"""Screens: a command's output and exit code, as text for a snapshot file.

A `Screen` runs commands in this process on a price book of ten offers, at a fixed time, in 80 columns and without
colour. Temporary paths and random ids are replaced. Update the files with `pytest tests/cli --snapshot-update`, and
review their diff.
"""

from __future__ import annotations

import os
import re
import shlex
import time
from pathlib import Path

import pytest
from syrupy.extensions.single_file import SingleFileSnapshotExtension, WriteMode

from broker.catalog.atomic_replace import replace_clouds
from broker.catalog.bundle import open_book
from broker.catalog.staleness import CloudFacts
from broker.cli.main import main
from broker.clock import SystemClock
from broker.state.store import Store
from broker.types import Offer

NOW_S = 1_796_126_400.0  # 2026-12-01 12:00 UTC
OWNER = "0123456789ab"
LOGINS = ("AWS_", "AZURE_", "BROKER_", "CLOUDSDK_", "GOOGLE_", "R2_")
SCRUBBED = (
    (re.compile(r"(job-\d+|nightly)-[a-z0-9]{5}\b"), r"\1-XXXXX"),  # of the same width, so that tables do not change
    (re.compile(r"^(lineage +).+$", re.MULTILINE), r"\1[ID]"),
    (re.compile(r"^(size +).+$", re.MULTILINE), r"\1[SIZE]"),
)


class TextExtension(SingleFileSnapshotExtension):
    """One readable file per screen."""

    _write_mode = WriteMode.TEXT
    file_extension = "txt"


def make_offers(cloud: str, *rows: tuple[str, str, str, float, float | None, float | None]) -> list[Offer]:
    """Make rows of (zone or region, instance type, accelerators, on-demand USD/h, spot USD/h, band)."""
    offers = []
    for place, instance_type, accelerators, ondemand_usd, spot_usd, band in rows:
        name, _, count = accelerators.partition(":")
        zone = place if place[-1] in "abc" else None
        region = place.rstrip("abc").rstrip("-") if zone else place
        offers.append(
            Offer(
                cloud=cloud, region=region, zone=zone, instance_type=instance_type, vcpus=96 if name else 4,
                memory_gib=1024 if name else 16, accelerator=name or None, accelerator_count=float(count or 0),
                ondemand_usd_hour=ondemand_usd, spot_usd_hour=spot_usd, interruption_band=band, as_of="2026-11-28",
                spot_as_of="2026-11-30",
            )
        )  # fmt: skip
    return offers


OFFERS = {
    "aws": make_offers(
        "aws",
        ("us-east-1a", "p5.48xlarge", "H100:8", 55.04, 22.6, 10),
        ("us-east-1b", "p5.48xlarge", "H100:8", 55.04, 22.6, 10),
        ("eu-west-1a", "p5.48xlarge", "H100:8", 60.5, 31.2, 20),
        ("us-east-1a", "m6i.xlarge", "", 0.192, 0.07, 5),
    ),
    "gcp": make_offers(
        "gcp",
        ("us-central1-a", "a3-highgpu-8g", "H100:8", 88.25, 26.4, None),
        ("europe-west4-b", "a3-highgpu-8g", "H100:8", 92.1, 28.9, None),
        ("us-central1-a", "a2-ultragpu-8g", "A100-80GB:8", 40.55, 16.1, None),
    ),
    "lambda": make_offers(
        "lambda",
        ("us-west-1", "gpu_8x_h100_sxm5", "H100:8", 23.92, None, None),
        ("us-east-1", "gpu_8x_a100_80gb_sxm4", "A100-80GB:8", 14.32, None, None),
        ("us-west-1", "gpu_1x_a10", "A10:1", 0.75, None, None),
    ),
}


def make_book(cache: Path) -> None:
    """Make a price book of the offers above only."""
    facts = {
        name: CloudFacts(cloud=name, ondemand_as_of="2026-11-28", spot_as_of="2026-11-30", source="a test")
        for name in OFFERS
    }
    replace_clouds(cache, open_book(cache), [(facts[name], OFFERS[name]) for name in OFFERS], is_alone=True)


class Screen:
    """A terminal of 80 columns with its own state folder."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self.home = folder / "home"
        self._capsys = capsys

    def write(self, name: str, text: str) -> str:
        (self.folder / name).write_text(text)
        return name

    def open_store(self) -> Store:
        self.home.mkdir(exist_ok=True)
        (self.home / "owner").write_text(OWNER)
        return Store(self.home / "state.db", clock=SystemClock(), owner=OWNER)

    def show(self, *arguments: str) -> str:
        """Return the command line, its exit code, stdout and stderr."""
        with pytest.raises(SystemExit) as leave:
            main(arguments)
        told = self._capsys.readouterr()
        parts = [f"$ broker {shlex.join(arguments)}", f"exit code: {leave.value.code}"]
        streams = {"stdout": told.out, "stderr": told.err}
        parts += [f"----- {name} -----\n{text.rstrip()}" for name, text in streams.items() if text]
        return self.scrub("\n".join(parts) + "\n")

    def scrub(self, text: str) -> str:
        text = text.replace(str(self.folder), "[FOLDER]")
        for pattern, stand_in in SCRUBBED:
            text = pattern.sub(stand_in, text)
        return text


def open_screen(
    folder: Path, cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Screen:
    """Open a screen whose commands see this price book, no login, no daemon, and noon of 2026-12-01 in UTC."""
    for name in list(os.environ):
        if name.startswith(LOGINS):
            monkeypatch.delenv(name)
    nowhere = str(folder / "no-login")
    logins = ("CLOUDSDK_CONFIG", "AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE", "BROKER_SKY_PYTHON")
    environment = {
        **dict.fromkeys(logins, nowhere), "AWS_EC2_METADATA_DISABLED": "true", "NO_GCE_CHECK": "true",
        "BROKER_HOME": str(folder / "home"), "XDG_CACHE_HOME": str(cache), "COLUMNS": "80",
        "NO_COLOR": "1", "TZ": "UTC", "BROKER_OFFLINE": "1",
    }  # fmt: skip
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    time.tzset()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(SystemClock, "now_s", lambda clock: NOW_S)
    monkeypatch.setattr("broker.app.market.measure_machine", lambda: (8, 32.0))
    monkeypatch.setattr("broker.app.container.Context.ensure_daemon", lambda context: None)
    return Screen(folder, capsys)
