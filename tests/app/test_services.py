"""Replicas are placed with the catalog's prices, the market model's hazards, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from broker.app.container import Context
from broker.app.planning import read_task
from broker.app.services import list_spot_places, place
from broker.provision.refusals import UnavailableOffers
from broker.serve.reconciling import ON_DEMAND, ReplicaView, Slot
from broker.serve.slots import PlacementRequest
from broker.types import Placement, Task


@pytest.fixture
def context(tmp_path: Path) -> Iterator[Context]:
    context = Context(tmp_path / "home")
    context.__dict__["clouds"] = {"aws": None, "gcp": None}  # set up, as far as prices are concerned
    yield context
    context.close()


@pytest.fixture
def task() -> Task:
    return read_task(
        {
            "name": "llm",
            "resources": {"accelerators": "A100:1", "use_spot": True},
            "service": {"readiness_probe": "/", "ports": 8000, "availability": 0.99, "replicas": 3},
            "run": "true",
        }
    )


def choose(context: Context, task: Task, availability: float, replicas: Sequence[ReplicaView] = ()) -> Sequence[Slot]:
    assert task.service is not None
    spec = replace(task.service, availability=availability)
    return place(context, PlacementRequest(task=task, spec=spec, count=3, replicas=tuple(replicas)))


def test_spot_places_have_hazards_although_a_service_has_no_amount_of_work(context: Context, task: Task) -> None:
    places = list_spot_places(context, task)
    assert len(places) > 3 and all(0.01 < each.losses_per_hour < 5 for each in places)


def test_higher_availability_spreads_and_insures_replicas(context: Context, task: Task) -> None:
    low, high, highest = (choose(context, task, each) for each in (0.3, 0.9, 0.9999))
    assert len(low) == 3 and len({each.zone for each in low}) == 1
    assert len(high) > 3 and len({each.region for each in high}) > 1
    assert ON_DEMAND in highest


def test_place_of_lost_replicas_and_refused_places_are_avoided_except_those_in_use(
    context: Context, task: Task
) -> None:
    slots = choose(context, task, 0.3)
    lost = [ReplicaView(number=1, version=1, slot=slots[0], is_lost=True)]
    assert slots[0] not in choose(context, task, 0.3, lost)
    first = next(each for each in list_spot_places(context, task) if each.slot == slots[0])
    refuse(context, task, first.slot)
    assert first.slot not in [each.slot for each in list_spot_places(context, task)]
    assert first.slot in [each.slot for each in list_spot_places(context, task, frozenset({first.slot}))]


def refuse(context: Context, task: Task, slot: Slot) -> None:
    from broker.errors import CapacityError

    for each in context.market.rank(task, usable_clouds=frozenset(context.clouds), history=None).estimates:
        offer = each.placement.offer
        if (offer.region, offer.zone) == (slot.region, slot.zone):
            placement = Placement(offer=offer, is_spot=True, node_count=1)
            UnavailableOffers(context.store).refuse(placement, CapacityError("full", scope="zone"))


def test_service_without_spot_is_placed_as_its_task_says(context: Context, task: Task) -> None:
    ondemand = replace(task, resources=tuple(replace(each, use_spot=False) for each in task.resources))
    assert choose(context, ondemand, 0.99) == [Slot()] * 3
    assert task.service is not None
    spec = replace(task.service, availability=None, policy=replace(task.service.policy, ondemand_min=1))
    found = place(context, PlacementRequest(task=task, spec=spec, count=3))
    assert found == [ON_DEMAND, Slot(is_spot=True), Slot(is_spot=True)]
