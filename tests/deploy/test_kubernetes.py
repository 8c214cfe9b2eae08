"""The manifests are valid and consistent, and the commands of their containers work as they are."""

from __future__ import annotations

import base64
import secrets
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from broker.clock import SystemClock
from broker.config import load_config
from broker.server.openapi import describe_api
from broker.state.postgres_store import PostgresStore
from tests.cli.conftest import ROOT, Shell
from tests.signals import signal_all
from tests.state.postgres_server import Server

FOLDER = ROOT / "deploy/kubernetes"
FILES = sorted(path for path in FOLDER.glob("*.yaml") if path.name != "kustomization.yaml")
CONTAINERFILE = (ROOT / "deploy/container/Containerfile").read_text()


def read_objects() -> list[dict[str, Any]]:
    return [each for path in FILES for each in yaml.safe_load_all(path.read_text())]


def find(kind: str, name: str) -> dict[str, Any]:
    (found,) = (each for each in read_objects() if (each["kind"], each["metadata"]["name"]) == (kind, name))
    return found


def find_pod(name: str) -> dict[str, Any]:
    pod: dict[str, Any] = find("Deployment", name)["spec"]["template"]["spec"]
    return pod


DEPLOYMENTS = [each["metadata"]["name"] for each in read_objects() if each["kind"] == "Deployment"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_manifest_is_valid_by_the_published_schema(path: Path) -> None:
    validate = pytest.importorskip("kubernetes_validate")
    for each in yaml.safe_load_all(path.read_text()):
        validate.validate(each, "1.37", strict=True)


def test_kustomization_lists_every_manifest_and_sets_the_image_of_every_container() -> None:
    found = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
    assert sorted(found["resources"]) == [path.name for path in FILES]
    images = {each["image"] for name in DEPLOYMENTS for each in find_pod(name)["containers"]}
    assert images == {each["name"] for each in found["images"]}


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_everything_that_a_deployment_names_exists(name: str) -> None:
    deployment, pod = find("Deployment", name), find_pod(name)
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"] == labels
    find("ServiceAccount", pod["serviceAccountName"])
    (container,) = pod["containers"]
    for each in container["envFrom"]:
        find("Secret", each["secretRef"]["name"])
    volumes = {each["name"]: each for each in pod["volumes"]}
    assert {each["name"] for each in container["volumeMounts"]} == set(volumes)
    find("PersistentVolumeClaim", volumes["home"]["persistentVolumeClaim"]["claimName"])


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_a_pod_runs_as_the_user_of_the_image_and_may_not_gain_more(name: str) -> None:
    pod = find_pod(name)
    (container,) = pod["containers"]
    context = pod["securityContext"]
    assert context["runAsNonRoot"] and container["securityContext"]["readOnlyRootFilesystem"]
    assert f"USER {context['runAsUser']}:{context['runAsGroup']}\n" in CONTAINERFILE
    mounts = [each["mountPath"] for each in container["volumeMounts"]]
    (home,) = (each["value"] for each in container["env"] if each["name"] == "BROKER_HOME")
    assert any(Path(home).is_relative_to(mount) for mount in mounts), "the image's own file system is read-only"
    assert any(f"HOME={mount} " in CONTAINERFILE for mount in mounts)


def test_service_and_probes_reach_routes_that_need_no_token() -> None:
    service, pod = find("Service", "broker"), find_pod("broker-server")
    assert service["spec"]["selector"] == find("Deployment", "broker-server")["spec"]["selector"]["matchLabels"]
    (container,) = pod["containers"]
    (port,) = container["ports"]
    assert service["spec"]["ports"][0]["targetPort"] == port["name"]
    assert f"EXPOSE {port['containerPort']}\n" in CONTAINERFILE
    paths = describe_api()["paths"]
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        asked = container[probe]["httpGet"]
        assert asked["port"] == port["name"] and asked["scheme"] == "HTTPS"
        assert paths[asked["path"]]["get"]["security"] == [], "no token is required"


@pytest.fixture
def shell(tmp_path: Path, postgres: Server) -> Iterator[Shell]:
    """Has the variables of the pods, with a database and a key in place of the secret's placeholders."""
    shell = Shell(tmp_path)
    shell.environment |= find("Secret", "broker")["stringData"]
    shell.environment["BROKER_STATE"] = postgres.make_url()
    shell.environment["BROKER_SECRET_KEY"] = base64.b64encode(secrets.token_bytes(32)).decode()
    yield shell
    signal_all(shell.find_processes())


def read_arguments(name: str) -> list[str]:
    (container,) = find_pod(name)["containers"]
    return list(container["args"])


@pytest.mark.long
def test_commands_of_the_pods_serve_and_control_with_one_database(shell: Shell) -> None:
    arguments = read_arguments("broker-server")
    arguments[arguments.index("0.0.0.0")] = "127.0.0.1"
    server = shell.open(*arguments, "--port", "0")
    controllers = [shell.open(*read_arguments("broker-controllers")) for _ in range(2)]
    assert server.stdout is not None
    url = server.stdout.readline().removeprefix("Server:").strip()
    for path in ("healthz", "readyz"):
        with urllib.request.urlopen(f"{url}/{path}") as answer:
            assert answer.status == 200
    laptop = Shell(shell.folder / "laptop")
    laptop.folder.mkdir()
    laptop.run("login", url, "--token-file", str(shell.home / "server/admin.token"))
    assert laptop.read_json("jobs", "queue", "--all") == []
    config = load_config(shell.home)
    store = PostgresStore(shell.environment["BROKER_STATE"], home=config.home, clock=SystemClock(), owner=config.owner)
    shell.wait_until(lambda: store.claims.measure_load().controller_count == 2, "two controllers have a lease")
    store.close()
    for process in (server, *controllers):
        process.send_signal(signal.SIGTERM)
    assert [process.wait() for process in (server, *controllers)] == [0, 0, 0]


@pytest.mark.parametrize("deployment", DEPLOYMENTS)
@pytest.mark.parametrize(("name", "code"), [("BROKER_STATE", 2), ("BROKER_SECRET_KEY", 4)])
def test_placeholders_of_the_secret_are_refused(shell: Shell, deployment: str, name: str, code: int) -> None:
    shell.environment[name] = find("Secret", "broker")["stringData"][name]
    done = shell.run(*read_arguments(deployment), code=code)
    assert name in done.stderr and "hint: " in done.stderr
