"""`broker check` for Google finds each problem and its fix; the printed role is exactly sufficient."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from broker.clock import SystemClock
from broker.clouds.gcp import check
from broker.clouds.gcp.policy import PERMISSIONS, write_role
from broker.clouds.gcp.sdk import Sdk
from broker.config import Config
from broker.errors import AuthError
from broker.types import MachineSpec, NodeRequest, Offer

# Not required by the fake's requests: images of the user's project, a subnetwork named in the settings, a person's
# login instead of a service account.
FOR_OTHER_SETTINGS = {
    *("compute.images.getFromFamily", "compute.images.useReadOnly", "compute.subnetworks.get"),
    "serviceusage.services.use",
}


def inspect(bench: Any, **changes: Any) -> dict[str, Any]:
    login = bench.make_cloud(**changes)._login
    return {each.name: each for each in bench.run(check.inspect_project(Sdk(login)))}


def test_all_checks_pass_in_a_complete_project(bench: Any) -> None:
    findings = inspect(bench)
    assert [findings[each].is_ok for each in ("credentials", "project", "api", "permissions")] == [True] * 4
    assert findings["project"].note == "pretend"
    assert findings["quota T4"].is_ok and "us-central1 1000" in findings["quota T4"].note
    assert not findings["quota V100"].command
    bench.run(bench.cloud.check())


def test_a_missing_project_is_named(bench: Any) -> None:
    findings = inspect(bench, project="")
    assert list(findings) == ["credentials", "project"]
    assert findings["project"].command == "gcloud config set project PROJECT"


def test_a_disabled_api_is_enabled_by_one_command(bench: Any) -> None:
    bench.gce.disabled = True
    findings = inspect(bench)
    assert list(findings)[-1] == "api"
    assert findings["api"].command == "gcloud services enable compute.googleapis.com --project=pretend"
    with pytest.raises(AuthError) as caught:
        bench.run(bench.cloud.check())
    assert "gcloud services enable compute.googleapis.com" in caught.value.hints[0]


def test_missing_permissions_are_named_with_the_role_that_has_them(bench: Any) -> None:
    bench.gce.allowed = set(PERMISSIONS) - {"compute.instances.delete", "compute.regions.list"}
    finding = inspect(bench)["permissions"]
    assert not finding.is_ok and finding.is_needed
    assert finding.note == "missing: compute.instances.delete, compute.regions.list"
    assert "broker check --policy gcp" in finding.command and "--project=pretend" in finding.command


def test_an_accelerator_without_quota_does_not_prevent_launches(bench: Any) -> None:
    for region in ("us-central1", "us-east4", "europe-west4"):
        for kind in ("", "PREEMPTIBLE_"):
            bench.gce.limits[region, f"{kind}NVIDIA_V100_GPUS"] = 0
    finding = inspect(bench)["quota V100"]
    assert (finding.is_ok, finding.is_needed, finding.note) == (False, False, "none in any region")
    wanted = "--project=pretend --quota-id=NVIDIA-V100-GPUS-per-project-region --preferred-value=8 --dimensions=region="
    assert wanted in finding.command
    bench.run(bench.cloud.check())


def test_a_project_without_gpu_quota_is_reported(bench: Any) -> None:
    assert inspect(bench)["quota of all GPUs"].note == "0 of 1000 in use"
    bench.gce.limits["global", "GPUS_ALL_REGIONS"] = 0
    finding = inspect(bench)["quota of all GPUs"]
    assert not finding.is_ok and not finding.is_needed and "no region" in finding.note
    assert "--quota-id=GPUS-ALL-REGIONS-per-project --preferred-value=8" in finding.command


def test_a_missing_network_comes_with_the_command_that_creates_it(bench: Any) -> None:
    assert inspect(bench)["network"].is_ok
    bench.gce.networks.clear()
    finding = inspect(bench)["network"]
    assert finding.command == "gcloud compute networks create default --subnet-mode=auto --project=pretend"
    with pytest.raises(AuthError):
        bench.run(bench.cloud.check())


def test_unknown_permissions_do_not_prevent_launches(bench: Any) -> None:
    bench.gce.tells_permissions = False
    finding = inspect(bench)["permissions"]
    assert not finding.is_ok and not finding.is_needed and "cloudresourcemanager" in finding.command
    bench.run(bench.cloud.check())


def test_a_missing_login_comes_with_the_command_to_log_in(tmp_path: Path, no_google: None, bench: Any) -> None:
    config = Config(home=tmp_path, owner="me")
    (finding,) = bench.run(check.inspect(config, clock=SystemClock()))
    assert not finding.is_ok and finding.command == "gcloud auth application-default login"


def test_the_role_is_a_file_that_gcloud_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_google: None) -> None:
    monkeypatch.setenv("BROKER_GCP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("GOOGLE_CLOUD_PROJECT", "vision")
    text = check.write_policy(Config(home=tmp_path, owner="me"))
    assert "--project=vision" in text.splitlines()[0]
    role = yaml.safe_load(text)
    assert set(role["includedPermissions"]) == set(PERMISSIONS) and role["stage"] == "GA"


def test_the_role_suffices_for_a_whole_life_and_has_nothing_to_spare(
    bench: Any, request_of: Callable[..., NodeRequest], offer_of: Callable[..., Offer]
) -> None:
    """The fake denies whatever the role does not grant, and records what was required."""
    bench.gce.allowed = set(yaml.safe_load(write_role())["includedPermissions"])
    cloud, spec = bench.cloud, MachineSpec(ports=("8080",))
    bench.run(cloud.check())
    gang = bench.run(cloud.create_nodes(request_of(offer_of(zone=None), node_count=2, spec=spec)))
    lone = bench.run(cloud.create_nodes(request_of(token="1" * 32, is_spot=False)))
    gpu = offer_of("n1-standard-4+1xT4")
    dear = bench.run(cloud.create_nodes(request_of(gpu, token="2" * 32, is_spot=False)))
    moved = bench.make_cloud()
    moved._launcher._find_callers = lambda login: ("198.51.100.9/32",)
    assert bench.run(moved.renew_access([lone[0]]))
    bench.run(cloud.stop_nodes([lone[0].id]))
    bench.run(cloud.start_nodes([lone[0].id]))
    bench.gce.preempt(gang[0].id.rpartition("/")[2])
    bench.run(cloud.terminate_nodes([gang[1], lone[0], dear[0]]))
    assert {node.reason for node in bench.run(cloud.list_nodes(gang[0].owner))} == {"preempted", "terminated"}
    bench.run(cloud.sweep(gang[0].owner, set()))
    assert bench.gce.list_names() == []
    assert set(PERMISSIONS) - bench.gce.used == FOR_OTHER_SETTINGS


@pytest.mark.parametrize("permission", sorted(PERMISSIONS.keys() - FOR_OTHER_SETTINGS))
def test_each_permission_is_requested(bench: Any, permission: str) -> None:
    bench.gce.allowed = set(PERMISSIONS) - {permission}
    finding = inspect(bench)["permissions"]
    assert finding.note == f"missing: {permission}"
