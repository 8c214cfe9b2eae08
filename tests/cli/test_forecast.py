"""The forecast in `broker plan`, on a price book of ten offers."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from broker.cli.main import main
from tests.cli.screens import OFFERS, Screen, make_book, open_screen

TASK = (
    "resources: {accelerators: 'H100:8', use_spot: true}\ngoal: {work: 40h, deadline: 60h, confidence: 0.3}\nrun: x\n"
)


@pytest.fixture
def screen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Screen]:
    make_book(tmp_path / "cache" / "broker")
    with pytest.MonkeyPatch.context() as patch:
        yield open_screen(tmp_path, tmp_path / "cache", capsys, patch)
    time.tzset()  # back to the environment's zone


def read_forecast(screen: Screen, capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    with pytest.raises(SystemExit):
        main(["plan", screen.write("spot.yaml", TASK), "--json"])
    (plan,) = json.loads(capsys.readouterr().out)
    found: dict[str, object] = plan["forecast"]
    return found


def test_json_has_the_forecast_and_refusals_of_all_places_raise_its_cost(
    screen: Screen, capsys: pytest.CaptureFixture[str]
) -> None:
    before = read_forecast(screen, capsys)
    usd = before["usd"]
    assert isinstance(usd, dict) and usd["p10"] < usd["p50"] < usd["p90"]
    store = screen.open_store()
    for cloud in OFFERS:
        store.refusals.add(cloud, "", None, "", True, 3600.0, "full")
    after = read_forecast(screen, capsys)
    assert after["usd_mean"] > before["usd_mean"]  # type: ignore[operator]
