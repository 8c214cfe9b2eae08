"""Copy files to a host over ssh: list the existing files first, then send the changed ones by tar or rsync."""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import shutil
import stat
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

from broker.errors import TransientError
from broker.runtime.skyignore import walk
from broker.sites.openssh import Completed, call, explain
from broker.types import Node

LIST_S = 60.0
COPY_S = 3600.0
# Above this size of changed files, sending differences outweighs rsync's extra round trips.
RSYNC_BYTES_MIN = 4 << 20
LIST_BEGIN = "broker-list\n"  # start-up files of the login shell may print before it
LIST = """\
echo broker-list
t={target}; case "$t" in /*) ;; *) t="$HOME/$t" ;; esac
[ -d "$t" ] && echo D || echo -
command -v rsync >/dev/null && echo R || echo -
[ -e "$t" ] && find "$t" -mindepth {depth} \\( -type f -o -type l -o -type d \\) -printf '%P\\t%s\\t%T@\\t%m\\t%l\\0'
true"""
# Outside the home folder, root creates the mount point and changes its owner, as SkyPilot does.
UNPACK = """\
t={target}; case "$t" in /*) ;; *) t="$HOME/$t" ;; esac
mkdir -p "$t" 2>/dev/null || {{ sudo -n mkdir -p "$t" && sudo -n chown "$(id -u):$(id -g)" "$t"; }}
cd "$t" && tar -xf - --no-same-owner"""


class Streams(Protocol):
    """A transport that streams bytes into a remote command."""

    async def stream(self, node: Node, command: str, *, stdin: bytes | IO[bytes], timeout_s: float) -> Completed:
        """Run a shell command on the node with bytes or a file as stdin. Raises TransientError."""


Existing = tuple[int, float, str, int]  # size in bytes, mtime in s, target of a link, mode


@dataclass(frozen=True, kw_only=True)
class RemoteFiles:
    """A node's files below the target."""

    is_folder: bool
    has_rsync: bool
    files: Mapping[str, Existing]


async def put_files(
    streams: Streams, node: Node, source: Path, target: str, *, remote_shell: str = "", destination: str = ""
) -> None:
    """Copy like rsync: skip files with the same size and time, delete nothing, respect ignore files.

    Without a `remote_shell`, or if either machine lacks rsync or it fails, files are sent by tar.
    """
    path = target.removeprefix("~/").rstrip("/") or "."
    remote = await list_remote(streams, node, path, is_folder=source.is_dir())
    if not source.is_dir():
        folder, name = (path, source.name) if remote.is_folder else split_path(path)
        if remote.is_folder:
            remote = await list_remote(streams, node, path, is_folder=True)
        else:
            remote = RemoteFiles(is_folder=False, has_rsync=remote.has_rsync, files=rename(remote.files, name))
        entries = {name: source}
    else:
        folder = path
        entries = await asyncio.to_thread(lambda: dict(list_entries(source)))
    changed = {name: file for name, file in entries.items() if is_changed(file, name, remote)}
    if not changed:
        return
    rewritten = sum(file.stat().st_size for name, file in changed.items() if name in remote.files and file.is_file())
    rsync = shutil.which("rsync") if remote_shell and source.is_dir() and remote.has_rsync else None
    if rsync and rewritten >= RSYNC_BYTES_MIN:
        argv = [rsync, "--rsh", remote_shell]
        with contextlib.suppress(TransientError):  # also of an rsync that lacks an option, as macOS's own does
            return await send_by_rsync(argv, source, folder, changed, destination=destination, node=node)
    await send_by_tar(streams, node, folder, changed)


def split_path(path: str) -> tuple[str, str]:
    """Split a path on the node into its folder and name."""
    folder, slash, name = path.rpartition("/")
    return folder or ("/" if slash else "."), name


def rename(files: Mapping[str, Existing], name: str) -> dict[str, Existing]:
    """Rename the starting point, which `find` reports as ""."""
    return {name: files[""]} if "" in files else {}


async def list_remote(streams: Streams, node: Node, path: str, *, is_folder: bool) -> RemoteFiles:
    """List what exists at `path` on the node, with sizes, times and links, by one `find`. Raises TransientError.

    rsync cannot talk to a host whose login shell prints something of its own.
    """
    command = LIST.format(target=shlex.quote(path), depth=1 if is_folder else 0)
    text = (await streams.stream(node, command, stdin=b"", timeout_s=LIST_S)).stdout.decode("utf-8", "surrogateescape")
    noise, _, text = text.partition(LIST_BEGIN)
    is_there, rsync, rest = text.split("\n", 2)
    files = {}
    for record in rest.split("\0"):
        if record.count("\t") >= 4:
            name, size, time_s, mode, link = record.rsplit("\t", 4)
            files[name] = (int(size), float(time_s), link, int(mode, 8))
    return RemoteFiles(is_folder=is_there == "D", has_rsync=rsync == "R" and not noise, files=files)


def list_entries(source: Path) -> Iterator[tuple[str, Path]]:
    """Yield files, links and folders (which may be empty) with their names below `source`."""
    for folder, names in walk(source):
        if folder != source:
            yield str(folder.relative_to(source)), folder
        for name in names:
            yield str((folder / name).relative_to(source)), folder / name


def is_changed(file: Path, name: str, remote: RemoteFiles) -> bool:
    """Return whether to send the file. Times are compared in microseconds: tar and `find` lose finer differences.

    `chmod +x` changes neither size nor time.
    """
    existing = remote.files.get(name)
    if file.is_symlink():
        return existing is None or existing[2] != str(file.readlink())
    if file.is_dir():
        return existing is None
    status = file.stat()
    if existing is None or existing[0] != status.st_size or abs(existing[1] - status.st_mtime) > 2e-6:
        return True
    return bool((existing[3] ^ status.st_mode) & stat.S_IXUSR)


async def send_by_tar(streams: Streams, node: Node, folder: str, entries: Mapping[str, Path]) -> None:
    """Send the entries as one archive to a folder, which is created if missing. Raises TransientError."""

    def pack(archive: IO[bytes]) -> None:
        with tarfile.open(fileobj=archive, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for name, file in entries.items():
                tar.add(file, arcname=name, recursive=False)
        archive.seek(0)

    with tempfile.TemporaryFile() as archive:
        try:
            await asyncio.to_thread(pack, archive)
        except FileNotFoundError as error:
            raise TransientError(f"{error.filename} disappeared while it was being copied") from error
        command = UNPACK.format(target=shlex.quote(folder))
        await streams.stream(node, command, stdin=archive, timeout_s=COPY_S)


async def send_by_rsync(
    rsync: Sequence[str], source: Path, folder: str, entries: Mapping[str, Path], *, destination: str, node: Node
) -> None:
    """Send the entries by rsync, which transfers only the changed parts of files. Raises TransientError."""
    names = b"".join(name.encode("utf-8", "surrogateescape") + b"\0" for name in entries)
    host = f"[{destination}]" if ":" in destination else destination
    options = ("--archive", "--no-owner", "--no-group", "--files-from=-", "--from0")
    argv = [*rsync, *options, f"{source}/", f"{host}:{folder}/"]
    result = await call(argv, stdin=names, timeout_s=COPY_S, what=f"node `{node.id}`")
    if result.returncode:
        raise TransientError(f"copying to node `{node.id}` failed{explain(result.stderr)}")
