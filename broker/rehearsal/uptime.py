"""Measure how much of the time a service had enough ready replicas, and how soon lost ones were replaced. Pure.

wanted 2; ready 0, 2 at 100 s, one lost at 500 s, 2 again at 560 s, end at 1,100 s
    start       100 s
    shares      1 or more: 100 % of 1,000 s; 2: 94 %
    recoveries  60 s
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise


@dataclass(frozen=True, kw_only=True)
class ReadyCount:
    """The number of ready replicas at a simulated time, and the number that the service wanted."""

    time_s: float
    wanted: int
    ready: int


@dataclass(frozen=True, kw_only=True)
class ReplicaLoss:
    """The loss of replicas whose machines one market preempted at the same time.

    `counted`: observations before it. The simulated clock may stand still, so that times do not tell which were.
    `announced`: observations before its notice. Programs that heed a notice end before their machines do.
    """

    time_s: float
    replicas: tuple[int, ...]
    place: str
    announced: int
    counted: int


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """A loss, and the time until as many replicas were ready as before it; None if that did not happen.

    It is 0 if spare replicas covered the loss, so that the service had as many ready replicas as it wanted.
    """

    loss: ReplicaLoss
    recovery_s: float | None


@dataclass(frozen=True, kw_only=True)
class Uptime:
    """Times in simulated seconds. Shares count from the first time that all wanted replicas were ready."""

    wanted: int = 0  # the largest number
    start_s: float | None = None  # until all wanted replicas were ready; None if they never were
    served_s: float = 0.0  # from then to the end
    kept_share: float | None = None  # of `served_s`, with at least the wanted number ready
    shares: Mapping[int, float] = field(default_factory=dict)  # of `served_s`, with at least this number ready
    recoveries: tuple[Recovery, ...] = ()


def measure_uptime(counts: Sequence[ReadyCount], losses: Sequence[ReplicaLoss]) -> Uptime:
    """Measure from observations, oldest first. Each holds until the next one; the last one is the end."""
    wanted = max((each.wanted for each in counts), default=0)
    first = next((index for index, each in enumerate(counts) if each.wanted and each.ready >= each.wanted), None)
    recoveries = tuple(Recovery(loss=each, recovery_s=_measure_recovery_s(counts, each)) for each in losses)
    if first is None:
        return Uptime(wanted=wanted, recoveries=recoveries)
    served_s = counts[-1].time_s - counts[first].time_s
    spans = [(after.time_s - each.time_s, each) for each, after in pairwise(counts[first:])]

    def share(span_s: float) -> float:
        return span_s / served_s if served_s > 0 else 1.0

    return Uptime(
        wanted=wanted,
        start_s=counts[first].time_s - counts[0].time_s,
        served_s=served_s,
        kept_share=share(sum(span_s for span_s, each in spans if each.ready >= each.wanted)),
        shares={
            count: share(sum(span_s for span_s, each in spans if each.ready >= count)) for count in range(1, wanted + 1)
        },
        recoveries=recoveries,
    )


def _measure_recovery_s(counts: Sequence[ReadyCount], loss: ReplicaLoss) -> float | None:
    if not loss.announced:
        return None
    before, after = counts[loss.announced - 1], counts[loss.counted :]
    needed = min(before.ready, before.wanted)
    if after and after[0].ready >= needed:
        return 0.0
    return next((each.time_s - loss.time_s for each in after if each.ready >= needed), None)
