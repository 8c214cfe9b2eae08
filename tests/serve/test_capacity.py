"""`instance_aware_least_load`: replicas of different accelerators get requests in relation to their targets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from broker.clock import SystemClock
from broker.serve.files import Backend, Routing, read_file
from broker.serve.haproxy_config import render
from broker.serve.routes import RouteTable
from broker.types import BalancerType, Offer, ReadinessProbe, ReplicaPolicy, Resources, ServiceSpec, Task
from tests.serve import test_controller
from tests.serve.test_controller import World
from tests.simulation.world import make_offer

TARGETS = {"H100": 4.0, "L4": 1.0}


def count_chosen(capacities: Mapping[int, float]) -> dict[int, int]:
    """Send 100 requests that do not end; return the number that each replica got."""
    table = RouteTable(clock=SystemClock())
    table.update([Backend(number=n, version=1, host="h", port=n, capacity=each) for n, each in capacities.items()])
    for route in table.routes.values():
        table.admit(route)
    for _ in range(100):
        chosen = table.choose(balancing="instance_aware_least_load")
        assert chosen is not None
        chosen.in_flight += 1
    return {number: route.in_flight for number, route in table.routes.items()}


def test_requests_in_flight_are_in_relation_to_capacities() -> None:
    assert count_chosen({1: 4.0, 2: 1.0}) == {1: 80, 2: 20}
    assert count_chosen({1: 1.0, 2: 1.0}) == {1: 50, 2: 50}


@pytest.mark.parametrize(
    ("balancing", "expected"), [("instance_aware_least_load", [4.0, 1.0]), ("least_load", [1.0, 1.0])]
)
def test_capacity_is_the_target_of_the_accelerators_that_a_replica_got(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, balancing: str, expected: list[float]
) -> None:
    kinds = list(TARGETS)

    def offer(name: str) -> Offer:
        return replace(make_offer(name), accelerator=kinds.pop(0), accelerator_count=1)

    monkeypatch.setattr(test_controller, "make_offer", offer)
    policy = ReplicaPolicy(replicas_min=2, replicas_max=4, target_qps=TARGETS, downscale_delay_s=1e9)
    spec = ServiceSpec(probe=ReadinessProbe(path="/"), policy=policy, port=8080, balancing=balancing)
    alternatives = tuple(Resources(cloud="local", accelerator=each, accelerator_count=1) for each in TARGETS)
    world = World(tmp_path, Task(name="web", run="x", resources=alternatives, service=spec))
    world.settle(6)
    routing = read_file(world.folder.routing, Routing)
    assert routing is not None and [each.capacity for each in routing.backends] == expected


def test_haproxy_gets_weights_for_all_servers_or_for_none() -> None:
    backends = (
        Backend(number=1, version=1, host="h", port=1, capacity=4.0),
        Backend(number=2, version=1, host="h", port=2),
        Backend(number=3, version=1, host="h", port=3, capacity=4.0, is_draining=True),
    )
    routing = Routing(
        generation=1, host="127.0.0.1", port=1, probe=ReadinessProbe(path="/"), backends=backends,
        balancer=BalancerType.HAPROXY,
    )  # fmt: skip
    weights = [line.partition(" weight ")[2] for line in render(routing, {1, 2, 3}).splitlines() if " id " in line]
    assert weights == ["256", "64", "0"]
    alike = replace(routing, backends=tuple(replace(each, capacity=1.0) for each in backends[:2]))
    assert "weight" not in render(alike, {1, 2})
