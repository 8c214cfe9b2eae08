"""Processes that run for weeks use the prices of the newest update: the pages, and the daemon for schedules."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from broker.app.container import Context
from broker.app.market import find_cache
from broker.app.schedules import RunLauncher
from broker.dashboard.reader import PageReader
from broker.types import Goal, JobSchedule, Resources, ScheduleSpec, Task
from tests.catalog.test_bundle import make_live

SOLD = "gpu_1x_a10"  # of Lambda, whose prices `make_live` raises
TASK = Task(run="true", resources=(Resources(cloud="lambda", instance_type=SOLD, use_spot=False),), goal=Goal())


@pytest.fixture
def context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Context]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    context = Context(tmp_path / "home")
    yield context
    context.close()


def read_price(context: Context) -> float:
    price = context.market.book.find_prices(SOLD)[0].ondemand_usd_hour
    assert price is not None
    return price


def test_pages_show_the_newest_prices(context: Context) -> None:
    reader = PageReader(lambda: context)
    before, _ = asyncio.run(reader.read(read_price))
    make_live(find_cache())
    after, _ = asyncio.run(reader.read(read_price))
    reader.close()
    assert after == pytest.approx(1.1 * before)


def test_job_of_a_schedule_is_planned_at_the_newest_prices(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("broker.app.schedules.check_programs", lambda context, plans: None)
    monkeypatch.setattr("broker.app.schedules.plan_launch", lambda context, task: context.market.plan(task))
    schedule = JobSchedule(
        name="monthly", uid="u", spec=ScheduleSpec(cron="0 2 1 * *"), user="", project="", created_s=0.0, hedge=1,
        is_paused=False, next_s=None,
    )  # fmt: skip
    launcher = RunLauncher(context)
    before = launcher.plan(schedule, TASK).choice.placement.usd_hour
    make_live(find_cache())
    assert launcher.plan(schedule, TASK).choice.placement.usd_hour == pytest.approx(1.1 * before)
