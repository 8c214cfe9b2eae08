"""Check that a service can be run: before money is spent, and before an update or a command reaches its balancer."""

from __future__ import annotations

from broker.app.container import Context
from broker.errors import UsageError
from broker.serve.gateway_task import check_places
from broker.serve.replicas import find_port, is_local
from broker.types import BalancerType, Service, ServiceProtocol, ServiceSpec, Task

PASSTHROUGH_HINT = "or write `tls: passthrough`, and let the program authenticate its clients"


def check_service(task: Task) -> ServiceSpec:
    """Return the task's service. Raises UsageError if it has none, or one that cannot be run."""
    spec = task.service
    if any(each.field in ("pool", "workers") for each in task.notices):
        raise UsageError("worker pools are not supported", hints=["launch one managed job per worker"])
    if spec is None:
        raise UsageError(
            "the task has no `service:`", hints=["for example `service: {readiness_probe: /, replicas: 2}`"]
        )
    if task.run is None:
        raise UsageError("the task has no `run:`", hints=["add `run:`: the program that serves requests"])
    if spec.probe is None:
        raise UsageError("`service` requires `readiness_probe`", hints=["for example `readiness_probe: /health`"])
    policy = spec.policy
    if policy.replicas_max not in (None, policy.replicas_min) and not policy.has_target:
        hint = "add `target_qps_per_replica`, `target_requests_in_flight_per_replica` or `target_ttft_seconds`"
        raise UsageError("`max_replicas` requires a target load or latency", hints=[hint])
    if policy.replicas_min == 0 and spec.balancer is BalancerType.HAPROXY:
        raise UsageError(
            "`min_replicas: 0` is not available with `balancer: {type: haproxy}`: it does not hold requests",
            hints=["write `min_replicas: 1`"],
        )
    if not is_local(task):
        find_port(task)
    if spec.gateway is not None:
        check_places(task, spec.gateway)
    return spec


def check_exposure(spec: ServiceSpec, host: str) -> None:
    """Raise UsageError for an address that others can reach if the balancer could not authenticate its clients."""
    from broker.serve.data_path import find_exposure

    if fault := find_exposure(spec, host):
        hint = "add `cafile: PATH` below `tls`, or listen on 127.0.0.1"
        raise UsageError(fault, hints=[hint, *([] if spec.protocol is ServiceProtocol.HTTP else [PASSTHROUGH_HINT])])


def check_same_path(before: ServiceSpec | None, spec: ServiceSpec) -> None:
    """Raise UsageError for an update that the running balancer, which both versions share, cannot carry out."""
    for name in ("protocol", "balancer"):
        old, new = getattr(before, name, None), getattr(spec, name)
        if before is not None and old is not new:
            raise UsageError(
                f"the {name} of a service cannot change from {old} to {new}",
                hints=["start another service, or terminate this one first"],
            )
    if before is not None and _describe_tls(before) != _describe_tls(spec):
        raise UsageError(
            "the `tls` of a service cannot change: its balancer keeps the one that it started with",
            hints=[
                "a renewed certificate is used within a second if it replaces the named files",
                "otherwise start another service, or terminate this one first",
            ],
        )
    if before is not None and spec.balancer.is_router and before.balancing != spec.balancing:
        raise UsageError(
            f"the load_balancing_policy of a service with `balancer: {{type: {spec.balancer}}}` cannot change: it is "
            "given to the router when it starts",
            hints=["start another service, or terminate this one first"],
        )


def _describe_tls(spec: ServiceSpec) -> object:
    """Return what a running balancer cannot change. Gateways get the contents of the files, whatever their names."""
    return spec.is_tls_passed, spec.tls is not None if spec.gateway is not None else spec.tls


def check_keys_available(context: Context, service: Service) -> None:
    """Raise UsageError for a service whose balancer does not read requests, and therefore not API keys."""
    spec = context.store.services.get_task(service.name, service.version).service
    if spec is not None and not spec.can_check_keys:
        what = f"balancer: {{type: {spec.balancer}}}" if spec.protocol is ServiceProtocol.HTTP else spec.protocol
        raise UsageError(
            f"API keys and quotas are not available for service `{service.name}`, which is `{what}`",
            hints=["require client certificates instead: `tls: {keyfile: PATH, certfile: PATH, cafile: PATH}`"],
        )


def check_library(spec: ServiceSpec) -> None:
    """Raise UsageError if the balancer's library or program is missing."""
    import importlib.util

    from broker.serve.haproxy_control import find_haproxy

    if spec.balancer is BalancerType.HAPROXY and find_haproxy() is None:
        raise UsageError("haproxy is not installed", hints=["install it with `apt-get install haproxy`"])
    if importlib.util.find_spec("aiohttp") is None:
        raise UsageError(
            "the balancer requires aiohttp", hints=["install it with `pip install 'intercloud-broker[serve]'`"]
        )
    if spec.balancer.is_router:
        from broker.serve.router_process import find_router

        if find_router(spec.balancer) is None:
            raise UsageError(
                f"{spec.balancer} is not installed", hints=[f"install it with `pip install {spec.balancer}`"]
            )


def check_canary(spec: ServiceSpec) -> None:
    """Raise UsageError if the balancer cannot divide requests between two versions."""
    if spec.balancer.is_router:
        raise UsageError(
            f"`--canary` is not available with `balancer: {{type: {spec.balancer}}}`, which chooses among all replicas",
            hints=["update without `--canary`"],
        )
