"""Replicas by the latency of streams: raised to keep a target, never lowered below it, and steady in between."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.app.service_checks import check_service
from broker.serve.files import Load, LoadWindow, ReplicaLoad
from broker.serve.observing import WINDOW_S, DemandMeter
from broker.serve.scaling import CALM, Demand, ScalingState, count_replicas, scale
from broker.task.loader import load_tasks_text
from broker.types import ReplicaPolicy

POLICY = ReplicaPolicy(replicas_min=1, replicas_max=20, target_ttft_s=0.6, target_tpot_s=0.05, downscale_delay_s=60)
BUSY = Demand(qps=5, in_flight=3, settled_count=4, ready_count=4)


@pytest.mark.parametrize(
    ("demand", "expected"),
    [
        (replace(BUSY, ttft_p95_s=0.9), 6),
        (replace(BUSY, ttft_p95_s=0.61), 5),
        (replace(BUSY, ttft_p95_s=60), 8),  # at most twice as many
        (replace(BUSY, ttft_p95_s=0.1, tpot_p95_s=0.06), 5),  # the worse of the two
        (replace(BUSY, ttft_p95_s=0.5), 4),  # would be 0.67 s with three
        (replace(BUSY, ttft_p95_s=0.3), 3),
        (BUSY, 4),  # requests without a stream have no such latency
        (replace(BUSY, ttft_p95_s=0.9, settled_count=0), 4),
        (replace(BUSY, ttft_p95_s=0.1, settled_count=3), 4),  # one has just become ready
        (replace(BUSY, ttft_p95_s=0.9, settled_count=2), 4),  # half of the measured load is about to move
        (Demand(settled_count=4, ready_count=4), 1),  # no requests
    ],
)
def test_number_of_replicas_follows_the_latency(demand: Demand, expected: int) -> None:
    assert count_replicas(POLICY, demand, wanted=4) == expected


def test_replicas_on_trial_or_draining_do_not_count() -> None:
    more = replace(BUSY, settled_count=9, ready_count=9, ttft_p95_s=0.5)
    assert count_replicas(POLICY, more, wanted=4) == 4


def test_spare_replicas_are_not_added_twice() -> None:
    policy = replace(POLICY, spare_count=1)
    assert count_replicas(policy, replace(BUSY, ttft_p95_s=0.5), wanted=3) == 3
    assert count_replicas(policy, replace(BUSY, ttft_p95_s=0.9), wanted=3) == 5


def test_latency_within_its_target_does_not_lower_the_number_that_the_load_requires() -> None:
    policy = replace(POLICY, target_in_flight=1.0)
    assert count_replicas(policy, replace(BUSY, in_flight=7, ttft_p95_s=0.1), wanted=4) == 7


@given(
    work=st.floats(0.1, 6.0),  # of the latency of one replica, in targets
    first=st.integers(1, 20),
    start_steps=st.integers(1, 30),
)
def test_steady_load_ends_within_the_target_without_oscillation(work: float, first: int, start_steps: int) -> None:
    """Latency is in proportion to the load of a replica; a replica needs time to start, and another minute to count."""
    step_s = 20.0
    state, now_s = ScalingState(wanted=first), 0.0
    ready_since = [-WINDOW_S] * first
    seen = []
    for _ in range(900):
        now_s += step_s
        ready = [since for since in ready_since if since <= now_s]
        settled = [since for since in ready if since <= now_s - WINDOW_S]
        # The window still holds the latencies of fewer replicas until all have settled.
        ttft_s = 0.6 * work / max(1, len(settled))
        demand = Demand(qps=1, in_flight=1, ttft_p95_s=ttft_s, settled_count=len(settled), ready_count=len(ready))
        asked = count_replicas(POLICY, demand, wanted=state.wanted)
        state = scale(POLICY, state, asked, now_s=now_s)
        ready_since = ready_since[: state.wanted]
        ready_since += [now_s + start_steps * step_s] * (state.wanted - len(ready_since))
        if not seen or seen[-1] != state.wanted:
            seen.append(state.wanted)
    assert work / state.wanted <= 1 + 1e-9, "the target is kept"
    assert state.wanted == 1 or work / (state.wanted - 1) > CALM - 1e-9, "and no replica is idle"
    rises = [after > before for before, after in pairwise(seen)]
    assert rises == sorted(rises, reverse=True), f"it rises, then falls at most once: {seen}"


def test_demand_counts_replicas_that_have_served_for_the_whole_window() -> None:
    def replica(since_s: float, *, is_ready: bool = True) -> ReplicaLoad:
        return ReplicaLoad(is_ready=is_ready, in_flight=1, since_s=since_s)

    load = Load(
        generation=1, time_s=1000.0, pid=7, in_flight=3, window=LoadWindow(ttft_p95_s=0.4, tpot_p95_s=0.02),
        replicas={1: replica(0.0), 2: replica(1000.0 - WINDOW_S), 3: replica(990.0), 4: replica(0.0, is_ready=False)},
    )  # fmt: skip
    demand = DemandMeter().measure(load)
    assert (demand.settled_count, demand.ready_count) == (2, 3)
    assert (demand.ttft_p95_s, demand.tpot_p95_s) == (0.4, 0.02)


def test_requests_are_counted_after_the_clock_was_set_back() -> None:
    """Until it was where it had been, the service had no load, and fell to its minimum."""
    meter = DemandMeter()
    for second in range(10):
        meter.measure(Load(generation=1, time_s=9_000.0 + second, pid=7, arrivals=5 * second))
    meter.measure(Load(generation=1, time_s=1_000.0, pid=7, arrivals=50))
    assert meter.measure(Load(generation=1, time_s=1_010.0, pid=7, arrivals=100)).qps == 5.0


TASK = """\
resources: {infra: local}
service:
  readiness_probe: /
  replica_policy: {min_replicas: 1, max_replicas: 4, target_ttft_seconds: 0.5, target_tpot_seconds: 0.05}
run: serve
"""


def test_latency_targets_are_read_from_the_task() -> None:
    (task,) = load_tasks_text(TASK, "task.yaml")
    policy = check_service(task).policy
    assert (policy.target_ttft_s, policy.target_tpot_s) == (0.5, 0.05)
