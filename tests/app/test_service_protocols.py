"""Services over tcp and grpc, and those with another balancer: unsupported options are refused early."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from broker.app.container import Context
from broker.app.planning import read_task
from broker.app.service_checks import (
    check_canary,
    check_exposure,
    check_keys_available,
    check_library,
    check_same_path,
    check_service,
)
from broker.errors import UsageError
from broker.serve import haproxy_control, router_process
from broker.types import ServiceSpec, Task

CERTIFICATES = {"keyfile": "k.pem", "certfile": "c.pem"}


def make_task(**service: Any) -> Task:
    return read_task({"name": "web", "run": "true", "resources": {"infra": "local"}, "service": service})


def make_spec(**service: Any) -> ServiceSpec:
    return check_service(make_task(**service))


@pytest.fixture
def context(tmp_path: Path) -> Iterator[Context]:
    context = Context(tmp_path / "home")
    yield context
    context.close()


@pytest.mark.parametrize(
    "service",
    [
        {"protocol": "grpc"},
        {"protocol": "tcp", "tls": CERTIFICATES},
        {"balancer": {"type": "haproxy"}, "tls": CERTIFICATES},
    ],
)
def test_service_without_keys_is_refused_on_an_address_that_others_reach(service: dict[str, Any]) -> None:
    spec = make_spec(**service)
    check_exposure(spec, "127.0.0.1")
    with pytest.raises(UsageError, match="requires certificates of clients"):
        check_exposure(spec, "0.0.0.0")


@pytest.mark.parametrize(
    "service",
    [
        {},
        {"protocol": "grpc", "tls": {**CERTIFICATES, "cafile": "a.pem"}},
        {"protocol": "tcp", "tls": "passthrough"},
    ],
)
def test_service_that_knows_its_clients_may_listen_anywhere(service: dict[str, Any]) -> None:
    check_exposure(make_spec(**service), "0.0.0.0")


@pytest.mark.parametrize(
    ("service", "what"),
    [({"protocol": "grpc"}, "grpc"), ({"balancer": {"type": "haproxy"}}, "balancer: {type: haproxy}")],
)
def test_keys_are_refused_where_requests_are_not_read(context: Context, service: dict[str, Any], what: str) -> None:
    added = context.store.services.add("web", make_task(**service), host="127.0.0.1", port=1, wanted=1)
    with pytest.raises(UsageError, match=f"not available for service `web`, which is `{what}`"):
        check_keys_available(context, added)
    check_keys_available(context, context.store.services.add("api", make_task(), host="127.0.0.1", port=2, wanted=1))


@pytest.mark.parametrize(
    ("service", "message"),
    [
        ({"protocol": "grpc"}, "the protocol of a service cannot change from http to grpc"),
        ({"balancer": {"type": "haproxy"}}, "the balancer of a service cannot change from broker to haproxy"),
    ],
)
def test_update_cannot_change_the_path_to_the_replicas(service: dict[str, Any], message: str) -> None:
    check_same_path(make_spec(), make_spec(replicas=2))
    with pytest.raises(UsageError, match=message):
        check_same_path(make_spec(), make_spec(**service))


CHANGED = {"keyfile": "other.pem", "certfile": "other.pem"}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {"tls": CERTIFICATES}),
        ({"tls": CERTIFICATES}, {}),
        ({"tls": CERTIFICATES}, {"tls": CHANGED}),
        ({"protocol": "grpc", "tls": CERTIFICATES}, {"protocol": "grpc", "tls": {**CERTIFICATES, "cafile": "a.pem"}}),
        ({"protocol": "grpc", "tls": CERTIFICATES}, {"protocol": "grpc", "tls": "passthrough"}),
    ],
)
def test_update_cannot_change_the_encryption_that_the_running_balancer_has(
    before: dict[str, Any], after: dict[str, Any]
) -> None:
    """It kept the one that it started with: after an update with `tls`, clients still sent their keys in the clear."""
    check_same_path(make_spec(**before), make_spec(**before, replicas=2))
    with pytest.raises(UsageError, match="`tls` of a service cannot change"):
        check_same_path(make_spec(**before), make_spec(**after))


def test_gateways_get_the_files_of_tls_by_their_contents() -> None:
    gateway = {"infra": "local"}
    check_same_path(make_spec(gateway=gateway, tls=CERTIFICATES), make_spec(gateway=gateway, tls=CHANGED))
    with pytest.raises(UsageError, match="`tls` of a service cannot change"):
        check_same_path(make_spec(gateway=gateway), make_spec(gateway=gateway, tls=CERTIFICATES))


def test_haproxy_holds_no_requests_so_a_replica_must_stay() -> None:
    policy = {"min_replicas": 0, "max_replicas": 2, "target_qps_per_replica": 1}
    make_spec(replica_policy=policy)
    with pytest.raises(UsageError, match="`min_replicas: 0` is not available"):
        make_spec(replica_policy=policy, balancer={"type": "haproxy"})


def test_router_keeps_its_policy_and_divides_no_requests_between_versions() -> None:
    before = make_spec(balancer={"type": "smg"})
    check_same_path(before, make_spec(balancer={"type": "smg"}, replicas=3))
    with pytest.raises(UsageError, match=r"the load_balancing_policy of a service with .* cannot change"):
        check_same_path(before, make_spec(balancer={"type": "smg"}, load_balancing_policy="round_robin"))
    with pytest.raises(UsageError, match="`--canary` is not available"):
        check_canary(before)
    check_canary(make_spec())


def test_service_with_a_router_has_api_keys_and_may_scale_to_zero(context: Context) -> None:
    policy = {"min_replicas": 0, "max_replicas": 2, "target_ttft_seconds": 1}
    task = make_task(balancer={"type": "vllm-router"}, replica_policy=policy)
    added = context.store.services.add("web", task, host="127.0.0.1", port=1, wanted=1)
    check_keys_available(context, added)
    check_exposure(make_spec(balancer={"type": "vllm-router"}, replica_policy=policy), "0.0.0.0")


def test_missing_router_is_named_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_process, "find_router", lambda kind: None)
    with pytest.raises(UsageError, match="vllm-router is not installed") as caught:
        check_library(make_spec(balancer={"type": "vllm-router"}))
    assert "pip install vllm-router" in caught.value.hints[0]


def test_missing_haproxy_is_named_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(haproxy_control, "find_haproxy", lambda: None)
    check_library(make_spec())
    with pytest.raises(UsageError, match="haproxy is not installed"):
        check_library(make_spec(balancer={"type": "haproxy"}))
