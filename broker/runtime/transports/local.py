"""The way to a local node: commands through its machine's Unix socket, files by copying into its home."""

from __future__ import annotations

import asyncio
import fnmatch
import json
import os
import secrets
import shutil
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath

from broker.errors import InvalidRequestError, TransientError
from broker.runtime.base import Completed, Shell
from broker.types import Node

NEVER_COPIED = (".git", ".venv", "__pycache__")
CHUNK_BYTES = 1 << 20
SHELL_S = 30.0


class LocalTransport:
    async def run(
        self,
        node: Node,
        argv: Sequence[str],
        *,
        timeout_s: float,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
    ) -> Completed:
        header = {"argv": list(argv), "env": dict(env or {}), "stdin": len(stdin), "timeout_s": timeout_s}
        try:
            return await asyncio.wait_for(exchange(Path(node.handle), header, stdin), timeout_s)
        except TimeoutError as error:
            raise TransientError(f"node `{node.id}` did not answer within {timeout_s:g} s") from error
        except (OSError, EOFError) as error:
            raise TransientError(f"node `{node.id}` cannot be reached") from error

    async def open_shell(self, node: Node) -> Shell:
        """A local node is this machine: its environment is what makes it another."""
        done = await self.run(node, ["env", "-0"], timeout_s=SHELL_S)
        pairs = (line.partition("=") for line in done.stdout.decode(errors="replace").split("\0") if line)
        env = {name: value for name, _, value in pairs}
        return Shell(argv=("bash", "--norc", "-i"), env={**env, "PS1": f"{node.id}:\\w$ "}, folder=env["HOME"])

    async def put(self, node: Node, source: Path, target: str) -> None:
        home = Path(node.handle) / "home"
        path = home / target.removeprefix("~/").rstrip("/")
        if PurePosixPath(target).is_absolute() or not path.resolve().is_relative_to(home.resolve()):
            raise InvalidRequestError(
                f"`{target}` lies outside the home folder of local node `{node.id}`", hints=("use a path below `~/`",)
            )
        try:
            if not home.is_dir():
                raise FileNotFoundError(home)
            await asyncio.to_thread(copy, source, path)
        except OSError as error:
            raise TransientError(f"cannot copy `{source}` to node `{node.id}`: {error.strerror}") from error


async def exchange(folder: Path, header: Mapping[str, object], stdin: bytes) -> Completed:
    path = json.loads(await asyncio.to_thread((folder / "node.json").read_text))["socket"]
    reader, writer = await asyncio.open_unix_connection(path)
    try:
        request = json.dumps(header).encode()
        writer.write(struct.pack("!I", len(request)) + request + stdin)
        await writer.drain()
        size = struct.unpack("!I", await reader.readexactly(4))[0]
        answer = json.loads(await reader.readexactly(size))
        stdout = await reader.readexactly(answer["stdout"])
        stderr = await reader.readexactly(answer["stderr"])
        return Completed(returncode=answer["returncode"], stdout=stdout, stderr=stderr)
    finally:
        writer.close()


def copy(source: Path, target: Path) -> None:
    """As rsync: what has the same size and time stays, nothing is deleted; `.skyignore` names what stays behind."""
    if not source.is_dir():
        target.parent.mkdir(parents=True, exist_ok=True)
        copy_file(source, target / source.name if target.is_dir() else target)
        return
    target.mkdir(parents=True, exist_ok=True)
    for folder, names in walk(source, read_patterns(source)):
        inside = target / folder.relative_to(source)
        inside.mkdir(exist_ok=True)
        for name in names:
            copy_file(folder / name, inside / name)


def read_patterns(source: Path) -> list[str]:
    path = source / ".skyignore"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]


def walk(source: Path, patterns: Sequence[str]) -> Iterator[tuple[Path, list[str]]]:
    for folder_name, folders, files in os.walk(source):
        folder = Path(folder_name)
        links = [name for name in folders if (folder / name).is_symlink()]
        relative = folder.relative_to(source)
        folders[:] = [
            name
            for name in folders
            if name not in links
            and name not in NEVER_COPIED
            and not is_ignored(relative / name, patterns, is_folder=True)
        ]
        yield folder, [name for name in files + links if not is_ignored(relative / name, patterns, is_folder=False)]


def is_ignored(path: Path, patterns: Sequence[str], *, is_folder: bool) -> bool:
    """As .gitignore in the simple cases: a pattern with a slash is anchored, one without matches any name."""
    for pattern in patterns:
        if pattern.endswith("/") and not is_folder:
            continue
        bare = pattern.rstrip("/")
        subject = str(path) if "/" in bare else path.name
        if fnmatch.fnmatchcase(subject, bare.lstrip("/")):
            return True
    return False


def copy_file(source: Path, target: Path) -> None:
    if source.is_symlink():
        target.unlink(missing_ok=True)
        target.symlink_to(source.readlink())
        return
    new = source.stat()
    if target.is_file():
        old = target.stat()
        if (old.st_size, old.st_mtime_ns) == (new.st_size, new.st_mtime_ns):
            return
    aside = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    shutil.copy2(source, aside)
    aside.replace(target)
