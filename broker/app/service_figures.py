"""Figures of a service that follow from its description: its hourly rate, and the cost of its tokens."""

from __future__ import annotations

from broker.app.services import ReplicaLine, ServiceLine
from broker.serve.files import LoadWindow


def sum_usd_hour(line: ServiceLine) -> float:
    """Return the hourly cost of the replicas, without gateways."""
    return sum(each.usd_hour for each in line.replicas)


def find_window(line: ServiceLine, each: ReplicaLine) -> LoadWindow:
    """Return the balancer's measurements of a replica."""
    seen = line.load.replicas.get(each.replica.number) if line.load else None
    return seen.window if seen else LoadWindow()


def find_usd_per_million(usd_hour: float, window: LoadWindow) -> float | None:
    """Return USD per million tokens, prompts included, at the current rate; None without tokens."""
    tokens_s = window.prompt_tokens_s + window.completion_tokens_s
    return usd_hour / 3600 / tokens_s * 1e6 if tokens_s else None
