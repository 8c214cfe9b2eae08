"""Read `service` into a `ServiceSpec`."""

from __future__ import annotations

import json
from typing import Any

from broker.task.fields_service import INSTANCE_AWARE, PASSTHROUGH
from broker.task.reading import Reader
from broker.task.shapes import Flag
from broker.task.tables import Section
from broker.task.yaml_reader import Marked
from broker.types import (
    GATEWAYS_MAX,
    BalancerType,
    GatewayPlace,
    GatewaySpec,
    ReadinessProbe,
    ReplicaPolicy,
    ServiceProtocol,
    ServiceSpec,
    TlsFiles,
)

LATENCY_TARGETS = {"target_ttft_s": "target_ttft_seconds", "target_tpot_s": "target_tpot_seconds"}


def read_service(reader: Reader, section: Section) -> ServiceSpec | None:
    """Return the service of a task; None if it has none, or describes a pool.

    Without `readiness_probe`, the probe is `GET /`, as in SkyPilot.
    """
    service: Section | None = section.get("service")
    if service is None or "workers" in service.values or "pool" in service.values:
        return None
    tls: Section | str | None = service.get("tls")
    balancer: Section | None = service.get("load_balancer")
    gateway: Section | None = service.get("gateway")
    protocol = ServiceProtocol(service.get("protocol", ServiceProtocol.HTTP))
    program: Section | None = service.get("balancer")
    kind = BalancerType(program.get("type", BalancerType.BROKER) if program else BalancerType.BROKER)
    _check_passing(reader, service, protocol, kind)
    _check_gateway(reader, service, protocol, kind)
    probe = _read_probe(reader, service, protocol)
    settings: dict[str, Any] = {
        "port": service.get("ports"),
        "availability": service.get("availability"),
        "balancing": service.get("load_balancing_policy"),
        "stream_timeout_s": balancer.get("stream_timeout_seconds") if balancer else None,
        "gateway": None if gateway is None else _read_gateway(reader, gateway),
        "tls": _read_tls(tls) if isinstance(tls, Section) else None,
        "is_tls_passed": tls == PASSTHROUGH,
        "protocol": protocol,
        "balancer": kind,
    }
    given = {name: value for name, value in settings.items() if value is not None}
    return ServiceSpec(probe=probe, policy=_read_policy(reader, service), **given)


def _read_gateway(reader: Reader, gateway: Section) -> GatewaySpec:
    infra = gateway.get("infra") or []
    found = [infra] if isinstance(infra, tuple) else infra  # one location is a tuple of its parts
    names = {"count": "count", "vcpus_min": "cpus"}
    given = {name: gateway.values[field] for name, field in names.items() if field in gateway.values}
    places = tuple(
        GatewayPlace(cloud="kubernetes" if cloud == "k8s" else cloud, region=region, zone=zone)
        for cloud, region, zone in found
    )
    read = GatewaySpec(places=places, **given)
    if len(places) > read.count:
        hint = f"add `count: {len(places)}`" if len(places) <= GATEWAYS_MAX else f"list at most {GATEWAYS_MAX}"
        reader.fault(gateway.marks["infra"], "`infra` has more locations than there are gateways", hint)
    return read


def _check_gateway(reader: Reader, service: Section, protocol: ServiceProtocol, kind: BalancerType) -> None:
    """Report settings that a gateway does not support, because it only has the balancer that reads requests."""
    tls: Section | str | None = service.get("tls")
    settings = {
        f"protocol: {protocol}": protocol is not ServiceProtocol.HTTP,
        f"balancer: {{type: {kind}}}": kind is not BalancerType.BROKER,
        "tls: {cafile}": isinstance(tls, Section) and tls.get("cafile") is not None,
    }
    if "gateway" in service.marks and (cause := next((each for each, is_set in settings.items() if is_set), None)):
        reader.fault(service.marks["gateway"], f"`gateway` is not available with `{cause}`", "remove one of the two")


def _read_tls(tls: Section) -> TlsFiles:
    return TlsFiles(
        key_path=tls.get("keyfile", ""), certificate_path=tls.get("certfile", ""), client_ca_path=tls.get("cafile")
    )


def _check_passing(reader: Reader, service: Section, protocol: ServiceProtocol, kind: BalancerType) -> None:
    """Report settings that require requests to be read, if the balancer forwards connections or is a different one."""
    is_http = protocol is ServiceProtocol.HTTP
    reads = is_http and kind is not BalancerType.HAPROXY
    cause = f"balancer: {{type: {kind}}}" if is_http else f"protocol: {protocol}"
    if not is_http and kind.is_router:
        reader.fault(
            service.marks["balancer"],
            f"`balancer: {{type: {kind}}}` is not available with `protocol: {protocol}`",
            "remove one of the two",
        )
    if service.get("load_balancing_policy") == INSTANCE_AWARE and kind.is_router:
        reader.fault(
            service.marks["load_balancing_policy"],
            f"`{INSTANCE_AWARE}` is not available with `balancer: {{type: {kind}}}`, which knows no capacities",
            "write `least_load`",
        )
    if not is_http and kind is BalancerType.BROKER:
        balancer: Section | None = service.get("load_balancer")
        if balancer is not None and "stream_timeout_seconds" in balancer.marks:
            reader.fault(
                balancer.marks["stream_timeout_seconds"],
                f"`stream_timeout_seconds` is not available with `protocol: {protocol}`: idle connections stay open",
                "remove it",
            )
    if service.get("load_balancing_policy") == "prefix_affinity" and not reads:
        reader.fault(
            service.marks["load_balancing_policy"],
            f"`prefix_affinity` is not available with `{cause}`: prompts are not read",
            "write `least_load`",
        )
    policy: Section | None = service.get("replica_policy")
    for field in LATENCY_TARGETS.values():
        if policy is not None and field in policy.marks and not reads:
            reader.fault(
                policy.marks[field],
                f"`{field}` is not available with `{cause}`: streams are not read",
                "write `target_requests_in_flight_per_replica`",
            )
    if service.get("tls") == PASSTHROUGH and is_http:
        reader.fault(
            service.marks["tls"],
            "`tls: passthrough` is not available with `protocol: http`: the balancer reads requests",
            "write `tls: {keyfile: PATH, certfile: PATH}`",
        )


def _read_probe(reader: Reader, service: Section, protocol: ServiceProtocol) -> ReadinessProbe:
    is_http = protocol is ServiceProtocol.HTTP
    probe: str | Section = service.get("readiness_probe", "/" if is_http else "")
    if not is_http:
        _refuse_request(reader, service, probe, protocol)
    if isinstance(probe, str):
        _check_path(reader, service, "readiness_probe", probe)
        return ReadinessProbe(path=probe)
    if is_http and "path" not in probe.values:
        reader.fault(probe.marked, "`readiness_probe` requires `path`", "for example `path: /health`")
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
        path=probe.get("path", "/") if is_http else "",
        post_data=body if body is None or isinstance(body, str) else json.dumps(_read_body(probe.marks["post_data"])),
        **given,
    )


def _read_body(marked: Marked) -> Any:
    """Return the value of `post_data`, in which `yes`, `no`, `on` and `off` are flags, as in SkyPilot."""
    if isinstance(marked.value, dict):
        return {key: _read_body(each) for key, each in marked.value.items()}
    if isinstance(marked.value, list):
        return [_read_body(each) for each in marked.value]
    flag = Flag().parse(marked) if marked.is_plain else None
    return marked.value if flag is None else flag


def _refuse_request(reader: Reader, service: Section, probe: str | Section, protocol: ServiceProtocol) -> None:
    """Report a probe by request, because a replica is ready when its port accepts a connection."""
    if isinstance(probe, str):
        wrong = [service.marks["readiness_probe"]] if probe else []
    else:
        wrong = [probe.marks[name] for name in ("path", "post_data", "headers") if name in probe.marks]
    for each in wrong[:1]:
        reader.fault(
            each,
            f"a readiness request is not available with `protocol: {protocol}`: a replica is ready when it accepts a "
            "connection",
            "remove it; `readiness_probe` only accepts times",
        )


def _check_path(reader: Reader, section: Section, field: str, path: str) -> None:
    if field in section.marks and not path.startswith("/"):
        reader.fault(section.marks[field], f"`{field}` must start with a slash", f"write `{field}: /{path}`")


def _read_policy(reader: Reader, service: Section) -> ReplicaPolicy:
    policy: Section | None = service.get("replica_policy")
    if policy is None:
        return ReplicaPolicy(replicas_min=service.get("replicas", 1))
    qps = policy.get("target_qps_per_replica")
    names = {
        "replicas_max": "max_replicas",
        "spare_count": "num_overprovision",
        "target_in_flight": "target_requests_in_flight_per_replica",
        **LATENCY_TARGETS,
        "is_predictive": "predictive_scaling",
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
    if read.is_predictive and not (read.target_qps or read.target_in_flight):
        hint = "add `target_qps_per_replica` or `target_requests_in_flight_per_replica`"
        reader.fault(policy.marks["predictive_scaling"], "`predictive_scaling` requires a target load", hint)
    return read
