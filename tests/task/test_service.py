"""`service` in every form that SkyPilot 0.14 accepts: loaded and planned, or refused in one sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import broker
from broker.app.service_checks import check_service
from broker.errors import TaskError, UsageError
from broker.task.expansion import fill_probe
from broker.task.loader import load_tasks, load_tasks_text
from broker.types import (
    GatewayPlace,
    GatewaySpec,
    ReadinessProbe,
    ServiceProtocol,
    ServiceSpec,
    Task,
    TlsFiles,
)

FILES = sorted((Path(__file__).parent.parent / "data" / "services").glob("*.yaml"))


def load(text: str) -> Task:
    (task,) = load_tasks_text(f"run: x\nresources: {{ports: 8080}}\n{text}", "task.yaml")
    return task


def load_file(name: str) -> ServiceSpec:
    (task,) = load_tasks(next(each for each in FILES if each.stem == name))
    return check_service(task)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_service_of_each_form_is_accepted_and_has_a_placement(path: Path) -> None:
    (task,) = load_tasks(path)
    assert check_service(task).probe is not None
    assert [each.field for each in task.notices if each.field != "service" and each.blocks_launch] == []
    assert broker.plan(path).estimates


def test_probe_has_the_values_of_the_file_and_otherwise_those_of_skypilot() -> None:
    assert load_file("probe_with_body").probe == ReadinessProbe(
        path="/v1/chat/completions",
        initial_delay_s=1800,
        timeout_s=30,
        interval_s=5,
        failure_s=60,
        headers={"authorization": "Bearer x"},
        post_data='{"model": "my-org/my-model", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}',
    )
    assert load_file("default_probe").probe == ReadinessProbe(path="/")
    assert load_file("several_nodes").stream_timeout_s == 600


def test_words_of_yaml_1_1_are_flags_in_the_body_of_a_probe_unless_they_come_from_a_variable() -> None:
    (task,) = load_tasks_text(
        "run: x\nresources: {ports: 8080}\nenvs: {STOP: 'no'}\nservice:\n"
        "  readiness_probe: {path: /v1, post_data: {stream: off, echo: [yes, 'on', 1], stop: $STOP, n: null}}",
        "task.yaml",
    )
    assert task.service is not None and task.service.probe is not None
    expected = {"stream": False, "echo": [True, "on", 1], "stop": "no", "n": None}
    assert json.loads(task.service.probe.post_data or "") == expected


def test_probe_refers_to_secrets_until_it_is_sent() -> None:
    """The row of a service in the state file has its probe."""
    (task,) = load_tasks_text(
        "run: x\nresources: {ports: 8080}\nsecrets: {LOGIN: 'a\"b'}\nenvs: {MODEL: m}\nservice:\n"
        "  readiness_probe: {path: /v1, headers: {a: Bearer $LOGIN}, post_data: {model: $MODEL, key: '${LOGIN}'}}",
        "task.yaml",
    )
    assert task.service is not None and task.service.probe is not None
    assert task.service.probe.headers == {"a": "Bearer $LOGIN"} and 'a"b' not in repr(task)
    filled = fill_probe(task.service.probe, task.secrets)
    assert filled.headers == {"a": 'Bearer a"b'}
    assert json.loads(filled.post_data or "") == {"model": "m", "key": 'a"b'}
    given = load_tasks_text(
        "run: x\nsecrets: {LOGIN: null}\nservice: {readiness_probe: {path: '/?key=$LOGIN'}}", "task.yaml",
        secrets={"LOGIN": "abc"},
    )[0]  # fmt: skip
    assert given.service is not None and given.service.probe is not None and given.service.probe.path == "/?key=$LOGIN"
    assert fill_probe(given.service.probe, given.secrets).path == "/?key=abc"


def test_words_are_accepted_in_any_case() -> None:
    assert load_file("instance_aware").balancing == "instance_aware_least_load"
    assert load_file("dynamic_ondemand").policy.has_ondemand_fallback


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("service: {readiness_probe: health}", "`readiness_probe` must start with a slash"),
        ("service: {readiness_probe: {path: health}}", "`path` must start with a slash"),
        ("service: {readiness_probe: {path: /, post_data: '{'}}", "`post_data` is not valid JSON"),
        ("service: {replica_policy: {min_replicas: 2, max_replicas: 1}}", "`max_replicas` is less than `min_replicas`"),
        ("service: {replicas: 1, replica_policy: {min_replicas: 1}}", "`replica_policy`"),
        ("service: {replica_policy: {min_replicas: 1, predictive_scaling: true}}", "requires a target load"),
        ("service: {load_balancing_policy: fastest}", "least_load"),
        ("service: {ports: 70000}", "at most 65535"),
        ("service: {tls: {keyfile: a}}", "certfile"),
        ("service: {port: 8000}", "write `ports` under `resources`"),
        ("service: {controller_resources: {cpus: 2}}", "controller_resources"),
        ("service: {https: {key: a, cert: b}}", "https"),
        ("service: {protocol: grpc, readiness_probe: /health}", "a replica is ready when it accepts a connection"),
        ("service: {protocol: tcp, readiness_probe: {headers: {a: b}}}", "not available with `protocol: tcp`"),
        ("service: {protocol: grpc, load_balancing_policy: prefix_affinity}", "prompts are not read"),
        ("service: {protocol: tcp, load_balancer: {stream_timeout_seconds: 9}}", "idle connections stay open"),
        (
            "service: {protocol: grpc, replica_policy: {min_replicas: 1, target_ttft_seconds: 1}}",
            "streams are not read",
        ),
        (
            "service: {balancer: {type: haproxy}, replica_policy: {min_replicas: 1, target_tpot_seconds: 1}}",
            "`target_tpot_seconds` is not available with `balancer: {type: haproxy}`",
        ),
        ("service: {tls: passthrough}", "the balancer reads requests"),
        ("service: {protocol: http3}", "one of http, tcp, grpc"),
        ("service: {balancer: {type: nginx}}", "one of broker, haproxy, smg, vllm-router"),
        ("service: {balancer: {type: smg}, protocol: grpc}", "`balancer: {type: smg}` is not available with"),
        (
            "service: {balancer: {type: vllm-router}, load_balancing_policy: instance_aware_least_load}",
            "which knows no capacities",
        ),
        ("service: {balancer: {type: haproxy}, load_balancing_policy: prefix_affinity}", "prompts are not read"),
        ("service: {readiness_probe: {timeout_seconds: 3}}", "requires `path`"),
        (
            "service: {replica_policy: {min_replicas: 1, dynamic_on_demand_fallback: true}}",
            "did you mean `dynamic_ondemand_fallback`",
        ),
        ("service: {replica_policy: {min_replicas: 1, spot_policy: a}}", "write `dynamic_ondemand_fallback: true`"),
        ("service: {replica_policy: {min_replicas: 1, auto_restart: false}}", "replicas are always restarted"),
        ("service: {replica_policy: {min_replicas: 1, init_replicas: 2}}", "unknown field `init_replicas`"),
        ("service: {replica_policy: {min_replicas: 1, queue_length_threshold: 4}}", "`queue_length_threshold`"),
        ("service: {external_load_balancers: [{resources: {cloud: aws}}]}", "unknown field `external_load_balancers`"),
    ],
)
def test_service_that_cannot_be_run_is_refused_in_one_sentence(text: str, message: str) -> None:
    with pytest.raises(TaskError) as caught:
        load(text)
    (issue,) = caught.value.issues
    assert message in f"{issue.message} {issue.hint}" and "\n" not in issue.message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("service: {replica_policy: {min_replicas: 1, max_replicas: 2}}", "requires a target load"),
        ("resources: {ports: [1, 2]}\nservice: {replicas: 1}", "names several ports"),
        ("resources: {ports: 8080-8090}\nservice: {replicas: 1}", "names several ports"),
        ("resources: {cpus: 2}\nservice: {replicas: 1}", "names no port"),
        ("run:\nservice: {replicas: 1}", "has no `run:`"),
    ],
)
def test_service_without_a_target_port_or_program_is_refused_by_serve_up(text: str, message: str) -> None:
    body = text if "resources" in text else f"resources: {{ports: 8080}}\n{text}"
    (task,) = load_tasks_text(body if "run" in text else f"run: x\n{body}", "task.yaml")
    with pytest.raises(UsageError, match=message):
        check_service(task)


@pytest.mark.parametrize("text", ["pool: {workers: 2}", "service: {workers: 2}", "service: {pool: {max_workers: 2}}"])
def test_pool_loads_and_cannot_be_launched_or_served(text: str) -> None:
    task = load(text)
    assert [each.blocks_launch for each in task.notices if "worker pools are not supported" in each.message] == [True]
    with pytest.raises(UsageError, match="worker pools are not supported"):
        check_service(task)


def read_gateway(text: str) -> GatewaySpec | None:
    service = load(f"service: {{readiness_probe: /, gateway: {text}}}").service
    assert service is not None
    return service.gateway


def test_gateway_has_a_number_and_one_location_or_a_list() -> None:
    east = GatewayPlace(cloud="aws", region="us-east-1")
    assert read_gateway("{}") == GatewaySpec()
    assert read_gateway("{count: 2, infra: aws/us-east-1, cpus: 4}") == GatewaySpec(
        count=2, places=(east,), vcpus_min=4
    )
    assert read_gateway("{count: 2, infra: [aws/us-east-1, k8s]}") == GatewaySpec(
        count=2, places=(east, GatewayPlace(cloud="kubernetes"))
    )
    assert load("service: {readiness_probe: /}").service.gateway is None  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{count: 3}", "`count` must be"),
        ("{count: 0}", "`count` must be"),
        ("{infra: [aws, gcp]}", "`infra` has more locations than there are gateways"),
        ("{infra: moon}", "`infra` must be like `aws`"),
        ("{infra: []}", "must not be an empty list"),
        ("{use_spot: true}", "use_spot"),
    ],
)
def test_gateway_that_is_impossible_is_refused(text: str, message: str) -> None:
    with pytest.raises(TaskError) as caught:
        read_gateway(text)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "setting"),
    [
        ("protocol: grpc", "protocol: grpc"),
        ("balancer: {type: haproxy}", "balancer: {type: haproxy}"),
        ("balancer: {type: smg}", "balancer: {type: smg}"),
        ("tls: {keyfile: k, certfile: c, cafile: a}", "tls: {cafile}"),
    ],
)
def test_gateway_requires_the_balancer_that_reads_requests(text: str, setting: str) -> None:
    with pytest.raises(TaskError) as caught:
        load(f"service: {{{text}, gateway: {{count: 2}}}}")
    assert f"`gateway` is not available with `{setting}`" in str(caught.value)


def test_grpc_service_is_ready_when_it_accepts_a_connection_and_keeps_the_times_of_its_probe() -> None:
    spec = load("service: {protocol: grpc, readiness_probe: {initial_delay_seconds: 30}}").service
    assert spec is not None and spec.probe == ReadinessProbe(path="", initial_delay_s=30)
    assert spec.protocol is ServiceProtocol.GRPC and not spec.can_check_keys
    assert load("service: {protocol: tcp, tls: passthrough}").service == ServiceSpec(
        probe=ReadinessProbe(path=""), protocol=ServiceProtocol.TCP, is_tls_passed=True
    )


def test_authority_of_clients_is_read() -> None:
    spec = load("service: {tls: {keyfile: k, certfile: c, cafile: a}}").service
    assert spec is not None and spec.tls == TlsFiles(key_path="k", certificate_path="c", client_ca_path="a")
