"""Reach a local node: commands through its machine's Unix socket, files by copying into its home."""

from __future__ import annotations

import asyncio
import json
import secrets
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

from broker.clock import Clock, within
from broker.config import Config
from broker.errors import InvalidRequestError, TransientError
from broker.runtime.base import Shell
from broker.runtime.skyignore import walk
from broker.runtime.streams import LINE_BYTES_MAX, Stream
from broker.runtime.transports.machine_protocol import pack_header, read_answer
from broker.sites.openssh import Completed
from broker.types import Node

SHELL_S = 30.0


def make_transport(config: Config, *, clock: Clock) -> LocalTransport:
    """Create the transport, for the registry; a local node's handle is enough to reach it."""
    return LocalTransport()


class LocalTransport:
    """Implement `Transport` for nodes of the local cloud."""

    async def run(
        self,
        node: Node,
        argv: Sequence[str],
        *,
        timeout_s: float,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
    ) -> Completed:
        """Run a program through the node's machine process. Raises TransientError if it is gone."""
        header = pack_header(argv, timeout_s=timeout_s, stdin_bytes=len(stdin), env=env)
        try:
            return await within(exchange(Path(node.handle), header, stdin), timeout_s)
        except TimeoutError as error:
            raise TransientError(f"node `{node.id}` did not answer within {timeout_s:g} s") from error
        except (OSError, EOFError) as error:
            raise TransientError(f"node `{node.id}` cannot be reached") from error

    async def open_stream(self, node: Node, argv: Sequence[str], *, carries_calls: bool = True) -> Stream:
        """Open a stream; a machine booted by an older broker runs the program without input, which ends the stream."""
        header = pack_header(argv, timeout_s=SHELL_S, is_stream=True)
        try:
            return Stream(*await connect(Path(node.handle), header))
        except OSError as error:
            raise TransientError(f"node `{node.id}` cannot be reached") from error

    async def open_shell(self, node: Node) -> Shell:
        """Return a shell with the node's environment, which distinguishes it from this machine."""
        result = await self.run(node, ["env", "-0"], timeout_s=SHELL_S)
        pairs = (line.partition("=") for line in result.stdout.decode(errors="replace").split("\0") if line)
        env = {name: value for name, _, value in pairs}
        return Shell(argv=("bash", "--norc", "-i"), env={**env, "PS1": f"{node.id}:\\w$ "}, folder=env["HOME"])

    async def put(self, node: Node, source: Path, target: str) -> None:
        """Copy files to the node's home folder. Raises InvalidRequestError for a target outside of it."""
        home = Path(node.handle) / "home"
        path = home / target.removeprefix("~/").rstrip("/")
        if PurePosixPath(target).is_absolute() or not path.resolve().is_relative_to(home.resolve()):
            raise InvalidRequestError(
                f"`{target}` is outside the home folder of local node `{node.id}`", hints=("use a path below `~/`",)
            )
        try:
            if not home.is_dir():
                raise FileNotFoundError(home)
            await asyncio.to_thread(copy, source, path)
        except OSError as error:
            if isinstance(error, PermissionError) and Path(str(error.filename)).is_relative_to(source):
                raise  # it is not the node's
            raise TransientError(f"cannot copy `{source}` to node `{node.id}`: {error.strerror}") from error


async def exchange(folder: Path, header: bytes, stdin: bytes) -> Completed:
    """Send a request to a local node's machine process and return its answer. Raises OSError, EOFError."""
    reader, writer = await connect(folder, header)
    try:
        writer.write(stdin)
        await writer.drain()
        return await read_answer(reader)
    finally:
        writer.close()


async def connect(folder: Path, header: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to the machine's socket and send the header of a command."""
    path = json.loads(await asyncio.to_thread((folder / "node.json").read_text))["socket"]
    reader, writer = await asyncio.open_unix_connection(path, limit=LINE_BYTES_MAX)
    writer.write(header)
    return reader, writer


def copy(source: Path, target: Path) -> None:
    """Copy like rsync: skip files with the same size and time, delete nothing, respect ignore files."""
    if not source.is_dir():
        target.parent.mkdir(parents=True, exist_ok=True)
        copy_file(source, target / source.name if target.is_dir() else target)
        return
    target.mkdir(parents=True, exist_ok=True)
    for folder, names in walk(source):
        inside = target / folder.relative_to(source)
        inside.mkdir(exist_ok=True)
        for name in names:
            copy_file(folder / name, inside / name)


def copy_file(source: Path, target: Path) -> None:
    """Copy a file or link if size or time differ, and replace the target atomically."""
    if source.is_symlink():
        target.unlink(missing_ok=True)
        target.symlink_to(source.readlink())
        return
    new = source.stat()
    if target.is_file():
        old = target.stat()
        if (old.st_size, old.st_mtime_ns, old.st_mode) == (new.st_size, new.st_mtime_ns, new.st_mode):
            return
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    shutil.copy2(source, temporary)
    temporary.replace(target)
