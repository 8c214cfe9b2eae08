"""The server's machine is lost while a job runs on a node: another host continues from the backup in a bucket.

The lost machine is cut off and stopped, so that it can wake up later and try to write and to give orders.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from broker.runtime.bootstrap import make_boot
from broker.runtime.keys import HOST, LOGIN, Keys
from tests.cli.conftest import ROOT, Shell
from tests.testbed.host import Host
from tests.testbed.metadata import MetadataServer
from tests.testbed.s3 import BUCKET, S3Server, serve_s3
from tests.testbed.s3 import LOGIN as S3_LOGIN
from tests.testbed.world import CONTROL

OLD, NEW, NODES = "10.79.0.1", "10.79.0.2", ("10.79.0.11", "10.79.0.12")
PLACE = f"s3://{BUCKET}/backups"
HOME = "/root/broker-state"
STORY_S_MAX = 600.0  # on a busy machine
POOLS = """\
lab:
  user: ubuntu
  identity_file: {keys}/login
  known_hosts: {folder}/known_hosts
  hosts: [{hosts}]
"""
TASK = """\
name: count
num_nodes: 2
resources: {{infra: ssh/lab}}
run: |
  echo "$BROKER_ATTEMPT $SKYPILOT_NODE_RANK begins" >> {shared}/log
  step=0
  while [ ! -e {shared}/enough ]; do
    step=$((step + 1)); echo "{{\\"step\\": $step}}" >> $BROKER_PROGRESS_FILE; sleep 0.2
  done
  echo "$BROKER_ATTEMPT $SKYPILOT_NODE_RANK ends" >> {shared}/log
"""
# The product's own server; it backs up and looks at the epoch each second, so that the story is short.
SERVER = """\
import sys
from broker.__main__ import main
from broker.server import backup
backup.BACKUP_S = backup.CONFIRM_S = 1.0
main()
"""
ORDER = """\
import asyncio, sys
from broker.app.container import Context
from broker.errors import FencedError
context = Context()
(cluster,) = context.store.clusters.list()
orders = {
    "stop": lambda: context.gang.cancel(cluster, 1),
    "renew": lambda: context.gang.renew_lease(cluster, lease_s=5.0),
    "start": lambda: context.gang.start(cluster, context.store.jobs.get(1).task, run_id=2, envs={}),
}
for name, give in orders.items():
    try:
        asyncio.run(give())
        print(name, "obeyed")
    except FencedError:
        print(name, "refused")
"""


class ServerHost:
    """A machine with broker on it, and a state folder that is lost with it."""

    def __init__(self, host: Host, address: str, s3: S3Server) -> None:
        self.host, self.address = host, address
        self._environment = {
            "BROKER_HOME": HOME, "BROKER_OFFLINE": "1", "PYTHONPATH": str(ROOT), "LANG": "C.UTF-8", "HOME": "/root",
            **S3_LOGIN, "AWS_ENDPOINT_URL_S3": s3.url, "AWS_EC2_METADATA_DISABLED": "true",
        }  # fmt: skip

    def run(self, *argv: str) -> tuple[int, str]:
        """Run Python on the machine; return its exit code and output."""
        pairs = [f"{name}={value}" for name, value in self._environment.items()]
        done = self.host.try_execute("env", *pairs, sys.executable, *argv)
        return done.returncode, done.stdout + done.stderr

    def start(self) -> None:
        """Start the server, as its supervisor would."""
        pairs = " ".join(f"{name}={value}" for name, value in self._environment.items())
        self.host.execute("sh", "-c", f"mkdir -p {HOME}; cat > /root/server.py", stdin=SERVER)
        command = f"{sys.executable} /root/server.py server start --host {self.address} --port 8471"
        self.host.execute("sh", "-c", f"env {pairs} setsid {command} >/root/server.log 2>&1 </dev/null &")

    def read(self, name: str) -> str:
        """Return a file of the state folder; empty without one."""
        return self.host.try_execute("cat", f"{HOME}/{name}").stdout

    def write(self, name: str, text: str) -> None:
        self.host.execute("sh", "-c", f"mkdir -p {HOME}; cat > {HOME}/{name}", stdin=text)

    def signal(self, name: str) -> None:
        """Send a signal to every process of broker."""
        self.host.execute("sh", "-c", f"pkill -{name} -f 'server[.]py|broker[ ]daemon|-m[ ]broker'")

    def list_processes(self) -> str:
        return self.host.try_execute("pgrep", "-af", "server[.]py|broker daemon").stdout


class Story:
    """Two server machines, two nodes, and a laptop for each user."""

    def __init__(self, folder: Path, shared: Path, s3: S3Server) -> None:
        keys = Keys(folder / "pool-keys").ensure("lab", "token")
        boot = make_boot(cloud="ssh", login=keys.read(LOGIN).public, host=keys.read(HOST))
        kind, blob = keys.read(HOST).public.split()[:2]
        (folder / "known_hosts").write_text("".join(f"{each} {kind} {blob}\n" for each in NODES))
        self.pools = POOLS.format(keys=keys.folder, folder=folder, hosts=", ".join(NODES))
        self.shared, self._folder = shared, folder
        self.servers: list[ServerHost] = []
        self.hosts = {
            address: Host(folder / "hosts", f"host-{number}", [address], boot=boot, shared=[shared]).start()
            for number, address in enumerate((OLD, NEW, *NODES), start=1)
        }
        for host in self.hosts.values():
            self.wait_until(lambda host=host: is_booted(host), "it has a root folder of its own")  # type: ignore[misc]
        self.servers = [ServerHost(self.hosts[each], each, s3) for each in (OLD, NEW)]
        self.old, self.new = self.servers

    def login(self, name: str, server: ServerHost) -> Shell:
        """Return a laptop that is logged in to a server."""
        folder = self._folder / name
        folder.mkdir()
        laptop = Shell(folder)
        laptop.environment["BROKER_OFFLINE"] = "1"
        self.wait_until(lambda: bool(self.find_listening(server)), f"the server on {server.address} listens")
        listening = self.find_listening(server)
        (folder / "token").write_text(server.read("server/admin.token"))
        pinned = ("--fingerprint", listening["fingerprint"])
        laptop.run("login", listening["url"], *pinned, "--token-file", str(folder / "token"))
        return laptop

    def find_listening(self, server: ServerHost) -> Any:
        text = server.read("server/listening.json")
        return json.loads(text) if text else None

    def read_log(self) -> list[str]:
        path = self.shared / "log"
        return sorted(path.read_text().splitlines()) if path.exists() else []

    def wait_until(self, is_so: Callable[[], bool], what: str) -> None:
        end_s = time.monotonic() + STORY_S_MAX
        while not is_so():
            assert time.monotonic() < end_s, f"this never happened: {what}\n{self.describe()}"
            time.sleep(0.1)

    def describe(self) -> str:
        logs = [each.host.try_execute("cat", "/root/server.log", f"{HOME}/logs/daemon.log")
                for each in self.servers if each.host.is_alive]  # fmt: skip
        return "\n".join(each.stdout[-3000:] for each in logs)


@pytest.fixture
def story(tmp_path: Path, metadata: MetadataServer, shared: Path) -> Iterator[Story]:
    with serve_s3(CONTROL) as s3:
        story = Story(tmp_path, shared, s3)
        yield story
        for host in story.hosts.values():
            host.power_off()


def test_restored_server_finishes_the_job_and_orders_of_the_woken_one_are_refused(story: Story) -> None:
    old, new = story.old, story.new
    old.write("config.toml", f'backup = "{PLACE}"\n')
    old.write("ssh_pools.yaml", story.pools)
    old.start()
    first = story.login("first", old)
    story.wait_until(lambda: "2 of 2 hosts answer" in old.run("-m", "broker", "check", "ssh")[1], "the nodes are up")
    first.run("jobs", "launch", first.write("count.yaml", TASK.format(shared=story.shared)), "--yes", "--detach-run")
    story.wait_until(lambda: len(story.read_log()) == 2, "both ranks run")
    story.wait_until(lambda: read_job(first)["status"] == "RUNNING", "the server knows it")
    key, known_s = old.read("secret.key"), time.time()
    story.wait_until(lambda: read_backup_s(old) > known_s + 1.0, "that is in the bucket")

    old.host.cut_off()
    old.signal("STOP")
    new.write("secret.key", key)
    code, output = new.run("-m", "broker", "server", "restore", "--from", PLACE, "--yes")
    assert code == 0 and "as epoch 2" in output, output
    new.start()
    second = story.login("second", new)
    story.wait_until(lambda: all(read_epoch(story.hosts[each]) == 2 for each in NODES), "the new server has spoken")

    old.host.reconnect()
    output = old.run("-c", ORDER)[1]
    assert sorted(output.splitlines()) == ["renew refused", "start refused", "stop refused"], output
    old.signal("CONT")
    story.wait_until(lambda: not old.list_processes(), "the woken server ends by itself")
    code, output = old.run("-m", "broker", "jobs", "cancel", "1")
    assert code and "was replaced by one that was restored" in output, output

    (story.shared / "enough").touch()
    story.wait_until(lambda: read_job(second)["status"] == "SUCCEEDED", "the job ends")
    assert "SUCCEEDED" in second.run("jobs", "queue", "--all").stdout
    assert story.read_log() == ["1 0 begins", "1 0 ends", "1 1 begins", "1 1 ends"], "one attempt, undisturbed"
    story.wait_until(lambda: not second.read_json("status")["clusters"], "its nodes are released")
    for address in NODES:
        left = story.hosts[address].try_execute("find", "/home/ubuntu/.broker-pool", "-name", "home").stdout
        assert not left and not story.hosts[address].try_execute("pgrep", "-f", "agent[.]py").stdout


def is_booted(host: Host) -> bool:
    """Return whether a command on the host sees its own files; before, it would write into this machine's."""
    return host.try_execute("cat", "/etc/hostname").stdout.strip() == host.name


def read_job(laptop: Shell) -> Any:
    (job,) = laptop.read_json("jobs", "queue", "--all")
    return job


def read_backup_s(server: ServerHost) -> float:
    text = server.read("server/backup.json")
    return float(json.loads(text).get("time_s", 0.0)) if text else 0.0


def read_epoch(host: Host) -> int:
    """Return the highest epoch that the node on a host has seen."""
    text = host.try_execute("sh", "-c", "cat /home/ubuntu/.broker-pool/*/home/.broker/epoch.json").stdout
    return int(json.loads(text)["server_epoch"]) if text else 0
