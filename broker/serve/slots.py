"""Choose the slots of a service: by its number of replicas and, with `availability`, by their observed losses."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace

from broker.frozen import frozen
from broker.serve.error_budget import ErrorBudget
from broker.serve.reconciling import ReplicaView, Slot
from broker.types import Replica, ServiceSpec, Task

COLD_START_S = 600.0  # from request to readiness: machine, image, weights; assumed until a replica has been ready
COLD_START_S_MIN, COLD_START_S_MAX = 60.0, 3600.0  # longer waits are for capacity
PLACE_EVERY_S = 600.0  # and whenever replicas start, run elsewhere, are lost or become ready
PLACE_S_MIN = 5.0  # time between two placements because of readiness, which may flap
BUDGET_S_MIN = 1.0  # time between two observations


@frozen
class PlacementRequest:
    """The inputs of a placement: `count` includes the spare replicas of the policy."""

    task: Task
    spec: ServiceSpec
    count: int
    replicas: tuple[ReplicaView, ...] = ()
    budget: ErrorBudget = ErrorBudget()
    cold_start_s: float = COLD_START_S


@frozen
class ChosenSlots:
    """Slots; `needed` of their replicas have to be ready. None: one replica per slot, in any state."""

    slots: tuple[Slot, ...]
    needed: int | None = None


Place = Callable[[PlacementRequest], Sequence[Slot]]


def is_placed_by_availability(task: Task, spec: ServiceSpec) -> bool:
    """Return whether spot and on-demand replicas are chosen for an availability."""
    return spec.availability is not None and any(each.use_spot for each in task.resources)


def measure_cold_start_s(replicas: Sequence[Replica]) -> float:
    """Return the median time to the first readiness; ten minutes without one, and within a minute and an hour."""
    durations = [each.ready_s - each.created_s for each in replicas if each.ready_s is not None]
    found = statistics.median(durations) if durations else COLD_START_S
    return min(max(found, COLD_START_S_MIN), COLD_START_S_MAX)


class SlotChooser:
    """Keeps the slots of one service, so that changes of prices do not move its replicas.

    The error budget is in memory: a restarted controller begins with an unused one.
    """

    def __init__(self, place: Place) -> None:
        self._place = place
        self._budget = ErrorBudget()
        self._chosen = ChosenSlots(slots=())
        self._key: tuple[int, int] | None = None  # version and number
        self._seen = self._ready = frozenset[object]()
        self._placed_s = self._observed_s = -math.inf
        self._was_ready = False  # with this key; replicas that were just requested do not count as a shortage

    def choose(self, request: PlacementRequest, *, version: int, now_s: float) -> ChosenSlots:
        """Return the slots for this number of replicas and version. `request.budget` is ignored: it is kept here."""
        key = version, request.count
        is_new = key != self._key
        if is_new:
            self._key, self._was_ready = key, False
        by_availability = request.count > 0 and is_placed_by_availability(request.task, request.spec)
        if by_availability:
            self._observe(request, now_s)
        if is_new or (by_availability and self._is_due(request, now_s)):
            self._placed_s, self._seen = now_s, _list_places(request.replicas)
            self._ready = _list_ready(request.replicas)
            slots = self._place(replace(request, budget=self._budget))
            needed = request.count - request.spec.policy.spare_count if by_availability else None
            self._chosen = ChosenSlots(slots=tuple(slots), needed=needed)
        return self._chosen

    def _is_due(self, request: PlacementRequest, now_s: float) -> bool:
        if self._seen != _list_places(request.replicas):
            return True
        age_s = now_s - self._placed_s
        return age_s >= PLACE_EVERY_S or (age_s >= PLACE_S_MIN and self._ready != _list_ready(request.replicas))

    def _observe(self, request: PlacementRequest, now_s: float) -> None:
        """Add the time since the last observation to the budget."""
        needed = request.count - request.spec.policy.spare_count
        is_ready = sum(each.is_ready for each in request.replicas) >= needed
        self._was_ready |= is_ready
        if now_s - self._observed_s < BUDGET_S_MIN:
            return
        hours = min(now_s - self._observed_s, PLACE_EVERY_S) / 3600  # a clock may jump
        self._observed_s = now_s
        if self._was_ready:
            self._budget = self._budget.observe(hours, is_short=not is_ready)


def _list_places(replicas: Sequence[ReplicaView]) -> frozenset[object]:
    return frozenset((each.number, each.slot, each.is_lost, each.is_draining) for each in replicas)


def _list_ready(replicas: Sequence[ReplicaView]) -> frozenset[object]:
    return frozenset(each.number for each in replicas if each.is_ready)
