"""Slots of a service: kept while nothing happens, chosen again when replicas are lost, move or become ready."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from broker.serve.placement import SpotPlace, count_ondemand, observe_places, place_replicas
from broker.serve.reconciling import ON_DEMAND, ReplicaView, Slot, decide
from broker.serve.slots import (
    LOST_S,
    PLACE_EVERY_S,
    PLACE_S_MIN,
    ChosenSlots,
    PlacementRequest,
    SlotChooser,
    is_placed_by_availability,
)
from broker.types import ReplicaPolicy, Resources, ServiceSpec, Task

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


def test_replicas_of_which_some_may_be_on_spot_are_placed_by_availability() -> None:
    spot, ondemand = Resources(use_spot=True), Resources(use_spot=False)
    spec = ServiceSpec(availability=0.99)
    found = [
        is_placed_by_availability(Task(resources=resources, service=each), each)
        for resources, each in (
            ((ondemand, spot), spec), ((spot,), spec), ((ondemand,), spec), ((spot,), replace(spec, availability=None)),
        )
    ]  # fmt: skip
    assert found == [True, True, False, False]


def test_readiness_that_flaps_does_not_ask_for_prices_each_time() -> None:
    recorder = Recorder()
    chooser = SlotChooser(recorder)
    for turn in range(100):
        chooser.choose(make_request(is_ready=turn % 2 == 0), version=1, now_s=turn * PLACE_S_MIN / 10)
    assert 2 <= len(recorder.requests) <= 11


def test_silence_of_the_balancer_is_neither_a_shortage_nor_a_reason_to_place_again() -> None:
    recorder = Recorder()
    chooser = SlotChooser(recorder)
    chooser.choose(make_request(), version=1, now_s=0.0)
    for turn in range(1, 20):
        silent = replace(make_request(is_ready=False), has_report=False)
        chooser.choose(silent, version=1, now_s=turn * PLACE_S_MIN)
    assert len(recorder.requests) == 1 and not chooser.history.budget.hours
    chooser.choose(make_request(is_ready=False), version=1, now_s=20 * PLACE_S_MIN)
    assert len(recorder.requests) == 2 and chooser.history.budget.hours > 0


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


def test_next_chooser_continues_with_the_budget_and_the_cold_starts() -> None:
    first, second = Recorder(), Recorder()
    chooser = SlotChooser(first)
    for now_s in (0.0, 600.0, 1200.0):
        request = make_request(is_ready=now_s < 1200)
        started = tuple(replace(each, start_s=90.0) for each in request.replicas)
        chooser.choose(replace(request, replicas=started), version=1, now_s=now_s)
    SlotChooser(second, chooser.history).choose(make_request(is_ready=False), version=1, now_s=1500.0)
    (found,) = second.requests
    assert found.budget.short_hours > first.requests[-1].budget.short_hours > 0
    assert found.cold_start_s == 90.0 and found.starts_s == {A: 90.0}


def test_place_of_lost_replicas_is_avoided_after_they_are_gone() -> None:
    recorder = Recorder()
    chooser = SlotChooser(recorder)
    chooser.choose(make_request(is_lost=True), version=1, now_s=0.0)
    chooser.choose(make_request(slot=ON_DEMAND), version=1, now_s=LOST_S - 1)
    chooser.choose(make_request(slot=ON_DEMAND), version=1, now_s=LOST_S + PLACE_EVERY_S)
    assert [each.lost for each in recorder.requests] == [{A}, {A}, frozenset()]


COLD_START_S, CLOSED_S, REFUSED_S = 60.0, 1800.0, 600.0
MARKETS = [
    SpotPlace(slot=Slot(is_spot=True, region=f"r{index // 3}", zone=f"z{index}"), usd_hour=price, losses_per_hour=0.5)
    for index, price in enumerate(price for price in (0.726, 0.744, 0.803) for _ in range(3))
]


@dataclass
class RehearsedService:
    """The real decisions over spot markets in virtual time. A replica that is refused starts in the cheapest other."""

    wanted: int
    now_s: float = 0.0
    drawn: int = 0
    short_s: float = 0.0
    replicas: dict[int, ReplicaView] = field(default_factory=dict)
    requested_s: dict[int, float] = field(default_factory=dict)
    closed_s: dict[Slot, float] = field(default_factory=dict)
    refused_s: dict[Slot, float] = field(default_factory=dict)
    refusals: Counter[Slot] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.spec = ServiceSpec(policy=ReplicaPolicy(replicas_min=self.wanted), availability=0.99)
        self.task = Task(name="web", resources=(Resources(use_spot=True),), service=self.spec)
        self.chooser = SlotChooser(self.place)

    def place(self, request: PlacementRequest) -> Sequence[Slot]:
        used = {each.slot for each in request.replicas}
        places = [each for each in MARKETS if each.slot in used or self.refused_s.get(each.slot, 0.0) <= self.now_s]
        return place_replicas(
            request.count, observe_places(places, request.replicas, request.lost, request.starts_s),
            ondemand_usd_hour=3.1, cold_start_hours=request.cold_start_s / 3600, availability=0.99,
            budget=request.budget, ondemand_present=count_ondemand(request.replicas),
        ).slots  # fmt: skip

    def count_ready(self) -> int:
        return sum(each.is_ready for each in self.replicas.values())

    def preempt(self) -> None:
        """Take the replicas of the market with the most of them, and close it."""
        ((slot, _),) = Counter(each.slot for each in self.replicas.values() if each.slot.is_spot).most_common(1)
        self.closed_s[slot] = self.now_s + CLOSED_S
        for number, each in self.replicas.items():
            if each.slot == slot:
                self.replicas[number] = replace(each, is_lost=True, is_ready=False)

    def step(self, step_s: float) -> None:
        for number, each in self.replicas.items():
            start_s = self.now_s - self.requested_s[number]
            each = replace(each, open_hours=start_s / 3600)
            if each.start_s is None and start_s >= COLD_START_S and not each.is_lost:
                each = replace(each, is_ready=True, start_s=start_s)
            self.replicas[number] = each
        views = tuple(self.replicas.values())
        request = PlacementRequest(task=self.task, spec=self.spec, count=self.wanted, replicas=views)
        chosen = self.chooser.choose(request, version=1, now_s=self.now_s)
        step = decide(chosen.slots, views, version=1, needed=chosen.needed)
        for number in step.drain:
            del self.replicas[number]
        for slot in step.start:
            self.start(slot)
        self.short_s += step_s if self.count_ready() < self.wanted else 0.0
        self.now_s += step_s

    def start(self, slot: Slot) -> None:
        if self.closed_s.get(slot, 0.0) > self.now_s:
            self.refused_s[slot] = self.now_s + REFUSED_S * 2 ** self.refusals[slot]
            self.refusals[slot] += 1
            slot = next(each.slot for each in MARKETS if self.closed_s.get(each.slot, 0.0) <= self.now_s)
        self.drawn += 1
        self.requested_s[self.drawn] = self.now_s
        self.replicas[self.drawn] = ReplicaView(number=self.drawn, version=1, slot=slot)


def test_healthy_replicas_are_moved_only_where_that_pays_off_after_a_loss() -> None:
    """Six hours of two replicas with two preemptions. 13 were started when choices ignored what runs."""
    service = RehearsedService(wanted=2)
    for hour in (2, 4, 6):
        while service.now_s < hour * 3600:
            service.step(20.0)
        assert service.count_ready() >= 2
        service.preempt()
    assert service.drawn <= 9
    assert service.short_s <= 3 * COLD_START_S, "the first start, and the losses"
