from __future__ import annotations

import asyncio
import errno
import fcntl
import json
import os
import resource
import shutil
import signal
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from local_gang import Rig, make_request, processes_of, wait_for

from broker.clock import SystemClock
from broker.clouds import local, local_machine
from broker.clouds.base import CanPreempt, CanStop
from broker.clouds.local import LocalCloud, is_alive
from broker.errors import CapacityError, TransientError, UnknownOutcomeError, UsageError
from broker.runtime.transports.local import exchange
from broker.runtime.transports.machine_protocol import pack_header
from broker.types import Node, NodeState

# Three double-forked grandchildren in their own sessions, ignoring SIGTERM, and one that works in the foreground.
EVIL = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
for i in range(3):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            open(os.path.expanduser(f"~/evil-{i}"), "w").close()
            time.sleep(1000)
        os._exit(0)
"""


async def release_evil(rig: Rig, node: Node) -> None:
    done = await rig.transport.run(node, ["python3", "-c", EVIL], timeout_s=300)
    assert done.returncode == 0, done
    await wait_for(lambda: all((Path(node.handle) / f"home/evil-{i}").exists() for i in range(3)))
    assert len(processes_of(node)) >= 3


@pytest.mark.parametrize("how", ["machine", "keeper", "both", "terminate", "preempt", "shutdown"])
def test_no_process_outlives_its_node(rig: Rig, how: str) -> None:
    async def act() -> None:
        (node,) = await rig.cloud.create_nodes(make_request())
        (other,) = await rig.cloud.create_nodes(make_request())
        await release_evil(rig, node)
        pids = json.loads((Path(node.handle) / "machine.json").read_text())
        if how == "terminate":
            await rig.cloud.terminate_nodes([node])
        elif how == "preempt":
            await rig.cloud.preempt_nodes([node.id], notice_s=0)
        elif how == "shutdown":
            (Path(node.handle) / "home/.broker/shutdown").write_text("lease")
        else:
            for pid in pids.values() if how == "both" else [pids[how]]:
                os.kill(pid, signal.SIGKILL)
        ended = await rig.wait_state(node, NodeState.TERMINATED)
        await wait_for(lambda: not processes_of(node))
        reasons = {"terminate": "terminated", "preempt": "preempted", "shutdown": "lease"}
        assert ended.reason == reasons.get(how, "crashed")
        assert ended.ended_s is not None and ended.ended_s >= ended.created_s
        assert not (Path(node.handle) / "home").exists()
        assert (await rig.state_of(other)).state is NodeState.RUNNING
        with pytest.raises(TransientError):
            await rig.transport.run(node, ["true"], timeout_s=300)

    asyncio.run(act())


def test_same_token_gives_the_same_nodes(rig: Rig) -> None:
    async def act() -> None:
        request = make_request(node_count=2)
        again = LocalCloud(rig.root, clock=SystemClock())
        first, second = await asyncio.gather(rig.cloud.create_nodes(request), again.create_nodes(request))
        assert [node.id for node in first] == [node.id for node in second]
        assert len(await rig.cloud.list_nodes("me")) == 2
        assert {node.rank for node in first} == {0, 1}
        assert first[0].usd_hour == pytest.approx(0.03)
        await rig.cloud.terminate_nodes(first)
        third = await rig.cloud.create_nodes(request)
        assert {node.state for node in third} == {NodeState.TERMINATED}

    asyncio.run(act())


def test_addresses_are_unique_where_loopback_has_many(rig: Rig) -> None:
    async def act() -> None:
        nodes = await rig.cloud.create_nodes(make_request(node_count=3))
        addresses = {node.address for node in nodes}
        assert len(addresses) == 3 or addresses == {"127.0.0.1"}

    asyncio.run(act())


def test_other_owners_do_not_see_our_nodes(rig: Rig) -> None:
    async def act() -> None:
        await rig.cloud.create_nodes(make_request())
        assert not (await rig.cloud.list_nodes("somebody")).nodes

    asyncio.run(act())


def test_interrupted_creation_is_pending_until_the_same_token_boots_it(rig: Rig) -> None:
    async def act() -> None:
        request = make_request()
        (node,) = await rig.cloud.create_nodes(request)
        await rig.cloud.terminate_nodes([node])
        for name in ("machine.json", "ended.json"):  # as if the creator had died between the folder and the boot
            (Path(node.handle) / name).unlink()
        (Path(node.handle) / "home/.broker").mkdir(parents=True)
        (Path(node.handle) / "tmp").mkdir(exist_ok=True)
        assert (await rig.state_of(node)).state is NodeState.PENDING
        (again,) = await rig.cloud.create_nodes(request)
        assert (again.id, again.state) == (node.id, NodeState.RUNNING)

    asyncio.run(act())


def test_stopped_node_keeps_its_disk_and_starts_again(rig: Rig) -> None:
    async def act() -> None:
        (node,) = await rig.cloud.create_nodes(make_request())
        await rig.transport.run(node, ["bash", "-c", "echo kept > ~/file"], timeout_s=300)
        await rig.cloud.stop_nodes([node.id])
        assert (await rig.state_of(node)).state is NodeState.STOPPED
        assert not processes_of(node)
        await rig.cloud.start_nodes([node.id])
        assert (await rig.state_of(node)).state is NodeState.RUNNING
        done = await rig.transport.run(node, ["cat", "file"], timeout_s=300)
        assert done.stdout == b"kept\n"
        await rig.cloud.stop_nodes([node.id])
        await rig.cloud.terminate_nodes([node])
        assert (await rig.state_of(node)).state is NodeState.TERMINATED

    asyncio.run(act())


def test_terminating_twice_or_the_unknown_is_success(rig: Rig) -> None:
    async def act() -> None:
        (node,) = await rig.cloud.create_nodes(make_request())
        for _ in range(2):
            await rig.cloud.terminate_nodes(
                [node, *(replace(node, id=other) for other in ("never-there", "../escape"))]
            )
        assert (await rig.state_of(node)).reason == "terminated"

    asyncio.run(act())


def test_end_that_a_full_disk_cannot_record_is_reported_and_recorded_later(rig: Rig) -> None:
    async def act() -> None:
        (node,) = await rig.cloud.create_nodes(make_request())
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        pids = json.loads((Path(node.handle) / "machine.json").read_text()).values()
        for number in (signal.SIGSTOP, signal.SIGKILL):  # stopped first: neither may record how the other ended
            for pid in pids:
                os.kill(pid, number)
        await wait_for(lambda: not is_alive(Path(node.handle)))
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))  # no file may grow, as on a full disk
        try:
            with pytest.raises(TransientError, match="cannot record the end"):
                await rig.cloud.terminate_nodes([node])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        await rig.wait_state(node, NodeState.TERMINATED)

    asyncio.run(act())


def test_node_that_a_full_disk_cut_off_while_it_was_made_is_cleared_away_by_the_next(rig: Rig) -> None:
    async def act() -> None:
        (first,) = await rig.cloud.create_nodes(make_request())
        root = Path(first.handle).parent
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
        try:
            with pytest.raises(TransientError):
                await rig.cloud.create_nodes(make_request())
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert list(root.glob(".new-*")), "it was cut off in the middle"
        await rig.cloud.create_nodes(make_request())
        assert not list(root.glob(".new-*"))

    asyncio.run(act())


def test_zone_without_capacity_refuses_and_creates_nothing(rig: Rig) -> None:
    async def act() -> None:
        await rig.cloud.check()
        (rig.root / "faults.json").write_text('{"zones": {"local-a": "capacity"}}')
        with pytest.raises(CapacityError) as caught:
            await rig.cloud.create_nodes(make_request())
        assert caught.value.scope == "zone"
        assert not (await rig.cloud.list_nodes("me")).nodes

    asyncio.run(act())


def test_old_terminated_nodes_are_forgotten(rig: Rig) -> None:
    class Later:
        def now_s(self) -> float:
            return SystemClock().now_s() + 4000

        async def sleep(self, duration_s: float) -> None: ...

    async def act() -> None:
        (node,) = await rig.cloud.create_nodes(make_request())
        await rig.cloud.terminate_nodes([node])
        assert len(await rig.cloud.list_nodes("me")) == 1
        assert not (await LocalCloud(rig.root, clock=Later()).list_nodes("me")).nodes
        assert not Path(node.handle).exists()

    asyncio.run(act())


def test_folders_are_private_and_abilities_declared(rig: Rig) -> None:
    async def act() -> None:
        assert isinstance(rig.cloud, CanStop) and isinstance(rig.cloud, CanPreempt)
        (node,) = await rig.cloud.create_nodes(make_request())
        folder = Path(node.handle)
        record = json.loads((folder / "node.json").read_text())
        for private in (rig.root, folder, folder / "home", folder / "tmp", Path(record["socket"]).parent):
            assert stat.S_IMODE(private.stat().st_mode) == 0o700, private
        assert stat.S_IMODE((folder / "node.json").stat().st_mode) == 0o600

    asyncio.run(act())


def test_node_goes_when_its_notice_has_run_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[str] = []
    now_s = 500.0
    monkeypatch.setattr(local_machine, "power_off", lambda folder, reason: ends.append(reason))
    monkeypatch.setattr(local_machine, "time", SimpleNamespace(monotonic=lambda: now_s))
    (tmp_path / "node.json").write_text("{}")
    assert local_machine.check_power(str(tmp_path), None) is None
    (tmp_path / "preempt.json").write_text('{"notice_s": 120.0, "time_s": 1.0}')
    gone_s = local_machine.check_power(str(tmp_path), None)
    assert gone_s == 620.0
    now_s = 619.0
    assert (local_machine.check_power(str(tmp_path), gone_s), ends) == (620.0, [])
    now_s = 620.0
    local_machine.check_power(str(tmp_path), gone_s)
    assert ends == ["preempted"]


def test_lock_of_a_host_is_open_to_other_users_and_kept_by_cleaners(tmp_path: Path) -> None:
    host = tmp_path / "broker-host" / "lock"
    (tmp_path / "node.json").write_text(json.dumps({"host_lock": str(host)}))
    umask = os.umask(0o077)
    try:
        locks = [local_machine.take_host(str(tmp_path)) for _ in range(2)]
    finally:
        os.umask(umask)
    assert locks[0] > 0 and locks[1] == -1, "the second node finds the host taken"
    assert stat.S_IMODE(host.parent.stat().st_mode) == 0o755 and stat.S_IMODE(host.stat().st_mode) == 0o644
    cleaner = os.open(host.parent, os.O_RDONLY)  # systemd-tmpfiles skips a folder that it cannot lock exclusively
    with pytest.raises(BlockingIOError):
        fcntl.flock(cleaner, fcntl.LOCK_EX | fcntl.LOCK_NB)
    for each in (cleaner, locks[0]):
        os.close(each)


def test_an_end_is_recorded_once(tmp_path: Path) -> None:
    local_machine.record_end(str(tmp_path), state="TERMINATED", reason="first")
    local_machine.record_end(str(tmp_path), state="TERMINATED", reason="second")
    assert json.loads((tmp_path / "ended.json").read_text())["reason"] == "first"
    assert [entry.name for entry in tmp_path.iterdir()] == ["ended.json"]


def test_a_timed_out_command_raises_instead_of_returning_a_code(rig: Rig) -> None:
    async def act() -> None:
        node = (await rig.make_cluster()).nodes[0]
        with pytest.raises(EOFError):
            await exchange(Path(node.handle), pack_header(["sleep", "60"], timeout_s=0.01), b"")

    asyncio.run(act())


def test_a_node_whose_folder_is_deleted_ends_with_its_processes(rig: Rig) -> None:
    async def act() -> None:
        node = (await rig.make_cluster()).nodes[0]
        await rig.transport.run(node, ["bash", "-c", "setsid sleep 5434 & echo hi"], timeout_s=300)
        await wait_for(lambda: len(processes_of(node)) > 2)  # a process has no environment while it executes a program
        pids = processes_of(node)
        deleted = Path(node.handle).rename(f"{node.handle}-deleted")  # at once: the node may write until it notices
        await wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
        shutil.rmtree(deleted)

    asyncio.run(act())


def test_a_node_whose_file_server_does_not_answer_lives_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pools may have their homes on NFS: an error of it, or a lack of descriptors, is not a deleted folder."""
    ends: list[str] = []
    monkeypatch.setattr(local_machine, "power_off", lambda folder, reason: ends.append(reason))
    (tmp_path / "node.json").symlink_to(tmp_path / "node.json")  # ELOOP
    local_machine.check_power(str(tmp_path), None)
    assert ends == []
    (tmp_path / "node.json").unlink()
    local_machine.check_power(str(tmp_path), None)
    assert ends == ["deleted"]


def test_a_node_without_a_free_descriptor_lives_on(rig: Rig) -> None:
    """As without a free process: the program may have started as many threads as its user may."""

    async def act() -> None:
        node = (await rig.make_cluster()).nodes[0]
        machine = json.loads((Path(node.handle) / "machine.json").read_text())["machine"]
        limits = resource.prlimit(machine, resource.RLIMIT_NOFILE)
        resource.prlimit(machine, resource.RLIMIT_NOFILE, (1, limits[1]))

        def count_ticks() -> int:
            return int(Path(f"/proc/{machine}/stat").read_text().rpartition(")")[2].split()[11])

        before = count_ticks()
        command = asyncio.ensure_future(exchange(Path(node.handle), pack_header(["true"], timeout_s=300.0), b""))
        await wait_for(lambda: not is_alive(Path(node.handle)) or count_ticks() > before + 2)  # it tries again
        resource.prlimit(machine, resource.RLIMIT_NOFILE, limits)
        assert (await command).returncode == 0
        assert [each.state for each in await rig.cloud.list_nodes("me")] == [NodeState.RUNNING]

    asyncio.run(act())


def test_one_node_that_does_not_end_does_not_keep_the_others(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    async def act() -> None:
        nodes = [node for _ in range(2) for node in await rig.cloud.create_nodes(make_request())]
        stuck, kill = nodes[0], local.kill

        def fail_once(folder: Path) -> None:
            if folder.name == stuck.id:
                raise UnknownOutcomeError(f"node `{folder.name}` does not terminate")
            kill(folder)

        with monkeypatch.context() as patch, pytest.raises(UnknownOutcomeError):
            patch.setattr(local, "kill", fail_once)
            await rig.cloud.terminate_nodes(nodes)
        states = {node.id: node.state for node in await rig.cloud.list_nodes("me")}
        assert states == {stuck.id: NodeState.RUNNING, nodes[1].id: NodeState.TERMINATED}

    asyncio.run(act())


@pytest.mark.parametrize("name", ["node.json", pytest.param("ended.json", marks=pytest.mark.long), "machine.json"])
def test_a_file_that_a_loss_of_power_has_damaged_disturbs_no_other_node(rig: Rig, name: str) -> None:
    async def act() -> None:
        request = make_request()
        (node,) = await rig.cloud.create_nodes(request)
        (other,) = await rig.cloud.create_nodes(make_request())
        await rig.cloud.terminate_nodes([node])
        (Path(node.handle) / name).write_text("")
        states = {each.id: each.state for each in await rig.cloud.list_nodes("me")}
        assert states[other.id] is NodeState.RUNNING and states.get(node.id) in (None, NodeState.TERMINATED)
        (again,) = await rig.cloud.create_nodes(request)
        assert again.state is (NodeState.RUNNING if name == "node.json" else NodeState.TERMINATED)

    asyncio.run(act())


def test_invalid_file_of_faults_is_named(rig: Rig) -> None:
    (rig.cloud._root / "faults.json").parent.mkdir(parents=True, exist_ok=True)
    (rig.cloud._root / "faults.json").write_text("{zones")
    with pytest.raises(UsageError, match=r"faults\.json must be JSON such as"):
        asyncio.run(rig.cloud.create_nodes(make_request()))


def test_a_full_disk_is_the_clouds_error_and_leaves_no_half_made_node(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The controller retries elsewhere or later; a raw OSError would be our bug."""

    def fail(path: str, value: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    async def act() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(local_machine, "write_json", fail)
            with pytest.raises(TransientError, match="No space left"):
                await rig.cloud.create_nodes(make_request())
        assert not (await rig.cloud.list_nodes("me")).nodes

    asyncio.run(act())


@pytest.mark.parametrize("may_sudo", [True, False])
def test_processes_of_root_are_killed_by_sudo_or_left(monkeypatch: pytest.MonkeyPatch, may_sudo: bool) -> None:
    """`sudo apt-get install` in `setup` runs as root: the end of a node waited for it at full speed, forever."""
    alive, calls = {10, 11}, list[list[str]]()

    def kill(pid: int, number: int) -> None:
        if pid == 11:
            raise PermissionError
        if number == signal.SIGKILL:
            alive.discard(pid)

    def spawn(mode: int, program: str, words: list[str]) -> int:
        calls.append(words)
        alive.difference_update({int(word) for word in words[4:]} if may_sudo else ())
        return 0 if may_sudo else 1

    monkeypatch.setattr(local_machine, "find_victims", lambda folder: list(alive))
    monkeypatch.setattr(local_machine, "reap", lambda: None)
    monkeypatch.setattr(local_machine.os, "kill", kill)
    monkeypatch.setattr(local_machine.os, "spawnvp", spawn)
    local_machine.kill_tree("node")
    assert calls == [["sudo", "-n", "kill", "-KILL", "11"]]
    assert alive == (set() if may_sudo else {11})


# Slurm signals the process group of a node, and the node's first process passes the signal on.
NOTICED_TWICE = """
import json, os, signal, sys
from broker.clouds import local_machine
write, interruptions = json.dump, []
def dump(value, file):
    write(value, file)
    if not interruptions:
        interruptions.append(1)
        os.kill(os.getpid(), signal.SIGTERM)
json.dump = dump
signal.signal(signal.SIGTERM, lambda *_: local_machine.give_notice(sys.argv[1]))
os.kill(os.getpid(), signal.SIGTERM)
assert interruptions
"""


def test_second_signal_of_a_notice_does_not_end_the_node(tmp_path: Path) -> None:
    (tmp_path / "home/.broker").mkdir(parents=True)
    (tmp_path / "node.json").write_text('{"notice_s": 20}')
    done = subprocess.run([sys.executable, "-c", NOTICED_TWICE, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "home/.broker/preemption").read_text())["notice_s"] == 20.0
