"""Merge the loads that several balancers of one service report. Pure.

in flight 3 at one, 5 at the other      ->  8
replica 1 ready at one, not the other   ->  ready: the one that is behind will see it at its next probe
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import zip_longest

from broker.serve.files import DurationCounts, Load, LoadTotals, LoadWindow, ReplicaLoad

UNKNOWN = -1  # no routing file has this generation


def merge_loads(loads: Sequence[Load], *, is_complete: bool) -> Load | None:
    """Return the load of the service; None without reports.

    Its generation is one on which all balancers act. Unless `is_complete`, a balancer that may have requests did not
    report, so none is known.
    """
    if not loads:
        return None
    numbers = sorted({number for each in loads for number in each.replicas})
    return Load(
        generation=min(each.generation for each in loads) if is_complete else UNKNOWN,
        time_s=max(each.time_s for each in loads),
        pid=0,
        arrivals=sum(each.arrivals for each in loads),
        in_flight=sum(each.in_flight for each in loads),
        waiting=sum(each.waiting for each in loads),
        resumed=sum(each.resumed for each in loads),
        broken=sum(each.broken for each in loads),
        window=merge_windows([each.window for each in loads]),
        totals=merge_totals([each.totals for each in loads]),
        replicas={
            number: _merge_replica([each.replicas[number] for each in loads if number in each.replicas])
            for number in numbers
        },
        certificate_ends_s=min((s for each in loads if (s := each.certificate_ends_s) is not None), default=None),
    )


def _merge_replica(seen: Sequence[ReplicaLoad]) -> ReplicaLoad:
    """Merge the views of one replica: ready since the first balancer saw it ready, unready since the last one did."""
    ready = [each for each in seen if each.is_ready]
    return ReplicaLoad(
        is_ready=bool(ready),
        in_flight=sum(each.in_flight for each in seen),
        since_s=min(each.since_s for each in ready) if ready else max(each.since_s for each in seen),
        error=next((each.error for each in seen if each.error), "") if not ready else "",
        window=merge_windows([each.window for each in seen]),
    )


def merge_windows(windows: Sequence[LoadWindow]) -> LoadWindow:
    """Add rates; of the percentiles keep the largest, which the joint one does not exceed."""
    return LoadWindow(
        requests=sum(each.requests for each in windows),
        errors=sum(each.errors for each in windows),
        qps=sum(each.qps for each in windows),
        prompt_tokens_s=sum(each.prompt_tokens_s for each in windows),
        completion_tokens_s=sum(each.completion_tokens_s for each in windows),
        ttft_p50_s=find_largest(each.ttft_p50_s for each in windows),
        ttft_p95_s=find_largest(each.ttft_p95_s for each in windows),
        tpot_p50_s=find_largest(each.tpot_p50_s for each in windows),
        tpot_p95_s=find_largest(each.tpot_p95_s for each in windows),
    )


def merge_totals(totals: Sequence[LoadTotals]) -> LoadTotals:
    """Add the responses of all balancers."""
    responses: Counter[str] = Counter()
    for each in totals:
        responses.update(each.responses)
    return LoadTotals(
        responses=dict(responses),
        prompt_tokens=sum(each.prompt_tokens for each in totals),
        completion_tokens=sum(each.completion_tokens for each in totals),
        first_token=_add_durations([each.first_token for each in totals]),
        request=_add_durations([each.request for each in totals]),
    )


def _add_durations(parts: Sequence[DurationCounts]) -> DurationCounts:
    counts = zip_longest(*(each.counts for each in parts), fillvalue=0)
    return DurationCounts(counts=tuple(map(sum, counts)), sum_s=sum(each.sum_s for each in parts))


def find_largest(values: Iterable[float | None]) -> float | None:
    """Return the largest of the known values; None if none is known."""
    return max((each for each in values if each is not None), default=None)


def shift_times(load: Load, shift_s: float) -> Load:
    """Return a load whose times are by another clock, which is ahead by this much."""
    return replace(
        load,
        time_s=load.time_s + shift_s,
        replicas={number: replace(each, since_s=each.since_s + shift_s) for number, each in load.replicas.items()},
    )
