"""`broker server up` on real hosts: over the user's own ssh, and on a machine of a cloud that it starts."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from broker.runtime.bootstrap import make_boot
from broker.runtime.keys import HOST, LOGIN, Keys
from tests.cli.conftest import Shell
from tests.testbed.ec2_account import ACCOUNT, Account
from tests.testbed.ec2_roles import find_credentials
from tests.testbed.host import Host
from tests.testbed.metadata import MetadataServer
from tests.testbed.stage import Stage, open_stage
from tests.testbed.sts import FakeStore, Session, allows, serve_store
from tests.testbed.world import CONTROL

ADDRESS = "10.78.0.1"
CONFIG = """\
Host lab
  HostName {address}
  User ubuntu
  IdentityFile {keys}/login
  UserKnownHostsFile {folder}/known_hosts
"""
WRITE_CONFIG = """
until id ubuntu >/dev/null 2>&1; do sleep 0.1; done
mkdir -p /home/ubuntu/.aws
cat >/home/ubuntu/.aws/config
echo "export AWS_ENDPOINT_URL_S3=$1 AWS_ENDPOINT_URL_STS=$1" >/home/ubuntu/.bashrc  # Debian's bash reads it for sshd
chown -R ubuntu /home/ubuntu/.aws
"""
HELLO_ON_AWS = """\
name: hello
resources: {infra: aws/us-east-1/us-east-1b, instance_type: m5.large, use_spot: true}
checkpoint: {to: s3://testbed/runs}
run: echo hello from $(hostname)
"""
HELLO = "name: hello\nresources: {infra: local}\nrun: echo hello from $(hostname)\n"


class Laptop(Shell):
    """A user's terminal, and a host of theirs that stays on."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.environment["BROKER_OFFLINE"] = "1"
        keys = Keys(folder / "own-keys").ensure("lab", "token")
        boot = make_boot(cloud="ssh", login=keys.read(LOGIN).public, host=keys.read(HOST))
        kind, blob = keys.read(HOST).public.split()[:2]
        (folder / "known_hosts").write_text(f"{ADDRESS} {kind} {blob}\n")
        self.config = folder / "ssh_config"
        self.config.write_text(CONFIG.format(address=ADDRESS, keys=keys.folder, folder=folder))
        self.host = Host(folder / "hosts", "lab-1", [ADDRESS], boot=boot).start()

    def up(self, *options: str, code: int | None = 0) -> str:
        place = ("--infra", "ssh://lab", "--ssh-config", str(self.config), "--python", sys.executable, "--local-cloud")
        return self.run("server", "up", *place, *options, code=code).stdout


@pytest.fixture
def laptop(tmp_path: Path, metadata: MetadataServer) -> Iterator[Laptop]:
    laptop = Laptop(tmp_path)
    yield laptop
    laptop.host.power_off()


@pytest.fixture
def stage(tmp_path: Path, metadata: MetadataServer) -> Iterator[Stage]:
    with open_stage(tmp_path, metadata) as stage:
        yield stage


def test_server_on_a_host_runs_jobs_without_the_laptop(laptop: Laptop) -> None:
    laptop.wait_until(lambda: "Server: " in laptop.up("--login", code=None), "the host has booted")
    status = laptop.read_json("server", "status")
    assert status["url"] == f"https://{ADDRESS}:8471" and status["is_running"] and status["fingerprint"]
    done = laptop.run("jobs", "launch", laptop.write("hello.yaml", HELLO))
    assert "hello from lab-1" in done.stdout
    assert not laptop.find_processes("broker daemon"), "nothing of broker runs on the laptop"
    laptop.run("server", "upgrade")
    assert laptop.read_json("jobs", "queue", "--all")[0]["status"] == "SUCCEEDED"
    assert "The server has been removed" in laptop.run("server", "down", "--force").stdout
    assert not laptop.host.try_execute("pgrep", "-f", "broker server").stdout
    assert not laptop.host.execute("find", "/home/ubuntu", "-name", ".broker-server")


def test_server_on_aws_launches_machines_with_the_role_that_broker_made(stage: Stage) -> None:
    """Without a login on the server's machine: the role, which `down` deletes, has all its permissions.

    Nodes get sessions of this role that are limited to the job's folder in the bucket.
    """
    with serve_store(CONTROL) as store:
        run_with_role(stage, store)


def run_with_role(stage: Stage, store: FakeStore) -> None:
    (stage.home / "aws.toml").write_text(f'ssh_from = ["{CONTROL}/32"]\naddress_url = "{stage.aws.url}"\n')
    config = f"[default]\nregion = us-east-1\nendpoint_url = {stage.aws.url}\n"
    words = ("sh", "-ec", WRITE_CONFIG, "write", store.url)
    stage.bridge.on_aws_host = lambda host: host.execute(*words, stdin=config)
    place = ("--infra", "aws/us-east-1", "--python", sys.executable, "--bucket", "testbed")
    up = stage.run("server", "up", *place, "--yes", "--login")
    role = f"broker-server-{stage.owner}"
    play_role(stage.account, store, role)
    assert f"creating the role `{role}`" in up.stderr
    (server,) = stage.account.instances.values()
    assert server.parameters["IamInstanceProfile"] == {"Name": role}
    done = stage.run("jobs", "launch", stage.write("hello.yaml", HELLO_ON_AWS), "--yes")
    assert "hello from i-" in done.stdout
    node = next(each for each in stage.account.instances.values() if each is not server)
    assert "IamInstanceProfile" not in node.parameters, "nodes do not have the server's role"
    assert any(key.endswith("/logs/1.log") for key in store.objects)
    assert any(action == "AssumeRole" for action, _ in store.calls)
    assert all(key.removeprefix("ASIA").isdigit() for key in store.used_keys), "nodes wrote with sessions"
    stage.wait_until(lambda: node.state == "terminated", "the job's machine has ended")
    stage.run("server", "down")
    assert stage.list_living() == set()
    assert set(stage.account.roles) == set(stage.account.profiles) == {"reader"}


def play_role(account: Account, store: FakeStore, name: str) -> None:
    """Let the role use the store as its permissions allow, and assume itself if its trust policy does."""
    key = find_credentials(account, name)
    assert key is not None
    arn = f"arn:aws:iam::{ACCOUNT}:role/broker/{name}"
    store.arn = f"arn:aws:sts::{ACCOUNT}:assumed-role/{name}/i-1"

    def find_policy() -> Mapping[str, Any]:
        found: Mapping[str, Mapping[str, Any]] = account.roles[name]["policies"]
        return next(iter(found.values()))

    def find_role(wanted: str) -> Mapping[str, Any] | None:
        _, trusted = account.roles[name]["trust"]["Statement"]
        is_trusted = trusted["Condition"] == {"ArnEquals": {"aws:PrincipalArn": arn}} and wanted == arn
        return find_policy() if is_trusted and allows(find_policy(), "sts:AssumeRole", wanted, None) else None

    store.find_role = find_role
    store.sessions[key["AccessKeyId"]] = Session(token=key["Token"], expires_s=float("inf"), policy=find_policy())


def test_server_on_a_cloud_is_a_cluster_that_down_terminates(stage: Stage) -> None:
    place = ("--infra", "aws/us-east-1", "--python", sys.executable)
    output = stage.run("server", "up", *place, "--yes", "--login").stdout
    (machine,) = stage.account.instances.values()
    assert not machine.is_spot and "Logged in as admin" in output
    assert stage.read_json("server", "status")["is_running"]
    assert stage.run("jobs", "queue").stdout.startswith("No managed jobs")
    stage.run("server", "up", *place, "--yes")
    assert len(stage.account.instances) == 1, "a repeated `up` starts no second machine"
    stage.run("server", "down")
    assert stage.list_living() == set()
    assert stage.read_json("status")["clusters"] == []


def test_server_on_google_has_the_service_account_that_was_named(stage: Stage) -> None:
    account = f"server@{stage.gce.project}.iam.gserviceaccount.com"
    place = ("--infra", "gcp/us-central1", "--python", sys.executable, "--role", account)
    assert "Logged in as admin" in stage.run("server", "up", *place, "--yes", "--login").stdout
    (name,) = stage.gce.list_names()
    machine = stage.gce.find(name)
    assert machine["scheduling"]["provisioningModel"] == "STANDARD"
    assert [each["email"] for each in machine["serviceAccounts"]] == [account]
    settings = stage.bridge.hosts[name].execute("cat", "/home/ubuntu/.broker-server/state/gcp.toml")
    assert settings == f'project = "{stage.gce.project}"\n', "its own login has no project"
    assert stage.read_json("server", "status")["is_running"]
    assert stage.run("jobs", "queue").stdout.startswith("No managed jobs")
    stage.run("server", "up", *place, "--yes")
    assert stage.gce.list_names() == [name], "a repeated `up` starts no second machine"
    stage.run("server", "down")
    assert stage.list_living() == set() and stage.gce.list_names() == []
