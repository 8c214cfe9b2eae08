"""Replicas are placed with the catalog's prices, the market model's hazards and recorded refusals."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from broker.app import gateways
from broker.app.container import Context
from broker.app.planning import read_task
from broker.app.services import ServiceTarget, list_spot_places, place
from broker.errors import NoOfferError, UsageError
from broker.provision.refusals import UnavailableOffers
from broker.serve.reconciling import ON_DEMAND, ReplicaView, Slot
from broker.serve.slots import PlacementRequest
from broker.types import Goal, Placement, Task


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


@pytest.mark.parametrize(
    ("limit", "note"),
    [
        ({"max_duration_s": 3600.0}, "`max_duration` has no effect on a service: end it with `broker serve down`"),
        ({"goal": Goal(budget_usd=5.0)}, "`budget` has no effect on a service: limit its cost with `max_replicas`"),
        (
            {"goal": Goal(deadline_hours=5.0)},
            "`deadline` has no effect on a service: it runs until `broker serve down`",
        ),
        (
            {"goal": Goal(hour_value_usd=5.0)},
            "`hour_value` has no effect on a service: its replicas have no work to finish",
        ),
    ],
)
def test_a_service_drops_limits_which_would_end_its_replicas(
    tmp_path: Path, task: Task, limit: dict[str, Any], note: str
) -> None:
    notes: list[str] = []
    context = Context(tmp_path / "home", on_note=notes.append)
    try:
        (limited,) = ServiceTarget(context=context).apply_defaults([replace(task, **limit)])
    finally:
        context.close()
    assert limited.max_duration_s is None and limited.goal in (None, Goal())
    assert notes == [note]


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
    places = {each.slot: each for each in list_spot_places(context, task, frozenset({first.slot}))}
    assert places[first.slot].is_full and not any(each.is_full for each in places.values() if each.slot != first.slot)
    running = [ReplicaView(number=1, version=1, slot=first.slot, is_ready=True, open_hours=1.0)]
    assert choose(context, task, 0.3, running).count(first.slot) <= 1, "at most the one that runs there"


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


def make_task(gateway: dict[str, object] | None, infra: str = "gcp") -> Task:
    given = {} if gateway is None else {"gateway": gateway}
    return read_task(
        {
            "name": "web", "resources": {"infra": infra, "cpus": "2+"}, "run": "true",
            "service": {"readiness_probe": "/", "ports": 8000, **given},
        }
    )  # fmt: skip


def test_local_gateways_reserve_adjacent_ports_and_others_listen_on_any_address(context: Context) -> None:
    local = make_task({"count": 1}, "local")
    first = gateways.choose_address(context, local, "127.0.0.1", None)
    context.store.services.add("web", local, host=first[0], port=first[1], wanted=1)
    second = gateways.choose_address(context, make_task(None, "local"), "127.0.0.1", None)
    assert second[1] not in range(first[1], first[1] + 2)  # the second gateway may still be added
    assert gateways.choose_address(context, make_task({"infra": "gcp"}), "127.0.0.1", 8443) == ("0.0.0.0", 8443)
    with pytest.raises(UsageError, match="`--host` is the address of a balancer on this machine"):
        gateways.choose_address(context, local, "192.0.2.1", None)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ({"count": 1}, {"count": 2}, ""),
        ({"infra": ["aws", "gcp"], "count": 2}, {"infra": "aws"}, ""),
        (None, None, ""),
        (None, {"count": 1}, "has no gateways, the update has some"),
        ({"count": 1}, None, "has gateways, the update has none"),
        ({"infra": "aws"}, {"infra": "gcp"}, "cannot move the gateways"),
        ({"infra": "aws"}, {"infra": "aws", "cpus": 8}, "cannot move the gateways"),
    ],
)
def test_update_keeps_gateways_except_for_their_number(
    context: Context, before: dict[str, object] | None, after: dict[str, object] | None, message: str
) -> None:
    service = context.store.services.add("web", make_task(before), host="0.0.0.0", port=30001, wanted=1)
    if not message:
        gateways.check_gateways_stay(context, service, make_task(after))
        return
    with pytest.raises(UsageError, match=message):
        gateways.check_gateways_stay(context, service, make_task(after))


def test_gateways_are_planned_on_small_machines_before_anything_is_recorded(context: Context) -> None:
    one, other = gateways.plan_gateways(context, make_task({"count": 2, "infra": ["aws/us-east-1", "gcp"]}))
    assert (one.choice.placement.offer.cloud, other.choice.placement.offer.cloud) == ("aws", "gcp")
    assert one.choice.placement.offer.region == "us-east-1" and not one.choice.placement.is_spot
    assert one.choice.placement.usd_hour < 0.2 and one.choice.placement.offer.vcpus >= 2
    (both,) = gateways.plan_gateways(context, make_task({"count": 2, "infra": "aws"}))
    assert both.choice.placement.node_count == 2
    (alone,) = gateways.plan_gateways(context, make_task({"count": 1, "infra": "aws"}))
    assert both.choice.placement.usd_hour == pytest.approx(2 * alone.choice.placement.usd_hour)
    assert gateways.plan_gateways(context, make_task(None)) == ()
    with pytest.raises(NoOfferError):
        gateways.plan_gateways(context, make_task({"infra": "gcp/no-such-region"}))
