"""The gateways of a service: their jobs, files and loads, with simulated machines and balancers."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from broker.errors import TransientError
from broker.runtime.reports import ExchangeReply
from broker.serve import gateways
from broker.serve.files import Load, LoadTotals, ReplicaLoad, Routing, ServiceFolder, read_file, write_file
from broker.serve.gateways import SILENT_S_MAX, find_cluster, list_tries, read_loads, read_merged_load
from broker.serve.keys import KeyUsage, UsageBook, create_key, read_usage
from broker.serve.observing import observe
from broker.types import Cluster, GatewaySpec, JobStatus, ServiceEventKind, Task
from tests.serve import test_controller_kills as kills
from tests.serve.test_controller import World, make_task
from tests.tiers import exhaustive, long

AHEAD_S = 500.0  # of the clocks of gateways


def make_gateway_task(gateway_count: int = 2, **fields: Any) -> Task:
    task = make_task(**fields)
    assert task.service is not None
    return replace(task, service=replace(task.service, gateway=GatewaySpec(count=gateway_count)))


class GatewayWorld(World):
    """Also simulates the machines of gateways: `files` is what each holds, by cluster."""

    def __init__(self, folder: Path, task: Task | None = None) -> None:
        self.files: dict[str, dict[str, str]] = {}
        self.silent: set[str] = set()  # clusters that do not answer
        self.in_flight: dict[str, int] = {}
        self.answered: dict[str, int] = {}  # requests
        self.calls = 0
        super().__init__(folder, task or make_gateway_task())

    def write_program(self, folder: ServiceFolder, *, is_here: bool) -> Path:
        assert is_here
        return folder.path / "gateway-program"

    def launch_balancer(self, folder: ServiceFolder) -> bool:
        raise AssertionError("a service with gateways has no balancer next to its controller")

    async def exchange(self, cluster: Cluster, files: Mapping[str, str], read: Sequence[str]) -> ExchangeReply:
        self.calls += 1
        if cluster.name in self.silent or self.store.clusters.get(cluster.name) is None:
            raise TransientError("no answer")
        held = self.files.setdefault(cluster.name, {})
        held.update(files)
        digests = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in held.items()}
        return ExchangeReply(files={name: held[name] for name in read if name in held}, digests=digests)

    def play(self) -> None:
        super().play()
        for name, held in self.files.items():
            if "routing.json" in held and self.store.clusters.get(name) is not None:
                routing = msgspec.json.decode(held["routing.json"], type=Routing)
                loads = {each.number: ReplicaLoad(is_ready=True, in_flight=0, since_s=0.0) for each in routing.backends}
                load = Load(
                    generation=routing.generation, time_s=self.clock.now + AHEAD_S, pid=1, replicas=loads,
                    in_flight=self.in_flight.get(name, 0), arrivals=self.answered.get(name, 0),
                    totals=LoadTotals(responses={"200": self.answered.get(name, 0)}),
                )  # fmt: skip
                held["load.json"] = msgspec.json.encode(load).decode()

    def name_clusters(self) -> list[str | None]:
        """Return the machine of each gateway, by number."""
        service = self.store.services.get("web")
        assert service is not None
        found = [find_cluster(self.store, each.job) for each in list_tries(self.store, service)]
        return [each.name if each is not None else None for each in found]

    def read_routing(self, number: int) -> Routing:
        name = self.name_clusters()[number - 1]
        assert name is not None
        return msgspec.json.decode(self.files[name]["routing.json"], type=Routing)

    def fail(self, number: int) -> None:
        """Let a gateway's program end, and its machine with it."""
        service = self.store.services.get("web")
        assert service is not None
        job = list_tries(self.store, service)[number - 1].job
        assert job is not None
        self.store.jobs.set_status(job.id, JobStatus.FAILED, "killed")
        self.store.jobs.put_attempt(replace(job.attempts[-1], ended_s=self.clock.now))
        self.store.clusters.delete(job.attempts[-1].cluster)

    def list_ready(self) -> list[int]:
        loads = read_loads(self.folder, now_s=self.clock.now).values()
        rows = self.store.services.list_replicas("web")
        unfinished = frozenset(self.store.jobs.list_unfinished_ids())
        return [
            row.version for row in rows
            if row.drained_s is None and any(observe(self.store, row, load, unfinished).is_ready for load in loads)
        ]  # fmt: skip

    def check(self) -> None:
        """Check that every live job belongs to a replica or to a gateway, which has at most one."""
        service = self.store.services.get("web")
        rows = self.store.services.list_replicas("web") if service else []
        live = {job.id: job.name for job in self.store.jobs.list() if not job.status.is_terminal}
        others = [name for job_id, name in live.items() if job_id not in {row.job_id for row in rows}]
        assert len(set(others)) == len(others) and all("-gateway-" in (name or "") for name in others)


def test_each_gateway_gets_its_own_key_and_nothing_of_the_service_beyond_what_it_needs(tmp_path: Path) -> None:
    world = GatewayWorld(tmp_path)
    create_key(world.folder, "ann", now_s=world.clock.now)
    world.settle(10)
    assert world.list_ready() == [1, 1]
    first, second = (world.files[name] for name in world.name_clusters() if name)
    expected = {"balancer.pem", "replica.pem", "keys.json", "routing.json", "load.json"}
    assert set(first) == set(second) == expected
    assert "PRIVATE KEY" in first["balancer.pem"] and first["balancer.pem"] != second["balancer.pem"]
    assert "PRIVATE KEY" not in first["replica.pem"] and "CERTIFICATE" in first["replica.pem"]
    row = world.store.services.list_replicas("web")[0]
    job = world.store.jobs.get(row.job_id)
    assert job is not None
    clients = job.task.secrets["BROKER_BALANCER_PEM"].value
    assert "PRIVATE KEY" not in clients and clients.count("BEGIN CERTIFICATE") == 2
    assert [world.read_routing(number).port for number in (1, 2)] == [1, 2]
    assert [world.read_routing(number).balancers for number in (1, 2)] == [2, 2]


def test_loads_are_added_for_scaling(tmp_path: Path) -> None:
    world = GatewayWorld(tmp_path, make_gateway_task(count=1, replicas_max=4, target_in_flight=2.0))
    world.settle(10)
    assert len(world.list_ready()) == 1
    first, second = world.name_clusters()
    assert first and second
    world.in_flight = {first: 3, second: 4}
    world.settle(10)
    assert len(world.list_ready()) == 4


def test_silent_gateway_keeps_the_replicas_that_its_load_required(tmp_path: Path) -> None:
    task = make_gateway_task(count=1, replicas_max=4, target_in_flight=2.0, downscale_delay_s=10.0)
    world = GatewayWorld(tmp_path, task)
    world.settle(10)
    first, second = world.name_clusters()
    assert first and second
    world.in_flight = {first: 7}
    world.settle(10)
    assert len(world.list_ready()) == 4
    world.silent.add(first)
    world.settle(60)
    assert len(world.list_ready()) == 4, "the other one alone would need one"
    world.silent.clear()
    world.in_flight = {}
    world.settle(60)
    assert len(world.list_ready()) == 1


def make_loaded_pair(folder: Path, first_load: int, second_load: int) -> tuple[GatewayWorld, str, str]:
    """Return a service whose two gateways have reported these requests in flight, and the names of their clusters."""
    task = make_gateway_task(count=1, replicas_max=4, target_in_flight=2.0, downscale_delay_s=10.0)
    world = GatewayWorld(folder, task)
    world.settle(10)
    first, second = world.name_clusters()
    assert first and second
    world.in_flight = {first: first_load, second: second_load}
    world.settle(10)
    return world, first, second


def test_gateway_that_stays_silent_counts_with_its_last_load(tmp_path: Path) -> None:
    world, first, second = make_loaded_pair(tmp_path, 3, 4)
    world.silent.add(first)
    world.in_flight = {first: 0, second: 1}
    world.settle(60)
    assert len(world.list_ready()) == 4
    world.clock.now += SILENT_S_MAX
    world.settle(60)
    assert len(world.list_ready()) == 2, "for the three that it had, and one"


@pytest.mark.long
def test_gateway_that_stays_silent_counts_with_its_last_load_at_the_next_controller(tmp_path: Path) -> None:
    world, first, _ = make_loaded_pair(tmp_path, 3, 1)
    world.silent.add(first)
    world.settle(10)
    for _ in range(2):  # the second one reads what the first one saved
        world.controller = world.make_controller()
        world.settle(60)
        world.clock.now += SILENT_S_MAX
        world.settle(60)
        assert len(world.list_ready()) == 2, "for the three that it had, and one"


def test_responses_of_gateways_are_never_counted_twice_and_never_fall(tmp_path: Path) -> None:
    world = GatewayWorld(tmp_path)

    def count() -> int:
        world.settle(20)
        load = read_merged_load(world.folder, now_s=world.clock.now)
        assert load is not None
        return load.totals.responses["200"]

    world.settle(10)
    first, second = world.name_clusters()
    assert first and second
    world.answered = {first: 5, second: 7}
    assert count() == 12
    world.silent.add(first)
    assert count() == 12, "the silent one has answered its five"
    world.fail(1)
    assert count() == 12
    replaced = world.name_clusters()[0]
    assert replaced not in (None, first)
    world.answered = {str(replaced): 2, second: 8}
    assert count() == 15
    world.controller = world.make_controller()
    assert count() == 15
    world.answered[second] = 3  # its balancer was started again
    assert count() == 18


def test_lost_gateway_is_replaced_while_the_other_is_instructed(tmp_path: Path) -> None:
    world = GatewayWorld(tmp_path)
    world.settle(10)
    before = world.name_clusters()
    world.fail(1)
    asyncio.run(world.controller.step())
    world.settle(2)
    assert world.read_routing(2).balancers == 1  # now it may use the whole of each limit
    world.settle(20)
    after = world.name_clusters()
    assert after[0] not in (None, before[0]) and after[1] == before[1]
    assert world.read_routing(1).balancers == 2
    assert ServiceEventKind.GATEWAY_LOST in world.list_kinds()
    world.check()


def test_drained_replica_is_kept_while_a_gateway_is_silent(tmp_path: Path) -> None:
    """It may still send requests there: it acts on its last routing file."""
    world = GatewayWorld(tmp_path)
    world.settle(10)
    silent = world.name_clusters()[1]
    assert silent is not None
    world.silent = {silent}
    world.settle(10)
    row = world.store.services.list_replicas("web")[0]
    world.store.services.put_replica(replace(row, drained_s=world.clock.now))
    world.settle(10)
    assert not world.store.jobs.is_cancel_requested(row.job_id)
    world.silent = set()
    world.settle(10)
    assert world.store.jobs.is_cancel_requested(row.job_id)


def test_files_that_differ_on_the_machine_are_pushed_again(tmp_path: Path) -> None:
    world = GatewayWorld(tmp_path)
    world.settle(10)
    name = world.name_clusters()[0]
    assert name is not None
    right = world.files[name]["routing.json"]
    world.files[name]["routing.json"] = "{}"  # by a controller that slept, and woke up too late
    world.files[name].pop("load.json")
    asyncio.run(world.controller.step())
    world.clock.now += 2
    asyncio.run(world.controller.step())
    assert world.files[name]["routing.json"] == right


def test_usage_is_added_and_each_gateway_learns_that_of_the_other(tmp_path: Path) -> None:
    world = GatewayWorld(tmp_path)
    key, _ = create_key(world.folder, "ann", now_s=world.clock.now, budget_tokens=100)
    world.settle(10)
    names = [name for name in world.name_clusters() if name]
    for name, tokens in zip(names, (30, 50), strict=True):
        book = UsageBook(keys={key.id: KeyUsage(requests=1, completion_tokens=tokens)})
        world.files[name]["usage.json"] = msgspec.json.encode(book).decode()
    world.settle(6)
    assert read_usage(world.folder).keys[key.id] == KeyUsage(requests=2, completion_tokens=80)
    others = [msgspec.json.decode(world.files[name]["other-usage.json"], type=UsageBook) for name in names]
    assert [each.keys[key.id].completion_tokens for each in others] == [50, 30]
    world.fail(1)
    world.controller = world.make_controller()
    world.settle(30)
    name = world.name_clusters()[0]
    assert name not in (None, names[0])
    seeded = msgspec.json.decode(world.files[name or ""]["usage.json"], type=UsageBook)
    assert seeded.keys[key.id].completion_tokens == 30  # the new machine continues the count of the lost one
    assert read_usage(world.folder).keys[key.id].completion_tokens == 80


def test_number_of_gateways_follows_an_update(tmp_path: Path) -> None:
    world = GatewayWorld(tmp_path)
    world.settle(10)
    before = world.name_clusters()
    world.store.services.add_version("web", make_gateway_task(gateway_count=1, version="b"))
    world.settle(60)
    assert world.name_clusters() == [before[0], None]
    assert world.read_routing(1).balancers == 1
    assert set(world.list_ready()) == {2}
    world.store.services.add_version("web", make_gateway_task(version="c"))
    world.settle(60)
    assert None not in world.name_clusters() and set(world.list_ready()) == {3}


def test_gateways_that_never_start_fail_the_service_instead_of_costing_money_forever(tmp_path: Path) -> None:
    world = GatewayWorld(tmp_path)
    world.failing = lambda task: "-gateway-" in (task.name or "")
    world.settle(60)
    service = world.store.services.get("web")
    assert service is not None and service.failure.startswith("gateway ")
    world.settle(60)
    tries = [job for job in world.store.jobs.list() if "-gateway-" in (job.name or "")]
    assert 3 <= len(tries) <= 6


class KilledInCall(SystemExit):
    """A kill during a call to a machine: the event loop ends with it, which it does with no other exception."""


STORIES = ("up", "lost", "fewer", "down")


def begin(folder: Path, story: str) -> GatewayWorld:
    folder.mkdir()
    world = GatewayWorld(folder)
    if story != "up":
        world.settle(10)
    if story == "lost":
        world.fail(2)
    if story == "fewer":
        world.store.services.add_version("web", make_gateway_task(gateway_count=1))
    if story == "down":
        world.store.services.request_down("web")
    return world


def is_done(world: GatewayWorld, story: str) -> bool:
    if story == "down":
        return world.store.services.get("web") is None
    names, wanted = world.name_clusters(), 1 if story == "fewer" else 2
    rows = world.store.services.list_replicas("web")
    is_complete = [name is not None for name in names] == [True, wanted == 2]
    has_all = len(rows) == 2 and world.list_ready() == [2 if story == "fewer" else 1] * 2
    return is_complete and has_all and len(read_loads(world.folder, now_s=world.clock.now)) == wanted


@contextmanager
def counted_effects(world: GatewayWorld, patches: pytest.MonkeyPatch, kill_at: int | None) -> Iterator[list[int]]:
    """Count effects as `test_controller_kills` does, files of the gateways' part, and calls to machines."""
    made = [0]
    write, exchange = gateways.write_file, world.exchange

    def count(error: type[BaseException]) -> None:
        made[0] += 1
        if made[0] == kill_at:
            raise error

    def guarded_write(path: Path, content: object) -> None:
        count(kills.Killed)
        write(path, content)

    async def guarded_exchange(*parts: Any) -> ExchangeReply:
        count(KilledInCall)
        return await exchange(*parts)

    def guarded_execute(*arguments: Any, **options: Any) -> Any:
        if arguments[0].lstrip()[:6].upper() != "SELECT":
            count(kills.Killed)
        return execute(*arguments, **options)

    execute = world.store.execute
    with patches.context() as inner:
        inner.setattr(gateways, "write_file", guarded_write)
        inner.setattr(world, "exchange", guarded_exchange)
        inner.setattr(world.store, "execute", guarded_execute)
        yield made


def run(world: GatewayWorld, story: str, patches: pytest.MonkeyPatch, kill_at: int | None = None) -> int:
    """Step to the end of the story; return the number of effects."""
    done = 0
    for _ in range(kills.STEPS_MAX):
        with counted_effects(world, patches, None if kill_at is None else kill_at - done) as made:
            try:
                if world.is_locked_run():
                    return done + made[0]
            except (kills.Killed, KilledInCall, RuntimeError):
                # The loop raises RuntimeError if the kill meets a call that it is cancelling.
                if kill_at is None or done + made[0] < kill_at:
                    raise
                world.controller = world.make_controller()
            done += made[0]
        world.play()
        world.check()
        if story == "lost":
            assert world.read_routing(1).backends, "the remaining gateway keeps serving"
        if is_done(world, story):
            return done
        world.clock.now += 1
    raise AssertionError("the story does not end")


@pytest.mark.parametrize("every", [14, pytest.param(4, marks=long), pytest.param(1, marks=exhaustive)])
@pytest.mark.parametrize("story", STORIES)
def test_kill_at_an_effect_doubles_and_forgets_no_gateway(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, story: str, every: int
) -> None:
    kill_at_effects(tmp_path, story, monkeypatch, every=every)


def kill_at_effects(tmp_path: Path, story: str, monkeypatch: pytest.MonkeyPatch, *, every: int) -> None:
    monkeypatch.setattr(logging.getLogger("asyncio"), "disabled", True)  # it reports calls in which we kill
    total = run(begin(tmp_path / "whole", story), story, monkeypatch)
    assert total >= 4
    for kill_at in range(1, total + 1, every):
        world = begin(tmp_path / str(kill_at), story)
        run(world, story, monkeypatch, kill_at=kill_at)
        assert is_done(world, story)
        if story == "down":
            assert not world.store.jobs.list_unfinished_ids() and not world.folder.path.exists()
        world.store.close()
    gc.collect()  # of the killed calls, while the logger is silent


def test_saved_loads_of_a_killed_controller_count_until_the_next_one_gets_reports(tmp_path: Path) -> None:
    world = GatewayWorld(tmp_path)
    world.settle(10)
    world.controller = world.make_controller()
    with kills.counted_effects(world, pytest.MonkeyPatch(), None):
        asyncio.run(world.controller.step())
    rows = world.store.services.list_replicas("web")
    assert len(rows) == 2 and all(row.drained_s is None for row in rows)
    assert read_file(world.folder.routing, Routing) is not None
    write_file(world.folder.gateways, {"loads": "damaged"})
    assert read_loads(world.folder, now_s=world.clock.now) == {}
