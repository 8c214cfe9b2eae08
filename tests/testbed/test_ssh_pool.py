"""An SSH pool of real hosts: a managed job loses a host to a power loss, and continues on the hosts that are left."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from broker.runtime.bootstrap import make_boot
from broker.runtime.keys import HOST, LOGIN, Keys
from broker.types import Job, JobStatus
from tests.cli.conftest import Shell
from tests.testbed.host import Host
from tests.testbed.metadata import MetadataServer

STORY_S_MAX = 600.0  # a silent host counts as lost after two minutes
ADDRESSES = ("10.77.0.1", "10.77.0.2", "10.77.0.3")
POOLS = """\
lab:
  user: ubuntu
  identity_file: {keys}/login
  known_hosts: {folder}/known_hosts
  fence: test -e {folder}/off-{{host}}
  hosts: [{hosts}]
"""
# The program continues to count: its state is in a folder that all hosts share, with the attempt of each step.
TASK = """\
name: count
num_nodes: 2
resources: {{infra: ssh/lab}}
checkpoint: {{to: {shared}}}
run: |
  step=$(cat {shared}/step-$SKYPILOT_NODE_RANK 2>/dev/null || echo 0)
  while [ ! -e {shared}/enough ]; do
    step=$((step + 1)); echo $step > {shared}/step-$SKYPILOT_NODE_RANK
    echo "{{\\"step\\": $step}}" >> $BROKER_PROGRESS_FILE
    echo "$BROKER_ATTEMPT $(hostname) "$SKYPILOT_NODE_IPS >> {shared}/log-$SKYPILOT_NODE_RANK
    sleep 1
  done
"""


class Pool(Shell):
    """A user's terminal, and three hosts of their own."""

    def __init__(self, folder: Path, shared: Path) -> None:
        super().__init__(folder)
        self.home.mkdir()
        self.environment["BROKER_OFFLINE"] = "1"
        keys = Keys(folder / "pool-keys").ensure("lab", "token")
        boot = make_boot(cloud="ssh", login=keys.read(LOGIN).public, host=keys.read(HOST))
        kind, blob = keys.read(HOST).public.split()[:2]
        (folder / "known_hosts").write_text("".join(f"{each} {kind} {blob}\n" for each in ADDRESSES))
        self.hosts = {
            address: Host(folder / "hosts", f"host-{number}", [address], boot=boot, shared=[shared]).start()
            for number, address in enumerate(ADDRESSES, start=1)
        }
        text = POOLS.format(keys=keys.folder, folder=folder, hosts=", ".join(ADDRESSES))
        (self.home / "ssh_pools.yaml").write_text(text)

    def lose_power(self, address: str) -> None:
        """Cut the power. From now on its fence command confirms that it is off."""
        self.hosts[address].power_off(is_silent=True)
        (self.folder / f"off-{address}").touch()

    def wait_for(self, is_so: Callable[[Job], bool], what: str) -> Job:
        end_s = time.monotonic() + STORY_S_MAX
        while True:
            with self.open_store() as store:
                job = store.jobs.get(1)
            assert job is not None
            if is_so(job):
                return job
            assert time.monotonic() < end_s, f"{what}\n{self.run('jobs', 'events', '1', code=None).stdout}"
            time.sleep(0.2)


@pytest.fixture
def pool(tmp_path: Path, metadata: MetadataServer, shared: Path) -> Iterator[Pool]:
    pool = Pool(tmp_path, shared)
    yield pool
    for pid in pool.find_processes("broker daemon"):
        os.kill(pid, signal.SIGTERM)
    for host in pool.hosts.values():
        host.power_off()


def test_job_survives_the_power_loss_of_a_host_of_the_pool(pool: Pool, shared: Path) -> None:
    pool.wait_until(lambda: "3 of 3 hosts answer" in pool.run("check", "ssh", code=None).stdout, "all hosts are up")
    pool.run("jobs", "launch", pool.write("count.yaml", TASK.format(shared=shared)), "--yes", "--detach-run")
    pool.wait_for(lambda job: bool(job.progress and job.progress.step >= 3), "it runs")
    with pool.open_store() as store:
        (cluster,) = store.clusters.list()
    assert {node.address for node in cluster.nodes} == set(ADDRESSES[:2])
    second = pool.write("two.yaml", "num_nodes: 2\nresources: {infra: ssh/lab}\nrun: 'true'\n")
    refused = pool.run("launch", second, "-c", "two", "--yes", code=None)
    assert refused.returncode and "in use by cluster" in refused.stderr, refused.stderr
    lost = next(node.address for node in cluster.nodes if node.rank == 1)
    pool.lose_power(lost)
    start_s = time.monotonic()
    log = shared / "log-0"
    pool.wait_for(lambda job: any(line.startswith("2 ") for line in log.read_text().splitlines()), "it moves")
    print(f"running again {time.monotonic() - start_s:.0f} s after the power loss")
    (shared / "enough").touch()
    job = pool.wait_for(lambda job: job.status.is_terminal, "it ends")
    assert job.status is JobStatus.SUCCEEDED and len(job.attempts) == 2
    lines = [line.split() for line in log.read_text().splitlines()]
    hosts = {attempt: set(line[2:]) for attempt in "12" for line in lines if line[0] == attempt}
    assert hosts == {"1": set(ADDRESSES[:2]), "2": set(ADDRESSES) - {lost}}
    assert int((shared / "step-0").read_text()) == len(lines), "no step was taken twice"
    pool.wait_for(lambda job: pool.is_at_rest(), "its cluster is down")
    for address in set(ADDRESSES) - {lost}:
        found = pool.hosts[address].execute("find", "/home/ubuntu/.broker-pool", "-name", "home")
        assert not found, "the files of a claim are removed"
        assert not pool.hosts[address].try_execute("pgrep", "-f", "machine-").stdout, "and its processes ended"
