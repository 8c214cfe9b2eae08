"""`broker check kubernetes`: kubectl, contexts, permissions, pools."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from broker.clock import SystemClock
from broker.clouds.findings import CheckResult
from broker.clouds.kubernetes.check import VERBS, inspect, write_policy
from broker.config import Config
from broker.sites.facts import find_facts
from broker.sites.kubernetes import read_pools
from broker.sites.offers import list_own_offers
from tests.clouds.kubernetes.api_server import ApiServer


def check(home: Path, server: ApiServer | None, text: str, monkeypatch: pytest.MonkeyPatch) -> Sequence[CheckResult]:
    if server:
        monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig))
    (home / "kubernetes.yaml").write_text(text)
    return asyncio.run(inspect(Config(home=home, owner="me"), clock=SystemClock()))


def test_empty_file_uses_the_current_context_and_its_namespace(
    server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.cluster.add_node("a")
    server.cluster.add_node(
        "b", gpus=8, cpu="96", memory="1000Gi", labels={"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"},
        taints=({"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"},),
    )  # fmt: skip
    (result,) = check(tmp_path, server, "", monkeypatch)
    assert result.is_ok and result.name == "test"
    assert "namespace `ml`: default (1 x 8cpu-16gb, 0 USD/h: set `usd_hour`)" in result.note
    assert "default (1 x 96cpu-1000gb-8xH100, 0 USD/h: set `usd_hour`)" in result.note
    assert {offer.accelerator for offer in list_own_offers(tmp_path)} == {None, "H100"}


def test_context_that_is_silent_keeps_its_pools(
    server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.cluster.add_node("a")
    (result,) = check(tmp_path, server, "test: {usd_hour: 2}\n", monkeypatch)
    assert result.is_ok and "namespace `ml`" in result.note, "that of the kubeconfig"
    server.is_logged_out = True
    (result,) = check(tmp_path, server, "test: {usd_hour: 2}\n", monkeypatch)
    assert not result.is_ok and "logged in" in result.note and result.command
    assert [pool.name for pool in read_pools(find_facts("kubernetes", tmp_path))["test"]] == ["default"]


def test_missing_permissions_are_named(server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server.cluster.add_node("a")
    server.denied.add(("ml", "pods"))
    (result,) = check(tmp_path, server, "test: {namespace: ml}\n", monkeypatch)
    assert not result.is_ok and "create pods, get pods" in result.note
    assert result.command == "broker check --policy kubernetes"


def test_unknown_pool_and_empty_cluster_are_reported(
    server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (result,) = check(tmp_path, server, "test: {}\n", monkeypatch)
    assert not result.is_ok and "no node is ready" in result.note
    server.cluster.add_node("a")
    (result,) = check(tmp_path, server, "test: {pools: gpu}\n", monkeypatch)
    assert not result.is_ok and "no pool `gpu`; there are default" in result.note


def test_missing_kubectl_is_the_first_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (result,) = check(tmp_path, None, "", monkeypatch)
    assert (result.name, result.is_ok) == ("kubectl", False) and "install kubectl" in result.command


def test_kubeconfig_without_a_current_context_is_explained(
    server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    (result,) = check(tmp_path, None, "", monkeypatch)
    assert not result.is_ok and result.command == "kubectl config use-context NAME"


def test_check_names_an_invalid_file(tmp_path: Path, server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    (result,) = check(tmp_path, server, "test: {nodes: 3}\n", monkeypatch)
    assert not result.is_ok and "kubernetes.yaml" in result.command


def test_policy_grants_what_is_checked(tmp_path: Path) -> None:
    (tmp_path / "kubernetes.yaml").write_text("lab: {namespace: ml}\n")
    documents = list(yaml.safe_load_all(write_policy(Config(home=tmp_path, owner="me"))))
    assert [each["kind"] for each in documents] == ["Role", "ClusterRole", "RoleBinding", "ClusterRoleBinding"]
    role = documents[0]
    assert role["metadata"]["namespace"] == "ml"
    granted = {(verb, name) for rule in role["rules"] for name in rule["resources"] for verb in rule["verbs"]}
    assert set(VERBS) == granted
    validate = pytest.importorskip("kubernetes_validate")
    for document in documents:
        validate.validate(document, "1.37", strict=True)
