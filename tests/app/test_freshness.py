"""Prices of processes that plan for days: the daemon, the controllers of a server, and the server itself."""

from __future__ import annotations

import asyncio
import subprocess
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from broker.app.container import Context
from broker.app.freshness import POLL_S, keep_prices_fresh
from broker.catalog.atomic_replace import replace_clouds
from broker.catalog.attempts import FRESH_S, record_attempts
from broker.catalog.bundle import open_book
from broker.task.loader import load_tasks_text
from tests.app.test_container import Hosts
from tests.cli.screens import OFFERS, make_book

TASK = "resources: {infra: aws, accelerators: 'H100:8', use_spot: true}\nrun: x\n"
START_S = 1.79e9


class EndedError(Exception):
    """The test's hours are over."""


class Hours:
    """A clock that moves only when it is slept on, and raises once `hours` have passed."""

    def __init__(self, hours: float) -> None:
        self.time_s, self.end_s = START_S, START_S + hours * 3600

    def now_s(self) -> float:
        return self.time_s

    async def sleep(self, duration_s: float) -> None:
        self.time_s += duration_s
        if self.time_s > self.end_s:
            raise EndedError


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "broker"


def test_controllers_plan_at_the_prices_of_the_last_update(tmp_path: Path, cache: Path) -> None:
    make_book(cache)
    context = Context(tmp_path / "home")
    context.__dict__["clouds"] = {"aws": Hosts(name="aws")}
    (task,) = load_tasks_text(TASK, "train.yaml")
    assert context.plan_for_controller(task, None).choice.placement.usd_hour == pytest.approx(22.6)
    cheaper = [replace(each, spot_usd_hour=(each.spot_usd_hour or 0.0) / 2) for each in OFFERS["aws"]]
    book = open_book(cache)
    replace_clouds(cache, book, [(book.get_facts("aws"), cheaper)])
    assert context.market.rank(task).choice.placement.usd_hour == pytest.approx(22.6)  # as a command has shown
    assert context.plan_for_controller(task, None).choice.placement.usd_hour == pytest.approx(11.3)
    context.store.close()


@pytest.mark.parametrize("is_offline", [False, True])
def test_process_that_lives_for_days_starts_the_updates_that_are_due(
    is_offline: bool, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("BROKER_OFFLINE", "CI"):
        monkeypatch.delenv(name, raising=False)
    if is_offline:
        monkeypatch.setenv("BROKER_OFFLINE", "1")
    clock, started = Hours(15.0), list[float]()

    def start(arguments: tuple[str, ...], **options: Any) -> None:
        assert arguments[-1] == "updater" and options["start_new_session"]
        started.append((clock.now_s() - START_S) / 3600)
        record_attempts(cache, {"aws": None}, now_s=clock.now_s())

    monkeypatch.setattr(subprocess, "Popen", start)
    cache.mkdir()
    record_attempts(cache, {"aws": None}, now_s=START_S)
    with suppress(EndedError):
        asyncio.run(keep_prices_fresh(clock, tmp_path / "home"))
    assert FRESH_S % POLL_S == 0
    assert started == ([] if is_offline else [pytest.approx(7.0), pytest.approx(14.0)])
