"""Guarantees of every transport to a node, tested on each: a local node, and a host behind a real sshd."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from local_gang import Rig, wait_for
from sshd import REASON, SSHD, Sshd

from broker.clock import SystemClock
from broker.config import Config
from broker.errors import InvalidRequestError, TransientError
from broker.runtime.base import Shell, Transport
from broker.runtime.keys import Keys
from broker.runtime.transports.routed import RoutedTransport
from broker.runtime.transports.sky import SkyTransport
from broker.runtime.transports.ssh import SshTransport
from broker.sites.openssh import Completed
from broker.types import Node, NodeState


@dataclass(frozen=True, kw_only=True)
class Stand:
    """One node, the transport to it, its home folder, and how it is switched off."""

    transport: Transport
    node: Node
    home: Path
    switch_off: Callable[[], None]


def write_host(config: Config, keys: Keys, sshd: Sshd) -> Node:
    """Write a cluster's second node in a file as SkyPilot writes it."""
    user, _, port = sshd.node.handle.removeprefix("ssh://").replace("@", " ").replace(":", " ").split()
    name = "b-me-lambda-00ff"
    file = config.home / "sky" / "ssh" / name
    file.parent.mkdir(parents=True)
    file.write_text(
        f"Host {name}\n  HostName 192.0.2.1\n\nHost {name}-worker1\n  HostName 127.0.0.1\n  Port {port}\n"
        f"  User {user}\n  IdentityFile {keys.ensure('c', 'token-1').login_path}\n  IdentitiesOnly yes\n"
        "  StrictHostKeyChecking no\n  UserKnownHostsFile=/dev/null\n  GlobalKnownHostsFile=/dev/null\n"
    )
    return replace(sshd.node, handle=f"sky://{name}/1")


@pytest.fixture(params=["local", "ssh", "sky"])
def stand(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stand]:
    if request.param == "local":
        rig: Rig = request.getfixturevalue("rig")
        node = asyncio.run(rig.make_cluster()).nodes[0]
        yield Stand(
            transport=rig.transport, node=node, home=Path(node.handle) / "home",
            switch_off=lambda: asyncio.run(rig.cloud.terminate_nodes([node])),
        )  # fmt: skip
        return
    if not SSHD:
        pytest.skip(REASON)
    sshd = Sshd(tmp_path / "sshd", keys := Keys(tmp_path / "keys"))
    sshd.start()
    try:
        transport, node = SshTransport(keys, clock=SystemClock()), sshd.node
        if request.param == "sky":
            config = Config(home=tmp_path / "state", owner="me")
            node = write_host(config, keys, sshd)
            transport = SkyTransport(config, clock=SystemClock())
        yield Stand(transport=transport, node=node, home=sshd.home, switch_off=sshd.stop)
    finally:
        sshd.stop()


def test_command_gets_stdin_and_environment_and_gives_all_its_output(stand: Stand) -> None:
    async def act() -> None:
        script = "cat; echo $X >&2; pwd >&2; exit 5"
        data = bytes(range(256)) * 5000
        env = {"X": "x 'y'", "Y": "two\nlines"}
        done = await stand.transport.run(stand.node, ["bash", "-c", script], timeout_s=300, stdin=data, env=env)
        assert (done.returncode, done.stdout) == (5, data)
        assert done.stderr == f"x 'y'\n{stand.home}\n".encode()
        lines = await stand.transport.run(stand.node, ["printenv", "Y"], timeout_s=300, env=env)
        assert lines.stdout == b"two\nlines\n"
        missing = await stand.transport.run(stand.node, ["no-such-command"], timeout_s=300)
        assert missing.returncode == 127

    asyncio.run(act())


@pytest.mark.parametrize("returncode", [1, 137, 255])
def test_exit_code_of_the_program_never_counts_as_a_lost_node(stand: Stand, returncode: int) -> None:
    done = asyncio.run(stand.transport.run(stand.node, ["sh", "-c", f"exit {returncode}"], timeout_s=300))
    assert done.returncode == returncode


def test_arguments_reach_the_program_unchanged(stand: Stand) -> None:
    words = ["two words", "", "$HOME", "`id`", "a'b\"c", "*", "new\nline", "ünï"]
    done = asyncio.run(stand.transport.run(stand.node, ["printf", "%s\\0", *words], timeout_s=300))
    assert done.stdout.decode().split("\0")[:-1] == words


def test_daemon_holding_the_output_open_does_not_delay_the_answer(stand: Stand) -> None:
    async def act() -> None:
        done = await stand.transport.run(stand.node, ["bash", "-c", "sleep 5432 & echo $!"], timeout_s=300)
        await stand.transport.run(stand.node, ["kill", done.stdout.decode().strip()], timeout_s=300)

    asyncio.run(act())


def test_command_past_its_time_is_killed_and_transient(stand: Stand) -> None:
    command = f"exec sleep {5433 + hash(stand.home) % 1000}"
    word = command.split()[-1].encode()

    async def act() -> None:
        with pytest.raises(TransientError):
            await stand.transport.run(stand.node, ["sh", "-c", command], timeout_s=0.3)
        await wait_for(lambda: not any(read_cmdline(entry).endswith(word + b"\0") for entry in list_processes()))

    asyncio.run(act())


def list_processes() -> list[Path]:
    return list(Path("/proc").glob("[0-9]*"))


def read_cmdline(entry: Path) -> bytes:
    try:
        return (entry / "cmdline").read_bytes()
    except OSError:
        return b""


def test_node_that_is_gone_is_transient(stand: Stand, tmp_path: Path) -> None:
    asyncio.run(stand.transport.run(stand.node, ["true"], timeout_s=300))
    stand.switch_off()
    (tmp_path / "a").write_text("a")
    with pytest.raises(TransientError):
        asyncio.run(stand.transport.run(stand.node, ["true"], timeout_s=300))
    with pytest.raises(TransientError):
        asyncio.run(stand.transport.put(stand.node, tmp_path / "a", "a"))


def test_put_copies_what_changed_and_skips_what_is_ignored(stand: Stand, tmp_path: Path) -> None:
    source = tmp_path / "source"
    for name in ("a.py", "sub/b.py", ".git/x", "__pycache__/x", "data/big.bin", "sub/c.tmp", "build/out"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(name)
    (source / "link").symlink_to("a.py")
    (source / ".skyignore").write_text("# ours\n*.tmp\n/data/big.bin\nbuild/\n")
    (source / "a.py").chmod(0o755)
    put, node, home = stand.transport.put, stand.node, stand.home

    async def act() -> None:
        await put(node, source, "sky_workdir")
        got = sorted(str(path.relative_to(home / "sky_workdir")) for path in (home / "sky_workdir").rglob("*"))
        assert got == [".skyignore", "a.py", "data", "link", "sub", "sub/b.py"]
        assert (home / "sky_workdir/a.py").stat().st_mode & 0o777 == 0o755
        inode = (home / "sky_workdir/a.py").stat().st_ino
        (source / "sub/b.py").write_text("longer than before")
        (source / "link").unlink()
        (source / "link").symlink_to("sub/b.py")
        await put(node, source, "sky_workdir/")
        assert (home / "sky_workdir/a.py").stat().st_ino == inode
        assert (home / "sky_workdir/sub/b.py").read_text() == "longer than before"
        assert (home / "sky_workdir/link").readlink() == Path("sub/b.py")
        await put(node, source / "a.py", "~/deep/er/file.py")
        assert (home / "deep/er/file.py").read_text() == "a.py"
        inode = (home / "deep/er/file.py").stat().st_ino
        await put(node, source / "a.py", "~/deep/er/file.py")
        assert (home / "deep/er/file.py").stat().st_ino == inode
        await put(node, source / "a.py", "deep")
        assert (home / "deep/a.py").read_text() == "a.py"

    asyncio.run(act())


def test_local_node_takes_nothing_outside_its_home(rig: Rig, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a")

    async def act() -> None:
        node = (await rig.make_cluster()).nodes[0]
        for outside in ("/data", "../escape"):
            with pytest.raises(InvalidRequestError):
                await rig.transport.put(node, tmp_path / "a", outside)

    asyncio.run(act())


class Calling:
    """A transport that supports calls only."""

    async def run(self, node: Node, argv: Sequence[str], **options: Any) -> Completed:
        raise AssertionError("not asked")

    async def put(self, node: Node, source: Path, target: str) -> None:
        raise AssertionError("not asked")

    async def open_shell(self, node: Node) -> Shell:
        raise AssertionError("not asked")


def test_a_transport_without_sessions_reports_that() -> None:
    node = Node(
        id="n", cloud="x", owner="me", cluster="c", attempt=1, rank=0, state=NodeState.RUNNING, token="t",
        address="", handle="x://c/0",
    )  # fmt: skip
    routed = RoutedTransport({"x": Calling})
    with pytest.raises(TransientError, match="the transport to node `n` does not support sessions"):
        asyncio.run(routed.open_stream(node, ["true"]))
