"""Reach a node that is a process tree on another host, through a program there that relays to its machine's socket.

A subclass defines how that program, `RELAY`, is started on the node's host: by ssh, `srun` or `kubectl exec`. Commands
then run inside the node, as in the local cloud, so they all end with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, TypeVar

from broker.clock import Clock
from broker.errors import BrokerError, InvalidRequestError, TransientError, UnreachedError
from broker.runtime.base import Shell
from broker.runtime.streams import LINE_BYTES_MAX, Stream, open_program
from broker.runtime.transports.machine_protocol import pack_header, read_answer
from broker.runtime.transports.ssh_files import put_files
from broker.sites.host_python import make_python_argv
from broker.sites.openssh import Completed, explain
from broker.types import Node
from broker.user_files import UserFile

Entries = TypeVar("Entries")

MARGIN_S = 15.0  # to start the relay: a login, or a step of a batch system
STREAM_S = 30.0
BEGIN = b"broker-relay\n"  # start-up files of the host's login shell may print before it
# argv: the node's folder, relative to the home folder of the login; `{user}` in it stands for the user's numeric ID.
# Copies standard input to the machine's socket, and its answer to standard output; either end closes the other.
RELAY = """\
import json, os, socket, sys, threading
os.chdir(os.path.expanduser("~"))
with open(os.path.join(sys.argv[1].replace("{user}", str(os.getuid())), "node.json")) as file:
    path = json.load(file)["socket"]
link = socket.socket(socket.AF_UNIX)
link.connect(path)
os.write(1, b"broker-relay\\n")
def send():
    while True:
        data = os.read(0, 65536)
        if not data:
            break
        link.sendall(data)
    link.shutdown(socket.SHUT_WR)
threading.Thread(target=send, daemon=True).start()
while True:
    data = link.recv(65536)
    if not data:
        break
    while data:
        data = data[os.write(1, data):]
os._exit(0)
"""


def read_site_file(file: UserFile[Entries]) -> Entries:
    """Return the entries of a site's file. Raises TransientError if it is invalid: a poll reports silent nodes then."""
    try:
        return file.read()
    except BrokerError as error:
        raise TransientError(error.message, hints=error.hints) from error


class MachineTransport:
    """`Transport` and `CanStream` for nodes whose machine is on another host."""

    def __init__(self, *, clock: Clock) -> None:
        self._clock = clock
        self._reached: set[str] = set()

    def _make_argv(self, node: Node, command: Sequence[str], *, has_terminal: bool = False) -> Sequence[str]:
        """Return the local command that runs `command` on the node's host, outside the node.

        Raises TransientError if the site's file does not list the host, or is invalid.
        """
        raise NotImplementedError

    def _find_folder(self, node: Node) -> str:
        """Return the node's folder, relative to the home folder of the login."""
        raise NotImplementedError

    async def run(
        self,
        node: Node,
        argv: Sequence[str],
        *,
        timeout_s: float,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
    ) -> Completed:
        """Run a command. Arguments, environment and input go through the stream: no process list shows them."""
        header = pack_header(argv, timeout_s=timeout_s, stdin_bytes=len(stdin), env=env)
        return await self._exchange(node, header, stdin, timeout_s=timeout_s)

    async def stream(self, node: Node, command: str, *, stdin: bytes | IO[bytes], timeout_s: float) -> Completed:
        """Run a shell command. Raises TransientError if it fails."""
        data = stdin if isinstance(stdin, bytes) else await asyncio.to_thread(stdin.read)
        result = await self.run(node, ["sh", "-c", command], timeout_s=timeout_s, stdin=data)
        if result.returncode:
            raise TransientError(f"copying to node `{node.id}` failed{explain(result.stderr)}")
        return result

    async def put(self, node: Node, source: Path, target: str) -> None:
        """Copy changed files by tar to the node's home folder. Raises InvalidRequestError for an absolute target."""
        if target.startswith("/"):
            raise InvalidRequestError(
                f"`{target}` is outside the home folder of node `{node.id}`", hints=("use a path below `~/`",)
            )
        await put_files(self, node, source, target)

    async def open_stream(self, node: Node, argv: Sequence[str], *, carries_calls: bool = True) -> Stream:
        """Open a session with a program in the node, without waiting for its first output.

        Raises TransientError if the relay does not start on this machine, or if the site's file does not list the host.
        """
        try:
            header = pack_header(argv, timeout_s=STREAM_S, is_stream=True)
            return await open_program(self._list_words(node), first=header)
        except OSError as error:
            raise TransientError(f"node `{node.id}` cannot be reached: {error.strerror}") from error

    async def open_shell(self, node: Node) -> Shell:
        """Return a shell with the node's environment, by which it ends with the node despite starting outside it."""
        result = await self.run(node, ["env", "-0"], timeout_s=STREAM_S)
        pairs = (line.partition("=") for line in result.stdout.decode(errors="replace").split("\0") if line)
        env = {name: value for name, _, value in pairs if name.isidentifier()}
        words = ["env", *(f"{name}={value}" for name, value in env.items()), f"PS1={node.id}:\\w$ "]
        inside = f"cd {shlex.quote(env['HOME'])} && exec {shlex.join(words)} bash --norc -i"
        argv = self._make_argv(node, ["sh", "-c", inside], has_terminal=True)
        return Shell(argv=tuple(argv), env={}, folder=str(Path.home()))

    def _list_words(self, node: Node) -> list[str]:
        return list(self._make_argv(node, make_python_argv("-c", RELAY, self._find_folder(node))))

    async def _exchange(self, node: Node, header: bytes, stdin: bytes, *, timeout_s: float) -> Completed:
        with tempfile.TemporaryFile() as errors:
            process = await asyncio.create_subprocess_exec(
                *self._list_words(node),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
                start_new_session=True,  # Ctrl-C in the terminal must not reach our connections
                limit=LINE_BYTES_MAX,
            )
            assert process.stdin and process.stdout
            try:
                async with asyncio.timeout(timeout_s + MARGIN_S):
                    with contextlib.suppress(ConnectionError, BrokenPipeError):  # the missing answer reports it
                        process.stdin.write(header + stdin)
                        await process.stdin.drain()
                    await process.stdout.readuntil(BEGIN)
                    answer = await read_answer(process.stdout)
                self._reached.add(node.id)
                return answer
            except TimeoutError as error:
                raise TransientError(f"node `{node.id}` did not answer within {timeout_s:g} s") from error
            except (EOFError, asyncio.LimitOverrunError) as error:
                errors.seek(0)
                message = f"node `{node.id}` cannot be reached{explain(errors.read())}"
                if node.id in self._reached:
                    raise TransientError(message) from error
                raise UnreachedError(message, node_id=node.id) from error  # its machine may be starting
            finally:
                process.stdin.close()
                if process.returncode is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process.pid, signal.SIGKILL)  # Popen's own kill would reap it before asyncio does
                await process.wait()
