"""A replica whose preemption is announced is replaced, and gets no new requests, before it is lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from broker.serve.files import Backend, Routing, read_file
from broker.serve.observing import NOTICED_S_MAX, observe
from broker.serve.reconciling import ON_DEMAND, Slot
from broker.serve.slots import PlacementRequest
from broker.types import EventKind, Resources, make_event
from tests.serve.test_controller import World, make_task

SPOT = Slot(is_spot=True)


def place(request: PlacementRequest) -> Sequence[Slot]:
    return [SPOT] * request.count


def start(folder: Path) -> World:
    """Run two replicas on spot machines, with on-demand ones that stand in."""
    task = replace(make_task(has_ondemand_fallback=True), resources=(Resources(cloud="local", use_spot=True),))
    world = World(folder, task)
    world.controller = world.make_controller(place)
    world.settle(5)
    for each in world.store.services.list_replicas("web"):
        (attempt,) = world.store.jobs.list_attempts(each.job_id)
        spot = replace(attempt.placement, is_spot=True)
        world.store.jobs.put_attempt(replace(attempt, placement=spot))
    return world


def announce(world: World, number: int, node: str = "") -> None:
    replica = next(each for each in world.store.services.list_replicas("web") if each.number == number)
    job = world.store.jobs.get(replica.job_id)
    assert job is not None
    event = make_event(EventKind.NOTICED, rank=0, node=node or job.stem, place="zone")
    world.store.events.add(event, job_id=job.id)


def read_backends(world: World) -> tuple[Backend, ...]:
    routing = read_file(world.folder.routing, Routing)
    assert routing is not None
    return routing.backends


def list_leaving(world: World) -> list[int]:
    return [each.number for each in read_backends(world) if each.is_leaving]


def test_noticed_replica_is_left_out_and_another_one_stands_in(tmp_path: Path) -> None:
    world = start(tmp_path)
    world.settle(2)
    assert list_leaving(world) == [] and len(world.store.services.list_replicas("web")) == 2
    announce(world, 1)
    world.settle(4)
    assert list_leaving(world) == [1]
    replicas = world.store.services.list_replicas("web")
    assert [(each.number, each.is_spot) for each in replicas] == [(1, True), (2, True), (3, ON_DEMAND.is_spot)]
    assert not any(each.drained_s for each in replicas), "it serves until it is lost"


def test_replica_that_outlives_its_notice_serves_again(tmp_path: Path) -> None:
    world = start(tmp_path)
    announce(world, 2)
    world.settle(2)
    assert list_leaving(world) == [2]
    world.clock.now += NOTICED_S_MAX
    world.settle(2)
    assert list_leaving(world) == []


def test_notice_of_an_earlier_machine_or_an_on_demand_one_is_none(tmp_path: Path) -> None:
    world = start(tmp_path)
    announce(world, 1, node="of an earlier attempt")
    world.settle(2)
    first, _ = world.store.services.list_replicas("web")
    now_s = world.clock.now
    assert not observe(world.store, first, None, frozenset()).describe(now_s).is_lost
    announce(world, 1)
    assert observe(world.store, first, None, frozenset()).describe(now_s).is_lost
    (attempt,) = world.store.jobs.list_attempts(first.job_id)
    on_demand = replace(attempt.placement, is_spot=False)
    world.store.jobs.put_attempt(replace(attempt, placement=on_demand))
    assert not observe(world.store, first, None, frozenset()).describe(now_s).is_lost
