"""Policies for a job on spot markets. Each has one file and one line in `POLICIES`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from broker.spot.policies.base import SpotPolicy

# name -> "module:function"; each function is a `broker.spot.policies.base.SpotPolicy`
POLICIES: dict[str, str] = {
    "on-demand": "broker.spot.policies.on_demand:decide",
    "greedy": "broker.spot.policies.greedy:decide",
    "uniform-progress": "broker.spot.policies.uniform_progress:decide",
    "next-spot": "broker.spot.policies.uniform_progress:decide_next_spot",
    "failover": "broker.spot.policies.skypilot:decide_failover",
    "eager": "broker.spot.policies.skypilot:decide_eager",
    "adaptive": "broker.spot.policies.adaptive:decide",
}
# Policies that know the future of a replay: bounds for comparison, unusable on a real market.
ORACLES = frozenset({"next-spot"})
# Policies that decide by the present alone: their replays are faster without the history of markets since submission.
MEMORYLESS = frozenset({"on-demand", "greedy", "uniform-progress", "next-spot", "failover", "eager"})


def load_policy(name: str) -> SpotPolicy:
    """Return the policy of that name, which must be in `POLICIES`."""
    module, _, attribute = POLICIES[name].partition(":")
    policy: SpotPolicy = getattr(importlib.import_module(module), attribute)
    return policy
