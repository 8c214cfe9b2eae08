"""A canary: its share of requests under load, its replicas, and its end."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from broker.app.canaries import read_share
from broker.clock import SystemClock
from broker.errors import UsageError
from broker.serve.canary import Canary, read_canary, remove_canary, write_canary
from broker.serve.files import Backend, Routing, read_file
from broker.serve.routes import RouteTable
from broker.types import JobStatus
from tests.serve.live_bed import LiveBed
from tests.serve.test_controller import World, make_task


def make_table(versions: list[int], share: float) -> RouteTable:
    table = RouteTable(clock=SystemClock(), draw=random.Random(1))
    backends = [Backend(number=n, version=v, host="h", port=n) for n, v in enumerate(versions, start=1)]
    table.update(backends, {2: share})
    for route in table.routes.values():
        table.admit(route)
    return table


def count_canaries(table: RouteTable, **wanted: Any) -> int:
    chosen = [table.choose(**wanted) for _ in range(2000)]
    return sum(each is not None and each.backend.version == 2 for each in chosen)


def test_canary_gets_its_share_whatever_the_number_of_replicas() -> None:
    assert count_canaries(make_table([1, 1, 1, 2], 0.1)) == pytest.approx(200, abs=50)
    assert count_canaries(make_table([1, 2, 2], 0.1)) == pytest.approx(200, abs=50)


def test_versions_without_ready_replicas_get_nothing_and_a_stream_keeps_its_version() -> None:
    table = make_table([1, 2], 0.1)
    one, canary = (table.routes[number].backend for number in (1, 2))
    assert count_canaries(table, like=canary) == 2000 and count_canaries(table, like=one) == 0
    table.exclude(table.routes[2], "gone")
    assert count_canaries(table) == 0
    table.admit(table.routes[2])
    table.exclude(table.routes[1], "gone")
    assert count_canaries(table) == 2000


def add_canary(world: World, share: float = 0.1) -> None:
    world.store.services.add_version("web", make_task(version="b"))
    world.store.services.set_version("web", 1)
    write_canary(world.folder, Canary(version=2, share=share))


def list_versions(world: World) -> list[int]:
    return sorted(each.version for each in world.store.services.list_replicas("web"))


def test_canary_runs_alongside_the_others_until_it_is_rolled_back(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.settle(20)
    add_canary(world)
    world.settle(20)
    assert list_versions(world) == [1, 1, 2]
    routing = read_file(world.folder.routing, Routing)
    assert routing is not None and routing.shares == {2: 0.1}
    world.controller = world.make_controller()
    world.settle(5)  # a new controller continues
    assert list_versions(world) == [1, 1, 2]
    remove_canary(world.folder)
    world.settle(20)
    assert list_versions(world) == [1, 1]
    assert world.store.services.find_ready_version("web") == 1


def test_canary_of_a_service_that_is_scaled_to_zero_has_no_replicas_either(tmp_path: Path) -> None:
    """Otherwise it would be the only ready one: it would get all requests, and cost as much as the service saves."""
    world = World(tmp_path, make_task(0, replicas_max=2, target_in_flight=4.0, downscale_delay_s=5.0))
    add_canary(world)
    world.settle(20)
    assert list_versions(world) == []
    for _ in range(2):
        world.in_flight_here = 1  # a waiting request
        world.settle(20)
        assert list_versions(world) == [1, 2]
        world.in_flight_here = 0
        world.settle(30)
        assert list_versions(world) == [] and all(each.status.is_terminal for each in world.store.jobs.list())
    assert read_canary(world.folder) is not None


def test_canary_keeps_its_replica_while_there_is_no_place_for_others(tmp_path: Path) -> None:
    world = World(tmp_path)
    add_canary(world)
    world.settle(20)
    assert list_versions(world) == [1, 1, 2]
    world.controller = world.make_controller(place=lambda request: [])
    world.settle(20)
    assert 2 in list_versions(world)


@pytest.mark.parametrize("is_killed", [False, True], ids=["whole", "killed"])
def test_promoted_canary_replaces_the_others(tmp_path: Path, is_killed: bool) -> None:
    world = World(tmp_path)
    world.settle(20)
    add_canary(world)
    world.settle(20)
    world.store.services.set_version("web", 2)
    if not is_killed:
        remove_canary(world.folder)
    world.settle(40)
    assert list_versions(world) == [2, 2]


def test_canary_that_becomes_ready_while_it_drains_is_no_version_to_return_to(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.settle(20)
    world.is_refusing = True
    add_canary(world)
    world.settle(3)
    remove_canary(world.folder)
    world.settle(1)
    (canary,) = (each for each in world.store.services.list_replicas("web") if each.version == 2)
    assert canary.drained_s is not None and canary.ready_s is None
    world.is_refusing = False
    world.settle(10)
    assert list_versions(world) == [1, 1] and world.store.services.find_ready_version("web") == 1


@pytest.mark.long
def test_canary_that_fails_three_times_is_rolled_back(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.settle(20)
    world.failing = lambda task: task.run == "b"
    add_canary(world)
    world.settle(400)
    assert read_canary(world.folder) is None and list_versions(world) == [1, 1]
    service = world.store.services.get("web")
    assert service is not None and service.version == 1 and not service.failure


def test_failures_of_a_canary_are_its_own(tmp_path: Path) -> None:
    """Replicas of the service fail and become ready meanwhile, which neither ends a canary nor keeps it."""
    world = World(tmp_path)
    world.settle(5)
    world.failing = lambda task: task.run == "b"
    add_canary(world)

    def count_failed() -> int:
        return sum(job.task.run == "b" and job.status is JobStatus.FAILED for job in world.store.jobs.list())

    seen = 0
    while read_canary(world.folder) is not None and seen < 6:
        world.settle(1)
        if count_failed() > seen:
            seen = count_failed()
            running = {job.id for job in world.store.jobs.list() if job.status is JobStatus.RUNNING}
            for each in [each for each in world.store.services.list_replicas("web") if each.job_id in running][:1]:
                world.fail(each)
    assert count_failed() == 3


def test_share_is_read_as_percent_or_fraction() -> None:
    assert read_share("10%") == read_share("0.1") == 0.1
    for text in ("0", "100%", "x", "2"):
        with pytest.raises(UsageError, match="invalid share"):
            read_share(text)


@pytest.mark.long
def test_shares_that_change_under_load_fail_no_request(tmp_path: Path) -> None:
    counts: dict[str, int] = {}

    async def run() -> None:
        bed = LiveBed(tmp_path, pause_s=0.0)
        async with bed.run(2), aiohttp.ClientSession() as client:

            async def ask(number: int) -> None:
                async with client.post(f"{bed.url}/echo", data=b"x") as response:
                    assert response.status == 200
                    version = response.headers["x-broker-version"]
                    counts[version] = counts.get(version, 0) + 1

            bed.add(version=2)
            for shares in ({2: 0.2}, {2: 0.5}, {}):
                bed.share(shares)
                await bed.until_ready(3)
                counts.clear()
                for _ in range(20):
                    await asyncio.gather(*(ask(number) for number in range(20)))
                share = counts.get("2", 0) / 400
                if shares:
                    assert share == pytest.approx(shares[2], abs=0.1)

    asyncio.run(run())
