"""`broker check` for users of Google Cloud."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from tests.cli.conftest import Shell
from tests.testbed.gce import FakeGce
from tests.testbed.gce_server import serve


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path)


def test_a_login_is_checked_in_detail(shell: Shell) -> None:
    gce = FakeGce()
    with serve(gce) as url:
        shell.environment |= {"BROKER_GCP_ENDPOINT": url, "GOOGLE_CLOUD_PROJECT": gce.project}
        found = {each["name"]: each for each in shell.read_json("check", "gcp")}
    assert all(found[each]["is_ok"] for each in ("credentials", "project", "api", "permissions", "quota T4"))
    assert found["project"]["note"] == "pretend"


@pytest.mark.long
def test_each_finding_has_its_remedy_and_fails_the_command(shell: Shell) -> None:
    gce = FakeGce(allowed={"compute.regions.list"}, limits={("us-central1", "NVIDIA_T4_GPUS"): 0.0})
    with serve(gce) as url:
        shell.environment |= {"BROKER_GCP_ENDPOINT": url, "GOOGLE_CLOUD_PROJECT": gce.project}
        done = shell.run("check", "gcp", code=5)
        rows = {row["cloud"]: row for row in shell.read_json("check")}
    assert "wrong  permissions: missing: compute.instances.create" in done.stdout
    assert "       fix: broker check --policy gcp > broker-role.yaml && gcloud iam roles create broker" in done.stdout
    notes = [line for line in done.stdout.splitlines() if "fix:" not in line]
    assert max(map(len, notes)) <= 80
    assert not rows["gcp"]["can_launch"] and rows["gcp"]["note"].startswith("permissions: missing: ")


def test_the_role_is_printed_as_a_file(shell: Shell) -> None:
    text = shell.run("check", "--policy", "gcp").stdout
    assert "compute.instances.create" in yaml.safe_load(text)["includedPermissions"]
    assert "gcloud iam roles create broker" in text.splitlines()[0]


def test_without_a_login_the_way_to_one_is_shown(shell: Shell) -> None:
    (finding,) = json.loads(shell.run("check", "gcp", "--json", code=5).stdout)
    assert not finding["is_ok"] and finding["command"] == "gcloud auth application-default login"
