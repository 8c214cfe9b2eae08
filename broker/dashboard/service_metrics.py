"""Collect the metrics of services: their replicas, cost, and the load that their balancers report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from broker.app.services import ServiceLine
from broker.dashboard.families import Family, Histogram
from broker.serve.files import FIRST_TOKEN_BOUNDS_S, REQUEST_BOUNDS_S

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
    ends = [(labels, load.certificate_ends_s) for labels, load in loads if load.certificate_ends_s is not None]
    name, text = "broker_service_certificate_expiry_timestamp_seconds", "When the certificate for clients expires."
    yield Family(name, "gauge", text, ends)
    totals = [(labels, load.totals) for labels, load in loads]
    answered = [
        ({**labels, "code": code}, float(count)) for labels, each in totals for code, count in each.responses.items()
    ]
    yield Family("broker_service_responses_total", "counter", "Responses by HTTP status code.", answered)
    tokens = [
        ({**labels, "kind": kind}, float(count))
        for labels, each in totals
        for kind, count in (("prompt", each.prompt_tokens), ("completion", each.completion_tokens))
        if each.responses
    ]
    yield Family("broker_service_tokens_total", "counter", "Tokens that a service read and generated.", tokens)
    first = [
        (labels, Histogram.of(FIRST_TOKEN_BOUNDS_S, each.first_token.counts, each.first_token.sum_s))
        for labels, each in totals
        if len(each.first_token.counts) == len(FIRST_TOKEN_BOUNDS_S) + 1
    ]
    name, text = "broker_service_time_to_first_token_seconds", "Time from a request to the first token of its stream."
    yield Family(name, "histogram", text, histograms=first)
    took = [
        (labels, Histogram.of(REQUEST_BOUNDS_S, each.request.counts, each.request.sum_s))
        for labels, each in totals
        if len(each.request.counts) == len(REQUEST_BOUNDS_S) + 1
    ]
    text = "Time from a request to the end of its response."
    yield Family("broker_service_request_seconds", "histogram", text, histograms=took)
