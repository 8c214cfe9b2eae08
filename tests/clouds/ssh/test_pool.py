"""Claims on hosts of a pool: who gets a host, what its silence means, and what is left after the end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from broker.clock import SystemClock
from broker.clouds.ssh.cloud import SshCloud, make_cloud, make_record
from broker.clouds.ssh.hosts import COMMAND
from broker.clouds.ssh.memory import HostMemory
from broker.config import Config
from broker.errors import AuthError, CapacityError, TransientError, UnknownOutcomeError
from broker.provision.lifecycle import Provisioner
from broker.sites.facts import Machine
from broker.sites.login import SshLogin
from broker.sites.openssh import Completed, call
from broker.sites.pools import Host, list_offers
from broker.state.store import Store
from broker.types import Cluster, ClusterStatus, Node, NodeState
from tests.clouds.contract import OWNER, make_request, wait_for
from tests.clouds.ssh.bed import PoolBed


class SharedHomeBed(PoolBed):
    """Hosts that share one home folder, as a cluster with NFS does, each with locks that the others do not see."""

    def find_folder(self, node: Node) -> Path:
        return self.root / "home" / ".broker-pool" / node.id

    async def run_on_host(self, host: Host, program: bytes, timeout_s: float) -> Completed:
        name = host.name.encode()
        for old, new in (
            (b"os.uname().nodename", b"'" + name + b"'"),
            (b"/proc/sys/kernel/random/boot_id", b"/nonexistent"),
            (b"alive.lock", b"alive-" + name + b".lock"),
        ):
            assert old in program or old == b"alive.lock"
            program = program.replace(old, new)
        env = {"HOME": str(self.root / "home"), "PATH": os.pathsep.join((f"{sys.base_prefix}/bin", os.environ["PATH"]))}
        return await call(["sh", "-c", COMMAND], stdin=program, timeout_s=timeout_s, what=host.name, env=env)


def list_all(bed: PoolBed, owner: str = OWNER) -> Sequence[Node]:
    return asyncio.run(bed.pool.list_nodes(owner)).nodes


def find_pids(bed: PoolBed, node: Node) -> list[int]:
    return list(json.loads((bed.find_folder(node) / "machine.json").read_text()).values())


def find_marked(bed: PoolBed, node: Node) -> list[int]:
    mark = f"BROKER_NODE_DIR={bed.find_folder(node)}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def test_host_of_one_broker_is_refused_to_another_and_named(bed: PoolBed) -> None:
    asyncio.run(bed.pool.create_nodes(make_request(bed, node_count=2)))
    with pytest.raises(CapacityError) as caught:
        asyncio.run(bed.make_cloud().create_nodes(make_request(bed, node_count=2, owner="another-owner")))
    assert f"h1 is in use by cluster train of broker {OWNER}" in caught.value.message
    assert not list_all(bed, "another-owner"), "the free host that it claimed is released"
    (node,) = asyncio.run(bed.pool.create_nodes(make_request(bed, owner="another-owner")))
    assert node.handle.startswith("pool://lab/h3/")


def test_host_is_free_again_after_all_processes_of_its_claim_were_killed(bed: PoolBed) -> None:
    async def act() -> None:
        request = make_request(bed, node_count=3)
        nodes = await bed.pool.create_nodes(request)
        for pid in find_pids(bed, nodes[0]):
            os.kill(pid, signal.SIGKILL)
        nodes = await wait_for(bed, request.token, lambda nodes: nodes[0].state is NodeState.TERMINATED)
        assert (nodes[0].reason, nodes[1].state) == ("crashed", NodeState.RUNNING)
        (again,) = await bed.pool.create_nodes(make_request(bed))
        assert again.handle.split("/")[3] == nodes[0].handle.split("/")[3]

    asyncio.run(act())


def test_silent_host_is_unseen_and_not_terminated(bed: PoolBed) -> None:
    asyncio.run(bed.pool.create_nodes(make_request(bed, node_count=2)))
    bed.dead = {"h1"}
    listed = asyncio.run(bed.pool.list_nodes(OWNER))
    assert {node.handle.split("/")[3]: node.state for node in listed} == dict.fromkeys(("h1", "h2"), NodeState.RUNNING)
    assert list(listed.unseen) == ["lab"] and "h1" in listed.unseen["lab"].message
    bed.dead = {"h1", "h2", "h3"}
    with pytest.raises(TransientError):
        asyncio.run(bed.pool.list_nodes(OWNER))


@pytest.mark.long
def test_silent_host_without_a_fence_cannot_be_ended(bed: PoolBed) -> None:
    nodes = asyncio.run(bed.pool.create_nodes(make_request(bed, node_count=2)))
    bed.dead = {"h1"}
    with pytest.raises(TransientError):
        asyncio.run(bed.pool.terminate_nodes(nodes))
    states = {node.handle.split("/")[3]: node.state for node in list_all(bed)}
    assert states == {"h1": NodeState.RUNNING, "h2": NodeState.TERMINATED}, "the other one was ended all the same"


@pytest.mark.parametrize(("code", "is_gone"), [(0, True), (1, False)])
def test_fence_command_decides_whether_a_silent_host_is_gone(bed: PoolBed, code: int, is_gone: bool) -> None:
    nodes = asyncio.run(bed.pool.create_nodes(make_request(bed)))
    called = bed.root / "fenced"
    bed.hosts[0] = replace(bed.hosts[0], fence=(f"echo {{host}} >{called}; exit {code}",))
    bed.dead = {"h1"}
    if is_gone:
        asyncio.run(bed.pool.terminate_nodes(nodes))
    else:
        with pytest.raises(TransientError):
            asyncio.run(bed.pool.terminate_nodes(nodes))
    assert called.read_text() == "h1\n"
    listed = asyncio.run(bed.make_cloud().list_nodes(OWNER))
    assert bool(listed.unseen) is not is_gone
    (node,) = listed
    assert (node.state, node.reason) == ((NodeState.TERMINATED, "fenced") if is_gone else (NodeState.RUNNING, ""))


def test_fenced_host_that_answers_again_is_believed(bed: PoolBed) -> None:
    nodes = asyncio.run(bed.pool.create_nodes(make_request(bed)))
    bed.hosts[0] = replace(bed.hosts[0], fence=("true",))
    bed.dead = {"h1"}
    asyncio.run(bed.pool.terminate_nodes(nodes))
    bed.dead = set()
    assert [node.state for node in list_all(bed)] == [NodeState.RUNNING], "here the fence command had no effect"
    bed.dead = {"h1"}
    assert asyncio.run(bed.pool.list_nodes(OWNER)).unseen, "what was confirmed then no longer holds"


def test_end_kills_detached_processes_and_removes_files(bed: PoolBed) -> None:
    (node,) = asyncio.run(bed.pool.create_nodes(make_request(bed)))
    folder = bed.find_folder(node)
    env = {**os.environ, "BROKER_NODE_DIR": str(folder)}

    async def start_beside() -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec("sleep", "600", env=env, start_new_session=True)

    async def act() -> None:
        beside = await start_beside()  # as a shell on the node, which is not a child of its machine
        (folder / "home/file").write_text("x")
        await bed.pool.terminate_nodes([node])
        assert await beside.wait() == -signal.SIGKILL
        assert not find_marked(bed, node)
        assert not (folder / "home").exists()

    asyncio.run(act())


def test_hosts_of_another_size_are_not_claimed(bed: PoolBed) -> None:
    machine = bed.hosts[0].machine
    assert machine
    bed.hosts[0] = replace(bed.hosts[0], machine=replace(machine, vcpus=64))
    (node,) = asyncio.run(bed.pool.create_nodes(make_request(bed)))
    assert node.handle.startswith("pool://lab/h2/")


@pytest.mark.parametrize("name", ["alive.lock", "node.json"])
def test_claim_whose_files_cannot_be_read_is_neither_dead_nor_gone(bed: PoolBed, name: str) -> None:
    """The home may be on a file server that does not answer for a moment, or the host may have no free descriptor."""
    (node,) = asyncio.run(bed.pool.create_nodes(make_request(bed)))
    path = bed.find_folder(node) / name
    kept, loop = path.with_name("kept"), path.with_name("loop")
    kept.hardlink_to(path)
    loop.symlink_to(path)
    loop.replace(path)  # ELOOP; in one step, as the machine ends if its folder is gone
    try:
        listed = asyncio.run(bed.pool.list_nodes(OWNER))
        assert [each.state for each in listed] == [NodeState.RUNNING] and "lab" in listed.unseen
        with pytest.raises(TransientError):
            asyncio.run(bed.pool.terminate_nodes([node]))
        assert find_marked(bed, node), "its processes were not killed"
    finally:
        kept.replace(path)
    assert [each.state for each in list_all(bed)] == [NodeState.RUNNING]


@pytest.mark.long
def test_claim_that_a_loss_of_power_has_damaged_is_made_again(bed: PoolBed) -> None:
    request = make_request(bed)
    (node,) = asyncio.run(bed.pool.create_nodes(request))
    asyncio.run(bed.pool.terminate_nodes([node]))
    (bed.find_folder(node) / "node.json").write_text("")
    assert not list_all(bed)
    (again,) = asyncio.run(bed.pool.create_nodes(request))
    assert (again.id, again.state) == (node.id, NodeState.RUNNING)


def make_lifecycle(bed: PoolBed, folder: Path) -> tuple[Store, Provisioner]:
    store = Store(folder / "state.db", clock=bed.clock)
    return store, Provisioner({"ssh": bed.pool}, store, clock=bed.clock, owner=OWNER)


def test_node_on_a_host_that_left_the_file_does_not_count_as_gone(bed: PoolBed, tmp_path: Path) -> None:
    store, provisioner = make_lifecycle(bed, tmp_path)
    request = make_request(bed)
    (node,) = asyncio.run(bed.pool.create_nodes(request))
    cluster = Cluster(
        name=request.cluster, status=ClusterStatus.UP, placement=request.placement, attempt=1, nodes=(node,)
    )
    store.clusters.put(cluster)
    removed = bed.hosts.pop(0)
    for act in (provisioner.refresh(cluster), provisioner.refresh(cluster), provisioner.down(cluster.name)):
        with pytest.raises(AuthError) as caught:
            asyncio.run(act)
        assert "host `h1` of pool `lab` is no longer in `ssh_pools.yaml`" in caught.value.message
        assert "add the host" in caught.value.hints[0] and "is_off: true" in caught.value.hints[1]
    assert store.clusters.get(cluster.name), "its record is kept, and with it the way to end it"
    assert find_marked(bed, node), "it still runs"
    bed.hosts.insert(0, removed)
    asyncio.run(provisioner.down(cluster.name))
    assert not store.clusters.get(cluster.name) and not find_marked(bed, node)
    store.close()


class UsersBed(PoolBed):
    """Hosts on which each user has a home folder and a number of their own."""

    async def run_on_host(self, host: Host, program: bytes, timeout_s: float) -> Completed:
        user = host.login.user or "alice"
        assert b"os.geteuid()" in program
        program = program.replace(b"os.geteuid()", {"alice": b"1001", "bob": b"1002"}[user])
        home = self.find_home(host.name) / user
        home.mkdir(parents=True, exist_ok=True)
        env = {"HOME": str(home), "PATH": os.pathsep.join((f"{sys.base_prefix}/bin", os.environ["PATH"]))}
        return await call(["sh", "-c", COMMAND], stdin=program, timeout_s=timeout_s, what=host.name, env=env)

    def log_in(self, user: str | None) -> None:
        self.hosts = [replace(host, login=replace(host.login, user=user)) for host in self.hosts]


def test_node_of_another_user_of_the_host_does_not_count_as_gone(tmp_path: Path) -> None:
    """Its claim is in the home folder of the user that the file named at its start: the job would run twice."""
    bed = UsersBed(tmp_path / "bed", host_count=1)
    store, provisioner = make_lifecycle(bed, tmp_path)
    request = make_request(bed)
    (node,) = asyncio.run(bed.pool.create_nodes(request))
    cluster = Cluster(
        name=request.cluster, status=ClusterStatus.UP, placement=request.placement, attempt=1, nodes=(node,)
    )
    store.clusters.put(cluster)
    bed.log_in("bob")
    for act in (provisioner.refresh(cluster), provisioner.down(cluster.name)):
        with pytest.raises(AuthError, match=r"now reached as user 1002, so node `.*` of user 1001 can be") as caught:
            asyncio.run(act)
        assert "restore the host's `user`" in caught.value.hints[0]
    assert store.clusters.get(cluster.name), "its record is kept, and with it the way to end it"
    bed.log_in("alice")
    asyncio.run(provisioner.down(cluster.name))
    assert not store.clusters.get(cluster.name)
    store.close()


@pytest.mark.parametrize(("used_mib", "is_taken"), [("40960", True), ("300", False), ("[N/A]", False)])
def test_host_whose_gpus_others_use_is_not_claimed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, used_mib: str, is_taken: bool
) -> None:
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text(f"#!/bin/sh\ncase $HOME in */h1) echo '4711, {used_mib}' ;; esac\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    bed = PoolBed(tmp_path / "bed", host_count=2)
    machine = Machine(vcpus=4, memory_gib=16, accelerator="H100", accelerator_count=8)
    bed.hosts = [replace(host, machine=machine) for host in bed.hosts]
    bed.offer = list_offers(bed.hosts)[0]
    (node,) = asyncio.run(bed.pool.create_nodes(make_request(bed)))
    assert node.handle.startswith("pool://lab/h2/" if is_taken else "pool://lab/h1/")
    if is_taken:
        with pytest.raises(CapacityError, match=r"h1 is in use by programs on its GPUs \(40960 MiB, process 4711\)"):
            asyncio.run(bed.pool.create_nodes(make_request(bed, node_count=2)))
    bed.clean_up([OWNER])


def test_pool_that_left_the_file_hides_a_launch_of_unknown_outcome(bed: PoolBed) -> None:
    removed, bed.hosts = bed.hosts, []
    found = bed.pool.find_removal("lab")
    assert isinstance(found, AuthError) and "pool `lab`" in found.message
    bed.hosts = removed
    assert bed.pool.find_removal("lab") is None


def test_hosts_file_that_cannot_be_read_fails_no_launch_for_good(tmp_path: Path) -> None:
    (tmp_path / "ssh_pools.yaml").write_text("lab: [")
    cloud = make_cloud(Config(home=tmp_path, owner=OWNER), clock=SystemClock())
    assert cloud
    with pytest.raises(TransientError):
        asyncio.run(cloud.list_nodes(OWNER))


@pytest.mark.long
def test_login_refused_while_a_part_of_the_gang_is_released_is_an_unknown_outcome(
    bed: PoolBed, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed.leave_room(1)
    run = bed.run_on_host

    async def run_until_released(host: Host, program: bytes, timeout_s: float) -> Completed:
        if b'"verb": "end"' in program:
            raise AuthError(f"host `{host.name}` cannot be reached: Permission denied")
        return await run(host, program, timeout_s)

    with monkeypatch.context() as patch, pytest.raises(UnknownOutcomeError):
        patch.setattr(bed.pool, "_run", run_until_released)
        asyncio.run(bed.pool.create_nodes(make_request(bed, node_count=2)))
    assert [node.state for node in list_all(bed)] == [NodeState.RUNNING], "it is still there, and to be ended"


@pytest.mark.long
def test_host_that_leaves_the_file_during_a_claim_is_released(bed: PoolBed, monkeypatch: pytest.MonkeyPatch) -> None:
    bed.leave_room(1)
    run, kept = bed.run_on_host, list(bed.hosts)

    async def run_and_edit(host: Host, program: bytes, timeout_s: float) -> Completed:
        done = await run(host, program, timeout_s)
        if b'"verb": "claim"' in program:
            bed.hosts = [each for each in kept if each.name != "h1"]
        return done

    monkeypatch.setattr(bed.pool, "_run", run_and_edit)
    with pytest.raises(CapacityError):
        asyncio.run(bed.pool.create_nodes(make_request(bed, node_count=2)))
    bed.hosts = kept
    assert not list_all(bed), "no claim is left"


@pytest.mark.long
def test_threads_of_a_server_lose_nothing_that_another_remembers(tmp_path: Path) -> None:
    """Each request has a cloud of its own, in a thread of its own."""
    hosts = [Host(pool="lab", login=SshLogin(host=f"h{number}")) for number in range(8)]
    claim = {"owner": "me", "ended": None}

    def remember(host: Host) -> None:
        memory = HostMemory(tmp_path)
        for number in range(20):
            memory.note_claim(host, {**claim, "id": f"{host.name}-{number}"})

    with ThreadPoolExecutor(len(hosts)) as pool:
        list(pool.map(remember, hosts))
    path = tmp_path / "ssh_claims.json"
    kept = path.rename(tmp_path / "kept")
    path.symlink_to(path)  # ELOOP: it cannot be read now
    with pytest.raises(TransientError):
        HostMemory(tmp_path).note_claim(hosts[0], {**claim, "id": "new"})
    path.unlink()
    kept.rename(path)
    known = [len(HostMemory(tmp_path).read_claims(host, "me", now_s=0.0)) for host in hosts]
    assert known == [20] * len(hosts)


def test_node_on_a_host_that_is_off_counts_as_gone(bed: PoolBed) -> None:
    nodes = asyncio.run(bed.pool.create_nodes(make_request(bed)))
    kept, bed.hosts[0] = bed.hosts[0], replace(bed.hosts[0], is_off=True)
    asyncio.run(bed.pool.terminate_nodes(nodes))
    listed = asyncio.run(bed.pool.list_nodes(OWNER))
    assert not listed.nodes and not listed.unseen
    bed.hosts[0] = kept


@pytest.mark.long
def test_host_that_is_avoided_is_not_claimed_until_its_time_is_over(bed: PoolBed) -> None:
    (node,) = asyncio.run(bed.pool.create_nodes(make_request(bed)))
    assert node.handle.startswith("pool://lab/h1/")
    bed.pool.avoid_machine(node, until_s=bed.clock.now_s() + 3600.0)
    asyncio.run(bed.pool.terminate_nodes([node]))
    (other,) = asyncio.run(bed.make_cloud().create_nodes(make_request(bed)))
    assert other.handle.startswith("pool://lab/h2/"), "another process avoids it, too"
    with pytest.raises(CapacityError) as caught:
        asyncio.run(bed.pool.create_nodes(make_request(bed, node_count=2)))
    assert "h1 has failed a check of its GPUs" in caught.value.message
    bed.pool.avoid_machine(node, until_s=bed.clock.now_s() - 1.0)
    (again,) = asyncio.run(bed.pool.create_nodes(make_request(bed)))
    assert again.handle.startswith("pool://lab/h1/")


@pytest.mark.long
def test_hosts_that_share_a_home_leave_each_others_claims_alone(tmp_path: Path) -> None:
    bed = SharedHomeBed(tmp_path, host_count=2)
    (tmp_path / "home").mkdir()
    try:
        nodes = asyncio.run(bed.pool.create_nodes(make_request(bed, node_count=2)))
        listed = list_all(bed)
        assert sorted(node.handle for node in listed) == sorted(node.handle for node in nodes)
        assert [node.state for node in listed] == [NodeState.RUNNING] * 2
        assert all((bed.find_folder(node) / "home" / ".broker").is_dir() for node in nodes), "no home is removed"
        asyncio.run(bed.pool.terminate_nodes(nodes[:1]))
        states = {node.handle: node.state for node in list_all(bed)}
        assert states == {nodes[0].handle: NodeState.TERMINATED, nodes[1].handle: NodeState.RUNNING}
    finally:
        bed.clean_up([OWNER])


def test_login_refused_after_a_part_of_the_gang_was_claimed_is_an_unknown_outcome(bed: PoolBed) -> None:
    """An AuthError means that nothing was created, so the claim would remain."""

    async def run(host: Host, program: bytes, timeout_s: float) -> Completed:
        if host.name == "h2" and b'"verb": "claim"' in program:
            raise AuthError("host `h2` cannot be reached: Permission denied")
        return await bed.run_on_host(host, program, timeout_s)

    cloud = SshCloud(
        lambda: bed.hosts, folder=bed.root / "other", clock=bed.clock, run=run,
        find_lock=lambda host: str(bed.find_home(host.name) / "locks" / "lock"),
    )  # fmt: skip
    with pytest.raises(UnknownOutcomeError, match="a part of the gang"):
        asyncio.run(cloud.create_nodes(make_request(bed, node_count=2)))
    assert [node.rank for node in list_all(bed)] == [0], "it is listed, and can be terminated"


@pytest.mark.parametrize("own", [0, 1, 2])
def test_machine_that_is_listed_under_several_names_is_one_node_under_the_name_of_its_claim(
    tmp_path: Path, own: int
) -> None:
    """Its address, its alias, and its address in another pool: each was a node more than the gang had."""
    bed = PoolBed(tmp_path)
    address = bed.hosts[0]
    hosts = [address, replace(address, login=SshLogin(host="alias")), replace(address, pool="other")]
    request = make_request(bed)
    record = make_record(request, 0, hosts[own], lock="", now_s=1.0)
    claim = {**record, "state": "RUNNING", "ended": None, "now_s": 1.0}

    async def answer(host: Host, program: bytes, timeout_s: float) -> Completed:
        return Completed(returncode=0, stdout=json.dumps({"answer": [claim], "uid": 0}).encode(), stderr=b"")

    pool = SshCloud(lambda: hosts, folder=tmp_path / "state", clock=bed.clock, run=answer)
    listed = asyncio.run(pool.list_nodes(OWNER)).nodes
    assert [node.handle for node in listed] == [f"pool://{hosts[own].key}/{record['id']}"]
    assert [node.id for node in asyncio.run(pool.create_nodes(request))] == [record["id"]]


def test_claims_share_the_price_of_their_gang(tmp_path: Path) -> None:
    bed = PoolBed(tmp_path)
    request = make_request(bed, node_count=2)
    records = [make_record(request, rank, bed.hosts[rank], lock="", now_s=1.0) for rank in range(2)]
    assert sum(float(str(each["usd_hour"])) for each in records) == pytest.approx(request.placement.usd_hour)


def test_end_of_a_claim_is_dated_by_our_clock_and_not_by_that_of_the_host(tmp_path: Path) -> None:
    """The host's clock is a day slow; its claim ended an hour ago."""
    bed = PoolBed(tmp_path)
    record = make_record(make_request(bed), 0, bed.hosts[0], lock="", now_s=1.0)
    now_s = bed.clock.now_s()
    ended = {"reason": "lease", "ended_s": now_s - 86400.0 - 3600.0}
    claim = {**record, "state": "TERMINATED", "ended": ended, "now_s": now_s - 86400.0}

    async def answer(host: Host, program: bytes, timeout_s: float) -> Completed:
        return Completed(returncode=0, stdout=json.dumps({"answer": [claim], "uid": 0}).encode(), stderr=b"")

    pool = SshCloud(lambda: bed.hosts[:1], folder=tmp_path / "state", clock=bed.clock, run=answer)
    (node,) = asyncio.run(pool.list_nodes(OWNER)).nodes
    assert node.ended_s == pytest.approx(now_s - 3600.0, abs=60.0)
