"""Read `service` into a `ServiceSpec`."""

from __future__ import annotations

import json
from typing import Any

from broker.task.tables import Section
from broker.task.yaml_reader import Marked
from broker.types import ReadinessProbe, ReplicaPolicy, ServiceSpec, TlsFiles


def read_service(section: Section) -> ServiceSpec | None:
    """Return the service of a task; None where it has none, or describes a pool."""
    service: Section | None = section.get("service")
    if service is None or "workers" in service.values or "pool" in service.values:
        return None
    tls: Section | None = service.get("tls")
    balancer: Section | None = service.get("load_balancer")
    probe = service.get("readiness_probe")
    settings: dict[str, Any] = {
        "port": service.get("ports"),
        "availability": service.get("availability"),
        "balancing": "round_robin" if service.get("load_balancing_policy") == "round_robin" else "least_load",
        "stream_timeout_s": balancer.get("stream_timeout_seconds") if balancer else None,
        "tls": TlsFiles(key_path=tls.get("keyfile", ""), certificate_path=tls.get("certfile", "")) if tls else None,
    }
    given = {name: value for name, value in settings.items() if value is not None}
    return ServiceSpec(probe=None if probe is None else _read_probe(probe), policy=_read_policy(service), **given)


def _read_probe(probe: str | Section) -> ReadinessProbe:
    if isinstance(probe, str):
        return ReadinessProbe(path=probe)
    body = probe.get("post_data")
    names = {
        "initial_delay_s": "initial_delay_seconds",
        "timeout_s": "timeout_seconds",
        "interval_s": "endpoint_probe_interval_seconds",
        "failure_s": "consecutive_failure_threshold_timeout",
        "headers": "headers",
    }
    given = {name: probe.values[field] for name, field in names.items() if field in probe.values}
    return ReadinessProbe(
        path=probe.get("path", "/"),
        post_data=body if body is None or isinstance(body, str) else json.dumps(_unmark(body)),
        **given,
    )


def _unmark(value: Any) -> Any:
    """Return a value of any shape without its positions."""
    if isinstance(value, Marked):
        return _unmark(value.value)
    if isinstance(value, dict):
        return {key: _unmark(each) for key, each in value.items()}
    return [_unmark(each) for each in value] if isinstance(value, list) else value


def _read_policy(service: Section) -> ReplicaPolicy:
    policy: Section | None = service.get("replica_policy")
    if policy is None:
        return ReplicaPolicy(replicas_min=service.get("replicas", 1))
    qps = policy.get("target_qps_per_replica")
    names = {
        "replicas_max": "max_replicas",
        "spare_count": "num_overprovision",
        "target_in_flight": "target_requests_in_flight_per_replica",
        "ondemand_min": "base_ondemand_fallback_replicas",
        "has_ondemand_fallback": "dynamic_ondemand_fallback",
        "upscale_delay_s": "upscale_delay_seconds",
        "downscale_delay_s": "downscale_delay_seconds",
    }
    given = {name: policy.values[field] for name, field in names.items() if field in policy.values}
    targets = {} if qps is None else qps if isinstance(qps, dict) else {"": qps}
    return ReplicaPolicy(replicas_min=policy.get("min_replicas", 1), target_qps=targets, **given)
