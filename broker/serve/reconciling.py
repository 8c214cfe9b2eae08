"""Compare the wanted replicas with the observed ones, and decide one step. Pure.

wanted 3 of version 2, rolling; 3 of version 1 ready   ->  start 1 of version 2
it is ready                                            ->  drain 1 of version 1, start the next
a spot replica is lost, with on-demand fallback        ->  start 1 on-demand, drained once the lost one is ready
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from broker.frozen import frozen
from broker.types import UpdateMode

DRAIN_S_MAX = 120.0  # for which a drained replica may end its requests; SkyServe's


@frozen
class Slot:
    """A location for one replica; None: as the task says."""

    is_spot: bool | None = None
    region: str | None = None
    zone: str | None = None


ON_DEMAND = Slot(is_spot=False)


@frozen
class ReplicaView:
    """A replica as observed. `is_lost`: its machines were preempted or failed, and it starts elsewhere.

    A replica whose preemption was announced is lost as well, and may be ready until then.
    """

    number: int
    version: int
    slot: Slot = Slot()
    is_ready: bool = False
    is_lost: bool = False
    is_draining: bool = False
    in_flight: int = 0
    open_hours: float = 0.0  # for how long its present machines have run
    start_s: float | None = None  # from its request to its first readiness


@frozen
class ReplicaStep:
    """The next step: start a replica in each of these slots, and drain these replicas."""

    start: tuple[Slot, ...] = ()
    drain: tuple[int, ...] = ()


def decide(
    slots: Sequence[Slot],
    replicas: Sequence[ReplicaView],
    *,
    version: int,
    mode: UpdateMode = UpdateMode.ROLLING,
    has_fallback: bool = False,
    needed: int | None = None,
) -> ReplicaStep:
    """Decide for one replica per slot of this version; `has_fallback`: on-demand ones stand in for lost spot ones.

    With `needed`, the slots were chosen for an availability and for the observed replicas: replicas that no slot
    requests are replaced by those of the missing slots. At least `needed` stay ready, and a ready replica is not
    drained before its replacement is ready: the slots include the spare ones that the availability requires meanwhile.
    """
    live = [each for each in replicas if not each.is_draining]
    new = [each for each in live if each.version == version]
    old = [each for each in live if each.version != version]
    wanted = [*slots, *[ON_DEMAND] * (_count_stand_ins(slots, new) if has_fallback and needed is None else 0)]
    missing = _find_missing(wanted, new, is_exact=needed is not None)
    if old and mode is UpdateMode.ROLLING:
        missing = missing[: max(0, len(slots) + 1 - len(old) - len(new))]
    surplus = _choose_surplus(wanted, slots, new) if needed is None else _choose_unrequested(slots, new, needed)
    return ReplicaStep(start=tuple(missing), drain=(*surplus, *_choose_old(len(slots), old, new, mode)))


def _count_stand_ins(slots: Sequence[Slot], new: Sequence[ReplicaView]) -> int:
    """Return the on-demand replicas that stand in: one for each lost spot one, kept until that is ready again."""
    spot = [each for each in new if each.slot.is_spot]
    present = sum(each.slot == ON_DEMAND for each in new) - sum(each == ON_DEMAND for each in slots)
    return max(sum(each.is_lost for each in spot), min(present, sum(not each.is_ready for each in spot)))


def _find_missing(wanted: Sequence[Slot], new: Sequence[ReplicaView], *, is_exact: bool) -> list[Slot]:
    """Return the slots without a replica; unless `is_exact`, as many as there are replicas too few."""
    rest = Counter(wanted)
    rest.subtract(each.slot for each in new)
    missing = [slot for slot in dict.fromkeys(wanted) for _ in range(max(0, rest[slot]))]
    return missing if is_exact else missing[: max(0, len(wanted) - len(new))]


def _choose_unrequested(slots: Sequence[Slot], new: Sequence[ReplicaView], needed: int) -> list[int]:
    """Return the replicas that no slot requests, lost ones first; ready ones only while enough others are ready."""
    rest = Counter(slots)
    unasked = list[ReplicaView]()
    for each in sorted(new, key=lambda each: (each.is_lost, not each.is_ready, each.number)):
        rest[each.slot] -= 1
        if rest[each.slot] < 0:
            unasked.append(each)
    spare = max(0, sum(each.is_ready for each in new) - max(needed, len(slots)))
    ready = sorted((each for each in unasked if each.is_ready), key=lambda each: (each.in_flight, -each.number))
    return [*(each.number for each in unasked if not each.is_ready), *(each.number for each in ready[:spare])]


def _choose_surplus(wanted: Sequence[Slot], slots: Sequence[Slot], new: Sequence[ReplicaView]) -> list[int]:
    """Return the replicas beyond the wanted ones: first those that no slot requests, unready, and least busy.

    A starting replica that a slot requests is not given up for a stand-in: otherwise, on-demand ones would stay
    forever.
    """
    count = len(new) - len(wanted)
    ready_count = sum(each.is_ready for each in new)
    rest = Counter(slots)
    unasked = set[int]()
    for each in sorted(new, key=lambda each: (not each.is_ready, each.number)):
        rest[each.slot] -= 1
        if rest[each.slot] < 0:
            unasked.add(each.number)
    ranked = sorted(new, key=lambda each: (each.number not in unasked, each.is_ready, each.in_flight, -each.number))
    chosen = ranked[: max(0, count)]
    # A ready replica stays as long as it is needed in place of one that is not.
    spare = ready_count - len(slots)
    kept = [each for each in chosen if each.is_ready]
    return [each.number for each in chosen if not each.is_ready] + [each.number for each in kept[: max(0, spare)]]


def _choose_old(count: int, old: Sequence[ReplicaView], new: Sequence[ReplicaView], mode: UpdateMode) -> list[int]:
    """Return the replicas of other versions that ready ones of the wanted version replace."""
    ready = sum(each.is_ready for each in new)
    if mode is UpdateMode.BLUE_GREEN and ready < count:
        return []
    ranked = sorted(old, key=lambda each: (each.is_ready, each.in_flight, each.number))
    return [each.number for each in ranked[: max(0, len(old) + ready - count)]]
