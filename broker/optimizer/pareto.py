"""The Pareto frontier of cost and time: placements that no other placement beats in both."""

from __future__ import annotations

import math
from collections.abc import Iterable

from broker.types import Estimate


def find_frontier(estimates: Iterable[Estimate]) -> list[Estimate]:
    """Return the frontier from the cheapest to the fastest; of equals, the first.

    Estimates without hours or dollars are skipped.
    """
    frontier = list[Estimate]()
    least_hours = math.inf
    for each in sorted(list_timed(estimates), key=lambda each: (each.expected_usd or 0.0, each.expected_hours or 0.0)):
        hours = each.expected_hours or 0.0
        if hours < least_hours * (1 - 1e-9):
            frontier.append(each)
            least_hours = hours
    return frontier


def list_timed(estimates: Iterable[Estimate]) -> list[Estimate]:
    """List estimates with finite hours and dollars."""
    return [
        estimate
        for estimate in estimates
        if estimate.expected_usd is not None
        and estimate.expected_hours is not None
        and math.isfinite(estimate.expected_usd)
        and math.isfinite(estimate.expected_hours)
    ]
