"""Observations of a service that outlive its replicas and its controller: used error budget and recent cold starts."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec

from broker.frozen import frozen
from broker.serve.error_budget import ErrorBudget
from broker.serve.reconciling import ReplicaView, Slot
from broker.state.store import Store
from broker.types import Service

COLD_START_S = 600.0  # from request to readiness: machine, image, weights; assumed until a replica has been ready
COLD_START_S_MIN, COLD_START_S_MAX = 60.0, 3600.0  # longer waits are for capacity
STARTS_MAX = 20  # enough for a median that follows changes of image and weights
OBSERVED_S_MAX = 600.0  # one observation stands for at most this long: clocks jump, and controllers are restarted
SAVE_S = 60.0  # between two writes, so that a controller that is killed loses at most a minute of observations


@frozen
class ReplicaStart:
    """The seconds from the request for a replica to its first readiness, and where it ran then."""

    number: int
    version: int
    slot: Slot
    duration_s: float


@frozen
class PlacementHistory:
    """Observations of a service.

    `counted`: the version and number of replicas that were ready last; a shortage counts only for these, because the
    first start is none. `starts`: those of the newest replicas, by number.
    """

    budget: ErrorBudget = ErrorBudget()
    observed_s: float | None = None
    counted: tuple[int, int] | None = None
    starts: tuple[ReplicaStart, ...] = ()

    def observe(self, now_s: float, *, is_counted: bool, is_short: bool) -> PlacementHistory:
        """Add the time since the last observation to the budget; before the first readiness, it is not counted."""
        passed_s = 0.0 if self.observed_s is None else min(max(0.0, now_s - self.observed_s), OBSERVED_S_MAX)
        budget = self.budget.observe(passed_s / 3600, is_short=is_short) if is_counted else self.budget
        return replace(self, budget=budget, observed_s=now_s)

    def add_starts(self, replicas: Sequence[ReplicaView]) -> PlacementHistory:
        """Add the starts of these replicas. They are kept when the replicas are lost."""
        found = {each.number: each for each in self.starts}
        for each in replicas:
            if each.start_s is not None and each.number not in found:  # a known one may have moved since
                found[each.number] = ReplicaStart(
                    number=each.number, version=each.version, slot=each.slot, duration_s=each.start_s
                )
        starts = tuple(found[number] for number in sorted(found)[-STARTS_MAX:])
        return self if starts == self.starts else replace(self, starts=starts)

    def measure_cold_start_s(self, version: int) -> float:
        """Return the median start of this version, else of any; ten minutes without one. From a minute to an hour."""
        return _find_median_s(self._list_starts(version))

    def measure_starts_s(self, version: int) -> Mapping[Slot, float]:
        """Return the median start in each slot with a known one."""
        places = dict[Slot, list[ReplicaStart]]()
        for each in self._list_starts(version):
            places.setdefault(each.slot, []).append(each)
        return {slot: _find_median_s(starts) for slot, starts in places.items()}

    def _list_starts(self, version: int) -> Sequence[ReplicaStart]:
        return [each for each in self.starts if each.version == version] or self.starts


def _find_median_s(starts: Sequence[ReplicaStart]) -> float:
    found = statistics.median(each.duration_s for each in starts) if starts else COLD_START_S
    return min(max(found, COLD_START_S_MIN), COLD_START_S_MAX)


class HistoryKeeper:
    """Reads the history of a service from the store, and writes it there when it has changed."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._saved = PlacementHistory()

    def read(self, service: Service) -> PlacementHistory:
        """Return the history; an empty one if there is none, or it is damaged: it only makes placement better."""
        text = self._store.services.get_placement_history(service)
        try:
            self._saved = msgspec.json.decode(text, type=PlacementHistory) if text else PlacementHistory()
        except msgspec.DecodeError:
            self._saved = PlacementHistory()
        return self._saved

    def save(self, service: Service, history: PlacementHistory) -> None:
        """Write the history if replicas have started since the last write, or after a minute of observations."""
        was_s, now_s = self._saved.observed_s, history.observed_s
        is_due = now_s is not None and (was_s is None or abs(now_s - was_s) >= SAVE_S)
        if is_due or history.starts != self._saved.starts:
            self._store.services.put_placement_history(service, msgspec.json.encode(history).decode())
            self._saved = history
