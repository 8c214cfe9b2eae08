"""Files of a task for a server: each folder or file as one archive, named by the SHA-256 of its content.

Archives of the same files are identical for all users: names are sorted and owners are dropped. So a folder that the
server already has is not sent again. File times are kept, because only files with a changed size or time are sent to
nodes.
"""

from __future__ import annotations

import hashlib
import stat
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO

from broker.app.planning import anchor
from broker.app.sources import make_read_error
from broker.config import find_home
from broker.errors import UsageError
from broker.types import Task

UPLOADED = "upload:"  # a path in a task that is sent to a server: `upload:SHA256/NAME`
CHUNK = 2**20

Send = Callable[[str, IO[bytes]], None]


def upload_files(task: Task, send: Send, *, note: Callable[[str], None] = lambda text: None) -> Task:
    """Send the local files of a task, and replace their paths. `send` receives the digest and the archive.

    A git repository is cloned here: the server has no credentials for it, and does not fetch URLs given by users.
    """
    if task.repository is not None:
        from broker.app.repositories import fetch_repositories

        (task,) = fetch_repositories([task], find_home(), note=note)
    task = anchor(task)

    def fix(path: str) -> str:
        return path if "://" in path else _send_path(Path(path).expanduser(), send)

    mounts = tuple(replace(each, source=tuple(fix(source) for source in each.source)) for each in task.storage_mounts)
    return replace(
        task,
        workdir=fix(task.workdir) if task.workdir else None,
        file_mounts={target: fix(source) for target, source in task.file_mounts.items()},
        storage_mounts=mounts,
    )


def _send_path(path: Path, send: Send) -> str:
    if not path.exists():
        raise UsageError(f"`{path}` does not exist", hints=["paths are relative to the current folder"])
    with tempfile.TemporaryFile() as file:
        try:
            write_archive(path, file)
        except PermissionError as error:
            raise make_read_error(error, field=str(path)) from error
        file.seek(0)
        digest = hashlib.sha256()
        while chunk := file.read(CHUNK):
            digest.update(chunk)
        file.seek(0)
        send(digest.hexdigest(), file)
    return f"{UPLOADED}{digest.hexdigest()}/{path.name or 'files'}"


def write_archive(path: Path, target: IO[bytes]) -> None:
    """Write a file, or the files of a folder that `.skyignore` or `.gitignore` do not exclude, below its own name."""
    name = path.name or "files"
    with tarfile.open(fileobj=target, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for inner, found in sorted(_list_files(path, name)):
            entry = archive.gettarinfo(str(found), arcname=inner)
            if not (entry.isfile() or entry.issym() or entry.isdir() or entry.islnk()):
                continue  # sockets and devices
            if entry.islnk():  # a second name of a file: sent as a regular file
                entry.type, entry.linkname, entry.size = tarfile.REGTYPE, "", found.stat().st_size
            entry.uid = entry.gid = 0
            entry.uname = entry.gname = ""
            entry.mtime = int(entry.mtime) if entry.isfile() else 0
            entry.mode = 0o755 if entry.mode & stat.S_IXUSR else 0o644
            if entry.isfile():
                with found.open("rb") as content:
                    archive.addfile(entry, content)
            else:
                archive.addfile(entry)


def _list_files(path: Path, name: str) -> Iterator[tuple[str, Path]]:
    from broker.runtime.skyignore import walk

    yield name, path
    if path.is_dir():
        for folder, names in walk(path):
            inner = name if folder == path else f"{name}/{folder.relative_to(path).as_posix()}"
            if folder != path:
                yield inner, folder
            yield from ((f"{inner}/{each}", folder / each) for each in names)
