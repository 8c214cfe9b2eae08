"""Define the machines that a server can run on: this one, a host that OpenSSH reaches, a node of a cluster."""

from __future__ import annotations

import asyncio
import json
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from broker.errors import StateError, TransientError, UsageError
from broker.frozen import frozen
from broker.runtime import node_python
from broker.runtime.base import Transport
from broker.sites.login import SshLogin
from broker.sites.openssh import Completed, find_program
from broker.types import Node

CALL_S = 900.0  # a call may install packages
CONFIG_S = 30.0
FOLDER = Path(__file__).parent
# Executed in this order, in one namespace.
PROGRAMS = (Path(node_python.__file__), FOLDER / "host_supervisor.py", FOLDER / "host_program.py")
BOOT = """\
import sys
for size in sys.argv[1:]:
    exec(compile(sys.stdin.buffer.read(int(size)), "host_program", "exec"))
"""
LOOPBACK = "127.0.0.1"


class HostMachine(Protocol):
    """A machine that runs commands."""

    @property
    def listens_on(self) -> str:
        """The address on which the server listens."""
        ...

    @property
    def address(self) -> str:
        """The address at which clients reach it."""
        ...

    async def run(self, argv: Sequence[str], *, stdin: bytes) -> Completed:
        """Run a command to its end. Raises AuthError, TransientError or StateError."""
        ...


@frozen
class ThisMachine:
    """The machine that broker runs on; only its own users reach the server."""

    listens_on: str = LOOPBACK
    address: str = LOOPBACK

    async def run(self, argv: Sequence[str], *, stdin: bytes) -> Completed:
        """Run a command here."""
        try:
            done = await asyncio.to_thread(subprocess.run, argv, input=stdin, capture_output=True, timeout=CALL_S)
        except subprocess.TimeoutExpired:
            raise TransientError(f"`{argv[0]}` did not end on this machine within {CALL_S:g} s") from None
        except OSError as error:
            raise StateError(f"cannot run `{argv[0]}` on this machine: {error.strerror}") from error
        return Completed(returncode=done.returncode, stdout=done.stdout, stderr=done.stderr)


@frozen
class SshMachine:
    """A host that the user's OpenSSH configuration can reach."""

    login: SshLogin
    listens_on: str = "0.0.0.0"

    @property
    def address(self) -> str:
        """The name or address that ssh connects to. Raises StateError if a `Match exec` of its configuration hangs."""
        config = ["-F", str(self.login.ssh_config)] if self.login.ssh_config else []
        words = [find_program("ssh"), "-G", *config, "--", self.login.host]
        try:
            output = subprocess.run(words, capture_output=True, text=True, timeout=CONFIG_S).stdout
        except subprocess.TimeoutExpired:
            raise StateError(
                f"ssh did not read its configuration for `{self.login.host}` within {CONFIG_S:g} s",
                hints=[f"find the `Match exec` that hangs: ssh -vG {shlex.quote(self.login.host)}"],
            ) from None
        found = [line.split(" ", 1)[1] for line in output.splitlines() if line.startswith("hostname ")]
        return found[0] if found else self.login.host

    async def run(self, argv: Sequence[str], *, stdin: bytes) -> Completed:
        """Run a command on the host."""
        return await self.login.run(shlex.join(argv), stdin=stdin, timeout_s=CALL_S)


@frozen
class NodeMachine:
    """The node of a cluster that broker launched."""

    transport: Transport
    node: Node
    listens_on: str = "0.0.0.0"

    @property
    def address(self) -> str:
        """The node's public address."""
        from broker.runtime.transports.ssh_options import parse_handle

        return parse_handle(self.node.handle).host

    async def run(self, argv: Sequence[str], *, stdin: bytes) -> Completed:
        """Run a command on the node."""
        return await self.transport.run(self.node, argv, timeout_s=CALL_S, stdin=stdin)


def parse_ssh(infra: str, ssh_config: str | None = None) -> SshLogin:
    """Read `ssh://[USER@]HOST[:PORT]`. Raises UsageError."""
    try:
        parts = urlsplit(infra)
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    if parts.scheme != "ssh" or not parts.hostname or parts.path.strip("/") or parts.password:
        raise UsageError(f"invalid machine `{infra}`", hints=["the format is `ssh://[USER@]HOST[:PORT]`"])
    return SshLogin(
        host=parts.hostname, user=parts.username, port=port, ssh_config=Path(ssh_config) if ssh_config else None
    )


async def call(machine: HostMachine, request: Mapping[str, object], content: bytes = b"") -> Any:
    """Send the host program and a request; return its answer.

    Raises StateError if the program refuses the request, TransientError if it gives no answer.
    """
    programs = [path.read_bytes() for path in PROGRAMS]
    stdin = b"".join(programs) + json.dumps(request).encode() + b"\n" + content
    done = await machine.run(["python3", "-I", "-S", "-c", BOOT, *(str(len(each)) for each in programs)], stdin=stdin)
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise TransientError(
            f"`{request['verb']}` failed on the server's machine: {last[:200] or f'exit code {done.returncode}'}",
            hints=("check that the machine has `python3` 3.8 or later, and repeat the command",),
        ) from None
    if "error" in answer:
        raise StateError(str(answer["error"]), hints=[answer["hint"]] if answer["hint"] else [])
    return answer["answer"]
