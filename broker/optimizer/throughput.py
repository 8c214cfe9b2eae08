"""Speed of a placement relative to the hardware on which the user measured."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache

from broker.optimizer.memory_model import Sharding
from broker.optimizer.model_shape import ModelShape
from broker.optimizer.network import find_network_gbs
from broker.optimizer.roofline import Hardware, estimate_step
from broker.types import AcceleratorFigures, Goal, Offer

# The reference workload for tasks that do not describe their model: GPT-3 XL (Brown 2020, table 2.1: 1.3 billion
# parameters, 24 x 2048), half a million tokens per step in sequences of 2,048, data parallel with sharded optimizer
# states. A larger model gains more from fast cards, a smaller one less.
REFERENCE_SHAPE = ModelShape(layers=24, width=2048, heads=16)
REFERENCE_SEQUENCE = 2048
REFERENCE_BATCH = 256
# `work_on: A100:16` does not say how its cards are connected: assume nodes of at most 8 on 400 Gbit/s.
REFERENCE_NODE = 8
REFERENCE_NETWORK_GBS = 50.0
PEAK_SHARE = 0.5  # share of the peak that a card reaches if only the peak is known


def scale_work(
    goal: Goal | None,
    offer: Offer,
    figures: Mapping[str, AcceleratorFigures],
    *,
    node_count: int = 1,
    measured: Mapping[str, float] | None = None,
) -> float | None:
    """Return fault-free hours of the goal's work on `node_count` nodes of this offer; None if no work is given.

    `goal.work_on`, and the keys of `measured` ("H100:8" -> tokens or samples per second), count all accelerators of a
    gang. Work without `on` takes the same hours everywhere, and so does work on or from an unknown card.
    """
    if goal is None or goal.work_hours is None:
        return None
    if goal.work_on is None or not offer.accelerator:
        return goal.work_hours
    name, _, text = goal.work_on.partition(":")
    count = float(text or 1)
    own_count = offer.accelerator_count
    own = find_speed(
        offer.accelerator, own_count, figures, node_count=node_count, measured=measured,
        network=find_network_gbs(offer.cloud, offer.instance_type),
    )  # fmt: skip
    reference = _find_gang_speed(name, count, figures, measured)
    if own and reference:
        return goal.work_hours * reference / own
    if name.lower() == offer.accelerator.lower() and own_count:
        return goal.work_hours * count / (own_count * node_count)
    return goal.work_hours


def find_speed(
    name: str,
    count: float,
    figures: Mapping[str, AcceleratorFigures],
    *,
    node_count: int = 1,
    network: float = REFERENCE_NETWORK_GBS,
    measured: Mapping[str, float] | None = None,
) -> float:
    """Return tokens per second of `node_count` nodes of `count` cards: measured, or else by the roofline.

    If another count of the same card was measured, scale its figure by the roofline's ratio of the two; if only other
    cards were measured, by their mean ratio of measured to roofline. `network` in GB/s. Zero if nothing is known.
    """
    known = _find_figures(name, figures)
    roofline = _roofline_speed(known, count, node_count, network) if known else 0.0
    if not measured:
        return roofline
    same: list[tuple[float, float]] = []  # (distance of the counts, measured / roofline)
    others: list[float] = []
    for key, value in measured.items():
        other, _, text = key.partition(":")
        other_count = float(text or 1)
        if other.lower() == name.lower():
            if other_count == count * node_count:
                return value
            base = _find_gang_speed(other, other_count, figures, None)
            distance = abs(math.log(other_count / (count * node_count)))
            if base and roofline:
                same.append((distance, value / base * roofline))
            else:
                same.append((distance, value / other_count * count * node_count))
        elif base := _find_gang_speed(other, other_count, figures, None):
            others.append(value / base)
    if same:
        return min(same)[1]
    return roofline * math.exp(sum(map(math.log, others)) / len(others)) if others else 0.0


def _find_gang_speed(
    name: str, count: float, figures: Mapping[str, AcceleratorFigures], measured: Mapping[str, float] | None
) -> float:
    """Return the speed of this many cards in total, in nodes like `REFERENCE_NODE`."""
    nodes = max(1, math.ceil(count / REFERENCE_NODE))
    return find_speed(name, count / nodes, figures, node_count=nodes, measured=measured)


def _find_figures(name: str, figures: Mapping[str, AcceleratorFigures]) -> AcceleratorFigures | None:
    found = figures.get(name)
    if found is None:
        lowered = name.lower()
        found = next((each for each in figures.values() if each.name.lower() == lowered), None)
    return found


@lru_cache(maxsize=8192)
def _roofline_speed(figures: AcceleratorFigures, count: float, node_count: int, network: float) -> float:
    """Return tokens per second on the reference workload; a fraction of a card has that fraction of its speed.

    If only the peak is known, use the peak alone. Cached: a plan calls this thousands of times.
    """
    if not figures.training_tflops or not count:
        return 0.0
    if not figures.memory_bandwidth_gbs:
        flops = figures.training_tflops * 1e12 * PEAK_SHARE * count * node_count
        return flops / REFERENCE_SHAPE.flops_per_token(REFERENCE_SEQUENCE)
    whole = max(1, round(count))
    ranks = whole * node_count
    batch = ranks * max(1, round(REFERENCE_BATCH / ranks))
    step = estimate_step(
        REFERENCE_SHAPE,
        Sharding(data=ranks, zero=1),
        Hardware(figures=figures, accelerators=whole, network_gbs=network),
        sequence=REFERENCE_SEQUENCE,
        batch=batch,
        micro_batch=max(1, min(4, batch // ranks)),
        recompute="selective",
    )
    return batch * REFERENCE_SEQUENCE / step.total_s * min(1.0, count / whole)
