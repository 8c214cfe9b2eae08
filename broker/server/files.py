"""Files sent by clients: archives, each unpacked once into a folder named after the SHA-256 of the archive."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import re
import shutil
import tarfile
from collections.abc import AsyncIterator, Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from pathlib import Path

from broker.app.mapping import MapRequest
from broker.client.files import UPLOADED
from broker.errors import InvalidRequestError, UsageError
from broker.state.copies import sync_file
from broker.types import Task

DIGEST = r"[0-9a-f]{64}"
ARCHIVE_MAX = 16 * 2**30
# After the last use of files that no task names: a client that asked for them does not send them again, and its launch
# may wait for an answer. A retried job needs the files for as long as it is recorded.
KEPT_S = 7 * 86400.0
PARTIAL_S = 86400.0  # after the last write to what a killed server left behind
SYNCED_MAX = 100  # files that are flushed one by one; for more, flushing everything is faster


class FileStore:
    """The folder of uploads; an unpacked upload never changes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def has(self, digest: str) -> bool:
        """Return whether the files with this SHA-256 are complete on the server, where they then stay for a week."""
        folder = self._folder / digest
        if not folder.is_dir():
            return False
        with contextlib.suppress(OSError):
            os.utime(folder)
        return True

    def forget_unused(self, is_named: Callable[[str], bool], *, now_s: float) -> int:
        """Delete old files that no task names, by their digest, and parts of uploads; return the number of uploads.

        A failure is left to the next call.
        """
        count = 0
        for path in list(self._folder.iterdir()) if self._folder.is_dir() else ():
            with contextlib.suppress(OSError):
                is_whole = re.fullmatch(DIGEST, path.name) is not None
                if now_s - path.stat().st_mtime < (KEPT_S if is_whole else PARTIAL_S) or (
                    is_whole and is_named(path.name)
                ):
                    continue
                gone = path
                if is_whole:
                    gone = path.rename(self._folder / f".{path.name}-gone")  # never seen in part
                    count += 1
                if gone.is_dir():
                    shutil.rmtree(gone)
                else:
                    gone.unlink()
        return count

    async def receive(self, digest: str, chunks: AsyncIterator[bytes], *, name: str) -> None:
        """Write, verify and unpack an archive. Raises InvalidRequestError if its digest differs."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        archive = self._folder / f".{digest}-{name}.tar"
        found, size = hashlib.sha256(), 0
        try:
            with archive.open("wb") as file:
                async for chunk in chunks:
                    size += len(chunk)
                    if size > ARCHIVE_MAX:
                        raise InvalidRequestError(f"the files exceed {ARCHIVE_MAX // 2**30} GiB")
                    found.update(chunk)
                    file.write(chunk)
            if found.hexdigest() != digest:
                raise InvalidRequestError("the files changed in transit: the SHA-256 digest differs")
            await asyncio.to_thread(self._unpack, archive, digest, name)  # minutes for large ones: others must not wait
        finally:
            archive.unlink(missing_ok=True)

    def _unpack(self, archive: Path, digest: str, name: str) -> None:
        aside = self._folder / f".{digest}-{name}"
        try:
            aside.mkdir(mode=0o700)
            with tarfile.open(archive) as file:
                check_links(file.getmembers())
                file.extractall(aside, filter="data")  # refuses names and links that point outside
            if not self.has(digest):
                _sync_tree(aside)  # the name vouches for the content, also after a power cut: it is never sent again
                os.utime(aside)  # the archive may have set another time
                aside.rename(self._folder / digest)
                sync_file(self._folder)
        except (tarfile.TarError, OSError) as error:
            if not self.has(digest):
                raise InvalidRequestError(f"cannot unpack the files: {error}") from None
        finally:
            shutil.rmtree(aside, ignore_errors=True)

    def localize_map(self, request: MapRequest, *, may_use_files: bool) -> MapRequest:
        """Localize the task. Raises UsageError for a path on this machine, or one that only exists on the client."""
        for flag, place in (("--input", request.input), ("--output", request.output)):
            scheme = place.partition("://")[0] if "://" in place else ""
            if not scheme or (scheme == "file" and not may_use_files):
                raise UsageError(
                    f"`{flag} {place}` is a path, which the server and the workers cannot read",
                    hints=["pass the URL of a bucket, such as `s3://BUCKET/FOLDER`"],
                )
        return replace(request, task=self.localize(request.task))

    def localize(self, task: Task) -> Task:
        """Replace uploaded paths with paths on this machine. Raises UsageError for any other local path."""

        def fix(path: str) -> str:
            if "://" in path and not path.startswith("file:"):
                return path
            match = re.fullmatch(rf"{UPLOADED}({DIGEST})/([^/]+)", path)
            found = self._folder / match[1] / match[2] if match and match[2] not in (".", "..") else None
            if found is None or not found.exists():
                raise UsageError(f"`{path}` was not uploaded", hints=["send it first: `PUT /v1/files/SHA256`"])
            return str(found)

        if task.repository is not None:
            message = "`workdir` is a git repository, which is cloned on the machine of the user"
            raise UsageError(message, hints=["launch with `broker` or `import broker`, which send the clone"])
        if task.service is not None and task.service.tls is not None:
            raise UsageError(
                "`service: {tls: ...}` names files on the balancer's machine, which are not uploaded with a task",
                hints=["remove `tls`, and put a proxy with a certificate in front of the balancer"],
            )
        mounts = tuple(replace(each, source=tuple(map(fix, each.source))) for each in task.storage_mounts)
        return replace(
            task,
            workdir=fix(task.workdir) if task.workdir else None,
            file_mounts={target: fix(source) for target, source in task.file_mounts.items()},
            storage_mounts=mounts,
        )


def check_links(members: Sequence[tarfile.TarInfo]) -> None:
    """Raise InvalidRequestError for an archive whose paths lead through its own links, which clients never write.

    The filter `data` resolves links on the disk, and Pythons before 3.11.13 and 3.12.11 can be made to resolve them to
    another place than the kernel does (CVE-2025-4517, CVE-2025-4330): a user could write to any file of the server.
    """
    links = {os.path.normpath(each.name) for each in members if each.issym()}
    for each in members:
        parts = os.path.normpath(each.name).split("/")
        if each.islnk() or any("/".join(parts[:length]) in links for length in range(1, len(parts))):
            raise InvalidRequestError(f"cannot unpack the files: `{each.name[:200]}` leads through a link")
        if each.issym() and _leads_back(parts[:-1], each.linkname.split("/"), links):
            raise InvalidRequestError(
                f"cannot unpack the files: the link `{each.name[:200]}` leads back through a link"
            )


def _leads_back(folder: Sequence[str], target: Sequence[str], links: AbstractSet[str]) -> bool:
    """Return whether a link's target has a `..` after another link, or more of them than folders."""
    place, has_passed = list(folder), False
    for part in target:
        if part == "..":
            if has_passed or not place:
                return True
            place.pop()
        elif part not in ("", "."):
            place.append(part)
            has_passed = has_passed or "/".join(place) in links
    return False


def _sync_tree(folder: Path) -> None:
    """Flush a folder with all its files to the disk."""
    paths = [folder, *(path for path in folder.rglob("*") if not path.is_symlink())]
    if len(paths) > SYNCED_MAX:
        os.sync()
        return
    for path in paths:
        sync_file(path)
