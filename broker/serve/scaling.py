"""Choose the number of replicas by load and by the latency of streams. Pure.

load         (requests in flight + waiting) / target in flight, or requests per second / target; the larger
10 in flight, target 4, 1 to 5 replicas  ->  3

latency      replicas x (measured / target), at most twice as many, as Kubernetes' HorizontalPodAutoscaler does
4 replicas, 0.9 s to the first token, target 0.6 s  ->  6
4 replicas, 0.3 s to the first token, target 0.6 s  ->  3: the load of each grows by a third, and so may its latency

The larger number counts, so a latency within its target never lowers the number that the load requires.
"""

from __future__ import annotations

import math
from dataclasses import replace

from broker.frozen import frozen
from broker.types import ReplicaPolicy

RATIO_MAX = 2.0  # a latency may be far above its target; the next step follows once new replicas have served a minute
CALM = 0.8  # share of the target below which the expected latency without a replica must be


@frozen
class Demand:
    """The measured load. By Little's law, requests in flight are arrivals per second times seconds per request.

    `settled_count` of the `ready_count` replicas have served for as long as the percentiles cover, so the latencies
    are theirs. Replicas that start meanwhile do not change it, which keeps the answer steady until they count.

    `is_known`: all balancers that may have requests report. Otherwise the load may be higher, and only adds replicas.
    """

    qps: float = 0.0
    in_flight: float = 0.0  # waiting ones included
    ttft_p95_s: float | None = None
    tpot_p95_s: float | None = None
    settled_count: int = 0
    ready_count: int = 0
    is_known: bool = True


@frozen
class ScalingState:
    """The present number, and since when the load has required more or fewer; None: it does not.

    `below_most`: the largest number that it has required since `below_since_s`.
    """

    wanted: int
    above_since_s: float | None = None
    below_since_s: float | None = None
    below_most: int = 0


def find_target_qps(policy: ReplicaPolicy, accelerator: str, count: float = 1) -> float:
    """Return the requests per second of a replica with these accelerators; 0 without a target.

    Keys are `A100:8`, `A100`, or "" for any; if none fits, the lowest target counts.
    """
    keys = (f"{accelerator}:{count:g}", accelerator, "")
    found = (policy.target_qps[key] for key in keys if key in policy.target_qps)
    return next(found, min(policy.target_qps.values(), default=0.0))


def count_replicas(
    policy: ReplicaPolicy, demand: Demand, *, wanted: int = 0, accelerator: str = "", accelerator_count: float = 1
) -> int:
    """Return the number that the load requires, within the bounds of the policy; `wanted` is the present number."""
    most = policy.replicas_min if policy.replicas_max is None else max(policy.replicas_max, policy.replicas_min)
    qps = find_target_qps(policy, accelerator, accelerator_count)
    counts = [0 if demand.is_known else wanted]
    if qps:
        counts.append(math.ceil(demand.qps / qps))
    if policy.target_in_flight:
        counts.append(math.ceil(demand.in_flight / policy.target_in_flight))
    if policy.has_latency_target:
        counts.append(_count_for_latency(policy, demand, wanted + policy.spare_count) - policy.spare_count)
    if policy.replicas_min == 0 and demand.in_flight > 0:
        counts.append(1)  # requests are waiting: scale up from 0
    return min(max(*counts, policy.replicas_min), most)


def _count_for_latency(policy: ReplicaPolicy, demand: Demand, present: int) -> int:
    """Return how many replicas, spare ones included, would keep the latencies within their targets.

    More than `present` may be ready while others drain or are on trial; they do not count.
    """
    settled, ready = min(demand.settled_count, present), min(demand.ready_count, present)
    if not demand.qps and not demand.in_flight:
        return 0
    pairs = ((demand.ttft_p95_s, policy.target_ttft_s), (demand.tpot_p95_s, policy.target_tpot_s))
    ratios = [measured / target for measured, target in pairs if measured is not None and target is not None]
    if not ratios or not settled:
        return ready
    ratio = max(ratios)
    if ratio > 1:
        return max(ready, math.ceil(settled * min(ratio, RATIO_MAX)))
    is_calm = settled == ready > 1 and ratio * ready / (ready - 1) <= CALM
    return ready - 1 if is_calm else ready


def scale(policy: ReplicaPolicy, state: ScalingState, asked: int, *, now_s: float) -> ScalingState:
    """Move to the required number once more or fewer have been required for long enough; bounds apply at once.

    It falls to the largest number that was required meanwhile: at the moment when the delay ends, a service may happen
    to have no request in flight.
    """
    least, most = policy.replicas_min, max(policy.replicas_max or policy.replicas_min, policy.replicas_min)
    wanted = min(max(state.wanted, least), most)
    # A clock that was set back restarts the delay, and does not add the hours by which it was set.
    above_s = None if asked <= wanted else now_s if state.above_since_s is None else min(now_s, state.above_since_s)
    below_s = None if asked >= wanted else now_s if state.below_since_s is None else min(now_s, state.below_since_s)
    below_most = 0 if below_s is None else asked if state.below_since_s is None else max(asked, state.below_most)
    if above_s is not None and (wanted == 0 or now_s - above_s >= policy.upscale_delay_s):
        return ScalingState(wanted=asked)
    if below_s is not None and now_s - below_s >= policy.downscale_delay_s:
        return ScalingState(wanted=below_most)
    return replace(state, wanted=wanted, above_since_s=above_s, below_since_s=below_s, below_most=below_most)
