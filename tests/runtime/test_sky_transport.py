"""Errors that only a transport through SkyPilot's files can have."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from sshd import REASON, SSHD, Sshd

from broker.clock import SystemClock
from broker.config import Config
from broker.errors import StateError, TransientError
from broker.runtime.keys import Keys
from broker.runtime.transports.sky import SkyTransport
from broker.types import Node, NodeState

NAME = "b-me-kubernetes-00ff"
NODE = Node(
    id=f"{NAME}/0", cloud="kubernetes", owner="me", cluster="c", attempt=1, rank=0, state=NodeState.RUNNING,
    handle=f"sky://{NAME}/0",
)  # fmt: skip
RELAY = """\
import os, socket, sys, threading
link = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
def send():
    while data := os.read(0, 65536):
        link.sendall(data)
threading.Thread(target=send, daemon=True).start()
while data := link.recv(65536):
    os.write(1, data)
"""


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(home=tmp_path / "state", owner="me")


def write(config: Config, text: str) -> None:
    file = config.home / "sky" / "ssh" / NAME
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


@pytest.mark.skipif(not SSHD, reason=REASON)
def test_a_pod_is_reached_through_the_proxy_that_skypilot_names(config: Config, tmp_path: Path) -> None:
    sshd = Sshd(tmp_path / "sshd", keys := Keys(tmp_path / "keys"))
    relay = tmp_path / "relay.py"
    relay.write_text(RELAY)
    user = sshd.node.handle.removeprefix("ssh://").partition("@")[0]
    write(
        config,
        f"Host {NAME}\n  HostName pod.invalid\n  User {user}\n  IdentityFile {keys.ensure('c', 'token-1').login_path}\n"
        "  StrictHostKeyChecking no\n  UserKnownHostsFile=/dev/null\n"
        f"  ProxyCommand {sys.executable} {relay} {sshd.port}\n",
    )
    sshd.start()
    sshd.wait()
    try:
        transport = SkyTransport(config, clock=SystemClock())
        for _ in range(2):
            done = asyncio.run(transport.run(NODE, ["sh", "-c", "cat; exit 3"], timeout_s=300, stdin=b"hello"))
            assert (done.returncode, done.stdout) == (3, b"hello")
    finally:
        sshd.stop()


def test_the_address_of_a_cluster_that_was_never_fetched_is_not_guessed(config: Config) -> None:
    with pytest.raises(StateError) as caught:
        asyncio.run(SkyTransport(config, clock=SystemClock()).run(NODE, ["true"], timeout_s=300))
    assert NAME in caught.value.message and caught.value.hints


@pytest.mark.parametrize("handle", [f"sky://{NAME}", f"sky://{NAME}/first", f"ssh://{NAME}/0"])
def test_handles_of_another_kind_are_refused(config: Config, handle: str) -> None:
    write(config, f"Host {NAME}\n")
    with pytest.raises(StateError):
        asyncio.run(
            SkyTransport(config, clock=SystemClock()).run(replace(NODE, handle=handle), ["true"], timeout_s=300)
        )


@pytest.mark.skipif(not SSHD, reason=REASON)
def test_the_users_own_ssh_configuration_is_ignored(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unreachable host is also reported with ssh's last message."""
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh" / "config").write_text("Host *\n  ProxyCommand false\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    write(config, f"Host {NAME}\n  HostName 127.0.0.1\n  Port 1\n")
    with pytest.raises(TransientError, match="refused"):
        asyncio.run(SkyTransport(config, clock=SystemClock(), patience_s=0).run(NODE, ["true"], timeout_s=300))
