"""Real processes listen where the table says and nowhere else, and a stranger who connects changes nothing."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import stat
import sys
import urllib.request
from pathlib import Path

import pytest

from broker.clock import SystemClock
from broker.runtime.keys import Keys
from broker.runtime.transports.ssh import SshTransport
from broker.serve.files import Routing, read_file
from tests.cli.conftest import ROOT, Shell
from tests.runtime.sshd import REASON, SSHD, Sshd
from tests.security.listeners import ANY, DECLARED, OUTSIDE, Found, find_declared, list_listeners, write_table
from tests.serve.live_service import LiveService

pytestmark = pytest.mark.skipif(not Path("/proc/net/unix").exists(), reason="needs Linux's /proc")
TASK = """\
name: waits
resources: {{infra: local}}
num_nodes: 2
envs: {{WAITING: {folder}}}
run: cd {root} && exec {command}
"""
ELASTIC = f"{sys.executable} -m trainers.launch --workers 1 -m tests.security.waiting --elastic 2:2"
STORE = f"{sys.executable} -m tests.security.waiting --store"
GARBAGE = (
    b'{"kind": "done"}\n',
    b'{"type": "hello", "rank": 1, "token": ""}\n{"type": "cancel"}\n',
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\x16\x03\x01\xff\xff" + b"\xff" * 400,
    b"\0" * 5000,
)


def start(shell: Shell, command: str) -> list[Found]:
    """Start a managed job of two nodes that wait; list the listeners meanwhile."""
    task = shell.write("task.yaml", TASK.format(folder=shell.folder, root=ROOT, command=command))
    shell.run("jobs", "launch", task, "--yes", "--detach-run")
    both = [shell.folder / f"waits-{rank}" for rank in range(2)]
    shell.wait_until(lambda: all(each.exists() for each in both), "both ranks wait")
    return list_listeners(shell.find_processes())


def finish(shell: Shell) -> str:
    (shell.folder / "enough").touch()
    shell.wait_until(lambda: shell.get_status(1) in ("SUCCEEDED", "FAILED"), "the job ends")
    return str(shell.read_json("jobs", "queue")[0]["status"])


def insult(found: Found) -> None:
    """Send what no member sends, and read the answer: at most the bytes of a TLS alert, never one of our lines."""
    host, _, port = found.address.removeprefix("tcp:").rpartition(":")
    for garbage in GARBAGE:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=300) as wire:
            answer = b""
            with contextlib.suppress(ConnectionError):
                wire.sendall(garbage)
                wire.shutdown(socket.SHUT_WR)
                while chunk := wire.recv(4096):
                    answer += chunk
            assert b"{" not in answer and len(answer) < 64, (found, answer)


@pytest.mark.long
def test_elastic_run_listens_as_documented_and_rejects_strangers(shell: Shell) -> None:
    found = start(shell, ELASTIC)
    rows = {each: find_declared(each) for each in found}
    assert [each for each, row in rows.items() if row is None] == []
    assert not any(each.is_wide for each in found)
    names = {row.name for row in rows.values() if row}
    assert names == {"gang coordinator", "elastic rendezvous", "machine of the local cloud"}
    for each in found:
        if each.address.startswith("tcp:"):
            insult(each)
        else:
            assert_private(each)
    assert finish(shell) == "SUCCEEDED"


@pytest.mark.long
def test_service_listens_as_documented_and_only_its_balancer_reaches_a_replica(shell: Shell) -> None:
    service = LiveService(shell, replicas=1)
    url = asyncio.run(service.start())
    (load,) = shell.home.glob("serve/*/routing.json")
    routing = read_file(load, Routing)
    assert routing is not None
    (backend,) = routing.backends
    found = list_listeners(shell.find_processes())
    rows = {each: find_declared(each) for each in found}
    assert [each for each, row in rows.items() if row is None] == []
    assert not any(each.is_wide for each in found)
    assert {"balancer of a service", "program of a replica"} <= {row.name for row in rows.values() if row}
    (entrance,) = [each for each in found if each.address.endswith(f":{backend.port}")]
    assert backend.is_encrypted and "agent.py _run" in entrance.command
    insult(entrance)
    with urllib.request.urlopen(f"{url}/health", timeout=300) as response:
        assert response.status == 200
    asyncio.run(service.stop())


@pytest.mark.long
def test_only_torch_listens_in_addition_to_broker(shell: Shell) -> None:
    pytest.importorskip("torch")
    found = start(shell, STORE)
    foreign = [each for each in found if find_declared(each) is None]
    programs = [each for each in foreign if "tests.security.waiting --store" in each.command]
    assert programs and foreign == programs
    assert all((row := find_declared(each, ours=False)) and row.name == OUTSIDE for each in programs)
    assert any(each.is_wide for each in programs), "torch's store binds less than the table says: correct the table"
    assert not any(each.is_wide for each in found if each not in foreign)
    assert finish(shell) == "SUCCEEDED"


def assert_private(found: Found) -> None:
    folder = Path(found.address.removeprefix("unix:")).parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700, folder


@pytest.mark.skipif(not SSHD, reason=REASON)
def test_kept_ssh_connection_listens_in_a_private_folder(tmp_path: Path) -> None:
    keys = Keys(tmp_path / "keys")
    sshd = Sshd(tmp_path / "node", keys)
    sshd.start()
    try:
        sshd.wait()
        transport = SshTransport(keys, clock=SystemClock())
        assert asyncio.run(transport.run(sshd.node, ["true"], timeout_s=300)).returncode == 0
        kept = [int(each.name) for each in Path("/proc").glob("[0-9]*") if is_master(each, tmp_path)]
        found = list_listeners(kept)
        assert {row and row.name for each in found for row in [find_declared(each)]} == {"kept ssh connection"}
        for each in found:
            assert_private(each)
    finally:
        sshd.stop()


def is_master(process: Path, keys: Path) -> bool:
    """Return whether this is a kept connection that uses one of these keys."""
    with contextlib.suppress(OSError):
        command = (process / "cmdline").read_bytes().decode(errors="replace")
        return str(keys) in command and "ControlMaster=yes" in command
    return False


def test_undeclared_listener_is_reported(tmp_path: Path) -> None:
    """The check can fail: a socket of this process is in no row."""
    import os

    with socket.socket() as wide, socket.socket(socket.AF_UNIX) as local:
        wide.bind(("0.0.0.0", 0))
        wide.listen()
        local.bind(str(tmp_path / "s"))
        local.listen()
        found = [each for each in list_listeners([os.getpid()]) if str(wide.getsockname()[1]) in each.address]
        found += [each for each in list_listeners([os.getpid()]) if each.address == f"unix:{tmp_path / 's'}"]
        assert [find_declared(each) for each in found] == [None, None]
        assert [each.is_wide for each in found] == [True, False]


def test_worker_of_skypilot_listens_nowhere() -> None:
    import subprocess

    worker = ROOT / "broker" / "clouds" / "sky" / "worker.py"
    with subprocess.Popen([sys.executable, str(worker)], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin and process.stdout
        process.stdin.write(b'{"id": 1, "verb": "nonsense", "arguments": {}}\n')
        process.stdin.flush()
        assert b"KeyError" in process.stdout.readline()
        assert list_listeners([process.pid]) == []
        process.stdin.close()


def test_security_page_shows_the_table() -> None:
    assert write_table() in (ROOT / "SECURITY.md").read_text()
    assert all(each.stranger for each in DECLARED) and ANY
