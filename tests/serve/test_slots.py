"""Slots of a service: kept while nothing happens, chosen again when replicas are lost, move or become ready."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from broker.serve.reconciling import ON_DEMAND, ReplicaView, Slot
from broker.serve.slots import PLACE_EVERY_S, PLACE_S_MIN, ChosenSlots, PlacementRequest, SlotChooser
from broker.serve.slots import measure_cold_start_s as measure
from broker.types import Replica, ReplicaPolicy, Resources, ServiceSpec, Task

A = Slot(is_spot=True, region="r", zone="a")


class Recorder:
    """A placement that returns one on-demand slot per replica, and records its requests."""

    def __init__(self) -> None:
        self.requests = list[PlacementRequest]()

    def __call__(self, request: PlacementRequest) -> Sequence[Slot]:
        self.requests.append(request)
        return [ON_DEMAND] * request.count


def make_request(
    count: int = 2, *, is_ready: bool = True, is_lost: bool = False, slot: Slot = A, spot: bool = True, spare: int = 0
) -> PlacementRequest:
    spec = ServiceSpec(policy=ReplicaPolicy(replicas_min=count - spare, spare_count=spare), availability=0.99)
    views = [ReplicaView(number=each, version=1, slot=A, is_ready=is_ready) for each in range(count - 1)]
    views.append(ReplicaView(number=count, version=1, slot=slot, is_ready=is_ready, is_lost=is_lost))
    task = Task(name="web", resources=(Resources(use_spot=spot),), service=spec)
    return PlacementRequest(task=task, spec=spec, count=count, replicas=tuple(views))


def test_slots_are_kept_until_a_replica_is_lost_or_moves_or_time_has_passed() -> None:
    recorder = Recorder()
    chooser = SlotChooser(recorder)
    chooser.choose(make_request(), version=1, now_s=0.0)
    chooser.choose(make_request(), version=1, now_s=PLACE_EVERY_S - 1)
    assert len(recorder.requests) == 1
    chooser.choose(make_request(is_lost=True), version=1, now_s=PLACE_EVERY_S - 0.5)
    assert len(recorder.requests) == 2
    chooser.choose(make_request(slot=replace(A, zone="b")), version=1, now_s=PLACE_EVERY_S)
    assert len(recorder.requests) == 3
    chooser.choose(make_request(slot=replace(A, zone="b")), version=1, now_s=2 * PLACE_EVERY_S)
    assert len(recorder.requests) == 4


def test_readiness_that_flaps_does_not_ask_for_prices_each_time() -> None:
    recorder = Recorder()
    chooser = SlotChooser(recorder)
    for turn in range(100):
        chooser.choose(make_request(is_ready=turn % 2 == 0), version=1, now_s=turn * PLACE_S_MIN / 10)
    assert 2 <= len(recorder.requests) <= 11


def test_service_without_spot_is_placed_once_per_number_and_version() -> None:
    recorder = Recorder()
    chooser = SlotChooser(recorder)
    for version, lost, now_s in ((1, False, 0.0), (1, True, 1e6), (2, False, 2e6)):
        chosen = chooser.choose(make_request(spot=False, is_lost=lost), version=version, now_s=now_s)
        assert chosen == ChosenSlots(slots=(ON_DEMAND,) * 2)
    assert len(recorder.requests) == 2


def test_spare_replicas_of_the_policy_are_not_needed() -> None:
    assert SlotChooser(Recorder()).choose(make_request(3, spare=1), version=1, now_s=0.0).needed == 2


def test_first_start_is_not_a_shortage_and_a_later_one_is() -> None:
    recorder = Recorder()
    chooser = SlotChooser(recorder)
    for now_s, is_ready in ((0.0, False), (600.0, True), (1200.0, True), (1800.0, False), (2400.0, True)):
        chooser.choose(make_request(is_ready=is_ready), version=1, now_s=now_s)
    budgets = [each.budget for each in recorder.requests]
    assert [each.short_hours > 0 for each in budgets] == [False, False, False, True, True]
    assert budgets[0].hours == 0 and budgets[-1].hours > 0


def test_cold_start_is_the_median_of_what_replicas_took_within_bounds() -> None:
    def make(took_s: float | None) -> Replica:
        ready_s = None if took_s is None else 100.0 + took_s
        return Replica(service="web", number=1, version=1, job_id=1, port=1, created_s=100.0, ready_s=ready_s)

    assert measure([]) == measure([make(None)]) == 600
    assert measure([make(100.0), make(300.0), make(9e9), make(None)]) == 300
    assert measure([make(1.0)]) == 60 and measure([make(9e9)]) == 3600
