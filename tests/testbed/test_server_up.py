"""`broker server up` on real hosts: over the user's own ssh, and on a machine of a cloud that it starts."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from broker.runtime.bootstrap import make_boot
from broker.runtime.keys import HOST, LOGIN, Keys
from tests.cli.conftest import Shell
from tests.testbed.host import Host
from tests.testbed.metadata import MetadataServer
from tests.testbed.stage import Stage, open_stage

ADDRESS = "10.78.0.1"
CONFIG = """\
Host lab
  HostName {address}
  User ubuntu
  IdentityFile {keys}/login
  UserKnownHostsFile {folder}/known_hosts
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
