"""The storage of checkpoints, a folder or a bucket (`buckets.py`), behind a common interface.

Paths are relative, with `/`. Files are written once and never changed.
"""

import errno
import hashlib
import io
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from trainers.errors import TrainerError

READ_BYTES = 8 * 2**20
# Errors of file systems without hard links, such as bucket mounts.
NO_LINK_ERRNOS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)
HASH_BYTES = 1 << 20


class Storage(Protocol):
    """Storage that outlives the machine. Every call may be repeated."""

    def list_names(self, path: str) -> list[str]:
        """Return names directly under a path, sorted; none if the path does not exist."""
        ...

    def read(self, path: str) -> bytes | None:
        """Return the content of a small file, or None if it does not exist."""
        ...

    def stream(self, path: str) -> Iterator[bytes]:
        """Yield the content of a file in parts. Raises FileNotFoundError at the first part if it is missing."""
        ...

    def create(self, path: str, content: bytes) -> bool:
        """Write a file atomically and durably; return False, without effect, if it exists."""
        ...

    def checksum(self, path: str) -> tuple[str, int] | None:
        """Return SHA-256 and size of a file, or None if it does not exist."""
        ...

    def seal(self, path: str) -> tuple[str, int] | None:
        """Return SHA-256 and size of a file that this process has written with `open_writer`. Call once per file."""
        ...

    def delete(self, path: str) -> None:
        """Delete a path and everything under it; no effect if it does not exist."""
        ...

    def open_writer(self, path: str) -> Any:
        """Return a torch.distributed.checkpoint StorageWriter below a path. Imports that library: 0.6 s."""
        ...


def open_storage(url: str) -> Storage:
    """Return the storage for a URL or folder. Raises TrainerError for an unsupported scheme."""
    scheme = urlsplit(url).scheme
    if scheme in ("", "file"):
        return FolderStorage(Path(url.removeprefix("file://")))
    from trainers.buckets import SCHEMES, open_bucket

    if scheme in SCHEMES:
        return open_bucket(url)
    schemes = ", ".join(f"`{scheme}://`" for scheme in SCHEMES)
    raise TrainerError(f"no checkpoint storage for `{scheme}://` in `{url}`; name a folder or one of {schemes}")


class FolderStorage:
    """A folder on a disk that all ranks share."""

    def __init__(self, root: Path) -> None:
        """Use the folder `root`, and create it if missing."""
        self._root = root.absolute()
        self._root.mkdir(parents=True, exist_ok=True)

    def list_names(self, path: str) -> list[str]:
        """Return the names in a folder, without files that are still being written."""
        try:
            return sorted(entry.name for entry in (self._root / path).iterdir() if not entry.name.endswith(".partial"))
        except FileNotFoundError:
            return []

    def read(self, path: str) -> bytes | None:
        """Return the content of a file, or None."""
        try:
            return (self._root / path).read_bytes()
        except FileNotFoundError:
            return None

    def stream(self, path: str) -> Iterator[bytes]:
        """Yield the content of the file in order."""
        with (self._root / path).open("rb", buffering=0) as file:
            while part := file.read(READ_BYTES):
                yield part

    def create(self, path: str, content: bytes) -> bool:
        """Write to a temporary file, flush it, then link it to its name, which is atomic."""
        target = self._root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f"{target.name}.{uuid.uuid4().hex}.partial")
        try:
            with partial.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            _link(partial, target)
        except FileExistsError:
            return False
        finally:
            partial.unlink(missing_ok=True)
        _flush_folder(target.parent)
        _flush_folder(target.parent.parent)  # the folder itself may be new
        return True

    def checksum(self, path: str) -> tuple[str, int] | None:
        """Read the whole file; return SHA-256 and size, or None."""
        try:
            with (self._root / path).open("rb") as file:
                return hash_file(file), os.fstat(file.fileno()).st_size
        except FileNotFoundError:
            return None

    def seal(self, path: str) -> tuple[str, int] | None:
        """Return the checksum of the file as the disk returns it."""
        return self.checksum(path)

    def delete(self, path: str) -> None:
        """Delete a file or a tree; another process may delete it concurrently."""
        target = self._root / path
        if target.is_dir():
            shutil.rmtree(target, ignore_errors=True)
        else:
            target.unlink(missing_ok=True)

    def open_writer(self, path: str) -> Any:
        """Return a writer of one file for each rank, flushed to the disk."""
        from torch.distributed.checkpoint import FileSystemWriter

        return FileSystemWriter(self._root / path, sync_files=True)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in NO_LINK_ERRNOS:
            raise
        # Without links, check and rename are not atomic. Two writers of one name cannot collide here: names of
        # checkpoints are unique to a process, and the file of an attempt always has the same content.
        if target.exists():
            raise FileExistsError(errno.EEXIST, "already there", str(target)) from error
        source.rename(target)


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some mounts do not support flushing a folder
            raise
    finally:
        os.close(descriptor)


def hash_file(file: io.BufferedReader) -> str:
    """Return the SHA-256 of the rest of a file (`hashlib.file_digest` requires Python 3.11)."""
    digest, buffer = hashlib.sha256(), memoryview(bytearray(HASH_BYTES))
    while count := file.readinto(buffer):
        digest.update(buffer[:count])
    return digest.hexdigest()
