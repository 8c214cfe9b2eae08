"""Choose the slots of a service: by its number of replicas and, with `availability`, by their observed losses."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace

from broker.frozen import frozen
from broker.serve.error_budget import ErrorBudget
from broker.serve.placement_history import COLD_START_S, PlacementHistory
from broker.serve.reconciling import ReplicaView, Slot
from broker.types import ServiceSpec, Task

PLACE_EVERY_S = 600.0  # and whenever replicas start, run elsewhere, are lost or become ready
PLACE_S_MIN = 5.0  # time between two placements because of readiness, which may flap
LOST_S = 600.0  # for which the place of lost replicas is avoided, as after a refusal (`CAPACITY_REFUSAL_S`)
BUDGET_S_MIN = 1.0  # time between two observations


@frozen
class PlacementRequest:
    """The inputs of a placement: `count` includes the spare replicas of the policy.

    `has_report`: the balancer reports which replicas are ready; otherwise, their readiness is no evidence.
    `SlotChooser` sets the fields after it: `starts_s` are the starts in known places, `lost` the places of recently
    lost replicas.
    """

    task: Task
    spec: ServiceSpec
    count: int
    replicas: tuple[ReplicaView, ...] = ()
    has_report: bool = True
    budget: ErrorBudget = ErrorBudget()
    cold_start_s: float = COLD_START_S
    starts_s: Mapping[Slot, float] = field(default_factory=dict)
    lost: frozenset[Slot] = frozenset()


@frozen
class ChosenSlots:
    """Slots; `needed` of their replicas have to be ready. None: one replica per slot, in any state."""

    slots: tuple[Slot, ...]
    needed: int | None = None


Place = Callable[[PlacementRequest], Sequence[Slot]]


def is_placed_by_availability(task: Task, spec: ServiceSpec) -> bool:
    """Return whether spot and on-demand replicas are chosen for an availability."""
    return spec.availability is not None and any(each.use_spot for each in task.resources)


class SlotChooser:
    """Keeps the slots of one service, so that changes of prices do not move its replicas.

    `history` has to be kept for the next chooser of the service: it has the error budget and the cold starts.
    """

    def __init__(self, place: Place, history: PlacementHistory = PlacementHistory()) -> None:
        self._place = place
        self.history = history
        self._chosen = ChosenSlots(slots=())
        self._key: tuple[int, int] | None = None  # version and number
        self._seen = self._ready = frozenset[object]()
        self._placed_s = -math.inf
        self._lost_s = dict[Slot, float]()  # when replicas were last seen as lost, by place

    def choose(self, request: PlacementRequest, *, version: int, now_s: float) -> ChosenSlots:
        """Return the slots for this number of replicas and version."""
        key = version, request.count
        is_new = key != self._key
        self._key = key
        by_availability = request.count > 0 and is_placed_by_availability(request.task, request.spec)
        if by_availability:
            self._observe(request, key, now_s)
        if is_new or (by_availability and self._is_due(request, now_s)):
            self._placed_s, self._seen = now_s, _list_places(request.replicas)
            self._ready = _list_ready(request.replicas)
            history = self.history
            slots = self._place(
                replace(
                    request, budget=history.budget, cold_start_s=history.measure_cold_start_s(version),
                    starts_s=history.measure_starts_s(version), lost=frozenset(self._lost_s),
                )
            )  # fmt: skip
            needed = request.count - request.spec.policy.spare_count if by_availability else None
            self._chosen = ChosenSlots(slots=tuple(slots), needed=needed)
        return self._chosen

    def _is_due(self, request: PlacementRequest, now_s: float) -> bool:
        if self._seen != _list_places(request.replicas):
            return True
        age_s = now_s - self._placed_s
        has_changed = request.has_report and self._ready != _list_ready(request.replicas)
        return age_s >= PLACE_EVERY_S or (age_s >= PLACE_S_MIN and has_changed)

    def _observe(self, request: PlacementRequest, key: tuple[int, int], now_s: float) -> None:
        """Add starts, and the time since the last observation. Replicas that were just requested are not a shortage."""
        history = self.history.add_starts(request.replicas)
        needed = request.count - request.spec.policy.spare_count
        is_ready = sum(each.is_ready for each in request.replicas) >= needed
        if is_ready and history.counted != key:
            history = replace(history, counted=key)
        if history.observed_s is None or abs(now_s - history.observed_s) >= BUDGET_S_MIN:
            is_counted = request.has_report and history.counted == key
            history = history.observe(now_s, is_counted=is_counted, is_short=not is_ready)
        self.history = history
        seen = {each.slot: now_s for each in request.replicas if each.is_lost and each.slot.is_spot}
        lost_s = {**self._lost_s, **seen}
        self._lost_s = {slot: since_s for slot, since_s in lost_s.items() if now_s - since_s < LOST_S}


def _list_places(replicas: Sequence[ReplicaView]) -> frozenset[object]:
    return frozenset((each.number, each.slot, each.is_lost, each.is_draining) for each in replicas)


def _list_ready(replicas: Sequence[ReplicaView]) -> frozenset[object]:
    return frozenset(each.number for each in replicas if each.is_ready)
