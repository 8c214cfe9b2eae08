"""Make the routing file of a service: from its task, its versions and its observed replicas to the balancer's input."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from broker.errors import UsageError
from broker.serve.canary import Canary
from broker.serve.files import Backend, Routing
from broker.serve.observing import ObservedReplica, find_capacity
from broker.state.store import Store
from broker.task.expansion import fill_probe
from broker.types import ReadinessProbe, Service, ServiceSpec, Task

NEAR_IN_FLIGHT = 8.0  # without a target: requests in flight up to which a replica in a gateway's region is preferred


def make_backends(
    spec: ServiceSpec, seen: Sequence[ObservedReplica], drained: Collection[int], *, now_s: float
) -> tuple[Backend, ...]:
    """Return the running replicas; `drained` are the numbers of those that receive no new requests."""
    return tuple(
        replace(
            each.backend,
            is_draining=each.replica.number in drained,
            is_leaving=each.is_leaving(now_s),
            capacity=find_capacity(spec, each.job),
        )
        for each in seen
        if each.backend
    )


def read_probes(store: Store, service: Service, versions: Iterable[int]) -> Mapping[int, ReadinessProbe]:
    """Return the probe of each version that the store knows, with the values of its secrets."""
    probes = dict[int, ReadinessProbe]()
    for version in set(versions):
        with suppress(UsageError):
            task = store.services.get_task(service.name, version)
            if task.service is not None and task.service.probe is not None:
                probes[version] = fill_probe(task.service.probe, task.secrets)
    return probes


def make_routing(
    service: Service,
    task: Task,
    backends: tuple[Backend, ...],
    *,
    probes: Mapping[int, ReadinessProbe],
    canary: Canary | None,
    balancers: int,
    has_json_logs: bool,
) -> Routing:
    """Return the routing file, of generation 0; `probes` are those of all versions with replicas."""
    spec = task.service
    assert spec is not None and spec.probe is not None, "`serve up` accepts only tasks with a service"
    probe = fill_probe(spec.probe, task.secrets)
    return Routing(
        generation=0,
        host=service.host,
        port=service.port,
        probe=probe,
        probes={version: each for version, each in sorted(probes.items()) if each != probe},
        backends=backends,
        balancing=spec.balancing,
        stream_timeout_s=spec.stream_timeout_s,
        tls=spec.tls,
        shares={} if canary is None else {canary.version: canary.share},
        balancers=balancers,
        protocol=spec.protocol,
        balancer=spec.balancer,
        is_tls_passed=spec.is_tls_passed,
        near_in_flight_max=spec.policy.target_in_flight or NEAR_IN_FLIGHT,
        has_json_logs=has_json_logs,
        failure=service.failure,
    )
