"""Collect the metrics of services: their replicas, cost, and the load of the last minute from their balancers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from broker.app.services import ServiceLine
from broker.dashboard.families import Family

SERVICES_MAX = 100


def list_service_families(lines: Sequence[ServiceLine]) -> Iterator[Family]:
    """List the families about the first `SERVICES_MAX` services; those about load only if a balancer reports it."""
    shown = [({"service": each.service.name}, each) for each in lines[:SERVICES_MAX]]
    states = [
        ({**labels, "status": status}, float(count))
        for labels, line in shown
        for status, count in sorted(Counter(replica.status for replica in line.replicas).items())
    ]
    yield Family("broker_service_replicas", "gauge", "Replicas of a service by status.", states)
    paid = [(labels, line.paid_usd) for labels, line in shown]
    yield Family("broker_service_spend_usd_total", "counter", "Money spent on the replicas of a service.", paid)
    loads = [(labels, line.load) for labels, line in shown if line.load is not None]
    arrived = [(labels, float(load.arrivals)) for labels, load in loads]
    yield Family("broker_service_requests_total", "counter", "Requests since the balancer started.", arrived)
    resumed = [(labels, float(load.resumed)) for labels, load in loads]
    yield Family("broker_service_streams_resumed_total", "counter", "Streams that another replica continued.", resumed)
    flying = [(labels, float(load.in_flight)) for labels, load in loads]
    yield Family("broker_service_in_flight", "gauge", "Requests that replicas are answering.", flying)
    waiting = [(labels, float(load.waiting)) for labels, load in loads]
    yield Family("broker_service_waiting", "gauge", "Requests that wait for a replica.", waiting)
    errors = [
        (labels, load.window.errors / load.window.requests) for labels, load in loads if load.window.requests
    ]  # fmt: skip
    yield Family("broker_service_error_ratio", "gauge", "Share of 5xx responses in the last minute.", errors)
    tokens = [
        ({**labels, "kind": kind}, rate)
        for labels, load in loads
        for kind, rate in (("prompt", load.window.prompt_tokens_s), ("completion", load.window.completion_tokens_s))
    ]
    yield Family("broker_service_tokens_per_second", "gauge", "Token rate of the last minute.", tokens)
    first = [
        ({**labels, "percentile": name}, value)
        for labels, load in loads
        for name, value in (("50", load.window.ttft_p50_s), ("95", load.window.ttft_p95_s))
        if value is not None
    ]
    yield Family(
        "broker_service_time_to_first_token_seconds", "gauge", "Time to the first token in the last minute.", first
    )
