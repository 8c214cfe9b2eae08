"""Pure decisions: how many replicas, and which to start and to drain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.serve.reconciling import ReplicaStep, ReplicaView, Slot, decide
from broker.serve.scaling import Demand, ScalingState, count_replicas, find_target_qps, scale
from broker.types import ReplicaPolicy, UpdateMode

POLICY = ReplicaPolicy(replicas_min=1, replicas_max=5, target_in_flight=4, upscale_delay_s=10, downscale_delay_s=100)
SPOT, ON_DEMAND = Slot(is_spot=True), Slot(is_spot=False)


@pytest.mark.parametrize(
    ("policy", "demand", "expected"),
    [
        (POLICY, Demand(in_flight=10), 3),
        (POLICY, Demand(in_flight=0), 1),
        (POLICY, Demand(in_flight=100), 5),
        (ReplicaPolicy(replicas_min=3), Demand(in_flight=100, qps=9), 3),
        (replace(POLICY, target_in_flight=None, target_qps={"": 2.0}), Demand(qps=5), 3),
        (replace(POLICY, replicas_min=0), Demand(), 0),
        (ReplicaPolicy(replicas_min=0, replicas_max=2, target_qps={"": 9.0}), Demand(in_flight=1), 1),
    ],
)
def test_count_follows_the_load_within_the_bounds(policy: ReplicaPolicy, demand: Demand, expected: int) -> None:
    assert count_replicas(policy, demand) == expected


def test_unknown_load_is_not_a_low_one_and_stays_within_the_bounds() -> None:
    silent = Demand(is_known=False)
    assert [count_replicas(POLICY, silent, wanted=number) for number in (0, 4, 9)] == [1, 4, 5]
    assert count_replicas(POLICY, Demand(in_flight=20, is_known=False), wanted=4) == 5
    assert count_replicas(ReplicaPolicy(replicas_min=2), silent, wanted=4) == 2


def test_target_of_the_accelerator_counts_before_the_general_one() -> None:
    policy = ReplicaPolicy(replicas_min=1, replicas_max=9, target_qps={"A100": 1.0, "": 4.0})
    assert count_replicas(policy, Demand(qps=8), accelerator="A100") == 8
    assert count_replicas(policy, Demand(qps=8), accelerator="T4") == 2


def test_number_changes_only_after_its_delay_and_a_calm_spell_starts_again() -> None:
    state = ScalingState(wanted=1)
    for now_s, asked, expected in ((0, 3, 1), (9, 3, 1), (10, 4, 4), (20, 2, 4), (100, 5, 4), (101, 2, 4), (201, 2, 2)):
        state = scale(POLICY, state, asked, now_s=now_s)
        assert state.wanted == expected, now_s


def test_number_falls_to_the_largest_that_was_required_meanwhile() -> None:
    """A sample without requests would otherwise send a busy service to zero, and through another cold start."""
    policy = replace(POLICY, replicas_min=0)
    state = ScalingState(wanted=4)
    steps = ((0, 1, 4), (50, 2, 4), (99, 1, 4), (100, 0, 2), (101, 1, 2), (201, 0, 1), (301, 0, 1), (401, 0, 0))
    for now_s, asked, expected in steps:
        state = scale(policy, state, asked, now_s=now_s)
        assert state.wanted == expected, now_s


def test_clock_that_is_set_back_does_not_add_to_the_delay() -> None:
    state = ScalingState(wanted=1)
    for now_s, asked, expected in ((3_600, 3, 1), (0, 3, 1), (10, 3, 3), (3_600, 2, 3), (5, 2, 3), (105, 2, 2)):
        state = scale(POLICY, state, asked, now_s=now_s)
        assert state.wanted == expected, now_s


def test_service_wakes_from_zero_at_once() -> None:
    assert scale(replace(POLICY, replicas_min=0), ScalingState(wanted=0), 1, now_s=0).wanted == 1


def view(
    number: int, version: int = 1, *, ready: bool = True, slot: Slot = ON_DEMAND, lost: bool = False
) -> ReplicaView:
    return ReplicaView(number=number, version=version, slot=slot, is_ready=ready, is_lost=lost)


def test_lost_spot_replica_has_a_stand_in_until_it_is_ready_again() -> None:
    replicas = [view(1, slot=SPOT), view(2, slot=SPOT, ready=False, lost=True)]
    slots = [SPOT, SPOT]
    assert decide(slots, replicas, version=1).start == ()
    assert decide(slots, replicas, version=1, has_fallback=True).start == (ON_DEMAND,)
    stood_in = [*replicas, view(3)]
    assert decide(slots, stood_in, version=1, has_fallback=True).start == ()
    assert decide(slots, stood_in, version=1, has_fallback=True).drain == ()
    back = [view(1, slot=SPOT), view(2, slot=SPOT), view(3)]
    assert decide(slots, back, version=1, has_fallback=True).drain == (3,)


def play_update(mode: UpdateMode, count: int) -> tuple[int, int]:
    """Return the fewest ready and the most live replicas of an update."""
    replicas = [view(number) for number in range(count)]
    fewest = most = count
    for turn in range(100, 100 + 6 * count):
        step = decide([ON_DEMAND] * count, replicas, version=2, mode=mode)
        replicas = [each for each in replicas if each.number not in step.drain]
        replicas += [view(turn * 10 + index, 2, ready=False) for index in range(len(step.start))]
        fewest = min(fewest, sum(each.is_ready for each in replicas))
        most = max(most, len(replicas))
        replicas = [replace(each, is_ready=True) for each in replicas]
    assert [each.version for each in replicas] == [2] * count
    return fewest, most


def test_update_never_has_fewer_ready_replicas_than_wanted() -> None:
    for count in range(1, 6):
        assert play_update(UpdateMode.ROLLING, count) == (count, count + 1)
        assert play_update(UpdateMode.BLUE_GREEN, count) == (count, 2 * count)


views = st.builds(
    ReplicaView, number=st.integers(1, 40), version=st.sampled_from([1, 2]), slot=st.sampled_from([SPOT, ON_DEMAND]),
    is_ready=st.booleans(), is_lost=st.booleans(), is_draining=st.booleans(), in_flight=st.integers(0, 3),
)  # fmt: skip


@given(
    st.lists(views, unique_by=lambda each: each.number, max_size=12),
    st.lists(st.sampled_from([SPOT, ON_DEMAND]), max_size=5),
    st.sampled_from(UpdateMode),
    st.booleans(),
)
def test_any_mixture_converges_without_too_few_ready_replicas(
    replicas: Sequence[ReplicaView], slots: Sequence[Slot], mode: UpdateMode, has_fallback: bool
) -> None:
    kept = list(replicas)
    number = 100
    for _ in range(60):
        step = decide(slots, kept, version=2, mode=mode, has_fallback=has_fallback)
        ready = sum(each.is_ready and not each.is_draining for each in kept)
        drained = sum(each.is_ready for each in kept if each.number in step.drain)
        assert len(set(step.drain)) == len(step.drain)
        assert drained == 0 or ready - drained >= len(slots)
        kept = [each for each in kept if each.number not in step.drain and not each.is_draining]
        for slot in step.start:
            number += 1
            kept.append(ReplicaView(number=number, version=2, slot=slot))
        kept = [replace(each, is_ready=True, is_lost=False) for each in kept]
    assert len(kept) == len(slots) and all(each.version == 2 for each in kept)


@pytest.mark.parametrize(("accelerator", "count", "qps"), [("A100", 8, 2.0), ("A100", 1, 0.5), ("H100", 1, 0.5)])
def test_target_of_the_exact_accelerators_counts_first_and_the_lowest_where_none_fits(
    accelerator: str, count: int, qps: float
) -> None:
    policy = ReplicaPolicy(target_qps={"A100:8": 2.0, "A100": 0.5, "L4": 1.0})
    assert find_target_qps(policy, accelerator, count) == qps


def test_stand_in_is_kept_until_the_spot_replica_is_ready_and_then_drained() -> None:
    ready, stand_in = ReplicaView(number=1, version=1, slot=SPOT, is_ready=True), Slot(is_spot=False)
    lost = ReplicaView(number=2, version=1, slot=SPOT, is_lost=True)
    slots = [SPOT, SPOT]
    assert decide(slots, [ready, lost], version=1, has_fallback=True).start == (stand_in,)
    for is_ready in (False, True):
        other = ReplicaView(number=3, version=1, slot=stand_in, is_ready=is_ready)
        starting = replace(lost, is_lost=False)
        assert decide(slots, [ready, starting, other], version=1, has_fallback=True).drain == ()
        back = replace(starting, is_ready=True)
        assert decide(slots, [ready, back, other], version=1, has_fallback=True).drain == (3,)


def test_replica_that_a_slot_requires_is_kept_rather_than_a_ready_one_that_none_requires() -> None:
    starting = ReplicaView(number=1, version=1, slot=SPOT)
    other = ReplicaView(number=2, version=1, slot=ON_DEMAND, is_ready=True)
    assert decide([SPOT], [starting, other], version=1).drain == ()


A, B = (Slot(is_spot=True, region="r", zone=zone) for zone in "ab")


def test_stand_in_that_is_no_longer_needed_is_drained_once_enough_others_are_ready() -> None:
    replicas = [view(1, slot=A), view(2), view(3)]
    starting = decide([A, A], replicas, version=1, needed=2)
    assert starting.start == (A,) and starting.drain == (3,)
    back = [view(1, slot=A), view(2), view(4, slot=A, ready=False)]
    assert decide([A, A], back, version=1, needed=2) == ReplicaStep()
    ready = [view(1, slot=A), view(2), view(4, slot=A)]
    assert decide([A, A], ready, version=1, needed=2) == ReplicaStep(drain=(2,))


def test_moved_replica_serves_until_the_one_that_replaces_it_is_ready() -> None:
    replicas = [view(1, slot=A), view(2, slot=A), view(3, slot=B)]
    assert decide([A, A, ON_DEMAND], replicas, version=1, needed=2) == ReplicaStep(start=(ON_DEMAND,))
    for is_ready in (False, True):
        moved = [*replicas, view(4, ready=is_ready)]
        assert decide([A, A, ON_DEMAND], moved, version=1, needed=2) == ReplicaStep(drain=(3,) if is_ready else ())


def test_lost_replica_is_replaced_where_the_slots_say() -> None:
    replicas = [view(1, slot=A, ready=False, lost=True), view(2, slot=B)]
    assert decide([B, B, ON_DEMAND], replicas, version=1, needed=2) == ReplicaStep(start=(B, ON_DEMAND), drain=(1,))


placed_views = st.builds(
    ReplicaView, number=st.integers(1, 40), version=st.just(2), slot=st.sampled_from([A, B, ON_DEMAND]),
    is_ready=st.booleans(), is_lost=st.booleans(), is_draining=st.booleans(), in_flight=st.integers(0, 3),
)  # fmt: skip


@given(
    st.lists(placed_views, unique_by=lambda each: each.number, max_size=12),
    st.lists(st.sampled_from([A, B, ON_DEMAND]), min_size=1, max_size=6),
    st.integers(1, 6),
)
def test_placed_replicas_reach_their_slots_and_readiness_never_falls_below_the_needed(
    replicas: Sequence[ReplicaView], slots: Sequence[Slot], needed: int
) -> None:
    needed = min(needed, len(slots))
    kept, number = list(replicas), 100
    for _ in range(20):
        step = decide(slots, kept, version=2, needed=needed)
        ready = sum(each.is_ready and not each.is_draining for each in kept)
        drained = sum(each.is_ready for each in kept if each.number in step.drain)
        assert drained == 0 or ready - drained >= needed
        assert len(step.start) <= len(slots)
        kept = [each for each in kept if each.number not in step.drain and not each.is_draining]
        for slot in step.start:
            number += 1
            kept.append(ReplicaView(number=number, version=2, slot=slot))
        kept = [replace(each, is_ready=True, is_lost=False) for each in kept]
    assert sorted(map(repr, slots)) == sorted(repr(each.slot) for each in kept)
