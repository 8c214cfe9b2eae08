"""The loads of several balancers as one."""

from __future__ import annotations

from broker.serve.files import DurationCounts, Load, LoadTotals, LoadWindow, ReplicaLoad
from broker.serve.merging import UNKNOWN, merge_loads, merge_totals, merge_windows, shift_times


def make_load(generation: int = 3, **fields: object) -> Load:
    return Load(generation=generation, time_s=100.0, pid=7, **fields)  # type: ignore[arg-type]


def test_counts_and_rates_are_added_and_percentiles_are_the_largest() -> None:
    one = make_load(
        arrivals=10, in_flight=3, waiting=1, resumed=1, broken=0, window=LoadWindow(qps=2.0, ttft_p95_s=0.4)
    )
    other = make_load(arrivals=4, in_flight=5, broken=2, window=LoadWindow(qps=1.0, requests=9))
    merged = merge_loads([one, other], is_complete=True)
    assert merged is not None
    assert (merged.arrivals, merged.in_flight, merged.waiting, merged.resumed, merged.broken) == (14, 8, 1, 1, 2)
    assert merged.window == LoadWindow(qps=3.0, requests=9, ttft_p95_s=0.4)
    assert merge_windows([]) == LoadWindow()


def test_generation_is_one_that_all_balancers_act_on_and_none_while_one_is_silent() -> None:
    loads = [make_load(3), make_load(4)]
    complete, partial = merge_loads(loads, is_complete=True), merge_loads(loads, is_complete=False)
    assert complete is not None and complete.generation == 3
    assert partial is not None and partial.generation == UNKNOWN
    assert merge_loads([], is_complete=True) is None


def test_replica_is_ready_if_any_balancer_sees_it_ready() -> None:
    ready = ReplicaLoad(is_ready=True, in_flight=2, since_s=50.0)
    behind = ReplicaLoad(is_ready=False, in_flight=0, since_s=90.0, error="not probed yet")
    bad = ReplicaLoad(is_ready=False, in_flight=1, since_s=70.0, error="returned 500")
    merged = merge_loads(
        [make_load(replicas={1: ready, 2: bad}), make_load(replicas={1: behind, 2: behind})], is_complete=True
    )
    assert merged is not None
    assert merged.replicas[1] == ReplicaLoad(is_ready=True, in_flight=2, since_s=50.0)
    assert merged.replicas[2] == ReplicaLoad(is_ready=False, in_flight=1, since_s=90.0, error="returned 500")


def test_times_of_a_machine_with_another_clock_are_shifted() -> None:
    load = make_load(replicas={1: ReplicaLoad(is_ready=True, in_flight=0, since_s=40.0)})
    shifted = shift_times(load, 1000.0)
    assert (shifted.time_s, shifted.replicas[1].since_s) == (1100.0, 1040.0)


def test_totals_are_added_bucket_by_bucket() -> None:
    one = LoadTotals(
        responses={"200": 5, "503": 1}, prompt_tokens=7, request=DurationCounts(counts=(1, 2, 3), sum_s=4.0)
    )
    other = LoadTotals(responses={"200": 2}, completion_tokens=3, request=DurationCounts(counts=(1, 1, 1), sum_s=1.0))
    expected = LoadTotals(
        responses={"200": 7, "503": 1}, prompt_tokens=7, completion_tokens=3,
        request=DurationCounts(counts=(2, 3, 4), sum_s=5.0),
    )  # fmt: skip
    assert merge_totals([one, other, LoadTotals()]) == expected  # the last one: of an earlier release, or without any
    merged = merge_loads([make_load(totals=one), make_load(totals=other)], is_complete=True)
    assert merged is not None and merged.totals == expected


def test_first_certificate_to_expire_counts() -> None:
    loads = [make_load(certificate_ends_s=each) for each in (None, 9.0, 5.0)]
    merged, bare = merge_loads(loads, is_complete=True), merge_loads(loads[:1], is_complete=True)
    assert merged is not None and merged.certificate_ends_s == 5.0
    assert bare is not None and bare.certificate_ends_s is None
