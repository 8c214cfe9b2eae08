"""Errors that only ssh can have: keys, host keys, hosts that boot, connections that are kept."""

from __future__ import annotations

import asyncio
import os
import shutil
import stat
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from sshd import REASON, SSHD, START_S_MAX, Sshd

from broker.clock import SystemClock
from broker.errors import AuthError, StateError, TransientError, UnreachedError
from broker.runtime.keys import HOST, LOGIN, Keys
from broker.runtime.transports.ssh import WRAPPER, SshTransport, is_listening
from broker.runtime.transports.ssh_options import parse_handle
from broker.sites.openssh import find_program
from broker.types import Node
from tests.clouds.clock_jumps import JumpingClock

pytestmark = pytest.mark.skipif(not SSHD, reason=REASON)


class Clock(SystemClock):
    """A clock that counts the waits; the host comes up at the second one."""

    def __init__(self, sshd: Sshd | None = None) -> None:
        self.waits = 0
        self._sshd = sshd

    async def sleep(self, duration_s: float) -> None:
        self.waits += 1
        if self._sshd and self.waits == 2:
            self._sshd.start()
        await asyncio.sleep(duration_s)


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path / "keys")


@pytest.fixture
def sshd(tmp_path: Path, keys: Keys) -> Iterator[Sshd]:
    sshd = Sshd(tmp_path / "sshd", keys)
    yield sshd
    sshd.stop()


def test_connection_waits_for_a_booting_host(sshd: Sshd, keys: Keys) -> None:
    clock = Clock(sshd)
    done = asyncio.run(SshTransport(keys, clock=clock).run(sshd.node, ["echo", "up"], timeout_s=300))
    assert done.stdout == b"up\n"
    assert clock.waits >= 2


def test_connection_does_not_wait_for_a_host_that_was_up(sshd: Sshd, keys: Keys) -> None:
    clock = Clock()
    transport = SshTransport(keys, clock=clock)
    sshd.start()
    sshd.wait()
    asyncio.run(transport.run(sshd.node, ["true"], timeout_s=300))
    waits = clock.waits
    sshd.stop()
    with pytest.raises(TransientError, match="cannot be reached") as caught:
        asyncio.run(transport.run(sshd.node, ["true"], timeout_s=300))
    assert clock.waits == waits and not isinstance(caught.value, UnreachedError)
    later = SshTransport(keys, clock=clock)  # as in the next process, which a daemon that was killed leaves behind
    with pytest.raises(TransientError, match="cannot be reached"):
        asyncio.run(later.run(sshd.node, ["true"], timeout_s=300))
    assert clock.waits == waits, "no other process mistakes it for a booting node either"


def wait_until_closed(control: Path) -> None:
    """Wait until the shared connection has noticed that its server is gone: a call meanwhile fails with it."""
    end_s = time.monotonic() + START_S_MAX
    while is_listening(control):
        assert time.monotonic() < end_s, "the shared connection outlives its server"
        time.sleep(0.01)


@pytest.mark.parametrize("is_known", [True, False])
def test_host_behind_a_firewall_is_reached_once_its_rule_is_renewed(sshd: Sshd, keys: Keys, is_known: bool) -> None:
    """This machine's address may change: the rule is renewed before the host is given up, and the call tried again."""
    transport = SshTransport(keys, clock=Clock(), patience_s=0)
    if is_known:
        sshd.start()
        sshd.wait()
        asyncio.run(transport.run(sshd.node, ["true"], timeout_s=300))
        sshd.stop()
        wait_until_closed(transport._find(sshd.node).control)
    asked: list[str] = []

    async def renew(node: Node) -> bool:
        asked.append(node.id)
        sshd.start()
        sshd.wait()
        return True

    transport.renew_access = renew
    done = asyncio.run(transport.run(sshd.node, ["echo", "in"], timeout_s=300))
    assert done.stdout == b"in\n" and asked == [sshd.node.id]


def test_host_that_stays_silent_after_a_firewall_update_is_an_error(sshd: Sshd, keys: Keys) -> None:
    clock = JumpingClock()
    transport = SshTransport(keys, clock=clock, patience_s=0)
    asked: list[str] = []

    async def renew(node: Node) -> bool:
        asked.append(node.id)
        return True

    transport.renew_access = renew
    with pytest.raises(UnreachedError, match="cannot be reached"):
        asyncio.run(transport.run(sshd.node, ["true"], timeout_s=300))
    assert asked == [sshd.node.id]


def test_refused_firewall_update_is_part_of_the_error(sshd: Sshd, keys: Keys) -> None:
    transport = SshTransport(keys, clock=JumpingClock(), patience_s=0)

    async def refuse(node: Node) -> bool:
        raise AuthError("ec2:AuthorizeSecurityGroupIngress is denied")

    transport.renew_access = refuse
    with pytest.raises(UnreachedError, match="its firewall cannot be changed: ec2:AuthorizeSecurityGroupIngress is"):
        asyncio.run(transport.run(sshd.node, ["true"], timeout_s=300))


def test_host_that_never_comes_up_is_distinguished_from_one_that_went_away(sshd: Sshd, keys: Keys) -> None:
    transport = SshTransport(keys, clock=Clock(), patience_s=5)
    with pytest.raises(UnreachedError, match="cannot be reached") as caught:
        asyncio.run(transport.run(sshd.node, ["true"], timeout_s=300))
    assert caught.value.node_id == sshd.node.id


def test_host_that_boots_is_tried_again_at_growing_pauses_up_to_a_second(sshd: Sshd, keys: Keys) -> None:
    pauses: list[float] = []

    class Noting(JumpingClock):
        async def sleep(self, duration_s: float) -> None:
            pauses.append(duration_s)
            await super().sleep(duration_s)

    with pytest.raises(UnreachedError):
        asyncio.run(SshTransport(keys, clock=Noting(), patience_s=8).run(sshd.node, ["true"], timeout_s=300))
    tries = [pause for pause in pauses if pause <= 1.0]
    assert tries[:2] == pytest.approx([0.1, 0.15]) and tries == sorted(tries) and tries[-1] == 1.0


def test_host_with_an_unexpected_key_is_sent_nothing(tmp_path: Path, keys: Keys) -> None:
    other = Keys(tmp_path / "other").ensure("c", "token-1")
    sshd = Sshd(tmp_path / "sshd", keys, host_key=other.folder / HOST)
    sshd.start()
    sshd.wait()
    try:
        transport = SshTransport(keys, clock=SystemClock(), patience_s=0)
        with pytest.raises(TransientError, match="its host key is unknown or has changed"):
            asyncio.run(transport.run(sshd.node, ["cat"], timeout_s=300, stdin=b"secret"))
        with pytest.raises(TransientError, match="its host key is unknown or has changed"):
            asyncio.run(transport.put(sshd.node, Path(__file__), "copy"))
    finally:
        sshd.stop()
    assert "Accepted" not in (sshd.folder / "sshd.log").read_text()


def test_many_simultaneous_commands_use_one_connection(sshd: Sshd, keys: Keys) -> None:
    transport = SshTransport(keys, clock=SystemClock())
    sshd.start()

    async def act() -> list[bytes]:
        calls = (transport.run(sshd.node, ["echo", str(number)], timeout_s=300) for number in range(20))
        return [done.stdout for done in await asyncio.gather(*calls)]

    assert asyncio.run(act()) == [f"{number}\n".encode() for number in range(20)]
    assert (sshd.folder / "sshd.log").read_text().count("Accepted publickey") == 1


def test_session_is_also_the_connection_that_all_calls_share(sshd: Sshd, keys: Keys) -> None:
    """One local process per host, also where a call has opened a connection before."""
    transport = SshTransport(keys, clock=SystemClock())
    sshd.start()

    async def act() -> tuple[int, str]:
        await transport.run(sshd.node, ["true"], timeout_s=300)
        stream = await transport.open_stream(sshd.node, ["cat"])
        try:
            assert stream.process is not None
            return stream.process.pid, find_owner(transport, sshd.node)
        finally:
            stream.kill()

    pid, owner = asyncio.run(act())
    assert owner.startswith(f"Master running (pid={pid})")


def find_owner(transport: SshTransport, node: Node) -> str:
    """Ask ssh which process owns the shared connection."""
    route = transport._find(node)
    check = [find_program("ssh"), *route.options, "-O", "check", route.host]
    return subprocess.run(check, capture_output=True, text=True, check=False).stderr


def test_small_change_of_a_large_file_reaches_the_node(sshd: Sshd, keys: Keys, tmp_path: Path) -> None:
    transport = SshTransport(keys, clock=SystemClock())
    sshd.start()
    source = tmp_path / "source"
    source.mkdir()
    data = bytearray(range(256)) * (5 << 12)
    (source / "big").write_bytes(data)

    async def act() -> None:
        await transport.put(sshd.node, source, "w")
        data[1 << 20] ^= 1
        (source / "big").write_bytes(data + b"!")
        await transport.put(sshd.node, source, "w")

    asyncio.run(act())
    assert (sshd.home / "w/big").read_bytes() == data + b"!"


def test_host_whose_login_shell_prints_is_reached_and_gets_its_files(sshd: Sshd, keys: Keys, tmp_path: Path) -> None:
    """As with an `echo` in `~/.bashrc`, which a program's `setup` may add to a node that already works."""
    config = sshd.folder / "sshd_config"
    config.write_text(config.read_text().replace("ForceCommand ", "ForceCommand echo '{Welcome}'; printf 'on '; "))
    transport = SshTransport(keys, clock=SystemClock())
    sshd.start()
    (sshd.home / "inside").mkdir()
    (tmp_path / "file").write_text("content")

    async def act() -> tuple[bytes, object]:
        done = await transport.run(sshd.node, ["echo", "{}"], timeout_s=300)
        await transport.put(sshd.node, tmp_path / "file", "inside")
        stream = await transport.open_stream(sshd.node, ["sh", "-c", 'echo "{\\"heard\\": 1}"; cat'])
        try:
            return done.stdout, await stream.read()
        finally:
            stream.kill()

    assert asyncio.run(act()) == (b"{}\n", {"heard": 1})
    assert (sshd.home / "inside" / "file").read_text() == "content"


@pytest.mark.parametrize("full", ["/dev/shm", "/tmp"])
def test_host_with_a_full_disk_answers(tmp_path: Path, full: str) -> None:
    """Its output went through files on the disk, so a node whose program had filled it counted as lost."""
    mktemp = tmp_path / "mktemp"
    mktemp.write_text(
        '#!/bin/sh\ncase "${1:-/tmp/}" in\n'
        f'{full}/*) link={tmp_path}/full.$$; ln -s /dev/full "$link"; echo "$link" ;;\n'
        f'*) exec {shutil.which("mktemp")} "$@" ;;\nesac\n'
    )
    mktemp.chmod(0o755)
    done = subprocess.run(
        ["sh", "-c", WRAPPER, "sh", "300.000", "-", "echo", "up"],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}"}, capture_output=True, check=False,
    )  # fmt: skip
    assert done.stdout.partition(b"broker-output\n")[2] == b"up\n"
    assert done.stderr.endswith(b"broker-exit 0")


def test_secret_environment_is_in_no_command_line(sshd: Sshd, keys: Keys) -> None:
    transport = SshTransport(keys, clock=SystemClock())
    sshd.start()
    look = "cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' '; echo $CANARY | tr a-z A-Z"
    done = asyncio.run(transport.run(sshd.node, ["sh", "-c", look], timeout_s=300, env={"CANARY": "tweet-tweet"}))
    assert b"tweet-tweet" not in done.stdout
    assert done.stdout.endswith(b"TWEET-TWEET\n")


def test_shell_is_an_ssh_to_the_node(sshd: Sshd, keys: Keys) -> None:
    transport = SshTransport(keys, clock=SystemClock())
    sshd.start()
    shell = asyncio.run(transport.open_shell(sshd.node))
    assert shell.argv[0].endswith("/ssh") and "-t" in shell.argv and shell.argv[-1] == "127.0.0.1"


def test_keys_are_private_made_once_and_forgotten_with_their_cluster(tmp_path: Path) -> None:
    keys = Keys(tmp_path / "keys")
    first = keys.ensure("c", "t1")
    text = first.read(LOGIN).private
    assert Keys(tmp_path / "keys").ensure("c", "t1").read(LOGIN).private == text
    assert keys.ensure("c", "t2").read(LOGIN).private != text
    for path in first.folder.iterdir():
        expected = 0o644 if path.suffix == ".pub" else 0o600
        assert stat.S_IMODE(path.stat().st_mode) == expected, path
    assert stat.S_IMODE(first.folder.stat().st_mode) == 0o700
    assert text.splitlines()[1] not in repr(first.read(LOGIN))
    assert keys.forget(but=[("c", "t2")]) == 1
    assert keys.find("c", "t1") is None
    assert keys.find("c", "t2") is not None


def test_node_whose_keys_are_elsewhere_is_named(tmp_path: Path, sshd: Sshd) -> None:
    transport = SshTransport(Keys(tmp_path / "empty"), clock=SystemClock())
    with pytest.raises(StateError, match="keys of cluster `c`"):
        asyncio.run(transport.run(sshd.node, ["true"], timeout_s=5))


@pytest.mark.parametrize(
    ("handle", "want"),
    [
        ("ssh://ubuntu@198.18.0.1:22", ("ubuntu", "198.18.0.1", 22)),
        ("ssh://ec2-user@host.example", ("ec2-user", "host.example", 22)),
        ("ssh://u@[2001:db8::1]:2222", ("u", "2001:db8::1", 2222)),
    ],
)
def test_handle_contains_the_nodes_address(handle: str, want: tuple[str, str, int]) -> None:
    place = parse_handle(handle)
    assert (place.user, place.host, place.port) == want


@pytest.mark.parametrize(
    "handle", ["", "ssh://host", "ssh://u@-oProxyCommand=x", "ssh://-o@h", "http://u@h:1", "ssh://u@h:port"]
)
def test_handle_without_an_address_is_refused(sshd: Sshd, keys: Keys, handle: str) -> None:
    transport = SshTransport(keys, clock=SystemClock())
    with pytest.raises(StateError):
        asyncio.run(transport.run(replace(sshd.node, handle=handle), ["true"], timeout_s=5))
