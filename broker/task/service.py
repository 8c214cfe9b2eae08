"""Read `service` into a `ServiceSpec`."""

from __future__ import annotations

import json
from typing import Any

from broker.task.reading import Reader
from broker.task.tables import Section
from broker.task.yaml_reader import Marked
from broker.types import ReadinessProbe, ReplicaPolicy, ServiceSpec, TlsFiles


def read_service(reader: Reader, section: Section) -> ServiceSpec | None:
    """Return the service of a task; None if it has none, or describes a pool.

    Without `readiness_probe` the probe is `GET /`, as in SkyPilot.
    """
    service: Section | None = section.get("service")
    if service is None or "workers" in service.values or "pool" in service.values:
        return None
    tls: Section | None = service.get("tls")
    balancer: Section | None = service.get("load_balancer")
    probe = _read_probe(reader, service)
    settings: dict[str, Any] = {
        "port": service.get("ports"),
        "availability": service.get("availability"),
        "balancing": service.get("load_balancing_policy"),
        "stream_timeout_s": balancer.get("stream_timeout_seconds") if balancer else None,
        "tls": TlsFiles(key_path=tls.get("keyfile", ""), certificate_path=tls.get("certfile", "")) if tls else None,
    }
    given = {name: value for name, value in settings.items() if value is not None}
    return ServiceSpec(probe=probe, policy=_read_policy(reader, service), **given)


def _read_probe(reader: Reader, service: Section) -> ReadinessProbe:
    probe: str | Section = service.get("readiness_probe", "/")
    if isinstance(probe, str):
        _check_path(reader, service, "readiness_probe", probe)
        return ReadinessProbe(path=probe)
    _check_path(reader, probe, "path", probe.get("path", "/"))
    body = probe.get("post_data")
    if isinstance(body, str):
        try:
            json.loads(body)
        except ValueError:
            reader.fault(probe.marks["post_data"], "`post_data` is not valid JSON", "write it as a mapping")
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


def _check_path(reader: Reader, section: Section, field: str, path: str) -> None:
    if field in section.marks and not path.startswith("/"):
        reader.fault(section.marks[field], f"`{field}` must start with a slash", f"write `{field}: /{path}`")


def _unmark(value: Any) -> Any:
    """Return a value of any shape without its positions."""
    if isinstance(value, Marked):
        return _unmark(value.value)
    if isinstance(value, dict):
        return {key: _unmark(each) for key, each in value.items()}
    return [_unmark(each) for each in value] if isinstance(value, list) else value


def _read_policy(reader: Reader, service: Section) -> ReplicaPolicy:
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
    read = ReplicaPolicy(replicas_min=policy.get("min_replicas", 1), target_qps=targets, **given)
    if read.replicas_max is not None and read.replicas_max < read.replicas_min:
        hint = f"set `max_replicas` to {read.replicas_min} or more"
        reader.fault(policy.marks["max_replicas"], "`max_replicas` is less than `min_replicas`", hint)
    return read
