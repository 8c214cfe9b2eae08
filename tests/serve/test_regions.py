"""A balancer prefers the replicas of its region until they are busy, and spills over to the others."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from broker.clock import SystemClock
from broker.serve.files import Backend
from broker.serve.routes import RouteTable
from tests.serve.test_gateways import GatewayWorld

EAST, WEST = "aws/us-east-1", "gcp/us-west1"


def make_table(region: str, *, near_in_flight_max: float = 4.0) -> RouteTable:
    """Make a table of two ready replicas in each of two regions."""
    table = RouteTable(clock=SystemClock(), draw=random.Random(1))
    backends = [Backend(number=n, version=1, host="h", port=n, region=EAST if n <= 2 else WEST) for n in range(1, 5)]
    table.update(backends, region=region, near_in_flight_max=near_in_flight_max)
    for route in table.routes.values():
        table.admit(route)
    return table


def send(table: RouteTable, count: int, balancing: str = "least_load") -> Counter[str]:
    """Send requests that do not end; return the number that each region got."""
    found: Counter[str] = Counter()
    for _ in range(count):
        route = table.choose(balancing=balancing, prefix=b"You are a helpful assistant.")
        assert route is not None
        route.in_flight += 1
        found[route.backend.region] += 1
    return found


@pytest.mark.parametrize("balancing", ["least_load", "prefix_affinity"])
def test_requests_stay_in_the_region_until_its_replicas_are_busy(balancing: str) -> None:
    table = make_table(EAST)
    assert send(table, 8, balancing) == {EAST: 8}
    assert send(table, 8, balancing)[WEST] >= 4, "the less busy ones, wherever they are"
    table.routes[1].in_flight = 0
    assert send(table, 1, balancing) == {EAST: 1}


def test_requests_leave_a_region_whose_replicas_are_gone() -> None:
    table = make_table(EAST)
    for number in (1, 2):
        table.exclude(table.routes[number], "refused")
    assert send(table, 3) == {WEST: 3}


@pytest.mark.parametrize("region", ["", "aws/eu-west-1"])
def test_balancer_without_a_region_or_replicas_there_uses_all(region: str) -> None:
    sent = send(make_table(region), 40)
    assert abs(sent[EAST] - sent[WEST]) <= 6, sent


def test_each_gateway_gets_its_own_region_and_those_of_the_replicas(tmp_path: Path) -> None:
    world = GatewayWorld(tmp_path)
    world.settle(10)
    routings = [world.read_routing(number) for number in (1, 2)]
    cluster = world.store.clusters.list()[0]
    expected = f"{cluster.placement.offer.cloud}/{cluster.placement.offer.region}"
    assert [each.region for each in routings] == [expected] * 2
    assert {backend.region for each in routings for backend in each.backends} == {expected}
